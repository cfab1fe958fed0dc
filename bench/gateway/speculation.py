"""Compare speculation policies on real servers: tokens/s and latency by number of streams.

    draftgate bench speculation --json OUT

Each policy has a server with one torch thread. All servers share one core, and the client has the
other core. Only one server has requests at a time. In each turn, all policies run the same requests
of a cell back to back, in an order that rotates from round to round. A cell has a kind of output, a
text and a number of streams. Each stream sends its next request after the previous response. The
texts are held-out code, its docstrings, and questions over passages of these docstrings.

Every server computes all prompts before the first round, so the prefix cache holds them and rounds
measure decoding. These requests also warm up the estimates of the policies. All policies must
return the same texts.

The results are written after every turn. If the file exists, the command continues it, so an
interrupted measurement or a subset of cells can be completed later.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from hashlib import sha256
from pathlib import Path
from statistics import fmean
from typing import Any, Final, NamedTuple

import uvloop

from bench.gateway.speculation_cells import (
    LOOP_TOKENS,
    OUTPUTS,
    SAMPLED,
    STREAMS,
    TEXTS,
    Cell,
    Pools,
    Prompt,
    all_cells,
    greedy_pools,
    held_out_prompts,
    planned,
    requests_of,
    unstreamed,
)
from bench.gateway.speculation_report import JUDGED, Run, Turns, summary, table
from bench.harness.loops import loop_start
from bench.harness.processes import on_core, two_cores
from bench.harness.provenance import BUSY_LIMIT, busy_share, simulated_provenance
from bench.harness.servers import Server, fresh_cache, run_server
from draftgate.gateway.cli.environment import collect_environment
from draftgate.loadgen.checking.audit import Verdict
from draftgate.loadgen.measuring.metrics import completion_tokens, latency_s, ttft_s
from draftgate.loadgen.measuring.speculation import total_speculation
from draftgate.loadgen.sending.client import OpenAIClient, first_model, open_session
from draftgate.loadgen.sending.driver import run_plan
from draftgate.loadgen.types import LoadRun, PlannedRequest, Record

POLICIES: Final = "off,fixed:2,fixed:4,smartspec,adaptive_verification,auto"
PROMPTS: Final = 64
ROUNDS: Final = 5
WARM_STREAMS: Final = 16
KV_BYTES: Final = 512 << 20
"""KV memory of each server in bytes. It holds all prompts, which together have 60,000 tokens."""

FLAGS: Final = (
    *("--device", "cpu", "--threads", "1"),
    *("--max-model-len", "2048", "--kv-bytes", str(KV_BYTES)),
)
FORMAT: Final = "speculation_servers/1"


class Contender(NamedTuple):
    """A policy with its server and a client of it."""

    policy: str
    server: Server
    client: OpenAIClient


@contextmanager
def serving(
    policies: Sequence[str], proposer: str | None, scratch: Path
) -> Iterator[dict[str, Server]]:
    """Run a server for each policy while the context lasts.

    Args:
        proposer: the only proposer of all servers, or None for all proposers.

    Raises:
        RuntimeError: a server does not start.
    """
    core = two_cores().servers
    with ExitStack() as stack:
        servers = {}
        for policy in policies:
            only = [] if proposer is None else ["--proposer", proposer]
            flags = [*FLAGS, "--speculation", policy, *only]
            servers[policy] = stack.enter_context(
                run_server(flags, scratch, core, backend="engine", variables=fresh_cache(scratch))
            )
            print(f"{policy} serves at {servers[policy].url}", flush=True)
        yield servers


@asynccontextmanager
async def contenders_of(servers: Mapping[str, Server]) -> AsyncIterator[list[Contender]]:
    """Open a session with each server while the context lasts."""
    async with AsyncExitStack() as stack:
        found = []
        for policy, server in servers.items():
            session = await stack.enter_async_context(open_session())
            model = await first_model(session, server.url)
            found.append(Contender(policy, server, OpenAIClient(session, server.url, model)))
        yield found


async def make_pools(contender: Contender, prompts: Mapping[str, Sequence[str]]) -> Pools:
    """Return the prompts of every kind of output, by the greedy outputs of a server."""
    pools: Pools = {}
    for text, each in prompts.items():
        starts = await _loop_starts(contender.client, each)
        pools[SAMPLED, text] = [Prompt(prompt) for prompt in each]
        for outputs, chosen in greedy_pools(each, starts).items():
            pools[outputs, text] = chosen
        print(text, {outputs: len(pools[outputs, text]) for outputs in OUTPUTS}, flush=True)
    return pools


async def _loop_starts(client: OpenAIClient, prompts: Sequence[str]) -> list[int]:
    limit = asyncio.Semaphore(WARM_STREAMS)

    async def start(prompt: str) -> int:
        body = unstreamed(Prompt(prompt, LOOP_TOKENS), client.model)
        url = f"{client.url}/v1/completions"
        async with limit, client.session.post(url, data=json.dumps(body)) as response:
            reply = await response.json()
        if response.status != 200:
            raise RuntimeError(f"{client.url} answered {response.status}: {reply}")
        return loop_start(reply["choices"][0]["logprobs"]["tokens"])

    return list(await asyncio.gather(*map(start, prompts)))


async def warm_up(contender: Contender, prompts: Mapping[str, Sequence[str]]) -> None:
    """Compute all prompts, sampled and greedy, so that caches and estimates are warm."""
    for each in prompts.values():
        for temperature in (0.8, 0.0):
            requests = [planned(i, Prompt(p), temperature) for i, p in enumerate(each)]
            intact_records(await run_plan(contender.client, requests, concurrency=WARM_STREAMS))


def intact_records(run: LoadRun) -> Sequence[Record]:
    """Return the records of a run in the order of their requests.

    Raises:
        RuntimeError: the run was interrupted, or a response was not intact.
    """
    if run.interrupted:
        raise RuntimeError("the run was interrupted")
    for record in run.records:
        if record.verdict != Verdict.OK:
            raise RuntimeError(f"a request failed: {record.verdict}: {record.detail}")
    return sorted(run.records, key=lambda record: record.planned.index)


class Measurement:
    """A measurement that may be interrupted and continued.

    Attributes:
        runs: all runs so far.
    """

    def __init__(self, contenders: Sequence[Contender], pools: Pools, runs: list[Run]) -> None:
        self.runs = runs
        self._contenders = contenders
        self._pools = pools
        self._texts: dict[tuple[Cell, int], str] = {}  # digest of the first text of each request

    def is_measured(self, cell: Cell, number: int) -> bool:
        """Return whether all policies have run a cell in a round."""
        found = {run.policy for run in self.runs if (run.cell, run.round) == (cell, number)}
        return found >= {contender.policy for contender in self._contenders}

    async def run_turn(self, cell: Cell, number: int) -> list[Run]:
        """Run all policies on a cell in the order of the round, and return their runs.

        Raises:
            RuntimeError: a request failed.
        """
        requests = requests_of(cell, self._pools[cell.outputs, cell.text])
        first = number % len(self._contenders)
        order = [*self._contenders[first:], *self._contenders[:first]]
        turn = [await self._run(contender, cell, number, requests) for contender in order]
        self.runs.extend(turn)
        return turn

    async def _run(
        self, contender: Contender, cell: Cell, number: int, requests: Sequence[PlannedRequest]
    ) -> Run:
        before_s = contender.server.cpu_s
        run = await run_plan(contender.client, requests, concurrency=cell.streams)
        cpu_s = contender.server.cpu_s - before_s
        records = intact_records(run)
        drafts = total_speculation(records)
        revised = [
            revision["drafting"] == "on" for record in records for revision in _revisions(record)
        ]
        return Run(
            *(number, *cell, contender.policy),
            tokens=sum(completion_tokens(record) or 0 for record in records),
            seconds=round(run.duration_s, 4),
            latency_s=round(fmean(map(latency_s, records)), 5),
            ttft_s=round(fmean(ttft_s(record) or 0.0 for record in records), 5),
            cpu_s=round(cpu_s, 2),
            steps=drafts.sum("steps") if drafts else 0,
            drafted=drafts.sum("drafted") if drafts else 0,
            accepted=drafts.sum("accepted") if drafts else 0,
            switched_on=sum(revised),
            switched_off=len(revised) - sum(revised),
            price=drafts.mean_price if drafts else None,
            different=sum(self._is_different(cell, record) for record in records),
        )

    def _is_different(self, cell: Cell, record: Record) -> bool:
        digest = sha256("".join(record.texts).encode()).hexdigest()
        return self._texts.setdefault((cell, record.planned.index), digest) != digest


def _revisions(record: Record) -> list[dict[str, Any]]:
    report = (record.metrics or {}).get("speculative_decoding") or {}
    return report.get("revisions") or []


async def measure(
    servers: Mapping[str, Server], args: argparse.Namespace, head: dict[str, Any], runs: list[Run]
) -> int:
    """Measure all cells, and write the results after each turn.

    Returns:
        The number of texts that differ between policies.
    """
    ends_s = time.monotonic() + 60 * args.minutes
    prompts = {text: held_out_prompts(text, args.prompts, args.seed) for text in args.texts}
    async with contenders_of(servers) as contenders:
        began_s = time.monotonic()
        pools = await make_pools(contenders[0], prompts)
        for contender in contenders:
            await warm_up(contender, prompts)
            print(f"{contender.policy} is warm after {time.monotonic() - began_s:.0f} s")
        head["idle_cpu_share"] = await _idle_cpu_share(servers)
        measurement = Measurement(contenders, pools, runs)
        cells = all_cells(args.outputs, args.texts, args.streams, pools)
        for number in range(args.rounds):
            for cell in cells:
                if measurement.is_measured(cell, number) or time.monotonic() > ends_s:
                    continue
                turn = await measurement.run_turn(cell, number)
                print(_progress(number, cell, turn), flush=True)
                write(args.json, head, measurement.runs)
    result = summary(Turns(measurement.runs, head["policies"]))
    print("\n".join(table(result, head["policies"])))
    return sum(run.different for run in measurement.runs)


async def _idle_cpu_share(servers: Mapping[str, Server], over_s: float = 2.0) -> dict[str, float]:
    """Return the share of a core that each idle server takes."""
    before = {policy: server.cpu_s for policy, server in servers.items()}
    await asyncio.sleep(over_s)
    return {p: round((server.cpu_s - before[p]) / over_s, 3) for p, server in servers.items()}


def _progress(number: int, cell: Cell, turn: Sequence[Run]) -> str:
    rates = ", ".join(
        f"{run.policy} {run.tokens / run.seconds:.0f} ({run.tokens / max(run.cpu_s, 0.01):.0f})"
        for run in sorted(turn, key=lambda run: run.policy)
    )
    return f"round {number} {' '.join(map(str, cell))}: tokens/s (per CPU second) {rates}"


def write(path: Path | None, head: Mapping[str, Any], runs: Sequence[Run]) -> None:
    """Write the results with one run per line, replacing the file as a whole."""
    if path is None:
        return
    turns = Turns(runs, head["policies"])
    content = json.dumps({**head, "columns": Run._fields, **summary(turns)}, indent=1)
    rows = ",\n".join(f"  {json.dumps(run)}" for run in runs)
    part = path.with_suffix(".part")
    part.write_text(f'{content[:-2]},\n "runs": [\n{rows}\n ]\n}}\n', encoding="utf-8")
    part.replace(path)


def read_runs(path: Path | None, head: Mapping[str, Any]) -> list[Run]:
    """Return the runs of an earlier part of the measurement, or nothing without a file.

    Raises:
        SystemExit: the file has other policies, prompts or another device.
    """
    if path is None or not path.exists():
        return []
    before = json.loads(path.read_text(encoding="utf-8"))
    for name in ("format", "policies", "proposer", "prompts", "seed", "commit", "device"):
        if before.get(name) != head[name]:
            raise SystemExit(
                f"{path} has {name} {before.get(name)}, not {head[name]}: choose another file"
            )
    return [Run(*row) for row in before["runs"]]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="draftgate bench speculation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--json", type=Path, help="write the results to this file, or continue it")
    add("--policies", default=POLICIES, help=f"comma-separated policies, including {JUDGED}")
    add("--proposer", help="the only proposer of all servers (default: all proposers)")
    add("--outputs", nargs="+", choices=OUTPUTS, default=OUTPUTS)
    add("--texts", nargs="+", choices=TEXTS, default=TEXTS)
    add("--streams", nargs="+", type=int, default=STREAMS)
    add("--rounds", type=int, default=ROUNDS)
    add("--minutes", type=float, default=60.0, help="begin no turn after this time")
    add("--prompts", type=int, default=PROMPTS, help="number of prompts of each text")
    add("--seed", type=int, default=0)
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `draftgate bench speculation`.

    Raises:
        SystemExit: texts differ between policies, or the file belongs to another measurement.
    """
    args = _parser().parse_args(arguments)
    policies = args.policies.split(",")
    if JUDGED not in policies or len(policies) < 2:
        raise SystemExit(f"--policies needs {JUDGED} and another policy")
    busy = busy_share()
    head: dict[str, Any] = {
        "format": FORMAT,
        **simulated_provenance("speculation", arguments),
        "device": collect_environment()["cpu"],
        "busy_share_before": round(busy, 3),
        "disturbed": busy > BUSY_LIMIT,
        "load_before": os.getloadavg()[0],
        "policies": policies,
        "proposer": args.proposer,
        "prompts": args.prompts,
        "seed": args.seed,
    }
    runs = read_runs(args.json, head)
    with (
        tempfile.TemporaryDirectory() as scratch,
        serving(policies, args.proposer, Path(scratch)) as servers,
        on_core(two_cores().clients),
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        different = runner.run(measure(servers, args, head, runs))
    if different:
        raise SystemExit(f"{different} texts differ between policies")


if __name__ == "__main__":
    main()
