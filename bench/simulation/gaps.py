"""Show the gaps between tokens of a decode when long prompts arrive, by batching policy.

    draftgate bench gaps --json OUT --html OUT

32 sequences decode with 4,096 tokens of context each. Four prompts of 8,192 tokens arrive one
second apart. The chart shows the time of each token of a single decode, and the gap before it. All
requests have the strict SLO of `draftgate bench capacity` as their TPOT target.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from bench.harness.provenance import bench_parser, simulated_provenance, write_results
from bench.simulation.capacity import SLO_CONTEXT, SLO_SEQUENCES, slo_seconds
from draftgate.backends.sim.assembly import SimEnvironment
from draftgate.backends.sim.profile import load_profile
from draftgate.backends.worker_config import WorkerConfig
from draftgate.gateway.cli.simulate.cluster import SimulatedCluster, simulate
from draftgate.gateway.cli.simulate.drawn import Drawn
from draftgate.loadgen.measuring.metrics import chunk_gaps_s, ttft_s
from draftgate.loadgen.planning.traces import TraceRow
from draftgate.loadgen.report.charts import COLOURS, FAILED, Chart
from draftgate.loadgen.report.html import html_chart, html_table
from draftgate.loadgen.types import PlannedRequest, Record, Slo

BATCHINGS: Final = ("slack", "fixed:512", "prefill_first")

LONG_TOKENS: Final = 8192
LONG_AT_S: Final = (8.0, 9.0, 10.0, 11.0)
"""Arrival times of the long prompts in seconds. All decodes run by then, because their prefills
take 3 to 5 s (h100-8b)."""

FROM_S, TO_S = 7.5, 12.5

DECODED, ANSWERED = 700, 16
"""Output tokens of decodes and of long prompts. The charted decode lasts until 12 s or later."""


def simulate_decodes(config: WorkerConfig, slo_s: float) -> list[Record]:
    """Simulate the decodes and the later long prompts."""
    short = TraceRow(0.0, SLO_CONTEXT, DECODED)
    long_prompts = [TraceRow(at_s, LONG_TOKENS, ANSWERED) for at_s in LONG_AT_S]
    drawn = Drawn((short,) * SLO_SEQUENCES + tuple(long_prompts), seed=0)
    planned = [
        PlannedRequest(one.index, row.at_s, one.request)
        for one, row in zip(drawn.planned(1.0, Slo(tpot_s=slo_s)), drawn.rows, strict=True)
    ]
    return simulate(SimulatedCluster(config, 1, SimEnvironment()), planned, to_job=drawn.job)


def watched_gaps(records: Sequence[Record]) -> list[tuple[float, float]]:
    """Return time and gap of each token of the last decode around the long prompts, in seconds."""
    record = records[SLO_SEQUENCES - 1]
    ends_s = [chunk.at_s for chunk in record.chunks][1:]
    pairs = zip(ends_s, chunk_gaps_s(record), strict=True)
    return [(round(at_s, 4), round(gap_s, 5)) for at_s, gap_s in pairs if FROM_S <= at_s <= TO_S]


def chart(series: dict[str, list[tuple[float, float]]], slo_s: float) -> Chart:
    """Return a chart of the gaps over time, with a line for each policy."""
    data = [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": name,
            "marker": {"color": COLOURS[place], "size": 5},
            "line": {"color": COLOURS[place], "width": 1},
            "x": [at_s for at_s, _ in points],
            "y": [gap_s * 1e3 for _, gap_s in points],
        }
        for place, (name, points) in enumerate(series.items())
    ]
    limit = {"color": FAILED, "width": 1, "dash": "dash"}
    across = {"xref": "paper", "x0": 0, "x1": 1, "y0": slo_s * 1e3, "y1": slo_s * 1e3}
    layout = {
        "xaxis": {"title": {"text": "s since the start"}},
        "yaxis": {"title": {"text": "gap before the token, ms"}, "rangemode": "tozero"},
        "shapes": [{"type": "line", "line": limit, **across}],
    }
    at = ", ".join(f"{at_s:g}" for at_s in LONG_AT_S)
    caption = f"Dashed: the promise, {slo_s * 1e3:.1f} ms. Prompts at {at} s."
    return Chart("Gaps between tokens of a decode", caption, data, layout, wide=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `draftgate bench gaps`."""
    parser = bench_parser("gaps", __doc__)
    parser.add_argument("--batching", default=",".join(BATCHINGS))
    args = parser.parse_args(arguments)
    slo_s = slo_seconds(load_profile(args.profile))["strict"]
    series, rows = dict[str, list[tuple[float, float]]](), list[dict[str, Any]]()
    for batching in args.batching.split(","):
        config = WorkerConfig(
            profile=args.profile,
            speculation="off",
            batching=batching,
            max_model_len=32_768,
            max_num_seqs=256,
            max_step_tokens=LONG_TOKENS,
        )
        records = simulate_decodes(config, slo_s)
        series[batching] = watched_gaps(records)
        firsts_s = [ttft_s(record) for record in records[SLO_SEQUENCES:]]
        longest_s = max(gap_s for _, gap_s in series[batching])
        rows.append({"batching": batching, "longest_gap_s": longest_s, "prompt_ttft_s": firsts_s})
        print(*_shown(rows[-1]))
    results = {
        "format": "gaps/1",
        **simulated_provenance("gaps", arguments),
        "profile": load_profile(args.profile).source,
        "slo_s": slo_s,
        "results": rows,
        "gaps": series,
    }
    write_results(
        args, results, "Gaps between tokens, simulated", _body(rows, chart(series, slo_s))
    )


def _shown(row: dict[str, Any]) -> list[str]:
    firsts_s = [first_s for first_s in row["prompt_ttft_s"] if first_s is not None]
    mean_ms = sum(firsts_s) / len(firsts_s) * 1e3
    return [row["batching"], f"{row['longest_gap_s'] * 1e3:.0f}", f"{mean_ms:.0f}"]


def _body(rows: list[dict[str, Any]], drawn: Chart) -> Iterator[str]:
    yield "<h1>Token gaps when long prompts arrive</h1>"
    yield f'<div class="charts">{html_chart(drawn)}</div>'
    head = ["batching", "longest gap, ms", "mean TTFT of the long prompts, ms"]
    yield html_table(head, list(map(_shown, rows)), __doc__ or "")


if __name__ == "__main__":
    main()
