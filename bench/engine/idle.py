"""How much of a run of decode steps the GPU stands idle, from the trace of its kernels."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final, NamedTuple

from torch.profiler import ProfilerActivity, profile

from bench.engine.ours import Ours
from bench.engine.serving import PLAIN, Serving, greedy_requests
from draftgate.policies.registry import speculation_policy

BATCHES: Final = (8, 64)
PROMPT_TOKENS: Final = 16
"""So few that prefills hardly count."""

HOST_GAP_S: Final = 10e-6
"""A gap longer than this is the host's: kernels of a graph follow within a few microseconds."""

WORK: Final = {"kernel", "gpu_memcpy", "gpu_memset"}
"""What a trace calls the things that a GPU does."""


class Idle(NamedTuple):
    """Shares of the time from the first kernel to the end of the last.

    Attributes:
        idle: nothing runs.
        waiting: of that, in gaps of more than `HOST_GAP_S`: the GPU waits for the host.
    """

    idle: float
    waiting: float


def measure_idle(ours: Ours, new_tokens: int) -> list[dict[str, Any]]:
    """Return a row for each batch: decode steps without drafts, through the worker's thread."""
    rows = []
    prompts = [prompt[:PROMPT_TOKENS] for prompt in ours.model.prompts(max(BATCHES))]
    with Serving(ours.worker(speculation_policy("off"), {})) as serving:
        for batch in BATCHES:

            def decode(batch: int = batch) -> None:
                serving.run(greedy_requests(prompts[:batch], new_tokens, PLAIN))

            decode()  # graphs are captured, kernels chosen
            found = idle_share(traced(decode))
            rows.append(
                {
                    "batch": batch,
                    "gpu_idle_share": round(found.idle, 4),
                    "gpu_waiting_share": round(found.waiting, 4),
                }
            )
            print({"model": ours.model.name, **rows[-1]}, flush=True)
    return rows


def traced(run: Callable[[], None]) -> list[tuple[float, float]]:
    """Return begin and end, in seconds, of everything a GPU does meanwhile, in any thread."""
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        run()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    micro = [(e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") in WORK]
    return [(begin * 1e-6, end * 1e-6) for begin, end in micro]


def idle_share(spans: Iterable[tuple[float, float]]) -> Idle:
    """Return how much of the time nothing runs.

    Raises:
        ValueError: nothing ran at all.
    """
    ordered = sorted(spans)
    if not ordered:
        raise ValueError("the trace has no kernels")
    first_s = busy_until_s = ordered[0][0]
    idle_s = waiting_s = 0.0
    for begin_s, end_s in ordered:
        gap_s = max(begin_s - busy_until_s, 0.0)
        idle_s += gap_s
        waiting_s += gap_s if gap_s > HOST_GAP_S else 0.0
        busy_until_s = max(busy_until_s, end_s)
    total_s = busy_until_s - first_s
    return Idle(idle_s / total_s, waiting_s / total_s)
