"""Steps of a worker, one after the other: the host works while the device does.

A device that works by itself has its next step before the last one is accounted for, wherever
that can be planned without knowing its tokens (`Scheduler.plan_behind`); else as soon as it is.
Texts are rendered and delivered while the next step is under way. So a sequence may turn out to
have ended in a step, by its token or at a stop string, when another one has been launched: what
that one gives for it is dropped, and the text is the same.

Its blocks may be handed out at once. Steps run in the order of their launch: what a launched one
still writes to them is there before whoever gets them writes in a later step, and nobody reads what
has not been written. Blocks that are known by their content are full, and never written again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from draftgate.backends.core.accounting import Emission
from draftgate.backends.core.steps import Executor, Launcher, StepPlan
from draftgate.backends.core.worker import WorkerCore
from draftgate.backends.types import Delta

_Launched = tuple[StepPlan, Any]  # and what its launch returned

Deliver = Callable[[list[tuple[str, Delta]]], None]
"""Takes the deltas of a step, if there are any, with their request ids."""


class Pipeline:
    """Runs a worker on an executor. One owner, which may use the worker between steps."""

    def __init__(
        self,
        worker: WorkerCore,
        executor: Executor,
        deliver: Deliver,
        launcher: Launcher | None = None,
        now_s: Callable[[], float | None] = lambda: None,
    ) -> None:
        """Keep them.

        Args:
            launcher: runs the steps instead, where the device works by itself.
            now_s: the time, which says what is late; where it says None, the seconds of
                steps are added up.
        """
        self._worker = worker
        self._executor = executor
        self._deliver = deliver
        self._launcher = launcher
        self._now_s = now_s
        self._under_way: _Launched | None = None

    def step(self) -> bool:
        """Go on by a step; return whether there was anything to do.

        With a launcher one step stays under way, whose deltas come with the next call.
        """
        if self._launcher is not None:
            return self._overlap(self._launcher)
        plan = self._worker.plan(self._now_s())
        if plan is not None:
            result = self._executor.execute(plan)
            self._tell(self._worker.apply(plan, result, self._now_s()))
        return plan is not None

    def _overlap(self, launcher: Launcher) -> bool:
        """Launch a step, and end the one that was under way."""
        if self._under_way is None:
            self._under_way = _launched(launcher, self._worker.plan(self._now_s()))
            return self._under_way is not None
        plan, step = self._under_way
        following = _launched(launcher, self._worker.plan_behind(plan, self._now_s()), step)
        result = launcher.fetch(step)
        emissions = self._worker.apply(plan, result, self._now_s())
        self._under_way = following or _launched(launcher, self._worker.plan(self._now_s()))
        self._tell(emissions)
        return True

    def _tell(self, emissions: list[Emission]) -> None:
        """Render what a step emitted, and deliver it."""
        self._deliver(self._worker.render(emissions))


def _launched(launcher: Launcher, plan: StepPlan | None, behind: Any = None) -> _Launched | None:
    return None if plan is None else (plan, launcher.launch(plan, behind))
