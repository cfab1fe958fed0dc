"""Measure the share of time in which a GPU is idle during decode steps, from kernel traces."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final, NamedTuple

from torch.profiler import ProfilerActivity, profile

from bench.engine.bench_engine import BenchEngine
from bench.engine.serving import PLAIN, Serving, greedy_requests
from draftgate.policies.registry import speculation_policy

BATCHES: Final = (8, 64)
PROMPT_TOKENS: Final = 16
"""Prompt length in tokens, short enough that prefills hardly count."""

HOST_GAP_S: Final = 10e-6
"""Seconds between kernels above which the host causes the gap. Kernels of a graph are a few
microseconds apart."""

WORK: Final = {"kernel", "gpu_memcpy", "gpu_memset"}
"""Trace categories of GPU work."""


class Idle(NamedTuple):
    """Shares of the time between the first start and the last end of a kernel.

    Attributes:
        idle: share of time without a running kernel.
        waiting: part of `idle` in gaps longer than `HOST_GAP_S`, where the GPU waits for the host.
    """

    idle: float
    waiting: float


def measure_idle(bench_engine: BenchEngine, new_tokens: int) -> list[dict[str, Any]]:
    """Return a row of decode steps without drafts for each batch size."""
    rows = []
    prompts = [prompt[:PROMPT_TOKENS] for prompt in bench_engine.model.prompts(max(BATCHES))]
    with Serving(bench_engine.worker(speculation_policy("off"), {})) as serving:
        for batch in BATCHES:

            def decode(batch: int = batch) -> None:
                serving.run(greedy_requests(prompts[:batch], new_tokens, PLAIN))

            decode()  # capture graphs and choose kernels
            found = idle_share(traced(decode))
            rows.append(
                {
                    "batch": batch,
                    "gpu_idle_share": round(found.idle, 4),
                    "gpu_waiting_share": round(found.waiting, 4),
                }
            )
            print({"model": bench_engine.model.name, **rows[-1]}, flush=True)
    return rows


def traced(run: Callable[[], None]) -> list[tuple[float, float]]:
    """Return begin and end of all GPU work of a run in any thread, in seconds."""
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        run()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    micro = [(e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") in WORK]
    return [(begin * 1e-6, end * 1e-6) for begin, end in micro]


def idle_share(spans: Iterable[tuple[float, float]]) -> Idle:
    """Return the idle shares.

    Args:
        spans: begin and end of each kernel, in seconds.

    Raises:
        ValueError: the trace contains no kernels.
    """
    ordered = sorted(spans)
    if not ordered:
        raise ValueError("the trace contains no kernels")
    first_s = busy_until_s = ordered[0][0]
    idle_s = waiting_s = 0.0
    for begin_s, end_s in ordered:
        gap_s = max(begin_s - busy_until_s, 0.0)
        idle_s += gap_s
        waiting_s += gap_s if gap_s > HOST_GAP_S else 0.0
        busy_until_s = max(busy_until_s, end_s)
    total_s = busy_until_s - first_s
    return Idle(idle_s / total_s, waiting_s / total_s)
