"""Count the instructions of requests, which do not depend on the load of the machine.

    python -m tests.performance.instructions [--record]

Prints the counts beside the baseline, `instructions.json`. With `--record`, the counts become the
baseline. Valgrind counts the instructions of all threads of a node in user mode. The count of a
request is the difference between two batches of requests, divided by their difference in size. It
includes the work that timers do for each request, but no collection of garbage.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.edge import wire
from bench.edge.targets import INSTANT
from bench.harness.processes import free_port

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
BASELINE = HERE / "instructions.json"
COMMAND = "python -m tests.performance.instructions --record"

TOLERANCE = 0.05
"""The largest relative difference between a count and the baseline. Counts of the same code differ
by up to 0.4% (2 cores, AMD EPYC, 2026-11-29). Other machines have not been compared, and their
libraries may choose other functions."""

WARM = (10, 6, 2, 2, 2)
"""Sizes of the batches before those that count, in which Python adapts its bytecode."""

SMALL, LARGE = 2, 12
REPETITIONS = 2
SIZES = (SMALL, SMALL, LARGE) * REPETITIONS

CHUNKS = 9
"""The length of the longer of two streams, whose difference is the cost of further chunks."""

START_S = 300.0

SHARED = ("--served-model-name", wire.MODEL, "--speculation", "off")
SIMULATED = ("--backend", "sim", "--profile", str(INSTANT), *SHARED)
QUIET = ("--log-level", "warning")

KEY = "sk-instructions"
KEYS = [{"name": "counted", "key": KEY, "requests_per_minute": 10**6, "tokens_per_minute": 10**9}]

OPENAI_CLIENT = {
    "Accept": "application/json",
    "Accept-Encoding": "gzip, deflate",
    "Authorization": "Bearer none",
    "User-Agent": "OpenAI/Python 2.8.1",
    "X-Stainless-Arch": "x64",
    "X-Stainless-Async": "false",
    "X-Stainless-Lang": "python",
    "X-Stainless-OS": "Linux",
    "X-Stainless-Package-Version": "2.8.1",
    "X-Stainless-Runtime": "CPython",
    "X-Stainless-Runtime-Version": "3.11.7",
    "x-stainless-read-timeout": "600",
    "x-stainless-retry-count": "0",
}
"""The headers of OpenAI's client for Python."""


class NodeFailed(Exception):
    """A node did not start, or did not respond to a request."""


@dataclass(frozen=True)
class Chat:
    """A chat whose instructions are counted."""

    tokens: int = 1
    stream: bool = False
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Node:
    """A node under Valgrind.

    Attributes:
        folder: where the node writes its counts.
        read_line: reads a line of the node's output.
        counted: the number of counts so far.
    """

    pid: int
    port: int
    folder: Path
    read_line: Callable[[], str]
    counted: int = 0

    def start(self) -> None:
        """Wait until the node is ready, and begin to count."""
        deadline_s = time.monotonic() + START_S
        while not self._is_ready():
            if time.monotonic() > deadline_s:
                raise NodeFailed("the node is not ready")
            time.sleep(0.1)
        self._send(signal.SIGWINCH)

    def instructions(self, chat: Chat) -> float:
        """Return the instructions of a chat."""
        counts: dict[int, list[int]] = {size: [] for size in (*WARM, SMALL, LARGE)}
        with self._connection() as connection:
            for size in (*WARM, *SIZES):
                counts[size].append(self._batch(connection, chat, size))
        # Timers of more than `ADVANCE_NS` fire in some batches.
        small, large = (min(counts[size]) for size in (SMALL, LARGE))
        return (large - small) / (LARGE - SMALL)

    @contextmanager
    def _connection(self) -> Iterator[http.client.HTTPConnection]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=START_S)
        try:
            yield connection
        finally:
            connection.close()

    def _is_ready(self) -> bool:
        with suppress(OSError), self._connection() as connection:
            connection.request("GET", "/ready")
            return connection.getresponse().status == http.HTTPStatus.OK
        return False

    def _batch(self, connection: http.client.HTTPConnection, chat: Chat, size: int) -> int:
        """Send chats one after the other, and return the instructions since the last batch."""
        body = wire.request_body(chat.tokens, stream=chat.stream)
        headers = {**chat.headers, "Content-Type": "application/json"}
        for _ in range(size):
            connection.request("POST", wire.PATH, body, headers)
            response = connection.getresponse()
            content = response.read()
            if response.status != http.HTTPStatus.OK:
                raise NodeFailed(content.decode())
        self._send(signal.SIGURG)
        self._wait_idle()
        self._send(signal.SIGWINCH)
        self.counted += 1
        counts = self.folder / f"counts.{self.pid}.{self.counted}"
        total = re.search(r"^totals: (\d+)", counts.read_text(encoding="utf-8"), re.MULTILINE)
        if total is None:
            raise NodeFailed(f"{counts} has no total")
        return int(total[1])

    def _send(self, number: signal.Signals) -> None:
        """Send a signal, and wait until the node has handled it."""
        os.kill(self.pid, number)
        while (line := self.read_line()) != "done\n":
            if not line:
                raise NodeFailed("the node has ended")

    def _wait_idle(self) -> None:
        """Wait until all threads sleep, because the timers that fired are done."""
        asleep = 0
        while asleep < 3:
            time.sleep(0.01)
            stats = Path(f"/proc/{self.pid}/task").glob("*/stat")
            states = {stat.read_text(encoding="ascii").rpartition(") ")[2][0] for stat in stats}
            asleep = asleep + 1 if states == {"S"} else 0


Nodes = Callable[[Sequence[str]], AbstractContextManager[Node]]


def missing() -> str | None:
    """Return why this machine cannot count instructions, or None."""
    if not sys.platform.startswith("linux"):
        return "counts instructions only on Linux"
    programs = [name for name in ("valgrind", "cc") if shutil.which(name) is None]
    return f"needs {' and '.join(programs)}" if programs else None


def measure() -> dict[str, int]:
    """Return the instructions of each kind of request."""
    with TemporaryDirectory(prefix="draftgate-") as name, _nodes(Path(name)) as nodes:
        keys = Path(name) / "keys.yaml"
        keys.write_text(json.dumps({"keys": KEYS}), encoding="utf-8")  # JSON is valid YAML
        keys.chmod(0o600)
        with nodes((*SIMULATED, *QUIET)) as node:
            chat = node.instructions(Chat())
            stream = node.instructions(Chat(stream=True))
            longer = node.instructions(Chat(CHUNKS, stream=True))
            client = node.instructions(Chat(headers=OPENAI_CLIENT))
        with_key = Chat(headers={"Authorization": f"Bearer {KEY}"})
        with nodes((*SIMULATED, "--api-keys-file", str(keys))) as node:
            quota = node.instructions(with_key)
        with _upstream() as upstream:
            with nodes((*upstream, *SHARED, *QUIET)) as node:
                proxy = node.instructions(Chat())
                proxied = node.instructions(Chat(stream=True))
            with nodes((*upstream, *SHARED, "--api-keys-file", str(keys))) as node:
                proxy_quota = node.instructions(with_key)
    counts = {
        "chat": chat,
        "stream of one chunk": stream,
        "further chunk": (longer - stream) / (CHUNKS - 1),
        "chat of OpenAI's client": client,
        "chat with a key, a quota and a log line": quota,
        "chat as a proxy": proxy,
        "stream of one chunk as a proxy": proxied,
        "chat as a proxy with a key, a quota and a log line": proxy_quota,
    }
    return {name: round(count) for name, count in counts.items()}


@contextmanager
def _nodes(folder: Path) -> Iterator[Nodes]:
    """Start Valgrind, and yield a function that runs nodes."""
    library = folder / "counted.so"
    source = HERE / "counted.c"
    subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-o", library, source, "-ldl"], check=True)
    valgrind = ("valgrind", "--tool=callgrind", "--instr-atstart=no", "--dump-line=no")
    command = (*valgrind, "--quiet", f"--callgrind-out-file={folder}/counts.%p", sys.executable)
    variables = {
        "DRAFTGATE_NO_ACCEPTANCE_CACHE": "true",
        # Otherwise libc selects its functions by the machine's instruction set.
        "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX2,-AVX512F,-AVX_Fast_Unaligned_Load,-ERMS,-FSRM",
        "LD_PRELOAD": str(library),
        "PYTHONHASHSEED": "0",
        "PYTHONPATH": str(ROOT),
    }
    process = subprocess.Popen(
        (*command, "-m", "tests.performance.counted", str(library)),
        cwd=ROOT,
        env=os.environ | variables,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with process:
        try:
            yield lambda options: _node(process, options, folder)
        finally:
            process.kill()


@contextmanager
def _node(process: subprocess.Popen[str], options: Sequence[str], folder: Path) -> Iterator[Node]:
    assert process.stdin is not None
    assert process.stdout is not None
    port = free_port()
    print(json.dumps([*options, "--port", str(port)]), file=process.stdin, flush=True)
    node = Node(int(process.stdout.readline()), port, folder, process.stdout.readline)
    try:
        node.start()
        yield node
    finally:
        os.kill(node.pid, signal.SIGKILL)


@contextmanager
def _upstream() -> Iterator[tuple[str, ...]]:
    """Run a server with prepared responses, and yield the options of a node in front of it."""
    port = free_port()
    command = (sys.executable, "-m", "bench.edge.mock", "--port", str(port))
    with subprocess.Popen(command, cwd=ROOT) as process:
        try:
            yield ("--backend", "openai", "--upstream", f"http://127.0.0.1:{port}")
        finally:
            process.kill()


def read_baseline() -> dict[str, object]:
    """Return the recorded counts and where they are from."""
    baseline: dict[str, object] = json.loads(BASELINE.read_text(encoding="utf-8"))
    return baseline


def record(counts: Mapping[str, int]) -> None:
    """Make the counts the baseline."""
    found = re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    baseline = {
        "command": COMMAND,
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "device": found[1] if found else platform.machine(),
        "python": sys.version,
        "instructions": counts,
    }
    BASELINE.write_text(json.dumps(baseline, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Print the counts, and record them if requested."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", action="store_true", help="make the counts the baseline")
    arguments = parser.parse_args()
    if reason := missing():
        parser.error(reason)
    recorded = read_baseline()["instructions"] if BASELINE.exists() else {}
    assert isinstance(recorded, dict)
    counts = measure()
    for name, count in counts.items():
        before = recorded.get(name)
        change = f"{count / before - 1:+8.1%}  from {before:>10,}" if before else ""
        sys.stdout.write(f"{name:50} {count:>10,} {change}\n")
    if arguments.record:
        record(counts)


if __name__ == "__main__":
    main()
