"""What travels between the gateway and a backend."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import NamedTuple

from draftgate.backends.token_ids import TokenIds
from draftgate.policies.types import ANYTIME, ServiceLevel, SpeculationPlan
from draftgate.policies.types import Pace as Pace  # noqa: PLC0414 - part of what backends speak


class Task(StrEnum):
    """What is wanted of a prompt."""

    GENERATE = "generate"
    EMBED = "embed"
    """Its pooled hidden state; no token is drawn."""


class FinishReason(StrEnum):
    """Why a choice ended, in OpenAI's words; `ABORT` never reaches a client.

    Under a grammar `STOP` without a stop text means that the output is whole.
    """

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn (contract: noise, order of filters).

    Attributes:
        max_tokens: most tokens to generate, at least 1; 0 where the task is to embed.
        seed: 64-bit key of the noise.
        temperature: 0 is greedy.
        top_k: keep the k likeliest tokens; 0 keeps all.
        top_p: keep the smallest set of this mass; 1 keeps all.
        min_p: keep tokens of at least this share of the likeliest one's probability; 0 keeps all.
        logit_bias: pairs (token id, what is added to its logit), by ascending id.
        repetition_penalty: logits of tokens in prompt or output are divided by it where positive
            and multiplied where negative; 1 is off (CTRL, arXiv 1909.05858).
        frequency_penalty: taken off a token's logit for each time it stands in the output.
        presence_penalty: taken off a token's logit once it stands in the output.
        min_tokens: neither an end-of-sequence token nor a stop text ends a choice before it has
            this many tokens; end-of-sequence tokens are not drawn until then.
        stop: texts that end a choice; they are not part of the output.
        ignore_eos: go on after an end-of-sequence token.
        logprobs: how many alternatives to report for each token; None reports nothing.
    """

    max_tokens: int
    seed: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    @property
    def counts_tokens(self) -> bool:
        """Whether what is drawn depends on which tokens came before, beyond the model."""
        return (
            self.repetition_penalty != 1
            or self.frequency_penalty != 0
            or self.presence_penalty != 0
        )

    @property
    def leaves_logits(self) -> bool:
        """Whether nothing here reads or changes logits before temperature and filters."""
        return (
            self.logprobs is None
            and not self.logit_bias
            and not self.counts_tokens
            and self.min_tokens == 0
        )


class GrammarKind(StrEnum):
    """What a grammar is written in."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CALLS = "calls"


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """What an output must be, from its first token to the end-of-sequence token behind its last.

    Attributes:
        text: the schema, as JSON, or the regular expression, which the whole output matches, or
            the JSON of a `CallForm`.
    """

    kind: GrammarKind
    text: str

    @property
    def param(self) -> str:
        """The request's parameter that asks for it."""
        return "tools" if self.kind is GrammarKind.CALLS else "response_format"


@dataclass(frozen=True, slots=True)
class ResumedChoice:
    """A choice that another worker began: it goes on behind these tokens.

    The tokens are all that has to travel. Noise is a function of seed, choice and position,
    penalties of the tokens, and the text held back (half a character, the start of a stop text)
    is what the tokens give when they are read again.

    Attributes:
        output_ids: the tokens generated so far, all of which the client's side has.
    """

    choice: int
    output_ids: tuple[int, ...]


@cache
def _from_start(n: int) -> tuple[ResumedChoice, ...]:
    """Return `n` choices that begin."""
    return tuple(ResumedChoice(index, ()) for index in range(n))


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A validated request for one prompt and `n` choices of continuation, or its embedding.

    Attributes:
        tenant: whose request it is; cached prefixes are shared within a tenant only.
        grammar: what every choice must be; None leaves it to the model.
        resumed: the choices to go on with; empty starts all `n`.
        service: how soon its tokens are wanted, and how much they matter.
        traced: whether its deltas tell what each step did.
        task: whether to continue the prompt or to embed it; an embedding has one choice.
        block_hashes: of the prompt's full KV blocks, from the first on (`core.prefix_cache`), as
            far as they are known; a worker computes those that it lacks.
        trace_context: headers (W3C Trace Context) by which a worker on another machine makes its
            spans part of the request's trace; empty where nobody reads them.
    """

    request_id: str
    prompt_ids: TokenIds
    sampling: SamplingParams
    speculation: SpeculationPlan
    n: int = 1
    tenant: str = ""
    grammar: GrammarSpec | None = None
    resumed: tuple[ResumedChoice, ...] = ()
    service: ServiceLevel = ANYTIME
    traced: bool = False
    task: Task = Task.GENERATE
    block_hashes: tuple[bytes, ...] = ()
    trace_context: tuple[tuple[str, str], ...] = ()

    def planned(self, speculation: SpeculationPlan) -> GenerationRequest:
        """Return the request with a plan; `replace` would take twice as long."""
        return GenerationRequest(
            self.request_id,
            self.prompt_ids,
            self.sampling,
            speculation,
            self.n,
            self.tenant,
            self.grammar,
            self.resumed,
            self.service,
            self.traced,
            self.task,
            self.block_hashes,
            self.trace_context,
        )

    @property
    def choices(self) -> tuple[ResumedChoice, ...]:
        """What is to be generated: the resumed choices, or all `n` from their start."""
        return self.resumed or _from_start(self.n)

    @property
    def most_tokens(self) -> int:
        """Tokens of prompt and output that its choices take at most."""
        return (len(self.prompt_ids) + self.sampling.max_tokens) * len(self.choices)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token's log probability before temperature and filters, with the likeliest others."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class SpeculationOutcome:
    """What speculation did for one choice.

    Attributes:
        num_spec_steps: steps that verified at least one draft token.
        num_drafted_tokens, num_accepted_tokens: draft tokens verified, and accepted.
        acceptance_histogram: steps that accepted 0, 1, 2, ... tokens.
    """

    num_spec_steps: int = 0
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    acceptance_histogram: tuple[int, ...] = ()

    def __add__(self, other: SpeculationOutcome) -> SpeculationOutcome:
        """Return the outcome of both together."""
        mine, others = self.acceptance_histogram, other.acceptance_histogram
        longest = max(len(mine), len(others))
        return SpeculationOutcome(
            self.num_spec_steps + other.num_spec_steps,
            self.num_drafted_tokens + other.num_drafted_tokens,
            self.num_accepted_tokens + other.num_accepted_tokens,
            tuple(
                (mine[i] if i < len(mine) else 0) + (others[i] if i < len(others) else 0)
                for i in range(longest)
            ),
        )


class StepTrace(NamedTuple):
    """What one step did for one choice, for a client that wants to see it.

    The step's tokens are the accepted ones of the draft, and one that the target drew behind them.

    Attributes:
        tokens: how many tokens the step added.
        proposer: what drafted, or None; `grammar` where a form forced the tokens.
        offered: draft tokens that were proposed.
        draft_ids: those of them that were verified, best first.
        accepted: how many of them were accepted.
        survivals: the chance that each verified one had by what was known before.
        price: expected tokens that a slot had to promise in this step.
    """

    tokens: int
    proposer: str | None = None
    offered: int = 0
    draft_ids: tuple[int, ...] = ()
    accepted: int = 0
    survivals: tuple[float, ...] = ()
    price: float = 0.0


class Phases(NamedTuple):
    """When a choice came how far on its worker.

    By `time.monotonic`, or the event loop's clock in a simulation; what comes from another machine
    has been moved to this one's clock by whoever received it (`backends.peer.clock`).

    Attributes:
        queued_s: it came to the worker.
        scheduled_s: the first step that it was in began.
        chunks: of its prompt, each with when its step ended and how many tokens it had.
        first_token_s: its first token was there.
        recorded: whether the worker's own node has made spans of it.
    """

    queued_s: float
    scheduled_s: float
    chunks: tuple[tuple[float, int], ...]
    first_token_s: float
    recorded: bool = False


class Delta(NamedTuple):
    """News of one choice: what one step added to it.

    Attributes:
        choice: index among the request's `n`.
        token_ids: tokens added, in order; several when drafts were accepted.
        text: what they add to the text. Text that may be the start of a stop string, or half a
            character, is held back until it is decided.
        logprobs: one entry per token, when asked for.
        finish_reason: set on the choice's last delta, and only there.
        outcome: what speculation did, on the choice's last delta.
        cached_tokens: prompt tokens whose keys and values were cached, on the choice's last delta.
        steps: what each step behind it did, where the request is `traced`.
        phases: how it came to its first token, on the choice's first delta with tokens.
        embedding: pooled hidden state of a prompt that was to be embedded, float32 in little-endian
            order, not normalised; on its one delta, which has no tokens and no outcome.
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
    embedding: bytes | None = None


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend can do beyond plain text.

    Attributes:
        token_ids: it is fed and answers with token ids, so the gateway counts, checks and renders.
        resume: it goes on where another one of its numerics class stopped.
        exact: one seed gives one text, whatever else runs.
        speculation: it drafts and verifies as it is told.
        embeddings: it gives pooled hidden states.
        embedding_size: numbers of one; 0 without.
        formats: it holds outputs to grammars.
    """

    token_ids: bool = True
    resume: bool = True
    exact: bool = False
    speculation: bool = True
    embeddings: bool = False
    embedding_size: int = 0
    formats: bool = False


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What a backend serves.

    Attributes:
        model_id: the name clients use.
        root: where the checkpoint came from.
        max_model_len: most tokens of prompt and output together.
        numerics_class: what must be equal for bits to be equal (contract); None for backends
            which promise nothing.
        created_s: Unix time of loading.
        capabilities: what it can do.
        pool_tokens: tokens that its KV pool holds; 0 where nobody knows.
        eos_ids: tokens that end a sequence, ascending.
    """

    model_id: str
    root: str
    max_model_len: int
    numerics_class: str | None
    created_s: int
    capabilities: Capabilities = Capabilities()
    pool_tokens: int = 0
    eos_ids: tuple[int, ...] = ()
