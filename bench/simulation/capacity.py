"""Find the capacity of batching policies as defined by Sarathi-Serve (arXiv 2403.02310).

    draftgate bench capacity --trace FILE --json OUT --html OUT

Capacity is the highest Poisson rate with two properties. The P99 of the gaps between tokens is
within the SLO. The median scheduling delay, from arrival to the first step of a request, is at most
2 s. The SLO is 5 times (strict) or 25 times (relaxed) the profile's time of a step of 32 decodes
with 4,096 tokens of context each. Each request has the SLO as its TPOT target. Lengths are from the
trace in random order. All rates and policies get the same requests.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, Final

from msgspec import structs

from bench.harness.provenance import bench_parser, simulated_provenance, write_results
from bench.simulation.search import STEP, grid_rate, highest_place, nearest_place
from draftgate.backends.sim.assembly import SimEnvironment
from draftgate.backends.sim.profile import Profile, load_profile
from draftgate.backends.worker_config import WorkerConfig
from draftgate.gateway.cli.simulate.cluster import SimulatedCluster, simulate
from draftgate.gateway.cli.simulate.drawn import Drawn
from draftgate.loadgen.checking.audit import Verdict
from draftgate.loadgen.measuring.metrics import METRICS, percentile, values_of
from draftgate.loadgen.planning.traces import read_trace
from draftgate.loadgen.report.html import html_table
from draftgate.loadgen.sending.health import without_full_gc
from draftgate.loadgen.types import Record, Slo

LATEST_S: Final = 2.0
"""Maximum median scheduling delay in seconds: "the system can sustain the load" (section 5.1)."""

STRETCHES: Final = {"strict": 5.0, "relaxed": 25.0}
SLO_SEQUENCES, SLO_CONTEXT = 32, 4096
"""The step whose multiples are the SLOs (Sarathi-Serve, table 3)."""

BATCHINGS: Final = (
    "slack", "fixed:256", "fixed:512", "fixed:1024", "fixed:1536", "fixed:2048",
    "prefill_first", "decode_first",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Point:
    """The result of a rate, with gaps pooled over all requests.

    Attributes:
        queue_p50_s: median scheduling delay.
        output_tokens_per_s: tokens divided by the duration of the run.
    """

    rate_rps: float
    gap_p50_s: float
    gap_p99_s: float
    gap_max_s: float
    queue_p50_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    output_tokens_per_s: float

    def holds(self, slo_s: float) -> bool:
        """Return whether the rate is within the capacity for a gap SLO in seconds."""
        return self.gap_p99_s <= slo_s and self.queue_p50_s <= LATEST_S


@dataclass(frozen=True, slots=True)
class Setting:
    """The requests, the worker and the SLO of a search."""

    drawn: Drawn
    config: WorkerConfig
    slo_s: float

    def point(self, rate_rps: float) -> Point:
        """Simulate a rate in requests per second."""
        planned = self.drawn.planned(rate_rps, Slo(tpot_s=self.slo_s))
        cluster = SimulatedCluster(self.config, 1, SimEnvironment(self.drawn.seed))
        return point_of(rate_rps, simulate(cluster, planned, to_job=self.drawn.job))


@dataclass(frozen=True, slots=True)
class Capacity:
    """The result of a search.

    Attributes:
        within: the highest rate within the capacity, or None if no rate is.
        beyond: the next rate of the grid.
        rates: number of simulated rates.
    """

    within: Point | None
    beyond: Point | None
    rates: int


def point_of(rate_rps: float, records: Sequence[Record]) -> Point:
    """Return the metrics of a run in which every request completed.

    Raises:
        ValueError: a request was refused, or no response has more than one token.
    """
    if any(record.verdict is not Verdict.OK for record in records):
        raise ValueError("a request was refused because it is longer than the model's context")
    gaps_s = sorted(values_of(METRICS["chunk_gap_s"], records))
    if not gaps_s:
        raise ValueError("all responses have a single token, so the run has no gaps")
    ttfts_s = sorted(values_of(METRICS["ttft_s"], records))
    tokens = sum(chunk.tokens or 0 for record in records for chunk in record.chunks)
    return Point(
        rate_rps,
        percentile(gaps_s, 0.5),
        percentile(gaps_s, 0.99),
        gaps_s[-1],
        median_delay_s(records),
        percentile(ttfts_s, 0.5),
        percentile(ttfts_s, 0.99),
        tokens / max(record.end_s for record in records),
    )


def median_delay_s(records: Sequence[Record]) -> float:
    """Return the median seconds from arrival to the first step of a request."""
    return median([float(record.metrics["queue_s"]) for record in records if record.metrics])


def capacity(setting: Setting, near: int) -> tuple[Capacity, int]:
    """Return the capacity, and its grid index as the start of the next search.

    Args:
        near: grid index of the first rate.
    """
    points = dict[int, Point]()

    def holds(place: int) -> bool:
        points[place] = setting.point(grid_rate(place))
        return points[place].holds(setting.slo_s)

    found = highest_place(holds, near)
    if found is None:
        return Capacity(None, None, len(points)), near
    return Capacity(points[found], points.get(found + 1), len(points)), found


def slo_seconds(profile: Profile) -> dict[str, float]:
    """Return the SLOs by name, as multiples of a decode step of the profile."""
    kv_tokens = SLO_SEQUENCES * SLO_CONTEXT
    step_s = profile.cost.seconds(SLO_SEQUENCES, kv_tokens, SLO_SEQUENCES)
    return {name: stretch * step_s for name, stretch in STRETCHES.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `draftgate bench capacity`."""
    parser = bench_parser("capacity", __doc__)
    parser.add_argument("--trace", type=Path, required=True, help="trace with the request lengths")
    parser.add_argument("--requests", type=int, default=1024)
    parser.add_argument("--batching", default=",".join(BATCHINGS))
    parser.add_argument("--speculation", default="off,auto")
    parser.add_argument(
        "--slo",
        default=",".join(STRETCHES),
        help="SLOs: strict, relaxed or both, separated by a comma",
    )
    parser.add_argument("--max-step-tokens", type=int, default=2048)
    parser.add_argument(
        "--near",
        type=float,
        default=8.0,
        help="rate at which the search starts, in requests per second",
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    slos = slo_seconds(load_profile(args.profile))
    if unknown := set(args.slo.split(",")) - set(slos):
        parser.error(f"--slo: expected {' or '.join(slos)}, not {', '.join(unknown)}")
    config = WorkerConfig(
        profile=args.profile,
        proposer="ngram",
        max_num_seqs=256,
        max_model_len=32_768,
        max_step_tokens=args.max_step_tokens,
    )
    with without_full_gc():
        rows = list(_searched(args, config, slos))
    results = {
        "format": "capacity/1",
        **simulated_provenance("capacity", arguments),
        "profile": load_profile(args.profile).source,
        "slo_s": slos,
        "settings": {
            "trace": args.trace.name,
            "requests": args.requests,
            "seed": args.seed,
            "max_step_tokens": args.max_step_tokens,
            "max_num_seqs": config.max_num_seqs,
            "belief_error": SimEnvironment().belief_error,
            "resolution": STEP - 1.0,
        },
        "capacities": rows,
    }
    title = f"Capacity on {args.profile}, lengths of {args.trace.stem}, simulated"
    write_results(args, results, title, _body(title, rows))


def _searched(
    args: argparse.Namespace, config: WorkerConfig, slos: dict[str, float]
) -> Iterator[dict[str, Any]]:
    """Search every combination, starting at the capacity of the previous combination."""
    drawn = Drawn.of(read_trace(args.trace), args.requests, args.seed)
    near = nearest_place(args.near)
    named = product(*(named.split(",") for named in (args.slo, args.speculation, args.batching)))
    for slo, speculation, batching in named:
        searched_config = structs.replace(config, batching=batching, speculation=speculation)
        began_s = time.process_time()
        found, near = capacity(Setting(drawn, searched_config, slos[slo]), near)
        row = _row(slo, speculation, batching, found)
        print(*_shown(row), f"{time.process_time() - began_s:.0f} CPU s")
        yield row


def _row(slo: str, speculation: str, batching: str, found: Capacity) -> dict[str, Any]:
    return {
        "slo": slo,
        "speculation": speculation,
        "batching": batching,
        "capacity_rps": 0.0 if found.within is None else found.within.rate_rps,
        "within": None if found.within is None else asdict(found.within),
        "beyond": None if found.beyond is None else asdict(found.beyond),
        "rates_tried": found.rates,
    }


HEAD: Final = (
    "SLO", "speculation", "batching", "capacity, requests/s",
    "gap p99, ms", "longest gap, ms", "queue p50, s", "TTFT p99, s", "limited by",
)  # fmt: skip


def _shown(row: dict[str, Any]) -> list[str]:
    within, beyond = row["within"], row["beyond"]
    limits = ["-"] * 4
    if within is not None:
        limits = [
            f"{within['gap_p99_s'] * 1e3:.1f}",
            f"{within['gap_max_s'] * 1e3:.0f}",
            f"{within['queue_p50_s']:.2f}",
            f"{within['ttft_p99_s']:.2f}",
        ]
    limit = "-" if beyond is None else "queue" if beyond["queue_p50_s"] > LATEST_S else "gaps"
    names = [row["slo"], row["speculation"], row["batching"]]
    return [*names, f"{row['capacity_rps']:.2f}", *limits, limit]


def _body(title: str, rows: list[dict[str, Any]]) -> Iterator[str]:
    yield f"<h1>{title}</h1>"
    yield html_table(list(HEAD), list(map(_shown, rows)), __doc__ or "")


if __name__ == "__main__":
    main()
