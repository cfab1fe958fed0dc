"""Whole requests in the worker's own thread, as in a server but without HTTP."""

from __future__ import annotations

import time
from collections.abc import Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from itertools import count
from queue import SimpleQueue
from types import TracebackType
from typing import Final, Self

from draftgate.backends.engine.loaded import LoadedEngine
from draftgate.backends.engine.loop import EngineLoop
from draftgate.backends.engine.served import ServedModel
from draftgate.backends.token_ids import compact
from draftgate.backends.types import Delta, GenerationRequest, SamplingParams, SpeculationOutcome
from draftgate.policies.types import SpeculationMode, SpeculationPlan, WorkerLoad

BATCHES: Final = (1, 8, 32)
ALONE: Final = 4
"""Number of prompts that run in sequence at batch 1."""

PLAIN: Final = SpeculationPlan("bench", SpeculationMode.OFF, None, 0, "a benchmark")
"""A plan without drafts."""

Prompt = tuple[int, ...]

_runs = count()


@dataclass
class Generation:
    """The output of a batch of requests, with times.

    Attributes:
        started_s: `time.perf_counter` when the first request was submitted.
        outputs: tokens by request.
        arrivals: time, request and number of tokens of each delta.
    """

    started_s: float
    outputs: dict[str, list[int]]
    arrivals: list[tuple[float, str, int]] = field(default_factory=list)
    outcome: SpeculationOutcome = field(default_factory=SpeculationOutcome)

    @property
    def wall_s(self) -> float:
        """Seconds to the last token, including prefills."""
        return self.arrivals[-1][0] - self.started_s

    @property
    def decode_window(self) -> tuple[int, float]:
        """Number of tokens and seconds in which all requests decoded.

        The window begins with the first token of the last request to start. It ends with the last
        token of the first request to finish. The window is empty if the requests do not overlap.
        """
        first: dict[str, float] = {}
        last: dict[str, float] = {}
        for arrived_s, request_id, _ in self.arrivals:
            first.setdefault(request_id, arrived_s)
            last[request_id] = arrived_s
        begin_s, end_s = max(first.values()), min(last.values())
        if end_s <= begin_s:
            return 0, 0.0
        return sum(n for at_s, _, n in self.arrivals if begin_s < at_s <= end_s), end_s - begin_s


def in_batches(prompts: Many[Prompt], batch: int) -> list[list[Prompt]]:
    """Return the batches of prompts: the first `batch` prompts, or `ALONE` single prompts."""
    return [list(prompts[:batch])] if batch > 1 else [[prompt] for prompt in prompts[:ALONE]]


class Serving:
    """A worker in its thread that runs a single batch at a time. Implements `loop.LoopEvents`."""

    def __init__(self, engine: LoadedEngine) -> None:
        """Prepare the worker. The context manager starts and stops its thread."""
        self.engine = engine
        self._loop = EngineLoop(lambda _progress: engine, self)
        self._news: SimpleQueue[tuple[float, list[tuple[str, Delta]]] | BaseException] = (
            SimpleQueue()
        )

    def __enter__(self) -> Self:
        """Start the thread."""
        self._loop.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop the thread."""
        self._loop.stop()
        self._loop.join()

    def run(self, requests: Iterable[GenerationRequest]) -> Generation:
        """Run requests until all have ended.

        Raises:
            BaseException: the error that ended the worker.
        """
        queued = list(requests)
        generation = Generation(time.perf_counter(), {request.request_id: [] for request in queued})
        for request in queued:
            self._loop.submit(request)
        unfinished = len(queued)
        while unfinished:
            news = self._news.get()
            if isinstance(news, BaseException):
                raise news
            unfinished -= sum(_add(generation, news[0], *each) for each in news[1])
        return generation

    def loading(self, share: float) -> None:
        """Ignore progress, because the model is already loaded."""

    def ready(self, served: ServedModel) -> None:
        """Ignore the event, because the worker is ready from the start."""

    def stepped(self, batch: list[tuple[str, Delta]], load: WorkerLoad) -> None:
        """Record the arrival of the deltas."""
        if batch:
            self._news.put((time.perf_counter(), batch))

    def adapter_failed(self, request_id: str, reason: str) -> None:
        """Fail, because the requests need no adapters."""
        self.failed(RuntimeError(reason))

    def failed(self, error: BaseException) -> None:
        """Pass the error to the caller of `run`."""
        self._news.put(error)


def greedy_requests(
    prompts: Many[Prompt], new_tokens: int, plan: SpeculationPlan
) -> list[GenerationRequest]:
    """Return greedy requests that share no cached prefix with earlier requests.

    Each call uses a new tenant.
    """
    tenant = f"bench-{next(_runs)}"
    return [
        GenerationRequest(
            str(index),
            compact(prompt),
            SamplingParams(new_tokens, seed=0, temperature=0.0, ignore_eos=True),
            plan,
            tenant=tenant,
        )
        for index, prompt in enumerate(prompts)
    ]


def _add(generation: Generation, arrived_s: float, request_id: str, delta: Delta) -> bool:
    """Add a delta, and return whether its request is complete."""
    if delta.token_ids:
        generation.outputs[request_id].extend(delta.token_ids)
        generation.arrivals.append((arrived_s, request_id, len(delta.token_ids)))
    if delta.outcome is not None:
        generation.outcome += delta.outcome
    return delta.finish_reason is not None
