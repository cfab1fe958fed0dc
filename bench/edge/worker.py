"""Measure the simulated worker without HTTP, as a part of the cost of `draftgate sim`.

    python -m bench.edge.worker

The process reads a `Work` as a line of JSON, runs it, and writes a `Done` as a line of JSON.
"""

from __future__ import annotations

import time
from itertools import count
from typing import Final

import msgspec

from bench.edge.targets import INSTANT
from bench.harness.processes import answer_lines
from draftgate.backends.sim.assembly import serving_worker
from draftgate.backends.token_ids import compact
from draftgate.backends.types import GenerationRequest, SamplingParams
from draftgate.backends.worker_config import WorkerConfig
from draftgate.policies.types import SpeculationMode, SpeculationPlan

OFF: Final = SpeculationPlan("off", SpeculationMode.AUTO, None, 0, "measured alone")


class Work(msgspec.Struct):
    """Requests of a fixed length at a fixed concurrency, for a minimum time in seconds."""

    tokens: int
    sequences: int
    for_s: float


class Done(msgspec.Struct):
    """The number of completed requests and deltas, and their CPU seconds."""

    requests: int
    deltas: int
    cpu_s: float


class BareWorker:
    """A worker that runs steps without pause."""

    def __init__(self) -> None:
        """Build the worker of `draftgate sim`."""
        built = serving_worker(WorkerConfig(profile=str(INSTANT), speculation="off"))
        self._worker, self._executor = built.worker, built.executor
        self._prompt = compact(built.worker.tokenizer.encode("Say something."))
        self._numbers = count()

    def run(self, work: Work) -> Done:
        """Keep the batch full until the time is over, and then finish all requests."""
        done = Done(0, 0, 0.0)
        began_s = time.process_time()
        for _ in range(work.sequences):
            self._submit(work.tokens)
        while (plan := self._worker.plan(time.monotonic())) is not None:
            result = self._executor.execute(plan)
            for _, delta in self._worker.complete(plan, result, time.monotonic()):
                done.deltas += 1
                if delta.finish_reason is not None:
                    done.requests += 1
                    if time.process_time() - began_s < work.for_s:
                        self._submit(work.tokens)
        done.cpu_s = time.process_time() - began_s
        return done

    def _submit(self, tokens: int) -> None:
        number = next(self._numbers)
        sampling = SamplingParams(tokens, number)
        request = GenerationRequest(str(number), self._prompt, sampling, OFF)
        self._worker.submit(request, time.monotonic())


def main() -> None:
    """Run the `Work` in each line of standard input."""
    answer_lines(Work, BareWorker().run)


if __name__ == "__main__":
    main()
