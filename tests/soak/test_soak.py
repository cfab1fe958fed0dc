"""A node under everything at once for twenty minutes: it neither grows, leaks, fails nor stays.

`make test-long` runs it in full. `SOAK_S=180` shortens it; the bound on growth is then
wider, as the first minutes fill what is bounded. `SOAK_JSON=FILE` keeps what was measured.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.harness.provenance import provenance
from tests.soak.traffic import KEYS, KEYS_FILE, MAX_BODY_BYTES, Crowd, Seen

SOAK_S = float(os.environ.get("SOAK_S", "1200"))
SETTLED_SHARE = 0.25
"""The first quarter, five minutes of twenty, fills what is bounded: the five minutes of live
samples, histories, decisions, the allocator's arenas."""

MOST_MB_PER_MINUTE = 0.5 * (1200 / SOAK_S) ** 2
"""Growth of memory afterwards. At the twenty visits a second of this traffic it is what a leak of
400 bytes a visit comes to: less than a task, request or stream that is not let go takes. Shortened
runs are still among the minutes in which histories and the allocator's arenas come to be."""

CLIENTS = 8
SAMPLE_S = 2.0
START_S = STOP_S = 60.0


@dataclass
class ServedModel:
    """A server process of the shipped model on the real engine."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path

    def get(self, path: str) -> str:
        """Return what a page says."""
        headers = {"Authorization": f"Bearer {KEYS['plain']}"}
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", headers=headers)
        with urllib.request.urlopen(request, timeout=30) as answer:
            return str(answer.read().decode())

    @property
    def in_flight(self) -> int:
        """Client requests that have not ended."""
        return int(json.loads(self.get("/health"))["in_flight"])

    def figure(self, name: str) -> float:
        """Return the sum over the series of a figure."""
        found = re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", self.get("/metrics"), re.MULTILINE)
        assert found, name
        return sum(map(float, found))

    @property
    def rss_mb(self) -> float:
        """Its resident memory."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e6

    @property
    def open_files(self) -> int:
        """Its open files, sockets included."""
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))


@contextmanager
def served(folder: Path) -> Iterator[ServedModel]:
    """Serve the shipped model with little KV memory, so that sequences are preempted, too."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    keys = folder / "keys.yaml"
    keys.write_text(json.dumps(KEYS_FILE))  # JSON is YAML
    flags = [
        *("--port", str(port), "--kv-bytes", "16MiB", "--threads", "1", "--log-level", "error"),
        *("--max-body-bytes", str(MAX_BODY_BYTES), "--api-keys-file", str(keys)),
        *("--ngram-corpus-tokens", "4096", "--max-queued", "32"),
    ]
    command = [
        sys.executable,
        "-m",
        "draftgate",
        "serve",
        *flags,
    ]
    log = folder / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=out)
    try:
        node = ServedModel(process, port, log)
        until_ready(node)
        yield node
    finally:
        process.kill()
        process.wait()


def until_ready(node: ServedModel) -> None:
    """Wait until it serves."""
    deadline_s = time.monotonic() + START_S
    while time.monotonic() < deadline_s:
        assert node.process.poll() is None, node.log.read_text()
        try:
            node.get("/ready")
        except OSError:
            time.sleep(0.2)
        else:
            return
    raise AssertionError("it does not start")


def at_rest(node: ServedModel) -> tuple[float, int]:
    """Return tasks and open files of a node that nobody asks anything."""
    tasks = node.figure("draftgate_event_loop_tasks")
    time.sleep(SAMPLE_S)  # the connection of that question closes
    return tasks, node.open_files


async def soaked(node: ServedModel, crowd: Crowd) -> list[tuple[float, float, float, float]]:
    """Send traffic; return time, memory, tasks and requests in flight, every few seconds."""
    samples = []
    running = asyncio.create_task(crowd.run(CLIENTS))
    began_s = time.monotonic()
    while time.monotonic() < began_s + SOAK_S:
        await asyncio.sleep(SAMPLE_S)
        tasks = await asyncio.to_thread(node.figure, "draftgate_event_loop_tasks")
        in_flight = await asyncio.to_thread(lambda: node.in_flight)
        samples.append((time.monotonic() - began_s, node.rss_mb, tasks, in_flight))
        assert not running.done(), running.result()
    crowd.stop()
    await running
    return samples


def growth(samples: list[tuple[float, float, float, float]]) -> tuple[float, float]:
    """Return megabytes a minute by least squares, and its standard error, once it has settled."""
    settled = np.array([(s / 60, mb) for s, mb, *_ in samples if s > SETTLED_SHARE * SOAK_S])
    (slope, _), covariance = np.polyfit(settled[:, 0], settled[:, 1], 1, cov=True)
    return float(slope), float(np.sqrt(covariance[0, 0]))


def told(
    samples: list[tuple[float, float, float, float]], seen: Seen, slope: float, error: float
) -> str:
    """Return what was seen, in words."""
    _, mb, tasks, in_flight = zip(*samples, strict=True)
    return (
        f"\n{sum(seen.visits.values())} visits in {samples[-1][0]:.0f} s: {dict(seen.visits)}\n"
        f"answers {dict(sorted(seen.statuses.items()))}, wrong: {dict(seen.wrong)}\n"
        f"memory {mb[0]:.1f} to {mb[-1]:.1f} MB, at most {max(mb):.1f}; after {SETTLED_SHARE:.0%} "
        f"{slope:+.3f} MB a minute (standard error {error:.3f}), bound {MOST_MB_PER_MINUTE:.2f}\n"
        f"tasks at most {max(tasks):.0f}, requests in flight at most {max(in_flight):.0f}\n"
    )


def recorded(
    samples: list[tuple[float, float, float, float]], seen: Seen, slope: float, error: float
) -> dict[str, Any]:
    """Return what was measured, for a file."""
    names = ("s", "rss_mb", "tasks", "in_flight")
    rounded = [[round(figure, 1) for figure in sample] for sample in samples]
    return {
        "visits": seen.visits,
        "statuses": dict(sorted(seen.statuses.items())),
        "wrong": seen.wrong,
        "growth_mb_per_minute": round(slope, 3),
        "standard_error": round(error, 3),
        "bound_mb_per_minute": round(MOST_MB_PER_MINUTE, 3),
        "samples": {name: list(column) for name, *column in zip(names, *rounded, strict=True)},
    }


@pytest.mark.long
def test_a_soaked_node_neither_grows_nor_leaks_nor_fails(tmp_path: Path) -> None:
    """Under mixed traffic memory stands still, no answer is a 5xx or ends twice, and afterwards no
    task, block, socket or request is left and the process exits cleanly."""
    facts = provenance() | {"command": f'SOAK_S={SOAK_S:g} make test-long ARGS="tests/soak -s"'}
    with served(tmp_path) as node:
        idle_tasks, idle_files = at_rest(node)
        crowd = Crowd(node.port, seed=20261121)
        samples = asyncio.run(soaked(node, crowd))
        deadline_s = time.monotonic() + STOP_S
        while node.in_flight and time.monotonic() < deadline_s:
            time.sleep(0.1)
        slope, error = growth(samples)
        sys.stdout.write(told(samples, crowd.seen, slope, error))
        if "SOAK_JSON" in os.environ:
            figures = recorded(samples, crowd.seen, slope, error)
            Path(os.environ["SOAK_JSON"]).write_text(json.dumps(facts | figures, indent=1) + "\n")
        assert not crowd.seen.wrong
        assert not [status for status in crowd.seen.statuses if status >= 500]
        assert slope < MOST_MB_PER_MINUTE
        assert node.in_flight == 0
        for name in ("running_sequences", "waiting_sequences", "kv_cache_usage_ratio"):
            assert node.figure(f"draftgate_{name}") == 0.0, name
        tasks, files = at_rest(node)
        assert tasks <= idle_tasks
        assert files <= idle_files
        node.process.send_signal(signal.SIGTERM)
        assert node.process.wait(STOP_S) == 0
        assert node.log.read_text() == ""
