"""Measure how long large requests block the event loop while streams are live.

    python -m bench.edge.hold ROUNDS

The command serves a simulated worker in this process and watches its event loop. `crowd` sends each
kind of request of one megabyte a few times while 16 streams run. The output is JSON with the
longest hold of each kind, and the longest value of each part of a hold (see `Hold`).
"""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
import tempfile
from pathlib import Path
from shutil import copytree, ignore_patterns
from typing import Any, Final

import uvloop

from bench.edge.crowd import KINDS
from bench.edge.targets import paced_profile
from bench.edge.watch import Hold, watch_loop
from draftgate.backends.checkpoints import SHIPPED_MODEL
from draftgate.gateway.app import build_node, listening, start_workers
from draftgate.gateway.config import ServeConfig
from draftgate.gateway.logs import configure
from draftgate.gateway.process import settle_process

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
