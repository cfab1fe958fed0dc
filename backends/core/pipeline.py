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
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from draftgate.backends.core.accounting import Emission
from draftgate.backends.core.steps import Executor, Launcher, StepPlan, StepResult
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
        launcher: Launcher | None = None,
        now_s: Callable[[], float | None] = lambda: None,
    ) -> None:
        """Prepare the pipeline without running a step.

        Args:
            launcher: runs the steps instead of the executor, if the device works asynchronously.
            now_s: clock for deadlines. If it returns None, the time is the sum of the step times.
        """
        self._worker = worker
        self._executor = executor
        self._deliver = deliver
        self._launcher = launcher
        self._now_s = now_s
        self._under_way: _Launched | None = None

    def step(self) -> bool:
        """Run one step, and return False if the worker is idle.

        With a launcher, one step remains in progress, and the next call delivers its deltas.
        """
        if self._launcher is not None:
            return self._overlap(self._launcher)
        plan = self._worker.plan(self._now_s())
        if plan is not None:
            result = self._executor.execute(plan)
            self._render(self._worker.apply(plan, result, self._now_s()))
        return plan is not None

    def _overlap(self, launcher: Launcher) -> bool:
        """Launch the next step and finish the step in progress."""
        if self._under_way is None:
            self._under_way = _launched(launcher, self._worker.plan(self._now_s()))
            return self._under_way is not None
        plan, step = self._under_way
        following = _launched(launcher, self._worker.plan_ahead(plan, self._now_s()), step)
        result = launcher.fetch(step)
        emissions = self._worker.apply(plan, result, self._now_s())
        self._under_way = following or _launched(launcher, self._worker.plan(self._now_s()))
        self._render(emissions)
        return True

    def _render(self, emissions: list[Emission]) -> None:
        self._deliver(self._worker.render(emissions))


def _launched(launcher: Launcher, plan: StepPlan | None, previous: Any = None) -> _Launched | None:
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
