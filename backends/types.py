"""The values that gateway and backends exchange."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from functools import cache
from itertools import zip_longest
from typing import Annotated, Final, NamedTuple

from msgspec import Meta

from draftgate.backends.adapter_card import AdapterCard
from draftgate.backends.generation_defaults import GenerationDefaults
from draftgate.backends.kv_transfer.format import KvFormat
from draftgate.backends.prompt_logprobs import PromptLogprobs
from draftgate.backends.sampling_params import SAMPLING_OPTIONS as SAMPLING_OPTIONS  # noqa: PLC0414 - re-exported
from draftgate.backends.sampling_params import SamplingParams as SamplingParams  # noqa: PLC0414 - re-exported
from draftgate.backends.token_ids import TokenIds
from draftgate.policies.speculation.revision import PlanRevision
from draftgate.policies.types import ANYTIME, ServiceLevel, SpeculationPlan
from draftgate.policies.types import Pace as Pace  # noqa: PLC0414 - re-exported
from draftgate.policies.values import immutable, replace

SIMULATED: Final = "sim:"
"""The beginning of the numerics classes of simulated workers."""


class Task(StrEnum):
    """The result to compute from a prompt."""

    GENERATE = "generate"
    EMBED = "embed"
    """The pooled hidden state of a text, without sampling a token."""

    SCORE = "score"
    """The score of a pair of texts, without sampling a token."""


class FinishReason(StrEnum):
    """The reason for the end of a choice, as in OpenAI's API. `ABORT` never reaches a client.

    With a grammar, `STOP` without a stop text is a complete output, and `ABORT` one that was cut.
    """

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class GrammarKind(StrEnum):
    """The notation of a grammar."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICE = "choice"
    GRAMMAR = "grammar"
    CALLS = "calls"


@immutable
class GrammarSpec:
    """A grammar for the whole output, up to the end-of-sequence token.

    Attributes:
        text: a JSON schema, regular expression, JSON list of texts, Lark, GBNF, or `CallForm`.
        param: the request parameter that sets the grammar.
        strict: effect of keywords without enforcement (`schema_rewriting.prepare_schema`).
    """

    kind: GrammarKind
    text: str
    param: str = "response_format"
    strict: bool | None = None


@immutable
class ResumedChoice:
    """A choice that another worker began.

    Its tokens suffice to resume the choice. The noise is a function of seed, choice and
    position. The penalties and the held-back text (a part of a character or of a stop text) follow
    from the tokens.

    Attributes:
        output_ids: tokens generated so far, all of which have been delivered.
        next_ids: the tokens after them, which another worker has computed too. The worker verifies
            them as drafts in the step that computes its first token. Peers of older versions ignore
            them.
    """

    choice: int
    output_ids: tuple[int, ...]
    next_ids: tuple[int, ...] = ()


_MOST_CHOICES: Final = 128
"""Maximum number of choices of a request from another node. Clients get at most 16."""


@cache
def _new_choices(n: int) -> tuple[ResumedChoice, ...]:
    return tuple(ResumedChoice(index, ()) for index in range(n))


@immutable
class GenerationRequest:
    """A validated request for `n` continuations of one prompt, or for another task.

    Attributes:
        tenant: owner of the request. Cached prefixes are shared only within a tenant.
        grammar: grammar of every choice, or None for free text.
        resumed: choices to resume, or empty to start all `n`.
        service: latency targets and priority.
        traced: whether deltas report the work of each step.
        task: result to compute. A task that generates nothing has one choice.
        block_hashes: hashes of the prompt's first full KV blocks (`core.prefix_cache`). The worker
            computes missing hashes.
        trace_context: W3C Trace Context headers, with which a worker on another machine joins the
            trace of the request, or empty without a trace.
        prediction_ids: tokens of the output that the client predicts, from which the worker drafts,
            or empty without a prediction. They never change the output.
        second_segment: index of the prompt's first token of the second segment, which a BERT marks
            in pairs of texts, or 0 if the prompt has a single segment.
        cache_salt: only requests of the tenant with the same salt share cached prefixes and drafts
            from earlier outputs.
        adapter: digest of the LoRA adapter to use, or empty for the model alone.
        corpus: whether drafts may come from earlier outputs of its owner (`cache_owner`), and later
            drafts from its output.
        age_s: seconds since its first worker got the request, or 0 for that worker. Other workers
            rank the request as if it had arrived then. Peers of older versions send none.
    """

    request_id: str
    prompt_ids: TokenIds
    sampling: SamplingParams
    speculation: SpeculationPlan
    n: Annotated[int, Meta(ge=1, le=_MOST_CHOICES)] = 1
    tenant: str = ""
    grammar: GrammarSpec | None = None
    resumed: tuple[ResumedChoice, ...] = ()
    service: ServiceLevel = ANYTIME
    traced: bool = False
    task: Task = Task.GENERATE
    block_hashes: tuple[bytes, ...] = ()
    trace_context: tuple[tuple[str, str], ...] = ()
    prediction_ids: tuple[int, ...] = ()
    second_segment: int = 0
    cache_salt: str = ""
    adapter: str = ""
    corpus: bool = True
    age_s: Annotated[float, Meta(ge=0.0)] = 0.0

    @property
    def cache_owner(self) -> str:
        """The owner of cached prefixes and earlier outputs, which only its requests share.

        An adapter changes keys, values and outputs. The salt comes last, because clients choose it.
        """
        if not self.adapter and not self.cache_salt:
            return self.tenant
        return f"{self.tenant}\0{self.adapter}\0{self.cache_salt}"

    def planned(self, speculation: SpeculationPlan) -> GenerationRequest:
        """Return the request with a plan."""
        return replace(self, speculation=speculation)

    @property
    def choices(self) -> tuple[ResumedChoice, ...]:
        """The choices to generate: the resumed choices, or `n` new choices."""
        return self.resumed or _new_choices(self.n)

    @property
    def most_tokens(self) -> int:
        """Maximum number of prompt and output tokens, over all choices."""
        choices = len(self.resumed) or self.n
        return (len(self.prompt_ids) + self.sampling.max_tokens) * choices


@immutable
class TokenLogprob:
    """A token's log probability, before temperature and filters, with the best alternatives."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@immutable
class SpeculationOutcome:
    """The result of speculation for one choice.

    Attributes:
        num_spec_steps: number of steps that verified at least one draft token.
        num_drafted_tokens, num_accepted_tokens: numbers of verified and accepted draft tokens.
        acceptance_histogram: numbers of steps that accepted 0, 1, 2, ... tokens.
        revisions: revisions of the plan, in order.
        accepted_prediction_tokens, rejected_prediction_tokens: numbers of accepted and rejected
            draft tokens from the client's prediction.
        saved_s: seconds by which the drafts of its steps made it faster, by the costs of steps on
            its worker. Negative if they made it slower.
    """

    num_spec_steps: int = 0
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    acceptance_histogram: tuple[int, ...] = ()
    revisions: tuple[PlanRevision, ...] = ()
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0
    saved_s: float = 0.0

    def __add__(self, other: SpeculationOutcome) -> SpeculationOutcome:
        """Return the sum of both outcomes."""
        if self is NO_OUTCOME:
            return other
        histograms = self.acceptance_histogram, other.acceptance_histogram
        return SpeculationOutcome(
            self.num_spec_steps + other.num_spec_steps,
            self.num_drafted_tokens + other.num_drafted_tokens,
            self.num_accepted_tokens + other.num_accepted_tokens,
            tuple(map(sum, zip_longest(*histograms, fillvalue=0))),
            self.revisions + other.revisions,
            self.accepted_prediction_tokens + other.accepted_prediction_tokens,
            self.rejected_prediction_tokens + other.rejected_prediction_tokens,
            self.saved_s + other.saved_s,
        )


NO_OUTCOME: Final = SpeculationOutcome()
"""The outcome before any choice has ended."""


def outcome_of(drafts: Sequence[tuple[int, int]]) -> SpeculationOutcome:
    """Return the outcome of some drafts, without revisions and predictions.

    Args:
        drafts: numbers of verified and of accepted tokens (`Delta.drafts`).
    """
    accepted = [tokens for _, tokens in drafts]
    histogram = tuple(accepted.count(tokens) for tokens in range(max(accepted, default=-1) + 1))
    verified = sum(tokens for tokens, _ in drafts)
    return SpeculationOutcome(len(drafts), verified, sum(accepted), histogram)


class StepTrace(NamedTuple):
    """The work of one step for one choice, for clients that request traces.

    The step's tokens are the accepted draft tokens, followed by a token that the target sampled.

    Attributes:
        tokens: number of tokens that the step added.
        proposer: source of the draft, which is `grammar` for forced tokens and None without a
            draft.
        offered: number of proposed draft tokens.
        draft_ids: proposed tokens that were verified, best first.
        accepted: number of accepted draft tokens.
        survivals: predicted survival of each verified token.
        price: price of a slot in this step, in expected tokens.
    """

    tokens: int
    proposer: str | None = None
    offered: int = 0
    draft_ids: tuple[int, ...] = ()
    accepted: int = 0
    survivals: tuple[float, ...] = ()
    price: float = 0.0


class Phases(NamedTuple):
    """The times at which a choice reached each phase on its worker.

    Times are those of `time.monotonic`, or of the event loop in a simulation. Times of another
    machine are converted to this machine's clock on arrival (`backends.peer.link`).

    Attributes:
        queued_s: arrival at the worker.
        scheduled_s: start of its first step.
        chunks: end of the step and number of tokens, for each chunk of its prompt.
        first_token_s: time of its first token.
        recorded: whether the worker's own node has recorded spans for the choice.
    """

    queued_s: float
    scheduled_s: float
    chunks: tuple[tuple[float, int], ...]
    first_token_s: float
    recorded: bool = False


class Delta(NamedTuple):
    """The tokens and text that one step added to one choice.

    Attributes:
        choice: index among the request's `n`.
        token_ids: new tokens in order, several if drafts were accepted.
        text: text of the tokens. Text that may be the start of a stop text or a part of a character
            is held back until later tokens decide.
        logprobs: one entry per token, if requested.
        finish_reason: set only on the choice's last delta.
        outcome: result of speculation, on the choice's last delta.
        cached_tokens: number of prompt tokens in the KV cache, on the choice's last delta.
        steps: trace of each step, if the request is `traced`.
        phases: phases of the choice, on its first delta with tokens.
        pooled: result of a task that generates nothing, float32 in little-endian order: the pooled
            hidden state, not normalised, or the score. It is on the only delta of the request,
            which has no tokens and no outcome.
        prompt_logprobs: log probabilities of the prompt from its second token on, if requested. The
            first delta of choice 0 has them, except for a prompt of one token.
        stop_text: stop text that ended the choice, on its last delta, or empty.
        drafts: numbers of verified and of accepted draft tokens, for each step that verified a
            draft. They survive a worker that is lost before it reports the outcome.
    """

    choice: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    outcome: SpeculationOutcome | None = None
    cached_tokens: int = 0
    steps: tuple[StepTrace, ...] = ()
    phases: Phases | None = None
    pooled: bytes | None = None
    prompt_logprobs: PromptLogprobs | None = None
    stop_text: str = ""
    drafts: tuple[tuple[int, int], ...] = ()


@immutable
class Capabilities:
    """The abilities of a backend beyond plain text.

    Attributes:
        token_ids: whether it takes and returns token ids, so that the gateway counts, checks and
            renders.
        resume: whether it resumes choices of another worker of its numerics class.
        exact: whether a seed determines the text for any load.
        speculation: whether it follows the gateway's speculation plans.
        tasks: tasks that it offers.
        embedding_size: dimensions of an embedding, or 0 without embeddings.
        formats: kinds of grammars that it can enforce.
        adapters: LoRA adapters that requests may select.
        options: those of `SAMPLING_OPTIONS` that it applies.
    """

    token_ids: bool = True
    resume: bool = True
    exact: bool = False
    speculation: bool = True
    tasks: tuple[Task, ...] = (Task.GENERATE,)
    embedding_size: int = 0
    formats: bool = False
    adapters: tuple[AdapterCard, ...] = ()
    options: tuple[str, ...] = ()


@immutable
class ModelCard:
    """The model that a backend serves.

    Attributes:
        model_id: name that clients use.
        root: origin of the checkpoint.
        max_model_len: maximum number of prompt and output tokens together.
        numerics_class: class of workers that compute the same bits, or None without that guarantee.
        created_s: Unix time of loading, in seconds.
        pool_tokens: number of tokens that its KV pool holds, or 0 if unknown.
        weight_bytes, kv_bytes: memory of its weights and of its KV pool, or 0 if unknown.
        eos_ids: tokens that end a sequence, ascending.
        kv_format: layout of the KV blocks that it exchanges (`base.KvEndpoint`), or
            None if it exchanges none.
        prompts: pairs (`input_type`, text to put before the texts of an embedding request), with an
            empty type for requests without one.
        defaults: parameters of requests that do not set them.
    """

    model_id: str
    root: str
    max_model_len: int
    numerics_class: str | None
    created_s: int
    capabilities: Capabilities = Capabilities()
    pool_tokens: int = 0
    eos_ids: tuple[int, ...] = ()
    kv_format: KvFormat | None = None
    prompts: tuple[tuple[str, str], ...] = ()
    defaults: GenerationDefaults = GenerationDefaults()
    weight_bytes: int = 0
    kv_bytes: int = 0

    @property
    def is_simulated(self) -> bool:
        """Whether a simulator stands in for the model."""
        return (self.numerics_class or "").startswith(SIMULATED)

    def prompt(self, input_type: str) -> str:
        """Return the text to put before the texts of an embedding request, which may be empty."""
        return dict(self.prompts).get(input_type, "")
