"""Processes with their cores and CPU time (Linux, from /proc)."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

import msgspec

Q = TypeVar("Q", bound=msgspec.Struct)
T = TypeVar("T", bound=msgspec.Struct)

_PROC: Final = Path("/proc")
_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")
START_S: Final = 120.0
"""Timeout for the start of a server, in seconds. LiteLLM takes 20 s for its imports, and longer on
a busy core."""

STOP_S: Final = 5.0
POLL_S: Final = 0.05


def cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process, its threads and its descendants.

    The result includes ended descendants. The resolution is a tick of 10 ms.
    """
    return sum(map(_ticks, process_tree(pid))) / _TICKS_PER_S


def process_tree(pid: int) -> Iterator[int]:
    """Yield the ids of a process and its descendants."""
    yield pid
    with suppress(OSError):  # the process has ended
        for thread in (_PROC / str(pid) / "task").iterdir():
            with suppress(OSError):  # the thread has ended since it was listed
                for child in (thread / "children").read_text().split():
                    yield from process_tree(int(child))


def resident_bytes(pid: int) -> int:
    """Return the main memory of a process and its descendants. Shared pages count once."""
    return sum(map(_proportional_bytes, process_tree(pid)))


def _proportional_bytes(pid: int) -> int:
    try:
        lines = (_PROC / str(pid) / "smaps_rollup").read_text().splitlines()
    except OSError:  # the process has ended
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def _ticks(pid: int) -> int:
    try:
        line = (_PROC / str(pid) / "stat").read_text()
    except OSError:
        return 0
    # The name in parentheses may contain any character. Fields 14-17 are utime, stime,
    # cutime and cstime.
    return sum(map(int, line.rpartition(")")[2].split()[11:15]))


def free_port() -> int:
    """Return a free port of the loopback interface."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Cores(NamedTuple):
    """The cores of the servers and of their clients, or None on a machine with a single core."""

    servers: int | None
    clients: int | None


def two_cores() -> Cores:
    """Return the first and the last core that this process may run on."""
    usable = sorted(os.sched_getaffinity(0))
    return Cores(usable[0], usable[-1]) if len(usable) > 1 else Cores(None, None)


@contextmanager
def on_core(core: int | None) -> Iterator[None]:
    """Pin this process and its future children to a core. None leaves the process unpinned."""
    before = os.sched_getaffinity(0)
    if core is not None:
        os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def pin(pid: int, core: int) -> None:
    """Pin a running process with all its threads to a core."""
    for thread in (_PROC / str(pid) / "task").iterdir():
        os.sched_setaffinity(int(thread.name), {core})


def start(
    command: Sequence[str], core: int | None, log: Path, variables: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start a server on a core, and write its output to a file."""
    with on_core(core), log.open("wb") as out:
        return subprocess.Popen(  # noqa: S603 - commands of this study
            command, stdout=out, stderr=out, env={**os.environ, **variables}
        )


class Helper:
    """A module of the benchmarks as a process that answers each line with a line."""

    def __init__(self, module: str, core: int | None) -> None:
        with on_core(core):
            self.process = subprocess.Popen(  # noqa: S603 - our own module
                [sys.executable, "-m", f"bench.edge.{module}"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )

    def request(self, question: msgspec.Struct, answer: type[T]) -> T:
        """Send a question, and wait for the reply.

        Raises:
            msgspec.DecodeError: the process ended without a reply.
        """
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(msgspec.json.encode(question) + b"\n")
        self.process.stdin.flush()
        return msgspec.json.decode(self.process.stdout.readline(), type=answer)


def answer_lines(question_type: type[Q], answer: Callable[[Q], msgspec.Struct]) -> None:
    """Reply to every line of standard input, in the process of a `Helper`."""
    for line in sys.stdin.buffer:
        sys.stdout.buffer.write(
            msgspec.json.encode(answer(msgspec.json.decode(line, type=question_type)))
        )
        sys.stdout.buffer.write(b"\n")
        sys.stdout.buffer.flush()


def wait_until_up(
    process: subprocess.Popen[bytes],
    url: str,
    body: bytes | None,
    timeout_s: float = START_S,
    authorization: str = "",
) -> None:
    """Wait until a server responds to a request.

    Args:
        body: the body to post, or None to get the URL.
        authorization: the header of this name.

    Raises:
        RuntimeError: the server ended, or did not respond in time.
    """
    headers = {"Content-Type": "application/json", "Authorization": authorization}
    request = urllib.request.Request(url, body, headers)  # noqa: S310 - our own server
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s and process.poll() is None:
        with (
            suppress(urllib.error.URLError, OSError),
            urllib.request.urlopen(request, timeout=5) as got,  # noqa: S310 - our own server
        ):
            if got.status == 200:
                return
        time.sleep(POLL_S)
    raise RuntimeError(
        "the server ended"
        if process.poll() is not None
        else f"the server did not respond within {timeout_s:g} s"
    )


def stop(process: subprocess.Popen[bytes], timeout_s: float = STOP_S) -> None:
    """Stop a server that this process started, and kill the descendants that outlive it."""
    started = {pid: _start_ticks(pid) for pid in process_tree(process.pid)}
    process.terminate()
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for pid, ticks in started.items():
        # The kernel may have given the number to another process since.
        if ticks is not None and _start_ticks(pid) == ticks:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _start_ticks(pid: int) -> int | None:
    """Return when a process started, or None if it has ended."""
    try:
        fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])
