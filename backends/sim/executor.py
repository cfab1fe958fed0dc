"""Turns plans into results with a simulated device."""

from __future__ import annotations

from collections.abc import Sequence as Many
from itertools import takewhile

from draftgate.backends.core.sequence import Sequence
from draftgate.backends.core.steps import SequenceWork, StepPlan, StepResult
from draftgate.backends.sim.device import Device
from draftgate.backends.sim.truth import Truth
from draftgate.backends.types import TokenLogprob


class SimExecutor:
    """An `Executor` whose steps take no real time: it says how long they would have taken.

    Attributes:
        drafting_s: seconds of drafting before the last step, which `StepResult.step_s` leaves out:
            drafts are made while the step is planned.
    """

    def __init__(self, truth: Truth, device: Device) -> None:
        self._truth = truth
        self._device = device
        self.drafting_s = 0.0

    def execute(self, plan: StepPlan) -> StepResult:
        """Return the true tokens: drafts as far as they agree, and the one behind them."""
        self.drafting_s = self._device.drafting_s()
        emitted = tuple(map(self._emit, plan.work))
        if plan.is_plain:
            logprobs: Many[tuple[TokenLogprob, ...]] = ((),) * len(emitted)
        else:
            logprobs = tuple(
                _logprobs(work.sequence, tokens)
                for work, tokens in zip(plan.work, emitted, strict=True)
            )
        return StepResult(emitted, logprobs, self._device.step_s(plan, emitted))

    def _emit(self, work: SequenceWork) -> tuple[int, ...]:
        if not work.samples:
            return ()
        draft, first = work.draft.token_ids, work.confirmed_end
        if not draft:  # as in most steps
            return self._truth.tokens(work.sequence, first)
        true = self._truth.tokens(work.sequence, first, len(draft) + 1)
        pairs = zip(draft, true, strict=False)
        agreed = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        return true[: agreed + 1]


def _logprobs(sequence: Sequence, tokens: tuple[int, ...]) -> tuple[TokenLogprob, ...]:
    """Return a certain distribution: the simulated model gives its token all the mass."""
    asked = sequence.request.sampling.logprobs
    if asked is None:
        return ()
    return tuple(TokenLogprob(t, 0.0, ((t, 0.0),) if asked else ()) for t in tokens)
