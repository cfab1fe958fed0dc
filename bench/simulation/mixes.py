"""Plan mixes of GPUs for traces, and compare them with single types of GPUs.

    draftgate bench mixes --trace code=FILE --trace chat=FILE --json OUT --html OUT

Each point is a trace, a TPOT target and a rate. It has the plan without speculation and the plan
with drafts (`draftgate plan mix` returns the cheaper one), and for each type of GPU the least
number that meets the share of requests alone. All numbers are simulated. The name of a trace is
the class of its requests, which selects the recorded drafts.

OUT is written after each point. Points that it has already are kept, so that a run can be continued
and extended.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, Final

from bench.harness.provenance import bench_parser, simulated_provenance, write_results
from draftgate.gateway.cli.plan.load_question import LoadQuestion
from draftgate.gateway.cli.plan.machines import AUTO, CONFIG, OFF, Rentable
from draftgate.gateway.cli.plan.mix_search import ATTEMPTS, Attempt
from draftgate.gateway.cli.plan.sources import source_with_arrivals
from draftgate.loadgen.report.html import html_table
from draftgate.loadgen.sending.health import without_full_gc
from draftgate.loadgen.types import Slo

PROFILES: Final = "l4-8b,a10g-8b,a100-8b,h100-8b"
"""The GPUs of Mélange's evaluation, with its prices."""

KEY: Final = ("trace", "tpot_ms", "rate_rps")
PROVENANCE: Final = ("commit", "date")

LARGEST: Final = 3
"""Multiple of the planned number up to which machines of a single type are simulated."""


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
    parser.add_argument("--arrival", default=None, help="recorded (default), poisson, ...")
    parser.add_argument("--requests", type=int, default=400, help="least number of requests")
    parser.add_argument("--seconds", type=float, default=30.0, help="least duration of the load")
    parser.add_argument("--attempts", type=int, default=ATTEMPTS, help="simulations of a plan")
    args = parser.parse_args(arguments)
    results = {
        "format": "mixes/2",
        **simulated_provenance("mixes", _without_folders(arguments)),
        "settings": _settings(args),
        "points": _known(args),
    }
    with without_full_gc():
        for point in _points(args, results):
            results["points"].append({**point, **{key: results[key] for key in PROVENANCE}})
            print(*_row(point), sep="  ", flush=True)
            write_results(args, results, "Mixes of GPUs, simulated", _body(results))


def _without_folders(arguments: Sequence[str] | None) -> list[str]:
    """Return the arguments with the names of traces in place of their paths."""
    given = sys.argv[1:] if arguments is None else arguments
    parts = (word.partition("=") for word in given)
    return [f"{name}={Path(path).name}" if equals else name for name, equals, path in parts]


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "ttft_s": args.ttft_ms / 1e3,
        "share": args.share,
        "profiles": args.profiles,
        "proposer": args.proposer,
        "arrival": args.arrival or "recorded",
        "requests": args.requests,
        "seconds": args.seconds,
        "attempts": args.attempts,
    }


def _known(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the points of an earlier run.

    Raises:
        SystemExit: the earlier run had other settings.
    """
    if args.json is None or not args.json.exists():
        return []
    earlier = json.loads(args.json.read_text())
    if earlier["settings"] != _settings(args):
        raise SystemExit(f"{args.json} has other settings: write to another file")
    return list(earlier["points"])


def _points(args: argparse.Namespace, results: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the points that the results do not have."""
    tpots_ms = [float(text) for text in args.tpot_ms.split(",")]
    rates = [float(text) for text in args.rates.split(",")]
    known = {tuple(point[key] for key in KEY) for point in results["points"]}
    for trace, tpot_ms, rate_rps in product(args.trace, tpots_ms, rates):
        class_name, _, file = trace.partition("=")
        if (class_name, tpot_ms, rate_rps) in known:
            continue
        began_s = time.process_time()
        question = _question(args, class_name, Path(file), tpot_ms, rate_rps)
        point = dict(zip(KEY, (class_name, tpot_ms, rate_rps), strict=True))
        point |= _answers(question)
        yield {**point, "cpu_s": round(time.process_time() - began_s, 1)}


def _question(
    args: argparse.Namespace, class_name: str, trace: Path, tpot_ms: float, rate_rps: float
) -> LoadQuestion:
    slo = Slo.of_ms(args.ttft_ms, tpot_ms)
    source = source_with_arrivals(
        None,
        trace,
        slo,
        arrival=args.arrival,
        class_name=class_name,
        most_tokens=CONFIG.max_model_len or 0,
    )
    requests = source.requests(rate_rps, 0, max(args.requests, round(rate_rps * args.seconds)))
    types = {name: Rentable.of(name, args.proposer) for name in args.profiles.split(",")}
    return LoadQuestion(
        requests.kept(), rate_rps, slo, args.share, types, {}, OFF, args.proposer, args.attempts
    )


def _answers(question: LoadQuestion) -> dict[str, Any]:
    """Return the plans without and with drafts, and the least number of each type alone."""
    plans = {name: replace(question, speculation=name).solve()[0] for name in (OFF, AUTO)}
    factor = plans[OFF].get("over_provisioning") or question.bursts()
    return {
        "plans": {name: _summary(plan) for name, plan in plans.items()},
        "alone": {name: _alone(question, name, factor) for name in question.types},
    }


def _alone(question: LoadQuestion, name: str, factor: float) -> dict[str, Any] | None:
    """Return the least number of machines of a type, or None if the type cannot meet the share.

    Args:
        factor: over-provisioning from which the program estimates the number.
    """
    planned = question.mix_at(factor, name)
    if not planned.feasible:
        return None
    simulated: dict[int, float] = {}

    def meets(count: int) -> bool:
        mix = question.mix_of(name, count)
        simulated[count] = Attempt(None, mix, question.simulate(mix)).attainment
        return simulated[count] >= question.share

    count = least_number(meets, planned.counts[name])
    if count is None:
        return None
    return {
        "count": count,
        "cost_per_hour": question.mix_of(name, count).cost_per_hour,
        "attainment": simulated[count],
        "planned": planned.counts[name],
    }


def least_number(meets: Callable[[int], bool], first: int) -> int | None:
    """Return the least number that meets a condition, up to a twentieth.

    The result is None if the number is larger than `LARGEST` times the first one.

    Args:
        meets: whether a number suffices, true for all numbers above one that suffices.
        first: the number to try first.
    """
    low, high, number, largest = 0, math.inf, first, LARGEST * first
    while low < largest:
        if meets(number):
            high = number
        else:
            low = number
        if high - low <= max(1, low // 20):
            return int(high)
        wider = min(low + max(1, low // 3), largest)
        number = wider if math.isinf(high) else (low + int(high)) // 2
    return None


def _summary(plan: Mapping[str, Any]) -> dict[str, Any]:
    kept = ("feasible", "cost_per_hour", "counts", "infeasible_buckets")
    found = {key: plan[key] for key in kept}
    if plan["feasible"]:
        simulated = plan["simulated"]
        found |= {key: plan[key] for key in ("bursts", "over_provisioning", "attempts")}
        found |= {key: simulated[key] for key in ("requests", "attainment", "ttft_s", "tpot_s")}
    return found


def _row(point: Mapping[str, Any]) -> list[str]:
    """Return a point as a row of the table."""
    without, with_drafts = (point["plans"][name] for name in (OFF, AUTO))
    alone = point["alone"].values()
    single = min((one["cost_per_hour"] for one in alone if one is not None), default=None)
    return [
        *(f"{point[key]:g}" if key != "trace" else point[key] for key in KEY),
        *_described(without),
        *("-" if one is None else f"{one['cost_per_hour']:.2f}" for one in alone),
        _saved(without["cost_per_hour"], single),
        *_described(with_drafts),
        _saved(with_drafts["cost_per_hour"], without["cost_per_hour"]),
        f"{point['cpu_s']:.0f}",
    ]


def _described(plan: Mapping[str, Any]) -> list[str]:
    """Return the machines of a plan, its price, and the share of requests within the targets."""
    if not plan["feasible"]:
        return ["none", "-", "-"]
    machines = " + ".join(f"{count} {name}" for name, count in plan["counts"].items() if count)
    return [machines, f"{plan['cost_per_hour']:.2f}", f"{plan['attainment']:.2%}"]


def _saved(cost: float | None, other: float | None) -> str:
    return "-" if cost is None or other is None else f"{1.0 - cost / other:.0%}"


def _body(results: Mapping[str, Any]) -> Iterator[str]:
    yield "<h1>Mixes of GPUs, simulated</h1>"
    types = [f"{name} alone, USD/h" for name in results["settings"]["profiles"].split(",")]
    head = ["trace", "TPOT, ms", "requests/s", "mix", "USD/h", "met", *types, "saved"]
    head += ["mix with drafts", "USD/h", "met", "saved", "CPU s"]
    yield html_table(head, list(map(_row, results["points"])), __doc__ or "")


if __name__ == "__main__":
    main()
