"""What a scheduler asks of a step, and what a step answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from backends.core.sequence import Sequence
from backends.types import TokenLogprob


@dataclass(frozen=True, slots=True)
class SequenceWork:
    """One sequence's part of a step: confirmed tokens to feed, then draft tokens.

    Attributes:
        start: position of the first token fed; all before it are in the cache.
        token_ids: tokens fed, at positions `start` and on. The last `num_drafts` are drafts.
        num_drafts: draft tokens to verify.
        samples: whether a token is sampled: true once all confirmed tokens are fed.
        draft_law: the `Draft.law` of the drafts.
    """

    sequence: Sequence
    start: int
    token_ids: tuple[int, ...]
    num_drafts: int
    samples: bool
    draft_law: object = None

    @property
    def num_tokens(self) -> int:
        """Tokens fed, drafts included."""
        return len(self.token_ids)

    @property
    def context_tokens(self) -> int:
        """Tokens in the cache once the step has run, drafts included."""
        return self.start + len(self.token_ids)

    @property
    def draft_ids(self) -> tuple[int, ...]:
        """The draft tokens."""
        return self.token_ids[len(self.token_ids) - self.num_drafts :]

    @property
    def num_samples(self) -> int:
        """Logit rows wanted: one behind the last confirmed token and one behind each draft."""
        return self.num_drafts + 1 if self.samples else 0


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One forward pass over a ragged batch of prefill chunks, decodes and drafts."""

    work: tuple[SequenceWork, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens of the step."""
        return sum(work.num_tokens for work in self.work)

    @property
    def kv_tokens(self) -> int:
        """KV tokens read."""
        return sum(work.context_tokens for work in self.work)

    @property
    def num_sampling(self) -> int:
        """Sequences that sample."""
        return sum(work.samples for work in self.work)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step produced, one entry for each `StepPlan.work`.

    Attributes:
        emitted: accepted drafts and the one token sampled behind them: 1 + accepted tokens for
            work that samples, none for the rest.
        logprobs: as many as emitted where the request asked for them, else none.
        step_s: seconds the step took.
    """

    emitted: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[TokenLogprob, ...], ...]
    step_s: float


class Executor(Protocol):
    """Turns a plan into a result: on a device, or with a cost model."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step. The plan has at least one entry."""
        ...


@dataclass(frozen=True, slots=True)
class Draft:
    """A chain of proposed tokens with the proposer's evidence for it.

    Attributes:
        evidence: what the proposer has to show: for n-gram the length of the match.
        law: the distributions the tokens were drawn from, for `verify: rejection`: probabilities
            [len(token_ids) or more, vocab_size], in whatever form the executor of this proposer
            reads. None for tokens that were not drawn: then each had probability 1.
    """

    token_ids: tuple[int, ...] = ()
    evidence: int = 0
    law: object = None


class Proposer(Protocol):
    """Proposes continuations of a sequence. Keeps its own state per sequence."""

    def propose(self, sequence: Sequence, max_tokens: int) -> Draft:
        """Return up to `max_tokens` tokens that may follow the sequence; often none.

        Called with any sequence at any time; must keep up with tokens added since the last call.
        """
        ...

    def forget(self, sequence: Sequence) -> None:
        """Drop what is kept for the sequence; it has finished. Idempotent."""
        ...
