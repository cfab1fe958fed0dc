"""Execution of a worker's steps, either one by one or overlapped with work on the device.

A device that works asynchronously gets its next step before the accounting for the last step, if
planning does not need the last tokens (`Scheduler.plan_ahead`). Otherwise it gets the next step
immediately afterwards. The worker renders and delivers text while the next step runs. So a sequence
may end, by its token or at a stop string, when another step with it is already running. The tokens
of that step are dropped, and the text is the same.

A step without drafts is followed by a step that was planned while it ran, also if sequences may
speculate. The lookups for its tokens run during the step after it. If a draft pays, the worker
waits for the tokens of that step, and verifies a draft in the following one.

The blocks of such a sequence may be reused immediately. Steps run in launch order, so a launched
step writes to the blocks before their next owner does. No step reads a block before it is written.
Blocks that are shared by content are full and never written again.

Several workers may share a device, and take turns (`Turns`). A turn lasts from the planning of a
step until its result is read. The next worker plans its step while this one renders text. A step is
launched ahead only while no other worker waits, and then belongs to the same turn. So a worker that
begins to wait waits for at most two launched steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, Protocol

from draftgate.backends.core.accounting import Emission
from draftgate.backends.core.steps import Executor, StepLauncher, StepPlan, StepResult
from draftgate.backends.types import Delta


class StepWorker(Protocol):
    """The sans-I/O core of a worker, which plans its steps and renders their results."""

    def plan(self, now_s: float | None = None) -> StepPlan | None:
        """Return the next step, or None if the worker is idle."""
        ...

    def plan_ahead(self, plan: StepPlan, now_s: float | None = None) -> StepPlan | None:
        """Return the step after a step that is not applied yet, or None if that is impossible."""
        ...

    def apply(
        self, plan: StepPlan, result: StepResult, now_s: float | None = None
    ) -> list[Emission]:
        """Account for the parts of a step that the next plan needs, before `render`."""
        ...

    def render(self, emissions: list[Emission]) -> list[tuple[str, Delta]]:
        """Return the deltas of a step with their request ids, and free sequences that ended."""
        ...

    def interrupt(self) -> None:
        """Record that other workers may use the device before the next step."""
        ...


class Turns(Protocol):
    """The turns of a worker on its device."""

    def take(self) -> bool:
        """Return whether the worker has the turn. Otherwise it waits for its turn from now on."""
        ...

    @property
    def awaited(self) -> bool:
        """Whether another worker waits for the device."""
        ...

    def end_step(self, *, launched: bool) -> bool:
        """Account for a step that ended, and return whether the worker keeps the turn.

        Args:
            launched: whether the next step runs already. The worker then keeps the turn.
        """
        ...

    def give_back(self) -> None:
        """End the turn of a worker that has no step to run."""
        ...


class OwnDevice:
    """The turns of a worker that shares its device with no other."""

    awaited: Final = False

    def take(self) -> bool:
        return True

    def end_step(self, *, launched: bool) -> bool:
        return True

    def give_back(self) -> None:
        pass


OWN_DEVICE: Final[Turns] = OwnDevice()

_Launched = tuple[StepPlan, Any]  # with the value that its launch returned

Deliver = Callable[[list[tuple[str, Delta]]], None]
"""Receives the deltas of a step, possibly none, with their request ids."""


class Pipeline:
    """Runs a worker on an executor, for a single owner.

    The owner may use the worker between steps.
    """

    def __init__(
        self,
        worker: StepWorker,
        executor: Executor,
        deliver: Deliver,
        launcher: StepLauncher | None = None,
        now_s: Callable[[], float | None] = lambda: None,
        turns: Turns = OWN_DEVICE,
    ) -> None:
        """Prepare the pipeline without running a step.

        Args:
            launcher: runs the steps instead of the executor, if the device works asynchronously.
            now_s: clock for deadlines. If it returns None, the time is the sum of the step times.
            turns: its turns on a device that other workers share.
        """
        self._worker = worker
        self._executor = executor
        self._deliver = deliver
        self._launcher = launcher
        self._now_s = now_s
        self._turns = turns
        self._under_way: _Launched | None = None

    def step(self) -> bool:
        """Run one step, and return False if the worker is idle or waits for its turn.

        With a launcher, one step remains in progress, and the next call delivers its deltas.
        """
        if self._launcher is not None:
            return self._overlap(self._launcher)
        plan = self._plan() if self._turns.take() else None
        if plan is not None:
            result = self._executor.execute(plan)
            emissions = self._worker.apply(plan, result, self._now_s())
            self._end_step()
            self._render(emissions)
        return plan is not None

    def _overlap(self, launcher: StepLauncher) -> bool:
        """Launch the next step and finish the step in progress."""
        if self._under_way is None:
            if self._turns.take():
                self._under_way = _launched(launcher, self._plan())
            return self._under_way is not None
        plan, step = self._under_way
        following = None
        if not self._turns.awaited:
            following = _launched(launcher, self._worker.plan_ahead(plan, self._now_s()), step)
        result = launcher.fetch(step)
        emissions = self._worker.apply(plan, result, self._now_s())
        keeps = self._end_step(launched=following is not None)
        if following is None and keeps:
            following = _launched(launcher, self._plan())
        self._under_way = following
        self._render(emissions)
        return True

    def _plan(self) -> StepPlan | None:
        """Return the next step, or end the turn if the worker is idle."""
        plan = self._worker.plan(self._now_s())
        if plan is None:
            self._turns.give_back()
        return plan

    def _end_step(self, *, launched: bool = False) -> bool:
        """Account for a step that ended, and return whether the worker keeps the turn."""
        keeps = self._turns.end_step(launched=launched)
        if not keeps:
            self._worker.interrupt()
        return keeps

    def _render(self, emissions: list[Emission]) -> None:
        self._deliver(self._worker.render(emissions))


def _launched(
    launcher: StepLauncher, plan: StepPlan | None, previous: Any = None
) -> _Launched | None:
    return None if plan is None else (plan, launcher.launch(plan, previous))


@dataclass(frozen=True, slots=True)
class CompletedStep:
    """A step that ran, with its plan, its result, and the deltas for its requests."""

    plan: StepPlan
    result: StepResult
    deltas: list[tuple[str, Delta]]


def run_until_idle(
    worker: StepWorker, executor: Executor, now_s: Callable[[], float | None] = lambda: None
) -> Iterator[CompletedStep]:
    """Run a worker in the caller's thread until it is idle, and yield its steps.

    Args:
        now_s: clock from which the worker learns the host's overhead. If it returns None, the time
            is the sum of the step times, and the host takes no time.
    """
    while (plan := worker.plan(now_s())) is not None:
        result = executor.execute(plan)
        emissions = worker.apply(plan, result, now_s())
        yield CompletedStep(plan, result, worker.render(emissions))
