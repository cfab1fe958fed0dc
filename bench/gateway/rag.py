"""Measure RAG questions on the shipped model, without speculation and with `auto`.

    draftgate bench rag --json OUT

Each policy has a server with the shipped model, and both servers embed the same passages. Only one
server is under load at a time. Each round sends the same questions at the same offsets to the first
server and then to the second server. The order alternates between rounds, so that other load on the
machine affects both. A question is a plan, embeddings and an answer under one deadline
(docs/guide/load-testing.md).
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Final

import uvloop
from rich.console import Console

from bench.harness.processes import on_core, two_cores
from bench.harness.provenance import bench_parser, simulated_provenance, write_results
from bench.harness.servers import Server, fresh_cache, run_server
from draftgate.gateway.cli.environment import collect_environment
from draftgate.loadgen.checking.audit import Verdict
from draftgate.loadgen.measuring.confidence import Z_95
from draftgate.loadgen.measuring.hops import summarize_hops
from draftgate.loadgen.measuring.metrics import METRICS, distribution, values_of
from draftgate.loadgen.measuring.slo import attainment
from draftgate.loadgen.measuring.summary import summarize
from draftgate.loadgen.planning.plan import Load
from draftgate.loadgen.report.html import html_table
from draftgate.loadgen.sending.run import run_load
from draftgate.loadgen.sending.target import Target
from draftgate.loadgen.types import LoadRun, Record, Slo

POLICIES: Final = ("off", "auto")
KV_BYTES: Final = 512 << 20
"""KV memory of each server in bytes. It holds 87,000 tokens of the shipped model, enough for forty
questions. The default would reserve half of the free memory for each server."""

COMPARED: Final = ("ttft_s", "tpot_s", "latency_s")


def measure(servers: Mapping[str, Server], args: Namespace) -> dict[str, Any]:
    """Return the summaries of each round and of all rounds."""
    rounds = list[dict[str, Any]]()
    runs: dict[str, list[LoadRun]] = {policy: [] for policy in POLICIES}
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        for place in range(args.rounds):
            load = _load(args, args.seed + place)
            for policy in POLICIES if place % 2 == 0 else reversed(POLICIES):
                target = Target(servers[policy].url)
                before = os.getloadavg()[0]
                run, _ = runner.run(run_load(load, target, Console(quiet=True)))
                runs[policy].append(run)
                labels = {"policy": policy, "round": place, "load_before": before}
                rounds.append({**labels, "summary": summarize(run)})
                print(labels, _line(rounds[-1]["summary"]), flush=True)
    off, auto = (runs[policy] for policy in POLICIES)
    return {
        "policies": {policy: together(runs[policy]) for policy in POLICIES},
        "auto_to_off": {figure: paired(off, auto, figure) for figure in COMPARED},
        "rounds": rounds,
    }


def together(runs: Sequence[LoadRun]) -> dict[str, Any]:
    """Return the metrics of a policy over all rounds."""
    records = [record for run in runs for record in run.records]
    counted = attainment(records)
    found = {figure: distribution(values_of(METRICS[figure], records)) for figure in COMPARED}
    return {
        "requests": counted.requests,
        "intact": counted.intact,
        "attainment": counted.share,
        "attainment_interval": list(counted.interval),
        **{name: None if one is None else one.as_dict() for name, one in found.items()},
        "hops": {hop.name: hop.as_dict() for hop in summarize_hops(records)},
    }


def paired(off: Sequence[LoadRun], auto: Sequence[LoadRun], figure: str) -> dict[str, Any] | None:
    """Return the mean difference of a metric over the questions that both policies completed.

    The difference is `auto` minus `off`, with a 95% interval from the normal distribution.
    Questions are treated as independent. The result also has the difference relative to the mean of
    `off`.

    Returns:
        The difference, or None with fewer than two pairs.
    """
    pairs = [
        (before, after)
        for one, other in zip(off, auto, strict=True)
        for before, after in _pairs(one, other, figure)
    ]
    if len(pairs) < 2:
        return None
    differences = [after - before for before, after in pairs]
    mean, base = fmean(differences), fmean(before for before, _ in pairs)
    half = Z_95 * stdev(differences) / sqrt(len(differences))
    return {
        "questions": len(pairs),
        "mean": mean,
        "interval": [mean - half, mean + half],
        "relative": mean / base,
    }


def _pairs(off: LoadRun, auto: LoadRun, figure: str) -> Iterator[tuple[float, float]]:
    """Yield the values of each question of a round under both policies."""
    before, after = (_by_question(run.records, figure) for run in (off, auto))
    for index in sorted(before.keys() & after.keys()):
        yield before[index], after[index]


def _by_question(records: Sequence[Record], figure: str) -> dict[int, float]:
    return {
        record.planned.index: value
        for record in records
        if record.verdict == Verdict.OK
        for value in METRICS[figure].values(record)
    }


def _load(args: Namespace, seed: int) -> Load:
    return Load(
        workload="rag",
        rate_rps=args.rate,
        requests=args.requests,
        slo=Slo(latency_s=args.deadline_ms / 1e3),
        seed=seed,
    )


def _line(summary: Mapping[str, Any]) -> str:
    latency_s, met = summary["latency_s"], summary["attainment"]
    shown = "none whole" if latency_s is None else f"latency p50 {latency_s['p50']:.2f} s"
    errors = summary["errors"]
    return f"in time {met:.1%}, {shown}, errors {errors}, valid {summary['valid']}"


def body(results: Mapping[str, Any]) -> Iterator[str]:
    """Yield the parts of the page."""
    yield "<h1>Retrieval-augmented questions</h1>"
    yield f"<p>{results['command']}, {results['commit']}, {results['date']}</p>"
    rows = [
        [policy, name, *(f"{figures[p] * 1e3:,.0f} ms" for p in ("p50", "p90", "p99")), share]
        for policy, metrics in results["policies"].items()
        for name, figures, share in _figure_rows(metrics)
    ]
    head = ["policy", "of", "p50", "p90", "p99", "of the deadline, p50"]
    yield html_table(head, rows, words=(1,))


def _figure_rows(metrics: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, float], str]]:
    """Yield latencies of the question and of its hops, if any question completed."""
    if metrics["latency_s"] is not None:
        yield f"question, {metrics['attainment']:.1%} in time", metrics["latency_s"], ""
    for name, hop in metrics["hops"].items():
        if hop["latency_s"] is not None:
            yield name, hop["latency_s"], f"{hop['share']['p50']:.1%}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `draftgate bench rag`."""
    parser = bench_parser("rag", __doc__)
    parser.add_argument("--rate", type=float, default=0.2, help="questions per second")
    parser.add_argument("--requests", type=int, default=40, help="number of questions per round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--deadline-ms", type=float, default=10_000.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    server_core, client_core = two_cores()
    results = {
        "format": "rag/1",
        **simulated_provenance("rag", arguments),
        "device": collect_environment()["cpu"],
        "threads": 1,
        "load_before": os.getloadavg()[0],
    }
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as opened:
        servers = {
            policy: opened.enter_context(
                run_server(
                    (*("--threads", "1", "--kv-bytes", str(KV_BYTES)), "--speculation", policy),
                    Path(scratch),
                    server_core,
                    backend="engine",
                    variables=fresh_cache(Path(scratch)),
                )
            )
            for policy in POLICIES
        }
        with on_core(client_core):
            results |= measure(servers, args)
    for policy, metrics in results["policies"].items():
        answers = metrics["hops"].get("answer", {"facts": {}})["facts"]
        shown = ", ".join(f"{name} {true} of {n}" for name, (true, n) in answers.items())
        print(f"{policy}: in time {metrics['attainment']:.1%}, {shown}")
    write_results(args, results, "Questions over documents", body(results))


if __name__ == "__main__":
    main()
