"""Runs a worker to the end, step by step, in the caller's thread: for benchmarks and tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from draftgate.backends.core.steps import Executor, StepPlan, StepResult
from draftgate.backends.core.worker import WorkerCore
from draftgate.backends.types import Delta


@dataclass(frozen=True, slots=True)
class DrivenStep:
    """One step: what was asked, what came, and what it told the requests."""

    plan: StepPlan
    result: StepResult
    deltas: list[tuple[str, Delta]]


def drive(
    worker: WorkerCore, executor: Executor, now_s: Callable[[], float | None] = lambda: None
) -> Iterator[DrivenStep]:
    """Yield steps until the worker has nothing left to do.

    Args:
        now_s: the time, by which the worker learns what the host takes; where it says None, the
            seconds of steps are added up, and the host takes none.
    """
    while (plan := worker.plan(now_s())) is not None:
        result = executor.execute(plan)
        yield DrivenStep(plan, result, worker.complete(plan, result, now_s()))
