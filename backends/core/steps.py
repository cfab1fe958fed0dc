"""The plan of a worker's step, the builder of the plan, and the result."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol

from draftgate.backends.core.drafts import NO_DRAFT, Draft
from draftgate.backends.core.sequence import Sequence
from draftgate.backends.prompt_logprobs import PromptLogprobs
from draftgate.backends.types import StepTrace, TokenLogprob
from draftgate.policies.batching import longest_step_s
from draftgate.policies.costs.step_cost import StepCost, StepSize
from draftgate.policies.types import BatchView
from draftgate.policies.values import immutable

PENDING: Final = -1
"""Placeholder for a token that a launched step is about to sample and only the device knows so far.
"""


@immutable
class SequenceWork:
    """The part of a step for one sequence: confirmed tokens to feed and a draft to verify.

    Attributes:
        start: position of the first token fed, where all earlier tokens are in the cache.
        token_ids: confirmed tokens to feed, from position `start` on.
        samples: whether a token is sampled, which requires that all confirmed tokens are fed.
        draft: draft to verify, depth first. It is fed after the confirmed tokens, each token into
            its own cache slot. Empty unless `samples`.
    """

    sequence: Sequence
    start: int
    token_ids: tuple[int, ...]
    samples: bool
    draft: Draft = NO_DRAFT

    @property
    def fed_ids(self) -> tuple[int, ...]:
        """All tokens fed, in the order of their cache slots."""
        return self.token_ids + self.draft.token_ids

    @property
    def confirmed_end(self) -> int:
        """Position after the last confirmed token."""
        return self.start + len(self.token_ids)

    @property
    def num_drafts(self) -> int:
        """Number of draft tokens to verify."""
        return len(self.draft.token_ids)

    @property
    def num_tokens(self) -> int:
        """Number of tokens fed, including drafts."""
        return len(self.token_ids) + len(self.draft.token_ids)

    @property
    def context_tokens(self) -> int:
        """Number of cache slots in use after the step, including drafts."""
        return self.start + len(self.token_ids) + len(self.draft.token_ids)

    @property
    def num_samples(self) -> int:
        """Number of logit rows: one after the last confirmed token and one per draft token."""
        return len(self.draft.token_ids) + 1 if self.samples else 0

    @property
    def continues_blindly(self) -> bool:
        """Whether the next step can be planned whatever token this work samples."""
        # The number of accepted draft tokens determines the positions of the next step.
        if self.draft.token_ids:
            return False
        return self.sequence.grammar is None and not self.sequence.request.sampling.reads_output


class ScoredRows(NamedTuple):
    """Rows of a prompt chunk that give the log probabilities of the tokens after them.

    Attributes:
        place: index of the chunk in `StepPlan.work`.
        first: first row within the chunk.
        rows: number of rows, at least 1.
    """

    place: int
    first: int
    rows: int


@dataclass  # not frozen, because each step makes one, and its constructor would take longer
class StepPlan:
    """The plan of one forward pass over a ragged batch of prompt chunks, decodes and drafts.

    Attributes:
        chunks: number of entries of `work` that feed prompts.
        prompt_tokens: number of tokens in these chunks.
        traces: drafting of each traced sequence that decodes, by key, without its outcome.
        pooled: indices in `work`, ascending, of embeddings. The step returns the hidden state of
            their last token and samples nothing.
        scored: prompt rows whose log probabilities the step returns, in order of `work`.
    """

    work: tuple[SequenceWork, ...]
    chunks: int = 0
    prompt_tokens: int = 0
    traces: Mapping[int, StepTrace] = field(default_factory=dict)
    pooled: tuple[int, ...] = ()
    scored: tuple[ScoredRows, ...] = ()
    _size: StepSize | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def size(self) -> StepSize:
        """The quantities that determine the cost of the step."""
        if self._size is None:
            tokens = kv_tokens = pairs = sampled = 0
            for work in self.work:
                start, drafts = work.start, len(work.draft.token_ids)
                fed = len(work.token_ids) + drafts
                tokens += fed
                kv_tokens += start + fed
                sampled += work.samples + drafts
                if fed > 1:
                    pairs += (fed - 1) * start + fed * (fed + 1) // 2 - 1
            self._size = StepSize(tokens, kv_tokens, len(self.work), pairs, sampled)
        return self._size

    @property
    def decodes_only(self) -> bool:
        """Whether each sequence feeds one token and samples, without a draft."""
        size = self.size
        return size.tokens == size.sequences == size.sampled

    @property
    def num_tokens(self) -> int:
        """Number of tokens fed."""
        return self.size.tokens

    @property
    def is_plain(self) -> bool:
        """Whether only the sampler uses the logits of the step."""
        return all(work.sequence.is_plain for work in self.work)


class StepBuilder:
    """A step under construction.

    `number` becomes `Sequence.last_step`.

    Attributes:
        budget: number of tokens that may still be added.
        work: parts of the step so far, by sequence key.
        traces: see `StepPlan`.
    """

    def __init__(self, number: int, budget: int) -> None:
        self._number = number
        self.budget = budget
        self.work: dict[int, SequenceWork] = {}
        self.traces: Mapping[int, StepTrace] = {}
        self._chunks = 0
        self._prompt_tokens = 0
        self._pooled: list[int] = []
        self._scored: list[ScoredRows] = []

    def add(self, sequence: Sequence, tokens: int) -> None:
        """Feed the next `tokens` pending tokens of the sequence."""
        start, known = sequence.num_computed, sequence.token_ids
        end = start + tokens
        fed = (known[start],) if tokens == 1 else tuple(known[start:end])
        sequence.last_step = self._number
        self.budget -= tokens
        samples = end == len(known)
        if samples and sequence.ends_with_prompt:
            samples = False
            if sequence.embeds:
                self._pooled.append(len(self.work))
        self.work[sequence.key] = SequenceWork(sequence, start, fed, samples)

    def add_chunk(self, sequence: Sequence) -> int:
        """Feed as many pending tokens of a prefill as the budget allows, and return how many."""
        tokens = min(sequence.pending_tokens, self.budget)
        self._chunks += 1
        self._prompt_tokens += tokens
        self._score_rows(sequence, tokens)
        self.add(sequence, tokens)
        return tokens

    def _score_rows(self, sequence: Sequence, tokens: int) -> None:
        """Request the missing log probabilities of the prompt that a chunk can compute."""
        first, start = sequence.scored_rows, sequence.num_computed
        end = min(start + tokens, sequence.prompt_tokens - 1)
        if first < end:
            self._scored.append(ScoredRows(len(self.work), first - start, end - first))
            sequence.scored_rows = end

    def attach_next(self, key: int, draft: Draft) -> None:
        """Verify tokens of another worker after the prompt of a sequence, as a part of it."""
        self._prompt_tokens += len(draft)
        self.attach_draft(key, draft)

    def attach_draft(self, key: int, draft: Draft) -> None:
        """Verify a draft after the tokens of a sequence of the step."""
        self.budget -= len(draft.token_ids)
        work = self.work[key]
        self.work[key] = SequenceWork(
            work.sequence, work.start, work.token_ids, work.samples, draft
        )

    def view(
        self,
        running: Iterable[Sequence],
        now_s: float | None,
        cost: StepCost,
        drafting_s: float,
        cost_error: float,
    ) -> BatchView:
        """Return the decodes, the drafts, and the remaining budget for a batching policy.

        Args:
            running: all sequences of the batch, in the order in which prompts continue.
            now_s: time if a sequence has a service level, else None.
            cost: predicted seconds of steps.
            drafting_s: seconds of computing drafts before the step.
            cost_error: relative error of predicted step times (`StepCostFit.relative_error`).
        """
        decodes = self.work.values()
        tokens = sum([len(work.token_ids) + len(work.draft.token_ids) for work in decodes])
        kv_tokens = tokens + sum([work.start for work in decodes])
        left_s, targets_s = list[float](), list[float]()
        if now_s is not None:
            token_s = cost.seconds(len(decodes), kv_tokens, len(decodes))
            for work in decodes:
                sequence = work.sequence
                due_in_s, tpot_s = sequence.due_in_s(now_s), sequence.tpot_s
                if due_in_s is not None and tpot_s is not None:
                    later = sequence.likely_later_tokens
                    left_s.append(longest_step_s(due_in_s, tpot_s, later, token_s))
                    targets_s.append(tpot_s)
        return BatchView(
            tokens=tokens,
            kv_tokens=kv_tokens,
            sequences=len(decodes),
            most_prefill_tokens=self.budget,
            prompt_kv_tokens=next((s.num_computed for s in running if s.pending_tokens > 1), 0),
            within_s=min(left_s, default=None),
            tpot_s=min(targets_s, default=None),
            drafting_s=drafting_s,
            cost_error=cost_error,
        )

    def build(self) -> StepPlan:
        """Return the finished plan."""
        work, pooled, scored = tuple(self.work.values()), tuple(self._pooled), tuple(self._scored)
        return StepPlan(work, self._chunks, self._prompt_tokens, self.traces, pooled, scored)


@immutable
class StepResult:
    """The outcome of a step, with one entry per `StepPlan.work`.

    Attributes:
        emitted: accepted draft tokens and the token sampled after them, or empty for work that does
            not sample.
        accepted: the path of the accepted tokens, as their indices in the draft, root first.
        logprobs: one entry per emitted token if the request wants them, else empty.
        step_s: duration of the step in seconds.
        pooled: hidden states after the final norm, one per `StepPlan.pooled`, as little-endian
            float32, or None.
        prompt_logprobs: one per `StepPlan.scored`.
    """

    emitted: Many[tuple[int, ...]]
    accepted: Many[tuple[int, ...]]
    logprobs: Many[tuple[TokenLogprob, ...]]
    step_s: float
    pooled: Many[bytes] | None = None
    prompt_logprobs: Many[PromptLogprobs] = ()


class Executor(Protocol):
    """Runs a plan on a device or with a cost model, and returns the result."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Run a step, whose plan has at least one entry."""
        ...


class StepLauncher(Protocol):
    """Runs steps in two parts, on a device that works asynchronously.

    Steps start and end in order.
    """

    def launch(self, plan: StepPlan, previous: Any = None) -> Any:
        """Start a step and return a handle for `fetch`.

        Args:
            previous: handle of the previous launch if it has not been fetched yet. Its samples
                replace the `PENDING` tokens of this plan.
        """
        ...

    def fetch(self, step: Any) -> StepResult:
        """Wait for a launched step and return its result."""
        ...
