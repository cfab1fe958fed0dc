"""Twenty minutes of mixed traffic on a node, during which memory, tasks and files must not grow.

`make test-long` runs the full length. `SOAK_S=180` shortens it and widens the bound on growth,
because bounded buffers fill in the first minutes. `SOAK_JSON=FILE` saves the measurements.
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
from draftgate.backends.checkpoints import SHIPPED_MODEL_ID
from tests.soak.traffic import KEYS, KEYS_FILE, MAX_BODY_BYTES, Observations, TrafficClients

SOAK_S = float(os.environ.get("SOAK_S", "1200"))
SETTLED_SHARE = 0.25
"""The share of the run during which bounded memory fills: live samples, histories, decisions, and
the allocator's arenas."""

MAX_MB_PER_MINUTE = 0.5 * (1200 / SOAK_S) ** 2
"""The bound on memory growth after the warm-up.

The bound equals a leak of 400 bytes per visit at 20 visits per second, which is less than a leaked
task, request or stream. The bound of shortened runs is wider, because histories and the
allocator's arenas are still filling."""

CLIENTS = 8
SAMPLE_S = 2.0
IDLE_READS = 20
START_S = STOP_S = 60.0


@dataclass
class ServedModel:
    """A server process with the shipped model on the real engine."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path

    def get(self, path: str) -> str:
        """Return the body of a page."""
        headers = {"Authorization": f"Bearer {KEYS['operator']}"}
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", headers=headers)
        with urllib.request.urlopen(request, timeout=30) as response:
            return str(response.read().decode())

    @property
    def in_flight(self) -> int:
        """The number of client requests that have not ended."""
        return int(json.loads(self.get("/health"))["in_flight"])

    def metric(self, name: str) -> float:
        """Return the sum of a metric over its series."""
        found = re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", self.get("/metrics"), re.MULTILINE)
        assert found, name
        return sum(map(float, found))

    @property
    def rss_mb(self) -> float:
        """The resident memory of the process, in MB."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e6

    @property
    def open_files(self) -> int:
        """The number of open files, including sockets."""
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))


@contextmanager
def serving(folder: Path) -> Iterator[ServedModel]:
    """Serve the shipped model with little KV memory, so that sequences are preempted."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    keys = folder / "keys.yaml"
    keys.write_text(json.dumps(KEYS_FILE))  # JSON is valid YAML
    flags = [
        *("--port", str(port), "--kv-bytes", "16MiB", "--threads", "1", "--log-level", "error"),
        *("--max-body-bytes", str(MAX_BODY_BYTES), "--api-keys-file", str(keys)),
        *("--ngram-corpus-bytes", "256KiB", "--max-queued", "32"),
    ]
    command = [
        sys.executable,
        "-m",
        "draftgate",
        "serve",
        SHIPPED_MODEL_ID,
        *flags,
    ]
    log = folder / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=out)
    try:
        node = ServedModel(process, port, log)
        wait_until_ready(node)
        yield node
    finally:
        process.kill()
        process.wait()


def wait_until_ready(node: ServedModel) -> None:
    """Wait until the node is ready."""
    deadline_s = time.monotonic() + START_S
    while time.monotonic() < deadline_s:
        assert node.process.poll() is None, node.log.read_text()
        try:
            node.get("/ready")
        except OSError:
            time.sleep(0.2)
        else:
            return
    raise AssertionError("the node did not become ready")


def idle_resources(node: ServedModel) -> tuple[float, int]:
    """Return the most tasks of an idle node, and its open files."""
    counts = []
    # Timed waits are tasks in Python 3.11, so the count of an idle node varies by one.
    for _ in range(IDLE_READS):
        time.sleep(SAMPLE_S / IDLE_READS)
        counts.append(node.metric("draftgate_event_loop_tasks"))
    time.sleep(SAMPLE_S)  # The connection of the metrics request needs time to close.
    return max(counts), node.open_files


async def send_traffic(
    node: ServedModel, clients: TrafficClients
) -> list[tuple[float, float, float, float]]:
    """Send traffic and return time, memory, tasks and requests in flight every `SAMPLE_S`."""
    samples = []
    running = asyncio.create_task(clients.run(CLIENTS))
    began_s = time.monotonic()
    while time.monotonic() < began_s + SOAK_S:
        await asyncio.sleep(SAMPLE_S)
        tasks = await asyncio.to_thread(node.metric, "draftgate_event_loop_tasks")
        in_flight = await asyncio.to_thread(lambda: node.in_flight)
        samples.append((time.monotonic() - began_s, node.rss_mb, tasks, in_flight))
        assert not running.done(), running.result()
    clients.stop()
    await running
    return samples


def growth(samples: list[tuple[float, float, float, float]]) -> tuple[float, float]:
    """Return the growth of settled memory in MB per minute, and its standard error."""
    settled = np.array([(s / 60, mb) for s, mb, *_ in samples if s > SETTLED_SHARE * SOAK_S])
    (slope, _), covariance = np.polyfit(settled[:, 0], settled[:, 1], 1, cov=True)
    return float(slope), float(np.sqrt(covariance[0, 0]))


def format_report(
    samples: list[tuple[float, float, float, float]],
    observed: Observations,
    slope: float,
    error: float,
) -> str:
    """Format the measurements as text."""
    _, mb, tasks, in_flight = zip(*samples, strict=True)
    visits = dict(observed.visits)
    return (
        f"\n{sum(visits.values())} visits in {samples[-1][0]:.0f} s: {visits}\n"
        f"answers {dict(sorted(observed.statuses.items()))}, wrong: {dict(observed.wrong)}\n"
        f"memory {mb[0]:.1f} to {mb[-1]:.1f} MB, at most {max(mb):.1f}; after {SETTLED_SHARE:.0%} "
        f"{slope:+.3f} MB a minute (standard error {error:.3f}), bound {MAX_MB_PER_MINUTE:.2f}\n"
        f"tasks at most {max(tasks):.0f}, requests in flight at most {max(in_flight):.0f}\n"
    )


def to_json(
    samples: list[tuple[float, float, float, float]],
    observed: Observations,
    slope: float,
    error: float,
) -> dict[str, Any]:
    """Return the measurements for a JSON file."""
    names = ("s", "rss_mb", "tasks", "in_flight")
    rounded = [[round(value, 1) for value in sample] for sample in samples]
    return {
        "visits": observed.visits,
        "statuses": dict(sorted(observed.statuses.items())),
        "wrong": observed.wrong,
        "growth_mb_per_minute": round(slope, 3),
        "standard_error": round(error, 3),
        "bound_mb_per_minute": round(MAX_MB_PER_MINUTE, 3),
        "samples": {name: list(column) for name, *column in zip(names, *rounded, strict=True)},
    }


@pytest.mark.long
def test_node_under_mixed_traffic_hardly_grows_and_neither_leaks_nor_fails(tmp_path: Path) -> None:
    """Memory grows less than the bound under mixed traffic, and no response is a 5xx or ends twice.

    No task, block, socket or request remains afterwards, and the process exits cleanly.
    """
    facts = provenance() | {"command": f'SOAK_S={SOAK_S:g} make test-long ARGS="tests/soak -s"'}
    with serving(tmp_path) as node:
        idle_tasks, idle_files = idle_resources(node)
        clients = TrafficClients(node.port, seed=20261121)
        samples = asyncio.run(send_traffic(node, clients))
        deadline_s = time.monotonic() + STOP_S
        while node.in_flight and time.monotonic() < deadline_s:
            time.sleep(0.1)
        slope, error = growth(samples)
        sys.stdout.write(format_report(samples, clients.observed, slope, error))
        if "SOAK_JSON" in os.environ:
            measurements = to_json(samples, clients.observed, slope, error)
            Path(os.environ["SOAK_JSON"]).write_text(
                json.dumps(facts | measurements, indent=1) + "\n"
            )
        assert not clients.observed.wrong
        assert not [status for status in clients.observed.statuses if status >= 500]
        assert slope < MAX_MB_PER_MINUTE
        assert node.in_flight == 0
        for name in ("running_sequences", "waiting_sequences", "kv_cache_usage_ratio"):
            assert node.metric(f"draftgate_{name}") == 0.0, name
        tasks, files = idle_resources(node)
        assert tasks <= idle_tasks
        assert files <= idle_files
        node.process.send_signal(signal.SIGTERM)
        assert node.process.wait(STOP_S) == 0
        assert node.log.read_text() == ""
