"""Measure how long large requests block the event loop while streams are live.

    python -m bench.edge.hold ROUNDS

The command serves a simulated worker in this process and watches its event loop. `crowd` sends each
kind of request of one megabyte a few times while 16 streams run. The output is JSON with the
longest hold of each kind, and the longest value of each part of a hold (see `Hold`).
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from shutil import copytree, ignore_patterns
from typing import Any, Final, NamedTuple

import uvloop

from bench.edge.crowd import KINDS
from bench.edge.targets import paced_profile
from draftgate.backends.checkpoints import SHIPPED_MODEL
from draftgate.gateway.app import build_node, listening, start_workers
from draftgate.gateway.config import ServeConfig
from draftgate.gateway.logs import configure
from draftgate.gateway.process import settle_process

# --- Durations and causes of a blocked event loop -------------------------------------------------


WATCH_S: Final = 0.001
"""Seconds between two observations of the loop. The interval is the resolution of a hold, because
uvloop's timers have milliseconds."""


class Hold(NamedTuple):
    """A period in which a loop was blocked, in seconds.

    Attributes:
        late_s: wall-clock duration of the period, which a client has to wait.
        own_s: CPU time of the loop's thread in callbacks, without garbage collections. On a
            busy machine it covers several callbacks that piled up while the thread had no core.
        collecting_s: wall time of garbage collections in any thread, which stop all threads.
        lock_s: lower bound of the wait for the interpreter lock or for a page of memory.
            The thread that holds the lock may have no core either.
        descheduled_s: time in which the thread was ready but had no core (0 outside Linux).
    """

    late_s: float = 0.0
    own_s: float = 0.0
    collecting_s: float = 0.0
    lock_s: float = 0.0
    descheduled_s: float = 0.0


class LoopWatch:
    """Recorder of the delays with which a loop runs a timer.

    Attributes:
        longest: the longest value of each part, possibly from different holds.
    """

    def __init__(self) -> None:
        self.longest = Hold()
        self._thread = threading.get_ident()
        self._collected_s = 0.0  # in all threads, wall time
        self._collected_here_s = 0.0  # in the loop's thread, CPU time
        self._began_s = self._began_here_s = 0.0

    def note(self, hold: Hold) -> None:
        """Record a hold."""
        self.longest = Hold(*map(max, self.longest, hold))

    async def watch(self) -> None:
        """Observe the loop until cancelled, in the thread that created the watch."""
        gc.callbacks.append(self._collected)
        try:
            with _scheduling() as delay_s:
                while True:
                    began_s, cpu_s, waited_s = time.perf_counter(), time.thread_time(), delay_s()
                    gc_s, gc_here_s = self._collected_s, self._collected_here_s
                    await asyncio.sleep(WATCH_S)
                    self.note(
                        split_hold(
                            time.perf_counter() - began_s - WATCH_S,
                            time.thread_time() - cpu_s,
                            delay_s() - waited_s,
                            self._collected_s - gc_s,
                            self._collected_here_s - gc_here_s,
                        )
                    )
        finally:
            gc.callbacks.remove(self._collected)

    def _collected(self, phase: str, _info: dict[str, Any]) -> None:
        if phase == "start":
            self._began_s, self._began_here_s = time.perf_counter(), time.thread_time()
            return
        self._collected_s += time.perf_counter() - self._began_s
        if threading.get_ident() == self._thread:
            self._collected_here_s += time.thread_time() - self._began_here_s


def split_hold(
    late_s: float, cpu_s: float, descheduled_s: float, gc_s: float, gc_here_s: float
) -> Hold:
    """Split a hold into its parts.

    Args:
        late_s: delay of the timer, in seconds.
        cpu_s: CPU seconds of the thread since the previous observation, an upper bound of the hold.
        descheduled_s: seconds without a core.
        gc_s: wall seconds of garbage collections in all threads.
        gc_here_s: CPU seconds of garbage collections in the loop's thread.
    """
    late_s = max(late_s, 0.0)
    elsewhere_s = max(gc_s - gc_here_s, 0.0)
    lock_s = late_s - cpu_s - descheduled_s - elsewhere_s
    parts = cpu_s - gc_here_s, gc_s, lock_s, descheduled_s
    return Hold(late_s, *(min(max(part_s, 0.0), late_s) for part_s in parts))


@asynccontextmanager
async def watch_loop() -> AsyncIterator[LoopWatch]:
    """Watch the running loop while the context lasts."""
    watch = LoopWatch()
    task = asyncio.create_task(watch.watch())
    try:
        yield watch
    finally:
        task.cancel()


@contextmanager
def _scheduling() -> Iterator[Any]:
    """Return a function that returns the seconds in which this thread was ready without a core."""
    path = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
    if not path.exists():
        yield lambda: 0.0
        return
    file = os.open(path, os.O_RDONLY)
    try:
        yield lambda: int(os.pread(file, 64, 0).split()[1]) / 1e9
    finally:
        os.close(file)


CONTEXT: Final = 1 << 20
"""Context length in tokens, large enough for a megabyte of text."""

STEP_TOKENS: Final = 8192
"""Tokens per step of a fast device, which prefills a megabyte in about 40 steps."""

KV_BYTES: Final = 64 << 30
"""KV memory of the simulated device in bytes. The device allocates none of it."""

PARTS: Final = tuple(f"{name.removesuffix('_s')}_ms" for name in Hold._fields)
"""Names of the hold and of its parts."""


def longest_holds(rounds: int) -> list[dict[str, Any]]:
    """Measure in a separate process, and return the longest holds of each kind, by round."""
    command = [sys.executable, "-m", "bench.edge.hold", str(rounds)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)  # noqa: S603 - our own module
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


async def measure(rounds: int, folder: Path) -> list[dict[str, Any]]:
    """Return a row for each kind, with holds and their parts (`Hold`) in milliseconds, by round."""
    rows = {kind: {"beside": kind, "statuses": []} | {part: [] for part in PARTS} for kind in KINDS}
    config = ServeConfig(
        model=str(long_model(folder)),
        port=0,
        backend="sim",
        profile=str(paced_profile(folder)),
        speculation="off",
        max_model_len=CONTEXT,
        max_step_tokens=STEP_TOKENS,
        kv_bytes=KV_BYTES,
        served_model_name=("mock",),
    )
    node = build_node(config)
    async with listening(node) as where:
        await start_workers(node)
        settle_process()
        for _ in range(rounds):
            for kind, row in rows.items():
                longest, statuses = await _longest_beside(where.url, kind)
                row["statuses"].append(statuses)  # type: ignore[attr-defined]
                for part, seconds in zip(PARTS, longest, strict=True):
                    row[part].append(round(seconds * 1e3, 2))  # type: ignore[attr-defined]
        await node.fleet.stop()
    return list(rows.values())


async def _longest_beside(url: str, kind: str) -> tuple[Hold, Any]:
    """Run `crowd` with a kind of request, and return the longest holds and the statuses."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "bench.edge.crowd",
        url,
        kind,
        stdout=subprocess.PIPE,
    )
    # Creating the process also blocks the loop, but is not part of the measurement.
    async with watch_loop() as watch:
        out, _ = await process.communicate()
    return watch.longest, json.loads(out)


def long_model(folder: Path) -> Path:
    """Return the shipped tokenizer with a context of `CONTEXT` tokens."""
    model = folder / "model"
    copytree(SHIPPED_MODEL, model, ignore=ignore_patterns("*.safetensors", "draft"))
    shape = model / "config.json"
    settings = json.loads(shape.read_text(encoding="utf-8"))
    shape.write_text(json.dumps(settings | {"max_position_embeddings": CONTEXT}), encoding="utf-8")
    return model


def main() -> None:
    """Measure the holds, and print the rows as JSON."""
    configure("error")
    # The server logs every stream that the crowd abandons.
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as scratch:
        rows = uvloop.run(measure(int(sys.argv[1]), Path(scratch)))
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
