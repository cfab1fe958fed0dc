"""Measure load imbalance when many gateways place bursts with stale load reports.

    draftgate bench herd --json OUT --html OUT

16 gateways serve 16 equal workers with requests of very different lengths. Every policy gets the
same requests at every age of the load reports, with and without leases. The study reports three
metrics of each burst. Two metrics are max / mean of the workers' backlogs, and max / mean of the
tokens that the burst added. The third metric is the work that requests find before them. Ages are
either equal or staggered, as with heartbeats. The study models what gateways know, not workers
(`bench/simulation/herd_model.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any, Final

from bench.harness.provenance import bench_parser, simulated_provenance, write_results
from bench.simulation.herd_model import MEDIAN_TOKENS, SIGMA, Ages, Bursts, Imbalance, imbalances
from draftgate.gateway.cli.simulate.intervals import differences, estimate
from draftgate.loadgen.report.charts import COLOURS, FAILED, SYMBOLS, Chart
from draftgate.loadgen.report.html import html_chart, html_table

POLICIES: Final = (
    "round_robin",
    "least_loaded",
    "power_of_two",
    "prefix_affinity",
    "weighted:load=1",
    "least_cost",
)
LEAST_COST: Final = "least_cost"
AGES_S: Final = (0.1, 0.2, 0.5, 1.0)


def measure(bursts: Bursts, ages: Sequence[Ages], seeds: int) -> list[dict[str, Any]]:
    """Return and print a row for each age, with and without leases."""
    rows = []
    for leased in (False, True):
        for one in ages:
            rows.append(_row(bursts, one, seeds, leased=leased))
            print(*_shown(rows[-1]), flush=True)
    return rows


def _row(bursts: Bursts, ages: Ages, seeds: int, *, leased: bool) -> dict[str, Any]:
    """Return the means of all policies, and compare `least_cost` with the best other policy."""
    found = {policy: _samples(bursts, policy, ages, seeds, leased=leased) for policy in POLICIES}
    means = {
        policy: {
            figure: _estimated([getattr(one, figure) for one in samples])
            for figure in Imbalance._fields
        }
        for policy, samples in found.items()
    }
    best = min(
        (policy for policy in POLICIES if policy != LEAST_COST),
        key=lambda policy: means[policy]["backlog"]["mean"],
    )
    least_cost, best_other = (
        [one.backlog for one in found[policy]] for policy in (LEAST_COST, best)
    )
    return {
        "age_s": ages.mean_s,
        "staggered": ages.staggered,
        "leases": leased,
        "policies": means,
        "best_other": best,
        "to_best_other": _estimated(differences(least_cost, best_other)),
    }


def _samples(
    bursts: Bursts, policy: str, ages: Ages, seeds: int, *, leased: bool
) -> list[Imbalance]:
    return [
        one
        for seed in range(seeds)
        for one in imbalances(bursts, policy, ages, seed, leased=leased)
    ]


def _estimated(values: Sequence[float]) -> dict[str, Any]:
    found = estimate(values)
    assert found is not None
    return found.as_dict()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `draftgate bench herd`."""
    parser = bench_parser("herd", __doc__, device=False)
    parser.add_argument("--ages-ms", default=",".join(f"{age_s * 1e3:g}" for age_s in AGES_S))
    parser.add_argument(
        "--staggered-ms", default="500", help="mean ages of staggered load reports, in milliseconds"
    )
    parser.add_argument("--gateways", type=int, default=16)
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--bursts", type=int, default=10)
    parser.add_argument("--requests", type=int, default=1600, help="number of requests per burst")
    parser.add_argument(
        "--utilisation", type=float, default=0.7, help="mean utilisation of the workers"
    )
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args(arguments)
    bursts = Bursts(
        args.bursts,
        requests=args.requests,
        utilisation=args.utilisation,
        gateways=args.gateways,
        workers=args.workers,
    )
    ages = [
        Ages(float(text) / 1e3, staggered)
        for staggered, given in ((False, args.ages_ms), (True, args.staggered_ms))
        for text in given.split(",")
        if text
    ]
    results = {
        "format": "herd/2",
        **simulated_provenance("herd", arguments),
        "settings": {
            **asdict(bursts),
            "median_tokens": MEDIAN_TOKENS,
            "sigma": SIGMA,
            "seeds": args.seeds,
        },
        "rows": measure(bursts, ages, args.seeds),
    }
    write_results(args, results, "Herding", _body(results))


def _shown(row: dict[str, Any]) -> list[str]:
    means = [row["policies"][policy]["backlog"]["mean"] for policy in POLICIES]
    difference = row["to_best_other"]
    half = ""
    if difference["interval"] is not None:
        half = f" ± {(difference['interval'][1] - difference['interval'][0]) / 2:.3f}"
    return [
        f"{row['age_s'] * 1e3:g}",
        "staggered" if row["staggered"] else "alike",
        "with" if row["leases"] else "without",
        *(f"{mean:.3f}" for mean in means),
        row["best_other"],
        f"{difference['mean']:+.3f}{half}",
    ]


def _body(results: dict[str, Any]) -> Iterator[str]:
    yield "<h1>Herding: max / mean of workers' backlogs at the ends of bursts</h1>"
    yield f"<p>{results['command']}, {results['commit']}, {results['date']}</p>"
    charts = [
        _chart(results["rows"], figure, title, leased=leased)
        for figure, title in (("backlog", "Backlogs"), ("placed", "Tokens of the burst"))
        for leased in (False, True)
    ]
    yield f'<div class="charts">{"".join(map(html_chart, charts))}</div>'
    head = [
        "age, ms",
        "ages",
        "leases",
        *POLICIES,
        "best other policy",
        f"{LEAST_COST} - best other policy",
    ]
    yield html_table(head, list(map(_shown, results["rows"])), __doc__ or "")


def _chart(rows: Sequence[dict[str, Any]], figure: str, title: str, *, leased: bool) -> Chart:
    """Return a chart of all policies over the age of the load reports."""
    shown = [row for row in rows if row["leases"] is leased and not row["staggered"]]
    data = [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": policy,
            "line": {"color": FAILED if policy == LEAST_COST else COLOURS[place]},
            "marker": {"symbol": SYMBOLS[place]},
            "x": [row["age_s"] * 1e3 for row in shown],
            "y": [row["policies"][policy][figure]["mean"] for row in shown],
        }
        for place, policy in enumerate(POLICIES)
    ]
    layout = {
        "xaxis": {
            "title": {"text": "age of load reports, ms"},
            "type": "log",
            "tickvals": data[0]["x"],
        },
        "yaxis": {"title": {"text": "max / mean"}, "type": "log"},
    }
    how = "with leases" if leased else "without leases"
    return Chart(
        f"{title}, {how}",
        "Mean over bursts and seeds. A value of 1 is perfect balance.",
        data,
        layout,
    )


if __name__ == "__main__":
    main()
