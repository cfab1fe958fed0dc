"""How long the event loop is held while requests of a megabyte come beside live streams.

    python -m gateway.cli.studies.edge.hold ROUNDS

serves a simulated worker in this process, watches its event loop, lets `crowd` send each kind of
request a few times beside 16 streams, and prints the longest hold of each as JSON.
"""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from shutil import copytree, ignore_patterns
from typing import Any, Final

import uvloop

from backends.shipped import SHIPPED_MODEL
from gateway.app import build_node, listening, start_workers
from gateway.cli.studies.edge.crowd import KINDS
from gateway.cli.studies.edge.targets import paced_profile
from gateway.config import ServeConfig
from gateway.telemetry.logs import configure

WATCH_S: Final = 0.001
"""How often the loop is looked at: uvloop's timers know milliseconds, so a hold is told to that."""

CONTEXT: Final = 1 << 20
"""Tokens: a megabyte of text fits and is not refused."""

STEP_TOKENS: Final = 8192
"""What a fast device takes at once: a megabyte is prefilled in some 40 steps."""

KV_BYTES: Final = 64 << 30
"""Of the simulated device, which has no memory: that many tokens of several requests."""


class LoopWatch:
    """Notes how much later than asked for the loop comes back.

    Attributes:
        longest_s: by the clock, which on a busy machine tells of others' work, too.
        longest_own_s: at most what this process computed meanwhile: its own doing.
    """

    def __init__(self) -> None:
        """Begin with nothing seen."""
        self.longest_s = self.longest_own_s = 0.0

    async def watch(self) -> None:
        """Look until cancelled."""
        while True:
            began_s, cpu_s = time.perf_counter(), time.process_time()
            await asyncio.sleep(WATCH_S)
            late_s = time.perf_counter() - began_s - WATCH_S
            self.longest_s = max(self.longest_s, late_s)
            self.longest_own_s = max(self.longest_own_s, min(late_s, time.process_time() - cpu_s))


@asynccontextmanager
async def _watched() -> AsyncIterator[LoopWatch]:
    watch = LoopWatch()
    task = asyncio.create_task(watch.watch())
    try:
        yield watch
    finally:
        task.cancel()


def longest_holds(rounds: int) -> list[dict[str, Any]]:
    """Measure in a process of its own; return what each kind held the loop for, by round."""
    command = [sys.executable, "-m", "gateway.cli.studies.edge.hold", str(rounds)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)  # noqa: S603 - our own module
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


async def measure(rounds: int, folder: Path) -> list[dict[str, Any]]:
    """Return a row for each kind, holds in milliseconds by round."""
    found = {kind: {"beside": kind, "hold_ms": [], "own_ms": [], "statuses": []} for kind in KINDS}
    config = ServeConfig(
        model=str(_long_model(folder)),
        port=0,
        backend="sim",
        profile=str(paced_profile(folder)),
        speculation="off",
        max_model_len=CONTEXT,
        max_step_tokens=STEP_TOKENS,
        kv_bytes=KV_BYTES,
        served_model_name="mock",
    )
    node = build_node(config)
    async with listening(node) as where:
        await start_workers(node)
        for _ in range(rounds):
            for kind, row in found.items():
                async with _watched() as watch:
                    statuses = await _crowd(where.url, kind)
                row["hold_ms"].append(round(watch.longest_s * 1e3, 2))  # type: ignore[attr-defined]
                row["own_ms"].append(round(watch.longest_own_s * 1e3, 2))  # type: ignore[attr-defined]
                row["statuses"].append(statuses)  # type: ignore[attr-defined]
        await node.fleet.stop()
    return [
        {**row, "longest_ms": max(row["hold_ms"]), "longest_own_ms": max(row["own_ms"])}
        for row in found.values()
    ]


async def _crowd(url: str, kind: str) -> Any:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "gateway.cli.studies.edge.crowd",
        url,
        kind,
        stdout=subprocess.PIPE,
    )
    out, _ = await process.communicate()
    return json.loads(out)


def _long_model(folder: Path) -> Path:
    """Return the shipped tokenizer with a context that a megabyte fits."""
    model = folder / "model"
    copytree(SHIPPED_MODEL, model, ignore=ignore_patterns("*.safetensors", "draft"))
    shape = model / "config.json"
    told = json.loads(shape.read_text(encoding="utf-8"))
    shape.write_text(json.dumps(told | {"max_position_embeddings": CONTEXT}), encoding="utf-8")
    return model


def main() -> None:
    """Measure; print the rows."""
    configure("error")
    # It tells of every stream that the crowd leaves.
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as scratch:
        rows = uvloop.run(measure(int(sys.argv[1]), Path(scratch)))
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
