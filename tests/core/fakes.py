"""A device without a model, on which each token is a function of its position."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from itertools import count
from random import Random

from draftgate.backends.core.drafts import NO_DRAFT, ROOT, Draft
from draftgate.backends.core.proposer import DraftRequest
from draftgate.backends.core.sequence import Sequence
from draftgate.backends.core.steps import ScoredRows, SequenceWork, StepPlan, StepResult
from draftgate.backends.prompt_logprobs import PromptLogprobs
from draftgate.backends.token_ids import compact
from draftgate.backends.types import GenerationRequest, SamplingParams, Task, TokenLogprob
from draftgate.policies.types import ANYTIME, ServiceLevel, SpeculationMode, SpeculationPlan

TrueToken = Callable[[Sequence, int], int]
"""The token of a sequence at an absolute position."""

_ids = count()


def hashed_token(sequence: Sequence, position: int) -> int:
    """Return a token of a stream without short repetitions.

    One token in 50 is 0, which tests use as the end token.
    """
    return Random(sequence.key * 100_003 + sequence.choice * 7 + position).randrange(50)


def scripted(*tokens: int) -> TrueToken:
    """Give every sequence the same output."""
    return lambda sequence, position: tokens[position - sequence.prompt_tokens]


def pooled_state(work: SequenceWork) -> bytes:
    """Return bytes that identify a hidden state by sequence and position."""
    return f"{work.sequence.key}@{work.confirmed_end - 1}".encode()


def scored_positions(plan: StepPlan, scored: ScoredRows) -> PromptLogprobs:
    """Return the positions of the scored tokens as log probabilities, and the tokens as ranks."""
    work = plan.work[scored.place]
    first = work.start + scored.first + 1
    positions = range(first, first + scored.rows)
    tokens = [work.sequence.token_ids[position] for position in positions]
    logprobs = struct.pack(f"<{scored.rows}f", *positions)
    return PromptLogprobs(0, logprobs, struct.pack(f"<{scored.rows}i", *tokens), b"", b"")


class FakeExecutor:
    """An executor that emits the true tokens and verifies drafts against them."""

    def __init__(self, true_token: TrueToken = hashed_token) -> None:
        self._true_token = true_token

    def execute(self, plan: StepPlan) -> StepResult:
        emitted = [tuple(self._emit(work)) for work in plan.work]
        accepted = tuple(
            work.draft.accepted_places(tokens)
            for work, tokens in zip(plan.work, emitted, strict=True)
        )
        logprobs = tuple(tuple(TokenLogprob(t, -float(t)) for t in tokens) for tokens in emitted)
        pooled = [pooled_state(plan.work[place]) for place in plan.pooled]
        scored = [scored_positions(plan, rows) for rows in plan.scored]
        return StepResult(tuple(emitted), accepted, logprobs, 1e-3, pooled or None, scored)

    def _emit(self, work: SequenceWork) -> Iterator[int]:
        """Yield the true tokens that the draft contains and the token after them."""
        at, position = ROOT, work.start + len(work.token_ids)
        while work.samples:
            token = self._true_token(work.sequence, position)
            yield token
            places = [i for i in range(work.num_drafts) if work.draft.parent(i) == at]
            right = [i for i in places if work.draft.token_ids[i] == token]
            if not right:
                return
            at, position = right[0], position + 1


class FakeProposer:
    """A proposer of true tokens, or of wrong tokens where `is_wrong(key, position)` is true.

    `branches` is the probability that a token has a wrong sibling before or after itself. The
    proposer finds no draft where `finds(key, position)` is false for the first position.
    """

    def __init__(
        self,
        true_token: TrueToken = hashed_token,
        is_wrong: Callable[[int, int], bool] = lambda key, position: False,
        *,
        depth_s: float = 0.0,
        branches: float = 0.0,
        finds: Callable[[int, int], bool] = lambda key, position: True,
    ) -> None:
        self._finds = finds
        self._true_token = true_token
        self._is_wrong = is_wrong
        self._depth_s = depth_s
        self._branches = branches
        self.forgotten: list[int] = []

    def depth_s(self, sequences: int) -> float:
        return self._depth_s

    def catch_up_s(self, sequence: Sequence) -> float:
        return 0.0

    def propose(self, requests: Many[DraftRequest]) -> list[Draft]:
        return [self.draft(request.sequence, request.max_tokens) for request in requests]

    def draft(self, sequence: Sequence, max_tokens: int) -> Draft:
        assert max_tokens >= 1
        if not self._finds(sequence.key, len(sequence.token_ids)):
            return NO_DRAFT
        random, at = Random(sequence.key + len(sequence.token_ids)), ROOT
        tokens: list[int] = []
        parents: list[int] = []
        for position in range(len(sequence.token_ids), len(sequence.token_ids) + max_tokens):
            token = self._true_token(sequence, position) + self._is_wrong(sequence.key, position)
            siblings = [token, token + 2] if random.random() < self._branches else [token]
            random.shuffle(siblings)
            parents += [at] * len(siblings)
            at = len(tokens) + siblings.index(token)
            tokens += siblings
        if not self._branches:
            return Draft(tuple(tokens))
        return Draft(tuple(tokens), tuple(parents)).first(max_tokens)

    def forget(self, sequence: Sequence) -> None:
        self.forgotten.append(sequence.key)


class ForcingGrammar:
    """A grammar that sometimes forces two tokens."""

    is_complete = True

    def __init__(self, sequence) -> None:
        self._sequence = sequence

    def accept(self, token: int) -> None:
        pass

    def forced(self, most: int) -> tuple[int, ...]:
        at = len(self._sequence.token_ids)
        return tuple(hashed_token(self._sequence, at + place) for place in range(min(most, 2)))

    def legal(self, tokens) -> int:
        return len(tokens)


def drafting(max_draft_tokens: int, proposer: str | None = "ngram") -> SpeculationPlan:
    if max_draft_tokens == 0:
        proposer = None
    return SpeculationPlan("test", SpeculationMode.AUTO, proposer, max_draft_tokens, "a test")


def request(
    prompt: int | tuple[int, ...] = 4,
    max_tokens: int = 8,
    drafts: int = 0,
    n: int = 1,
    proposer: str = "ngram",
    task: Task = Task.GENERATE,
    service: ServiceLevel = ANYTIME,
    **sampling: object,
) -> GenerationRequest:
    prompt_ids = tuple(range(1, prompt + 1)) if isinstance(prompt, int) else prompt
    if task is Task.EMBED:
        max_tokens = drafts = 0
    params = SamplingParams(max_tokens=max_tokens, seed=1, **sampling)
    plan = drafting(drafts, proposer)
    ids = compact(prompt_ids)
    return GenerationRequest(f"test-{next(_ids)}", ids, params, plan, n, task=task, service=service)
