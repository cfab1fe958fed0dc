"""What a scheduler asks of a step, and what a step answers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Final, NamedTuple, Protocol

from draftgate.backends.core.drafts import NO_DRAFT, Draft
from draftgate.backends.core.sequence import Sequence
from draftgate.backends.types import StepTrace, TokenLogprob
from draftgate.policies.step_cost import StepSize

PENDING: Final = -1
"""A token that a launched step is to draw: known on the device before it is known here."""


class SequenceWork(NamedTuple):
    """One sequence's part of a step: confirmed tokens to feed, and a draft to verify behind them.

    A tuple, as others that are made for each sequence in each step: it takes a third of the time.

    Attributes:
        start: position of the first token fed; all before it are in the cache.
        token_ids: confirmed tokens fed, at positions `start` and on.
        samples: whether a token is sampled: true once all confirmed tokens are fed.
        draft: laid out depth first; fed behind the confirmed tokens, each token into a slot of its
            own. Only where `samples`.
    """

    sequence: Sequence
    start: int
    token_ids: tuple[int, ...]
    samples: bool
    draft: Draft = NO_DRAFT

    @property
    def fed_ids(self) -> tuple[int, ...]:
        """All tokens fed, in the order of their slots."""
        return self.token_ids + self.draft.token_ids

    @property
    def confirmed_end(self) -> int:
        """Position behind the last confirmed token."""
        return self.start + len(self.token_ids)

    @property
    def positions(self) -> Iterable[int]:
        """Positions of all tokens fed: those of a draft by depth, siblings share theirs."""
        if self.draft.is_chain:
            return range(self.start, self.context_tokens)
        confirmed = range(self.start, self.confirmed_end)
        return chain(confirmed, (self.confirmed_end + d - 1 for d in self.draft.depths))

    @property
    def num_drafts(self) -> int:
        """Draft tokens to verify."""
        return len(self.draft.token_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens fed, drafts included."""
        return len(self.token_ids) + len(self.draft.token_ids)

    @property
    def context_tokens(self) -> int:
        """Slots of the cache in use once the step has run, drafts included."""
        return self.start + len(self.token_ids) + len(self.draft.token_ids)

    @property
    def num_samples(self) -> int:
        """Logit rows wanted: one behind the last confirmed token and one behind each draft."""
        return len(self.draft.token_ids) + 1 if self.samples else 0


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One forward pass over a ragged batch of prefill chunks, decodes and drafts.

    Attributes:
        chunks: how many of `work` feed prompts.
        prompt_tokens: that those feed.
        traces: of traced sequences that decode, by key: what was drafted, nothing being known of
            the tokens yet.
        pooled: places in `work` where the hidden state of the last token fed is wanted, and no
            sample; ascending.
    """

    work: tuple[SequenceWork, ...]
    chunks: int = 0
    prompt_tokens: int = 0
    traces: Mapping[int, StepTrace] = field(default_factory=dict)
    pooled: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens of the step."""
        return sum([len(work.token_ids) + len(work.draft.token_ids) for work in self.work])

    @property
    def kv_tokens(self) -> int:
        """KV tokens read."""
        return self.num_tokens + sum([work.start for work in self.work])

    @property
    def size(self) -> StepSize:
        """All that its cost depends on, in one pass."""
        tokens = kv_tokens = pairs = 0
        for work in self.work:
            fed = len(work.token_ids) + len(work.draft.token_ids)
            tokens += fed
            kv_tokens += work.start + fed
            if fed > 1:
                pairs += (fed - 1) * work.start + fed * (fed + 1) // 2 - 1
        return StepSize(tokens, kv_tokens, len(self.work), pairs)

    @property
    def is_plain(self) -> bool:
        """Whether nothing reads or changes logits of the step but the sampler."""
        return all(work.sequence.is_plain for work in self.work)

    @property
    def num_sampling(self) -> int:
        """Sequences that sample."""
        return sum([work.samples for work in self.work])


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step produced, one entry for each `StepPlan.work`.

    Attributes:
        emitted: accepted drafts and the one token sampled behind them: 1 + accepted tokens for
            work that samples, none for the rest.
        logprobs: as many as emitted where the request asked for them, else none.
        step_s: seconds the step took.
        pooled: hidden states behind the final norm, one for each of `StepPlan.pooled`: float32 in
            little-endian order. None for none.
    """

    emitted: Many[tuple[int, ...]]
    logprobs: Many[tuple[TokenLogprob, ...]]
    step_s: float
    pooled: Many[bytes] | None = None


class Executor(Protocol):
    """Turns a plan into a result: on a device, or with a cost model."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step. The plan has at least one entry."""
        ...


class Launcher(Protocol):
    """Runs steps in two parts, on a device that works by itself. Steps run and end in order."""

    def launch(self, plan: StepPlan, behind: Any = None) -> Any:
        """Begin a step; what is returned goes to `fetch`.

        Args:
            behind: what the launch before this one returned, if it is not fetched yet. Tokens of
                the plan which are `PENDING` are those that it draws for their sequences.
        """
        ...

    def fetch(self, step: Any) -> StepResult:
        """Wait for a launched step and return its result."""
        ...
