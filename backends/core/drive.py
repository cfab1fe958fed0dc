"""Runs a worker to the end, step by step, in the caller's thread: for benchmarks and tests."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from backends.core.steps import Executor, StepPlan, StepResult
from backends.core.worker import Worker
from backends.types import Delta


@dataclass(frozen=True, slots=True)
class DrivenStep:
    """One step: what was asked, what came, and what it told the requests."""

    plan: StepPlan
    result: StepResult
    deltas: list[tuple[str, Delta]]


def drive(worker: Worker, executor: Executor) -> Iterator[DrivenStep]:
    """Yield steps until the worker has nothing left to do."""
    while (plan := worker.plan()) is not None:
        result = executor.execute(plan)
        yield DrivenStep(plan, result, worker.complete(plan, result))
