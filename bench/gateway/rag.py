"""Measure RAG questions on the shipped model, by speculation policy, agent and deadlines.

    draftgate bench rag --json OUT
    draftgate bench rag --arms off:planned:flow,auto:planned:flow --json OUT

An arm is a policy of the server, the agent of a question, and how its requests announce the
deadline (docs/guide/load-testing.md). Each policy has a server with the shipped model, and all
servers embed the same passages. Only one server is under load at a time. Each round sends the same
questions at the same offsets in every arm. The order of the arms alternates between rounds, so that
other load on the machine affects all. Prompts start with a different text in every run, because
otherwise an arm would find the prompts of earlier arms in the server's cache.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import tempfile
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Final, NamedTuple, Self

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
from draftgate.loadgen.workloads.rag_flow import Agent, Deadlines, RagOptions

ARMS: Final = (
    "auto:planned:flow,off:planned:flow,auto:interleaved:flow,auto:planned:split,auto:planned:none"
)
"""The first arm, and arms that differ from it in one respect."""

KV_BYTES: Final = 512 << 20
"""KV memory of each server in bytes. It holds 87,000 tokens of the shipped model, enough for forty
questions. The default would reserve half of the free memory for each server."""

COMPARED: Final = ("ttft_s", "tpot_s", "latency_s")


class Arm(NamedTuple):
    """A policy of the server, and how its questions are sent."""

    policy: str
    agent: Agent
    deadlines: Deadlines

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the arm of a text such as `auto:planned:flow`.

        Raises:
            ValueError: the text names no arm.
        """
        policy, _, rest = text.partition(":")
        agent, _, deadlines = rest.partition(":")
        return cls(policy, Agent(agent), Deadlines(deadlines))

    def __str__(self) -> str:
        return ":".join(self)


def measure(servers: Mapping[str, Server], args: Namespace) -> dict[str, Any]:
    """Return the summaries of each round, and of all rounds by arm.

    Args:
        servers: the server of each policy.
        args: the options of `main`. The other arms are compared with the first of `args.arms`.
    """
    rounds = list[dict[str, Any]]()
    runs: dict[Arm, list[LoadRun]] = {arm: [] for arm in args.arms}
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        for place in range(args.rounds):
            for arm in args.arms if place % 2 == 0 else reversed(args.arms):
                target = Target(servers[arm.policy].url)
                load = _load(args, arm, place)
                before = os.getloadavg()[0]
                run, _ = runner.run(run_load(load, target, Console(quiet=True)))
                runs[arm].append(run)
                labels = {"arm": str(arm), "round": place, "load_before": before}
                rounds.append({**labels, "summary": summarize(run)})
                print(labels, _line(rounds[-1]["summary"]), flush=True)
    base, *others = args.arms
    return {
        "arms": {str(arm): together(runs[arm]) for arm in args.arms},
        "base": str(base),
        "differences": {
            str(arm): {figure: paired(runs[base], runs[arm], figure) for figure in COMPARED}
            for arm in others
        },
        "rounds": rounds,
    }


def together(runs: Sequence[LoadRun]) -> dict[str, Any]:
    """Return the metrics of an arm over all rounds."""
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


def paired(base: Sequence[LoadRun], other: Sequence[LoadRun], figure: str) -> dict[str, Any] | None:
    """Return the mean difference of a metric over the questions that both arms completed.

    The difference is `other` minus `base`, with a 95% interval from the normal distribution.
    Questions are treated as independent. The result also has the difference relative to the mean of
    `base`.

    Returns:
        The difference, or None with fewer than two pairs.
    """
    pairs = [
        (before, after)
        for first, second in zip(base, other, strict=True)
        for before, after in _pairs(first, second, figure)
    ]
    if len(pairs) < 2:
        return None
    differences = [after - before for before, after in pairs]
    mean, base_mean = fmean(differences), fmean(before for before, _ in pairs)
    half = Z_95 * stdev(differences) / sqrt(len(differences))
    return {
        "questions": len(pairs),
        "mean": mean,
        "interval": [mean - half, mean + half],
        "relative": mean / base_mean,
    }


def _pairs(first: LoadRun, second: LoadRun, figure: str) -> Iterator[tuple[float, float]]:
    """Yield the values of each question of a round in both arms."""
    before, after = (_by_question(run.records, figure) for run in (first, second))
    for index in sorted(before.keys() & after.keys()):
        yield before[index], after[index]


def _by_question(records: Sequence[Record], figure: str) -> dict[int, float]:
    return {
        record.planned.index: value
        for record in records
        if record.verdict == Verdict.OK
        for value in METRICS[figure].values(record)
    }


def _load(args: Namespace, arm: Arm, place: int) -> Load:
    """Return the questions of a round for an arm."""
    salt = f"Run {place:03}{args.arms.index(arm):02}.\n"  # All salts have one length.
    models = (args.embedding_model, args.query_embedding_model)
    return Load(
        workload="rag",
        rate_rps=args.rate,
        requests=args.requests,
        slo=Slo(latency_s=args.deadline_ms / 1e3),
        seed=args.seed + place,
        rag=RagOptions(arm.agent, arm.deadlines, *models, salt),
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
        [arm, name, *(f"{figures[p] * 1e3:,.0f} ms" for p in ("p50", "p90", "p99")), share]
        for arm, metrics in results["arms"].items()
        for name, figures, share in _figure_rows(metrics)
    ]
    head = ["arm", "of", "p50", "p90", "p99", "of the deadline, p50"]
    yield html_table(head, rows, words=(1,))
    yield f"<h2>Differences from {results['base']}</h2>"
    differences = [
        [arm, figure, f"{found['mean'] * 1e3:,.1f} ms", _interval_ms(found)]
        for arm, figures in results["differences"].items()
        for figure, found in figures.items()
        if found is not None
    ]
    yield html_table(["arm", "metric", "mean", "95% interval"], differences, words=(1,))
    yield "<h2>Retrieval</h2>"
    facts = [
        [arm, name.replace("_", " "), f"{true} of {known}"]
        for arm, metrics in results["arms"].items()
        for name, (true, known) in _facts(metrics).items()
    ]
    yield html_table(["arm", "fact", "questions"], facts, words=(1,))


def _interval_ms(found: Mapping[str, Any]) -> str:
    low, high = found["interval"]
    return f"{low * 1e3:,.1f} to {high * 1e3:,.1f} ms"


def _facts(metrics: Mapping[str, Any]) -> Mapping[str, tuple[int, int]]:
    """Return how often each fact about the retrieval was true, and how often it was known."""
    facts: Mapping[str, tuple[int, int]] = metrics["hops"].get("answer", {"facts": {}})["facts"]
    return facts


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
    parser.add_argument(
        "--arms",
        default=ARMS,
        help="POLICY:AGENT:DEADLINES,...; the others are compared with the first (%(default)s)",
    )
    parser.add_argument("--embedding-model", default="", help="model that embeds passages")
    parser.add_argument("--query-embedding-model", default="", help="model that embeds queries")
    parser.add_argument("--serve-flags", default="", help="further flags of the servers, as text")
    args = parser.parse_args(arguments)
    args.arms = [Arm.parse(text) for text in args.arms.split(",")]
    server_core, client_core = two_cores()
    results = {
        "format": "rag/2",
        **simulated_provenance("rag", arguments),
        "device": collect_environment()["cpu"],
        "threads": 1,
        "load_before": os.getloadavg()[0],
    }
    flags = ("--threads", "1", "--kv-bytes", str(KV_BYTES), *shlex.split(args.serve_flags))
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as opened:
        servers = {
            policy: opened.enter_context(
                run_server(
                    (*flags, "--speculation", policy),
                    Path(scratch),
                    server_core,
                    backend="engine",
                    variables=fresh_cache(Path(scratch)),
                )
            )
            for policy in dict.fromkeys(arm.policy for arm in args.arms)
        }
        with on_core(client_core):
            results |= measure(servers, args)
    for arm, metrics in results["arms"].items():
        shown = ", ".join(f"{name} {true} of {n}" for name, (true, n) in _facts(metrics).items())
        print(f"{arm}: in time {metrics['attainment']:.1%}, {shown}")
    write_results(args, results, "Questions over documents", body(results))


if __name__ == "__main__":
    main()
