"""Measure clients on slow paths: what they cost other clients, and how many chunks they take.

    draftgate bench client-paths --before DIR --json OUT

Some clients are on slow paths: the round trip is long, and the path carries a quarter of what the
worker generates for one client in chunks of one token. The paths are emulated in network
namespaces, with the kernel's TCP on both sides. All other clients are on the server's machine.
Clients send requests in closed loops. Each round measures these arms in shuffled order:

* `healthy`: no path is slow;
* `slow`: the paths are slow;
* `less`: no path is slow, but their clients ask for tokens only a quarter of the time;
* `equal`: as `less`, but so often that they get as many tokens as in `slow`;
* `before`: as `slow`, with the server of another checkout (`--before`).

The simulated device takes longer for each sequence of a step. Chunks contain a token's text
(`text`), so that larger chunks help, or also log probabilities (`logprobs`), so that they do not.
The benchmark needs root privileges.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import socket
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any, Final

import msgspec

from bench.harness.emulated_network import SERVER, EmulatedNetwork, PathConditions
from bench.harness.provenance import bench_parser, simulated_provenance, write_results
from bench.harness.servers import Server, quantiles, run_server, shaped_profile
from draftgate.gateway.cli.environment import collect_environment

PROMPT: Final = "def read_lines(path):\n"
ARMS: Final = ("healthy", "slow", "less", "equal", "before")
TEXT_TOKENS: Final = 4000
"""Tokens of a request, which no client reads to its end in a round."""

REQUEST_TOKENS: Final = 200
"""Tokens of a request of other clients."""

SHORT_TOKENS: Final = 50
"""Tokens of a request whose client then waits."""

SHARE: Final = 0.25
"""Share of the generation rate that a slow path carries."""

MODES: Final = {"text": {}, "logprobs": {"logprobs": 20}}
FULL_BYTES_S: Final = 1e8


class _Logprobs(msgspec.Struct):
    tokens: list[str] = []


class _Choice(msgspec.Struct):
    text: str = ""
    logprobs: _Logprobs | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []


_decode = msgspec.json.Decoder(_Event).decode


@dataclass(slots=True)
class Reading:
    """What a client has read of its streams.

    Attributes:
        chunks: arrival times of chunks and their characters, for each stream.
        ttft_s: times to first token.
    """

    chunks: list[list[tuple[float, int]]] = field(default_factory=list)
    ttft_s: list[float] = field(default_factory=list)

    def within(self, began_s: float, ended_s: float) -> list[list[tuple[float, int]]]:
        """Return the chunks of each stream that arrived within a time."""
        return [[one for one in part if began_s <= one[0] <= ended_s] for part in self.chunks]


@dataclass(slots=True)
class Clients:
    """The clients of a round, of which the first `slow` are on emulated paths."""

    network: EmulatedNetwork
    port: int
    fields: dict[str, Any]
    args: Namespace
    readings: list[Reading] = field(default_factory=list)

    async def read(self, share: float) -> None:
        """Read streams in closed loops, until cancelled.

        Args:
            share: share of the time in which the clients on emulated paths ask for tokens.
        """
        self.readings = [Reading() for _ in range(self.args.clients)]
        async with asyncio.TaskGroup() as group:
            for number, reading in enumerate(self.readings):
                group.create_task(self._read_forever(number, reading, share))

    async def _read_forever(self, number: int, reading: Reading, share: float) -> None:
        slow = number < self.args.slow
        tokens = REQUEST_TOKENS
        if slow:
            tokens = SHORT_TOKENS if share < 1 else TEXT_TOKENS
        await asyncio.sleep(random.random())
        while True:
            if slow:
                connection = await self.network.connect(number + 1, self.port)
            else:
                connection = await _connect_beside(self.port)
            await self._read_stream(connection, tokens, reading)
            if slow and share < 1:
                # The next request begins a round trip or two after it is sent, too.
                busy_s = reading.chunks[-1][-1][0] - reading.chunks[-1][0][0]
                idle_s = busy_s * (1 / share - 1) - 2 * self.args.rtt_ms / 1e3
                await asyncio.sleep(max(idle_s, 0.0))

    async def _read_stream(self, connection: socket.socket, tokens: int, reading: Reading) -> None:
        reader, writer = await asyncio.open_connection(sock=connection)
        chunks: list[tuple[float, int]] = []
        reading.chunks.append(chunks)
        try:
            began_s = time.perf_counter()
            writer.write(_request(tokens, self.fields))
            while line := await reader.readline():
                if not line.startswith(b"data: {"):
                    continue
                size = _size(line[6:])
                if size and not chunks:
                    reading.ttft_s.append(time.perf_counter() - began_s)
                if size:
                    chunks.append((time.perf_counter(), size))
        finally:
            writer.transport.abort()


def _size(data: bytes) -> int:
    """Return the tokens of an event with log probabilities, or else its characters."""
    choices = _decode(data).choices
    if choices and choices[0].logprobs is not None:
        return len(choices[0].logprobs.tokens)
    return sum(len(choice.text) for choice in choices)


def _request(tokens: int, fields: dict[str, Any]) -> bytes:
    wanted = {"prompt": PROMPT, "max_tokens": tokens, "stream": True, "ignore_eos": True}
    body = json.dumps({**wanted, "seed": 1, **fields}).encode()
    head = "POST /v1/completions HTTP/1.0\r\nHost: localhost\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


async def _connect_beside(port: int) -> socket.socket:
    connection = socket.socket()
    connection.setblocking(False)
    await asyncio.get_running_loop().sock_connect(connection, (SERVER, port))
    return connection


@dataclass(slots=True)
class Study:
    """The measurement of one kind of chunks.

    Attributes:
        servers: the server of this checkout, and that of the other one if there is one.
        carried_share: tokens that slow paths carry, as a share of those of healthy paths.
    """

    network: EmulatedNetwork
    servers: list[Server]
    mode: str
    args: Namespace
    path_bytes_s: float = FULL_BYTES_S
    token_size: float = 1.0
    carried_share: float = 1.0

    async def calibrate(self) -> dict[str, Any]:
        """Measure the bytes of a token, set the rate of slow paths, and measure what they carry."""
        healthy = await self.measure("healthy")
        self.token_size = healthy["slow"]["size_per_chunk"]
        self.path_bytes_s = SHARE * healthy["slow"]["path_bytes_s"] / self.args.slow
        slow = await self.measure("slow")
        healthy_tokens_s = healthy["slow"]["tokens_s"] / self.token_size  # was in characters
        self.carried_share = slow["slow"]["tokens_s"] / healthy_tokens_s
        found = {"path_bytes_s": self.path_bytes_s, "carried_share": self.carried_share}
        return found | {"healthy": healthy, "slow": slow}

    async def measure(self, arm: str) -> dict[str, Any]:
        """Return the results of an arm."""
        server = self.servers[-1 if arm == "before" else 0]
        rate = self.path_bytes_s if arm in {"slow", "before"} else FULL_BYTES_S
        paths = list(self.network.paths.values())
        for path in paths:
            path.bytes_s, path.busy_until_s = rate, 0.0
        clients = Clients(self.network, server.port, MODES[self.mode], self.args)
        share = {"less": SHARE, "equal": self.carried_share}.get(arm, 1.0)
        reading = asyncio.create_task(clients.read(share))
        await asyncio.sleep(self.args.settle_s)
        began_s, before = time.perf_counter(), [(one.packets, one.num_bytes) for one in paths]
        await asyncio.sleep(self.args.seconds)
        ended_s, after = time.perf_counter(), [(one.packets, one.num_bytes) for one in paths]
        reading.cancel()
        with suppress(asyncio.CancelledError):
            await reading
        await asyncio.sleep(2.0)  # the server notices the ends
        window = began_s, ended_s
        packets = sum(a[0] - b[0] for a, b in zip(after, before, strict=True))
        num_bytes = sum(a[1] - b[1] for a, b in zip(after, before, strict=True))
        slow = self._slow(clients.readings[: self.args.slow], window)
        slow |= {"packets": packets, "path_bytes_s": num_bytes / (ended_s - began_s)}
        return {"arm": arm, "slow": slow, **_others(clients.readings[self.args.slow :], window)}

    def _slow(self, readings: Sequence[Reading], window: tuple[float, float]) -> dict[str, Any]:
        """Return the results of clients on slow paths."""
        parts = [part for one in readings for part in one.within(*window)]
        chunks, size = sum(map(len, parts)), sum(size for part in parts for _, size in part)
        gaps_s = [b[0] - a[0] for part in parts for a, b in pairwise(part)]
        return {
            "chunks": chunks,
            "size_per_chunk": size / max(chunks, 1),
            "tokens_s": size / self.token_size / (window[1] - window[0]),
            "gap_s": quantiles(gaps_s) if gaps_s else None,
        }


def _others(readings: Sequence[Reading], window: tuple[float, float]) -> dict[str, Any]:
    """Return the results of the other clients, each of whose chunks is a token."""
    parts = [part for one in readings for part in one.within(*window) if len(part) > 1]
    gaps_s = [b[0] - a[0] for part in parts for a, b in pairwise(part)]
    tpots_s = [(part[-1][0] - part[0][0]) / (len(part) - 1) for part in parts if len(part) > 20]
    return {
        "tpot_s": median(tpots_s),
        "gap_s": quantiles(gaps_s),
        "ttft_s": quantiles([seconds for one in readings for seconds in one.ttft_s]),
        "tokens_s": sum(map(len, parts)) / (window[1] - window[0]),
    }


def summary(rounds: Sequence[dict[str, dict[str, Any]]]) -> dict[str, Any]:
    """Return the ratios between arms, as mean and half width of the 95% interval over rounds."""

    def ratio(of: str, to: str, *keys: str) -> dict[str, float] | None:
        values = []
        for row in rounds:
            if of not in row or to not in row:
                return None
            above: Any = row[of]
            below: Any = row[to]
            for key in keys:
                above, below = above[key], below[key]
            values.append(above / below)
        return interval(values)

    pairs = {
        "slow_to_healthy": ("slow", "healthy"),
        "slow_to_less": ("slow", "less"),
        "slow_to_equal": ("slow", "equal"),
        "before_to_healthy": ("before", "healthy"),
        "before_to_less": ("before", "less"),
        "slow_to_before": ("slow", "before"),
    }
    found: dict[str, Any] = {}
    for name, (of, to) in pairs.items():
        found[name] = {
            "other_tpot": ratio(of, to, "tpot_s"),
            "other_gap_p50": ratio(of, to, "gap_s", "p50"),
            "other_gap_p99": ratio(of, to, "gap_s", "p99"),
            "other_ttft_p50": ratio(of, to, "ttft_s", "p50"),
            "other_tokens_s": ratio(of, to, "tokens_s"),
            "slow_tokens_s": ratio(of, to, "slow", "tokens_s"),
            "all_tokens_s": ratio(of, to, "all_tokens_s"),
            "chunks_per_token": ratio(of, to, "chunks_per_token"),
            "packets_per_token": ratio(of, to, "packets_per_token"),
        }
    return found


def interval(values: Sequence[float]) -> dict[str, float]:
    """Return mean and half width of the 95% interval (Student's t)."""
    t95 = {2: 12.71, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365}
    if len(values) < 2:
        return {"mean": fmean(values), "half_width": math.inf}
    half = t95.get(len(values), 2.2) * stdev(values) / math.sqrt(len(values))
    return {"mean": fmean(values), "half_width": half}


def _completed(row: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Return the results of an arm with those per token of slow clients, and of all clients."""
    slow = row["slow"]
    tokens = slow["tokens_s"] * seconds
    return row | {
        "all_tokens_s": row["tokens_s"] + slow["tokens_s"],
        "chunks_per_token": slow["chunks"] / tokens,
        "packets_per_token": slow["packets"] / tokens,
    }


async def _measure(network: EmulatedNetwork, servers: list[Server], args: Namespace) -> Any:
    modes: dict[str, Any] = {}
    with network.running():
        for mode in args.modes:
            study = Study(network, servers, mode, args)
            calibration = await study.calibrate()
            rounds = []
            for number in range(args.rounds):
                arms = [arm for arm in ARMS if arm != "before" or len(servers) > 1]
                random.Random(number).shuffle(arms)
                row = {arm: _completed(await study.measure(arm), args.seconds) for arm in arms}
                rounds.append(row)
                _show(mode, row)
            modes[mode] = {"summary": summary(rounds), "calibration": calibration, "rounds": rounds}
    return modes


def _show(mode: str, row: dict[str, dict[str, Any]]) -> None:
    for arm in sorted(row):
        one = row[arm]
        print(
            f"{mode:>8} {arm:>8}: others TPOT {one['tpot_s'] * 1e3:.2f} ms, gap p99"
            f" {one['gap_s']['p99'] * 1e3:.1f} ms, {one['tokens_s']:.0f} tokens/s;"
            f" slow {one['slow']['tokens_s']:.0f} tokens/s, {one['slow']['chunks']} chunks of"
            f" {one['slow']['size_per_chunk']:.1f}, {one['slow']['packets']} packets",
            flush=True,
        )


@contextmanager
def _servers(args: Namespace, scratch: Path) -> Iterator[list[Server]]:
    """Run the servers in the present namespace."""
    sizes = range(1, 1025)  # steps are padded to the next size
    step_s = [(args.step_ms + (size - 1) * args.sequence_ms) / 1e3 for size in sizes]
    profile = shaped_profile(scratch, token_buckets=list(sizes), step_s=step_s)
    flags = ["--profile", str(profile), "--speculation", args.speculation, "--host", "0.0.0.0"]  # noqa: S104 - in a namespace
    with ExitStack() as stack:
        servers = [stack.enter_context(run_server(flags, scratch))]
        if args.before is not None:
            variables = {"PYTHONSAFEPATH": "1", "PYTHONPATH": str(args.before.resolve())}
            servers.append(stack.enter_context(run_server(flags, scratch, variables=variables)))
        yield servers


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `draftgate bench client-paths`."""
    parser = bench_parser("client-paths", __doc__, device=False)
    parser.add_argument("--clients", type=int, default=20, help="number of clients")
    parser.add_argument("--slow", type=int, default=6, help="number of clients on slow paths")
    parser.add_argument("--rtt-ms", type=float, default=300.0, help="their round trip, in ms")
    parser.add_argument("--step-ms", type=float, default=10.0, help="a step of one sequence, in ms")
    parser.add_argument(
        "--sequence-ms", type=float, default=1.0, help="time of each further token, in ms"
    )
    parser.add_argument("--speculation", default="off", help="speculation policy of the servers")
    parser.add_argument("--modes", nargs="+", choices=tuple(MODES), default=list(MODES))
    parser.add_argument("--before", type=Path, help="checkout of the server to compare with")
    parser.add_argument("--settle-s", type=float, default=8.0, help="seconds before each arm")
    parser.add_argument("--seconds", type=float, default=20.0, help="measured seconds of each arm")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args(arguments)
    results: dict[str, Any] = {
        "format": "client-paths/1",
        **simulated_provenance("client-paths", arguments),
        "device": f"simulated, on {collect_environment()['cpu']}",
        "load_before": os.getloadavg()[0],
    }
    delay_s = args.rtt_ms / 2e3
    paths = {number + 1: PathConditions(delay_s=delay_s) for number in range(args.slow)}
    network = EmulatedNetwork(paths)
    with (
        tempfile.TemporaryDirectory() as scratch,
        network.server.entered(),
        _servers(args, Path(scratch)) as servers,
    ):
        results["modes"] = asyncio.run(_measure(network, servers, args))
    results["load_after"] = os.getloadavg()[0]
    print(json.dumps({mode: one["summary"] for mode, one in results["modes"].items()}, indent=1))
    write_results(args, results, "Clients on slow paths", ())


if __name__ == "__main__":
    main()
