"""Interleaved rounds, each of which sends every question to every target in shuffled order."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Final

import msgspec

from bench.edge import wire
from bench.edge.client import Load, Measured
from bench.edge.targets import PACE_MS, Kind, Target
from bench.edge.worker import Done, Work
from bench.harness.processes import (
    Cores,
    Helper,
    free_port,
    start,
    stop,
    wait_until_up,
)
from draftgate.loadgen.measuring.metrics import percentile

WORKER: Final = "worker alone"

SATURATED: Final = 0.85
"""Share of their core above which client and mock, not the target, limit a measurement."""

QUOTED_LOG_LINES: Final = 4
"""Number of log lines that are quoted if a server does not start."""


@dataclass(frozen=True, slots=True)
class Question:
    """The load of a single measurement.

    Attributes:
        paced: whether chunks are `PACE_MS` apart instead of immediate.
    """

    name: str
    connections: int
    stream: bool
    tokens: int
    paced: bool = False


def questions(chunks: int) -> tuple[Question, ...]:
    """Return the questions that every target receives.

    Args:
        chunks: number of chunks of a long stream.
    """
    return (
        Question("whole, 1 client", 1, stream=False, tokens=1),
        Question("whole, 16 clients", 16, stream=False, tokens=1),
        Question("short stream, 1 client", 1, stream=True, tokens=1),
        Question("short stream, 16 clients", 16, stream=True, tokens=1),
        Question("long stream, 1 client", 1, stream=True, tokens=chunks),
        Question("long stream, 16 clients", 16, stream=True, tokens=chunks),
        Question("paced stream, 16 clients", 16, stream=True, tokens=chunks, paced=True),
    )


class Row(msgspec.Struct):
    """The result of a question for a target in a single round, with times in seconds.

    Latencies are NaN if no request ended in time.

    Attributes:
        requests, chunks, failed: number of requests that ended in time, of their events, and of
            failed requests.
        saturated: whether client and mock took more than `SATURATED` of their core.
    """

    target: str
    kind: Kind
    question: str
    round: int
    requests: int
    chunks: int
    failed: int
    wall_s: float
    latency_p50_s: float
    latency_p99_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    server_cpu_s: float
    client_cpu_s: float
    mock_cpu_s: float
    saturated: bool


@dataclass(frozen=True, slots=True)
class Server:
    """A running target, with port and process id of the server and of its paced variant."""

    target: Target
    port: int
    pid: int
    paced_port: int
    paced_pid: int


class Bench:
    """The mock, the client, and the running targets."""

    def __init__(self, stack: ExitStack, folder: Path, cores: Cores) -> None:
        self._stack, self._folder = stack, folder
        self._server_core, self._client_core = cores
        self.servers: list[Server] = []
        self.missing: dict[str, str] = {}
        command = [sys.executable, "-m", "bench.edge.mock"]
        at = self._start("mock", command, "--port", self._client_core, {})
        self._mock_port, self._mock_pid = at
        self._client = Helper("client", self._client_core)
        self._worker = Helper("worker", self._server_core)
        stack.callback(stop, self._client.process)
        stack.callback(stop, self._worker.process)

    @property
    def upstream(self) -> str:
        """URL of the mock upstream."""
        return f"http://127.0.0.1:{self._mock_port}"

    def start_target(self, target: Target) -> None:
        """Start a target, or record the reason why it did not start."""
        if target.command is None:
            port, pid = self._mock_port, 0
            self.servers.append(Server(target, port, pid, port, pid))
            return
        variables, core, flag = target.variables, self._server_core, target.port_flag
        try:
            at = self._start(target.name, target.command, flag, core, variables)
            paced = at
            if target.paced_command is not None:
                name = f"{target.name} paced"
                paced = self._start(name, target.paced_command, flag, core, variables)
        except (OSError, RuntimeError) as error:
            log_lines = self._log(target.name).read_text(errors="replace").split("\n")
            self.missing[target.name] = f"{error}: {' / '.join(log_lines[-QUOTED_LOG_LINES:])}"
            return
        self.servers.append(Server(target, *at, *paced))

    def _start(
        self,
        name: str,
        command: Sequence[str],
        port_flag: str,
        core: int | None,
        variables: Mapping[str, str],
    ) -> tuple[int, int]:
        port = free_port()
        command = [*command, port_flag, str(port)]
        process = start(command, core, self._log(name), variables)
        self._stack.callback(stop, process)
        url = f"http://127.0.0.1:{port}{wire.PATH}"
        body = wire.request_body(1, stream=False)
        wait_until_up(process, url, body, authorization=wire.AUTHORIZATION)
        return port, process.pid

    def _log(self, name: str) -> Path:
        return self._folder / f"{name.replace(' ', '-')}.log"

    def measure(self, server: Server, question: Question, for_s: float, number: int) -> Row:
        """Measure a question on a target, and return its row."""
        port, pid = (
            (server.paced_port, server.paced_pid) if question.paced else (server.port, server.pid)
        )
        load = Load(
            "127.0.0.1",
            port,
            question.tokens,
            question.stream,
            question.connections,
            warm_s=for_s / 5,
            for_s=for_s,
            pace_ms=PACE_MS if question.paced else 0.0,
            server=pid,
            upstream=self._mock_pid,
        )
        measured = self._client.request(load, Measured)
        return row_of(server.target, question, number, measured)

    def measure_worker(self, question: Question, for_s: float, number: int) -> Row:
        """Run the load of a question on the simulated worker without HTTP."""
        work = Work(question.tokens, question.connections, for_s)
        done = self._worker.request(work, Done)
        return Row(
            WORKER,
            Kind.NO_EDGE,
            question.name,
            number,
            done.requests,
            done.deltas,
            0,
            done.cpu_s,
            *(math.nan,) * 4,
            done.cpu_s,
            0.0,
            0.0,
            saturated=False,
        )


def row_of(target: Target, question: Question, number: int, measured: Measured) -> Row:
    """Return the row of what the client measured."""

    def at(values: list[float], share: float) -> float:
        return percentile(sorted(values), share) if values else math.nan

    busy_s = measured.client_cpu_s + measured.upstream_cpu_s
    return Row(
        target.name,
        target.kind,
        question.name,
        number,
        len(measured.latency_s),
        measured.chunks,
        measured.failed,
        measured.wall_s,
        at(measured.latency_s, 0.5),
        at(measured.latency_s, 0.99),
        at(measured.ttft_s, 0.5),
        at(measured.ttft_s, 0.99),
        measured.server_cpu_s,
        measured.client_cpu_s,
        measured.upstream_cpu_s,
        busy_s > SATURATED * measured.wall_s,
    )


@contextmanager
def open_bench(folder: Path, cores: Cores) -> Iterator[Bench]:
    """Start mock and client, and stop them and every target at exit."""
    with ExitStack() as stack:
        yield Bench(stack, folder, cores)


def rounds(
    bench: Bench,
    question_list: Sequence[Question],
    *,
    number: int,
    for_s: float,
    seed: int,
    show_status: Callable[[str], None],
) -> Iterator[Row]:
    """Yield the rows of interleaved rounds, in which every target gets each question once.

    Args:
        number: number of rounds.
    """
    order = Random(seed)
    turns = [(server, question) for server in bench.servers for question in question_list]
    for place in range(number):
        order.shuffle(turns)
        for done, (server, question) in enumerate(turns):
            show_status(
                f"round {place + 1}/{number}, {done + 1}/{len(turns)}: {server.target.name}"
            )
            yield bench.measure(server, question, for_s, place)
        for question in question_list:
            if question.connections > 1 and not question.paced:
                yield bench.measure_worker(question, for_s, place)
