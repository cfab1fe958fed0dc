"""Plan mixes of GPUs for traces, and compare them with single types of GPUs.

    draftgate bench mixes --trace code=FILE --trace conv=FILE --json OUT --html OUT

Each rate and TPOT target has a plan without and with speculation (`draftgate plan mix`), which is
the cheapest simulated one that meets the share of requests. A single type of GPU is simulated if it
may cost less than the mix. Otherwise its cost is that of the integer program for the same
over-provisioning. The name of a trace is the class of its requests, which selects the recorded
drafts.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any, Final

from bench.harness.provenance import bench_parser, simulated_provenance, write_results
from draftgate.gateway.cli.plan.load_question import LoadQuestion
from draftgate.gateway.cli.plan.machines import AUTO, CONFIG, OFF, Rentable
from draftgate.gateway.cli.plan.mix_search import ATTEMPTS
from draftgate.gateway.cli.plan.sources import source_with_arrivals
from draftgate.loadgen.report.html import html_table
from draftgate.loadgen.sending.health import without_full_gc
from draftgate.loadgen.types import Slo

PROFILES: Final = "l4-8b,a10g-8b,a100-8b,h100-8b"
"""The GPUs of Mélange's evaluation, with its prices."""

HEAD: Final = (
    "trace", "TPOT, ms", "requests/s", "speculation", "mix", "USD/h", "met",
    "best single type", "USD/h", "met", "saved", "CPU s",
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `draftgate bench mixes`."""
    parser = bench_parser("mixes", __doc__, device=False)
    parser.add_argument("--trace", action="append", required=True, metavar="CLASS=FILE")
    parser.add_argument("--rates", default="1,2,4,8,16,32", help="requests per second")
    parser.add_argument("--tpot-ms", default="120,40", help="targets for the time per token")
    parser.add_argument("--ttft-ms", type=float, default=2000.0)
    parser.add_argument("--share", type=float, default=0.995)
    parser.add_argument("--profiles", default=PROFILES)
    parser.add_argument("--proposer", default="ngram")
    parser.add_argument("--speculation", default=f"{OFF},{AUTO}")
    parser.add_argument("--arrival", default=None, help="recorded (default), poisson, ...")
    parser.add_argument("--requests", type=int, default=500, help="least number of requests")
    parser.add_argument("--seconds", type=float, default=60.0, help="least duration of the load")
    parser.add_argument("--attempts", type=int, default=ATTEMPTS, help="simulations of a plan")
    args = parser.parse_args(arguments)
    with without_full_gc():
        rows = list(_rows(args))
    results = {
        "format": "mixes/1",
        **simulated_provenance("mixes", _without_folders(arguments)),
        "settings": {
            "ttft_s": args.ttft_ms / 1e3,
            "share": args.share,
            "proposer": args.proposer,
            "arrival": args.arrival or "recorded",
            "attempts": args.attempts,
        },
        "plans": rows,
    }
    write_results(args, results, "Mixes of GPUs, simulated", _body(rows))


def _without_folders(arguments: Sequence[str] | None) -> list[str]:
    """Return the arguments with the names of traces in place of their paths."""
    given = sys.argv[1:] if arguments is None else arguments
    return [
        f"{word.partition('=')[0]}={Path(word).name}" if "=" in word else word for word in given
    ]


def _rows(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    tpots_ms = [float(text) for text in args.tpot_ms.split(",")]
    rates = [float(text) for text in args.rates.split(",")]
    for trace, tpot_ms, rate, speculation in product(
        args.trace, tpots_ms, rates, args.speculation.split(",")
    ):
        began_s = time.process_time()
        row = _plans(args, trace, Slo.of_ms(args.ttft_ms, tpot_ms), rate, speculation)
        row["cpu_s"] = round(time.process_time() - began_s, 1)
        print(*_shown(row), sep="  ")
        yield row


def _plans(
    args: argparse.Namespace, trace: str, slo: Slo, rate_rps: float, speculation: str
) -> dict[str, Any]:
    """Return the plan of a mix, and that of a single type."""
    class_name, _, file = trace.partition("=")
    source = source_with_arrivals(
        None,
        Path(file),
        slo,
        arrival=args.arrival,
        class_name=class_name,
        most_tokens=CONFIG.max_model_len or 0,
    )
    requests = source.requests(rate_rps, 0, max(args.requests, round(rate_rps * args.seconds)))
    types = {name: Rentable.of(name, args.proposer) for name in args.profiles.split(",")}
    question = LoadQuestion(
        requests.kept(),
        rate_rps,
        slo,
        args.share,
        types,
        {},
        speculation,
        args.proposer,
        args.attempts,
    )
    plan, _ = question.answer()
    assert slo.tpot_s is not None
    return {
        "trace": class_name,
        "tpot_ms": slo.tpot_s * 1e3,
        "rate_rps": rate_rps,
        "speculation": speculation,
        "mix": _summary(plan),
        "single_types": plan.get("single_types"),
        "best_single": _best_single(plan),
    }


def _best_single(plan: dict[str, Any]) -> dict[str, Any] | None:
    """Return the cheapest machines of a single type, simulated or else by the program."""
    met = [
        attempt
        for attempt in plan.get("attempts", ())
        if attempt["attainment"] >= plan["targets"]["share"]
        and len([name for name, count in attempt["counts"].items() if count]) == 1
    ]
    planned = [
        {"counts": {name: one["count"]}, "cost_per_hour": one["cost_per_hour"], "attainment": None}
        for name, one in plan.get("single_types", {}).items()
        if one["cost_per_hour"] is not None
    ]
    return min(met or planned, key=lambda one: one["cost_per_hour"], default=None)


def _summary(plan: dict[str, Any]) -> dict[str, Any]:
    kept = ("feasible", "cost_per_hour", "counts", "infeasible_buckets")
    found = {key: plan[key] for key in kept}
    if plan["feasible"]:
        simulated = plan["simulated"]
        found |= {key: plan[key] for key in ("bursts", "over_provisioning", "attempts")}
        found |= {key: simulated[key] for key in ("requests", "attainment", "ttft_s", "tpot_s")}
    return found


def _shown(row: dict[str, Any]) -> list[str]:
    mix, single = row["mix"], row["best_single"]
    saved = "-"
    if single is not None:
        saved = f"{1.0 - mix['cost_per_hour'] / single['cost_per_hour']:.0%}"
    return [
        row["trace"],
        f"{row['tpot_ms']:g}",
        f"{row['rate_rps']:g}",
        row["speculation"],
        *_described(mix),
        *_described(single),
        saved,
        f"{row['cpu_s']:.0f}",
    ]


def _described(plan: dict[str, Any] | None) -> list[str]:
    """Return the machines of a plan, its price, and the share of requests within the targets."""
    if plan is None or plan["cost_per_hour"] is None:
        return ["none", "-", "-"]
    machines = " + ".join(f"{count} {name}" for name, count in plan["counts"].items() if count)
    met = "not simulated" if plan["attainment"] is None else f"{plan['attainment']:.2%}"
    return [machines, f"{plan['cost_per_hour']:.2f}", met]


def _body(rows: list[dict[str, Any]]) -> Iterator[str]:
    yield "<h1>Mixes of GPUs, simulated</h1>"
    yield html_table(list(HEAD), list(map(_shown, rows)), __doc__ or "")


if __name__ == "__main__":
    main()
