"""A device without a model: the token at a place is a given function of the place."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from random import Random

from backends.core.sequence import Sequence
from backends.core.steps import Draft, StepPlan, StepResult
from backends.types import GenerationRequest, SamplingParams, TokenLogprob
from policies.types import SpeculationMode, SpeculationPlan

TrueToken = Callable[[Sequence, int], int]
"""The token of a sequence at an absolute position."""

_ids = count()


def hashed_token(sequence: Sequence, position: int) -> int:
    """A stream without short repetitions; token 0, where tests put the end, is one in 50."""
    return Random(sequence.key * 100_003 + sequence.choice * 7 + position).randrange(50)


def scripted(*tokens: int) -> TrueToken:
    """The same output for every sequence."""
    return lambda sequence, position: tokens[position - sequence.prompt_tokens]


class FakeExecutor:
    """Emits the true stream, drafts checked against it."""

    def __init__(self, true_token: TrueToken = hashed_token) -> None:
        self._true_token = true_token

    def execute(self, plan: StepPlan) -> StepResult:
        emitted = []
        for work in plan.work:
            tokens: list[int] = []
            first = work.context_tokens - work.num_drafts
            for ahead in range(work.num_samples):
                tokens.append(self._true_token(work.sequence, first + ahead))
                if ahead < work.num_drafts and tokens[-1] != work.draft_ids[ahead]:
                    break
            emitted.append(tuple(tokens))
        logprobs = tuple(tuple(TokenLogprob(t, -float(t)) for t in tokens) for tokens in emitted)
        return StepResult(tuple(emitted), logprobs, 1e-3)


class FakeProposer:
    """Drafts the true stream, wrong where `is_wrong(key, position)` says so."""

    def __init__(
        self,
        true_token: TrueToken = hashed_token,
        is_wrong: Callable[[int, int], bool] = lambda key, position: False,
    ) -> None:
        self._true_token = true_token
        self._is_wrong = is_wrong
        self.forgotten: list[int] = []

    def propose(self, sequence: Sequence, max_tokens: int) -> Draft:
        assert max_tokens >= 1
        first = len(sequence.token_ids)
        return Draft(
            tuple(
                self._true_token(sequence, p) + self._is_wrong(sequence.key, p)
                for p in range(first, first + max_tokens)
            )
        )

    def forget(self, sequence: Sequence) -> None:
        self.forgotten.append(sequence.key)


def drafting(max_draft_tokens: int, proposer: str | None = "ngram") -> SpeculationPlan:
    if max_draft_tokens == 0:
        proposer = None
    return SpeculationPlan("test", SpeculationMode.AUTO, proposer, max_draft_tokens, "a test")


def request(
    prompt: int | tuple[int, ...] = 4,
    max_tokens: int = 8,
    drafts: int = 0,
    n: int = 1,
    **sampling: object,
) -> GenerationRequest:
    prompt_ids = tuple(range(1, prompt + 1)) if isinstance(prompt, int) else prompt
    params = SamplingParams(max_tokens=max_tokens, seed=1, **sampling)
    return GenerationRequest(f"test-{next(_ids)}", prompt_ids, params, drafting(drafts), n)
