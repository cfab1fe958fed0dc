"""The simulated model: an executor with known tokens, and proposers of known quality."""

from __future__ import annotations

import struct
from collections.abc import Sequence as Many
from typing import Final

from draftgate.backends.core.drafts import NO_DRAFT, Draft
from draftgate.backends.core.proposer import DraftRequest
from draftgate.backends.core.sequence import Sequence, SequenceState
from draftgate.backends.core.steps import ScoredRows, SequenceWork, StepPlan, StepResult
from draftgate.backends.prompt_logprobs import PromptLogprobs
from draftgate.backends.recording import Guess, Tree
from draftgate.backends.sim.acceptance import Acceptance
from draftgate.backends.sim.device_model import DeviceModel
from draftgate.backends.sim.grammar_tokens import GrammarTokens, Walk
from draftgate.backends.sim.profile import DraftCost
from draftgate.backends.sim.tokens import TrueTokens
from draftgate.backends.types import TokenLogprob
from draftgate.policies.costs.step_cost import StepSize
from draftgate.policies.costs.step_cost_fit import StepCostFit


class SimExecutor:
    """An `Executor` that takes no real time and reports how long a step would have taken.

    Attributes:
        host_s: seconds of the host's work for the last step, which `StepResult.step_s` omits.
    """

    def __init__(
        self, tokens: TrueTokens, device: DeviceModel, forms: GrammarTokens | None = None
    ) -> None:
        """Use the tokens of all texts.

        Args:
            forms: chooses the tokens of sequences with a grammar, or None without such sequences.
        """
        self._tokens = tokens
        self._device = device
        self._forms = forms
        self.host_s = 0.0

    @property
    def launches_ahead(self) -> bool:
        """Whether a step may be launched while the previous step runs."""
        return self._device.launches_ahead

    def execute(self, plan: StepPlan) -> StepResult:
        """Return the true tokens: the agreeing part of each draft and the next token."""
        self.host_s = self._device.pop_host_s(len(plan.work))
        plain = plan.is_plain
        next_tokens, finished = self._tokens.tokens, SequenceState.FINISHED
        accepted, emitted = list[tuple[int, ...]](), list[tuple[int, ...]]()
        nothing: tuple[int, ...] = ()
        for work in plan.work:
            path = tokens = nothing
            # A step that was planned ahead may contain sequences that have ended since then.
            if work.samples and work.sequence.state is not finished:
                if plain and not work.draft.token_ids:  # the usual case
                    tokens = next_tokens(work.sequence, work.start + len(work.token_ids))
                else:
                    path, tokens = self._walk(work)
            accepted.append(path)
            emitted.append(tokens)
        logprobs: Many[tuple[TokenLogprob, ...]] = ((),) * len(emitted)
        if not plain:
            logprobs = [
                _logprobs(work.sequence, tokens)
                for work, tokens in zip(plan.work, emitted, strict=True)
            ]
        scored = [_prompt_logprobs(plan, rows) for rows in plan.scored]
        step_s = self._device.step_s(plan, emitted)
        return StepResult(emitted, accepted, logprobs, step_s, None, scored)

    def _walk(self, work: SequenceWork) -> Walk:
        """Return the accepted path of a sequence that samples, and its tokens."""
        if self._forms is not None and work.sequence.grammar is not None:
            return self._forms.walk(work)
        true = self._tokens.tokens(work.sequence, work.confirmed_end, work.num_samples)
        if allowed := work.sequence.request.sampling.allowed_token_ids:
            true = tuple(allowed[token % len(allowed)] for token in true)
        if not work.draft.token_ids:  # the usual case
            return (), true
        path = work.draft.accepted_places(true)
        return path, true[: len(path) + 1]


def _logprobs(sequence: Sequence, tokens: tuple[int, ...]) -> tuple[TokenLogprob, ...]:
    """Return log probabilities of 0, because the simulated model is certain of its tokens."""
    asked = sequence.request.sampling.logprobs
    if asked is None:
        return ()
    return tuple(TokenLogprob(t, 0.0, ((t, 0.0),) if asked else ()) for t in tokens)


def _prompt_logprobs(plan: StepPlan, scored: ScoredRows) -> PromptLogprobs:
    """Return log probabilities of 0 for the tokens after the rows of a chunk."""
    work, zeros = plan.work[scored.place], bytes(4 * scored.rows)
    ranks = struct.pack("<i", 1) * scored.rows
    if not work.sequence.request.sampling.prompt_logprobs:
        return PromptLogprobs(0, zeros, ranks, b"", b"")
    begin = work.start + scored.first + 1
    tokens = work.sequence.token_ids[begin : begin + scored.rows]
    return PromptLogprobs(1, zeros, ranks, struct.pack(f"<{scored.rows}i", *tokens), zeros)


WRONG_TOKEN: Final = -2
"""The first of the ids of wrong tokens in trees, which descend. No vocabulary has negative ids, and
`steps.PENDING` is -1."""


class SimProposer:
    """Drafts chains and trees with the right tokens that `Acceptance` determines.

    The device model determines the time of drafting. The proposer starts from the worker's belief
    and fits it to the measured depths, as the engine's proposers do.
    """

    def __init__(
        self,
        name: str,
        tokens: TrueTokens,
        acceptance: Acceptance,
        believed: DraftCost,
        device: DeviceModel,
    ) -> None:
        self._name = name
        self._tokens = tokens
        self._acceptance = acceptance
        self._fit = StepCostFit(believed.depths)
        self._device = device

    def depth_s(self, sequences: int) -> float:
        """Return the believed seconds of a depth, or 0 for lookups."""
        return self._fit.cost.seconds(sequences)

    def catch_up_s(self, sequence: Sequence) -> float:
        """Return 0, because a simulated proposer has no state."""
        return 0.0

    def propose(self, requests: Many[DraftRequest]) -> list[Draft]:
        """Return a draft for each request, up to the length for which the proposer has evidence."""
        depth = max([request.max_tokens for request in requests], default=0)
        depth_s = self._device.draft(self._name, len(requests), depth)
        if depth_s:
            for _ in range(depth):
                self._fit.add_step(StepSize(len(requests), 0, 0, 0), depth_s)
        return [self.draft(request.sequence, request.max_tokens) for request in requests]

    def agreed(self, sequence: Sequence, most: int) -> int:
        """Return how many tokens of a draft of `most` tokens would be accepted, for the oracle."""
        return self._acceptance.guess(self._name, sequence, most).agreed

    def accepted(self, sequence: Sequence, draft: Draft) -> Draft:
        """Return the tokens of a draft that would be accepted, for the oracle."""
        true = self._tokens.tokens(sequence, len(sequence.token_ids), len(draft))
        return draft.select(draft.accepted_places(true))

    def forget(self, sequence: Sequence) -> None:
        """Drop the state of a finished sequence."""
        self._tokens.forget(sequence)
        self._acceptance.forget(sequence)

    def draft(self, sequence: Sequence, most: int) -> Draft:
        """Return the draft of a sequence without its time, for `oracle.Knowledge`."""
        guess = self._acceptance.guess(self._name, sequence, most)
        return simulated_draft(guess, sequence, self._tokens)


def simulated_draft(guess: Guess, sequence: Sequence, tokens: TrueTokens) -> Draft:
    """Return the draft of a guess for the position after the sequence's last token."""
    if not guess.proposed:
        return NO_DRAFT
    first = len(sequence.token_ids)
    if guess.tree is not None:
        return _tree(guess, guess.tree, tokens.tokens(sequence, first, guess.agreed))
    drafted = tokens.draft(sequence, first, guess.agreed, guess.proposed)
    return Draft(drafted, evidence=guess.evidence, agreement=guess.agreement)


def _tree(guess: Guess, tree: Tree, right: tuple[int, ...]) -> Draft:
    """Return a draft with branches, in which only the tokens on the path are right."""
    tokens = [WRONG_TOKEN - place for place in range(len(tree.parents))]
    for place, token in zip(guess.path, right, strict=True):
        tokens[place] = token
    draft = Draft(
        tuple(tokens), tree.parent_places(), tree.all_shares(), guess.evidence, guess.agreement
    )
    return draft.first(guess.proposed)
