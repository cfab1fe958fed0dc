"""Steps of a worker, one after the other: the host renders texts while the device computes.

A device that works by itself gets its next step as soon as the last one is accounted for; the texts
of that one are made and delivered meanwhile. A stop string is so found when the next step is under
way: what it emits behind the stop is dropped, the text is the same. Blocks that a sequence gives
back then are handed out by the next plan at the earliest, when that step has been applied; and
cancelled ones that it still writes to are written again by whoever gets them, in a later step.
"""

from __future__ import annotations

from collections.abc import Callable

from backends.core.scheduler import Emission
from backends.core.steps import Launcher, StepPlan
from backends.core.worker import Worker
from backends.types import Delta

Deliver = Callable[[list[tuple[str, Delta]]], None]
"""Takes the deltas of a step, at least one, with their request ids."""


class Pipeline:
    """Runs a worker on an executor. One owner, which may use the worker between steps."""

    def __init__(self, worker: Worker, executor: Launcher, deliver: Deliver) -> None:
        """Keep them."""
        self._worker = worker
        self._executor = executor
        self._deliver = deliver
        self._untold: list[Emission] = []

    def step(self) -> bool:
        """Run the next step; return whether there was anything to do.

        Where the executor is asynchronous, the deltas of this step are delivered by the next call.
        """
        plan = self._worker.plan()
        if self._executor.asynchronous:
            return self._overlapped(plan)
        if plan is None:
            return False
        self._tell(self._worker.apply(plan, self._executor.execute(plan)))
        return True

    def _overlapped(self, plan: StepPlan | None) -> bool:
        launched = None if plan is None else self._executor.launch(plan)
        untold, self._untold = self._untold, []
        self._tell(untold)
        if plan is not None:
            self._untold = self._worker.apply(plan, self._executor.fetch(launched))
        return plan is not None

    def _tell(self, emissions: list[Emission]) -> None:
        """Render what a step emitted, and deliver it."""
        deltas = self._worker.render(emissions)
        if deltas:
            self._deliver(deltas)
