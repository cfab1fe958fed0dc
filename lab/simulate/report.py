"""The results as JSON, as a table on the terminal, and as a page with plots.

The JSON has a `summary/1` for each policy, intervals, differences and the settings. It does not
depend on the machine or the time, so the same command gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from html import escape
from typing import Any, Final

from msgspec import to_builtins
from rich.console import Group, RenderableType
from rich.table import Table

from draftgate import __version__
from draftgate.backends.sim.profile import load_profile
from draftgate.lab.simulate.experiment import ExperimentOutcome, Results, Setup
from draftgate.lab.simulate.intervals import Estimate, differences, estimate, known
from draftgate.loadgen.measuring.metrics import METRICS
from draftgate.loadgen.measuring.speculation import total_speculation
from draftgate.loadgen.report.charts import (
    FROM_ZERO,
    Chart,
    ChartSeries,
    colour,
    distribution_chart,
)
from draftgate.loadgen.report.formatting import number, percent
from draftgate.loadgen.report.html import (
    html_chart,
    html_page,
    html_report_table,
    html_settings,
    html_table,
)
from draftgate.loadgen.report.tables import class_table, metric_table, speculation_table
from draftgate.loadgen.report.time_charts import load_chart
from draftgate.loadgen.types import LoadRun

MEANS: Final = ("goodput_rps", "attainment", "accepted_tokens_per_s")
DISTRIBUTIONS: Final = ("ttft_s", "tpot_s", "latency_s")

_HEAD: Final = (
    "policy",
    "latency mean",
    "latency p99",
    "TTFT p99",
    "TPOT mean",
    "tokens /s",
    "SLO met",
    "latency vs first",
)

NOTES: Final = (
    "Times in ms. SLO met: share of requests that met their SLO."
    " Last column: paired difference of mean latency, with its 95% interval."
)

CUT_SHORT: Final = "The simulation was interrupted, so policies or seeds are missing."


def as_json(setup: Setup, results: Results) -> dict[str, Any]:
    """Return the results for JSON."""
    first, *others = results.outcomes
    return {
        "format": "simulation/1",
        "version": __version__,
        **({"interrupted": True} if results.interrupted else {}),
        "settings": settings_of(setup),
        "profile": load_profile(setup.config.profile).source,
        "acceptance": setup.replayed.source,
        **_recorded(setup),
        "policies": {outcome.policy: _policy(outcome) for outcome in results.outcomes},
        "differences": {
            outcome.policy: {"to": first.policy, **compared(outcome, first)} for outcome in others
        },
    }


def _recorded(setup: Setup) -> dict[str, Any]:
    """Return the recorded run that the load replays, or nothing."""
    if setup.replay is None:
        return {}
    run, exact = setup.replay
    recorded = {
        "policy": run.worker.speculation,
        "requests": len(exact.requests),
        "steps": exact.steps,
        "duration_s": run.duration_s,
        "drafted_tokens": exact.drafted_tokens,
        "accepted_tokens": exact.accepted_tokens,
    }
    return {"recorded": recorded}


def settings_of(setup: Setup) -> dict[str, Any]:
    """Return the settings needed to repeat the simulation."""
    load = to_builtins(setup.load, enc_hook=str)
    config, limits = setup.config, setup.config.step_limits("cpu")
    return {
        **{name: value for name, value in load.items() if value is not None},
        "workers": setup.workers,
        "routing": setup.routing,
        "rescheduling": setup.rescheduling,
        "binding": setup.binding,
        "phases": setup.phases,
        "roles": [role.value for role in setup.roles],
        "profile": config.profile,
        "batching": config.batching,
        "proposer": config.proposer or "ngram",
        "max_num_seqs": limits.sequences,
        "max_step_tokens": limits.tokens,
        "max_model_len": config.max_model_len,
        "kv_bytes": config.kv_bytes,
        "seeds": list(setup.seeds),
        "belief_error": setup.belief_error,
        "truth": setup.truth,
    }


def compared(outcome: ExperimentOutcome, to: ExperimentOutcome) -> dict[str, Any]:
    """Return the differences to another policy on the same requests, by metric."""
    found = {}
    for metric, ours in outcome.samples.items():
        theirs = to.samples[metric]
        difference, base = estimate(differences(ours, theirs)), estimate(known(theirs))
        if difference is not None and base is not None:
            relative = difference.mean / base.mean if base.mean else None
            found[metric] = {**difference.as_dict(), "relative": relative}
    return found


def estimates(outcome: ExperimentOutcome) -> dict[str, Estimate]:
    """Return the means of an outcome with their intervals, by metric."""
    found = {metric: estimate(known(values)) for metric, values in outcome.samples.items()}
    return {metric: value for metric, value in found.items() if value is not None}


def mean_summary(summaries: list[dict[str, Any]]) -> dict[str, Any]:
    """Return one `summary/1` for several seeds, with summed counts and averaged metrics."""
    errors: dict[str, int] = {}
    for summary in summaries:
        for cause, count in summary["errors"].items():
            errors[cause] = errors.get(cause, 0) + count
    return {
        "requests": sum(summary["requests"] for summary in summaries),
        "valid": all(summary["valid"] for summary in summaries),
        "errors": errors,
        **{name: _mean([summary[name] for summary in summaries]) for name in MEANS},
        **{name: _means([summary[name] for summary in summaries]) for name in DISTRIBUTIONS},
    }


def _policy(outcome: ExperimentOutcome) -> dict[str, Any]:
    intervals = {metric: value.as_dict() for metric, value in estimates(outcome).items()}
    found: dict[str, Any] = {
        "moves": dict(sorted(outcome.moves.items())),
        "intervals": intervals,
    }
    if outcome.failures:
        found["failures"] = [asdict(one) for one in outcome.failures.values()]
    if len(outcome.summaries) == 1:
        return {**outcome.summaries[0], **found}
    return {**mean_summary(outcome.summaries), **found, "runs": outcome.summaries}


def _mean(values: list[float | None]) -> float | None:
    found = estimate(known(values))
    return None if found is None else found.mean


def _means(distributions: list[dict[str, float] | None]) -> dict[str, float | None] | None:
    found = [each for each in distributions if each is not None]
    return {name: _mean([each[name] for each in found]) for name in found[0]} if found else None


def render_outcomes(results: Results) -> RenderableType:
    """Return the table of all policies, which fits a terminal of 80 columns."""
    table = Table(box=None, pad_edge=False)
    # Headers take two lines and never shrink. A long policy name wraps instead.
    table.add_column(_HEAD[0], overflow="fold")
    for name in _HEAD[1:]:
        table.add_column(name.replace(" ", "\n", 1), justify="right", no_wrap=True)
    for row in _rows(results):
        table.add_row(*row)
    cut_short = (CUT_SHORT,) if results.interrupted else ()
    return Group(table, "", NOTES, *_moves(results), *failed_policies(results), *cut_short)


def _rows(results: Results) -> Iterator[list[str]]:
    first = results.outcomes[0]
    for outcome in results.outcomes:
        summary = mean_summary(outcome.summaries)
        yield [
            outcome.policy + (" (failed)" if outcome.failures else ""),
            _ms(summary["latency_s"], "mean"),
            _ms(summary["latency_s"], "p99"),
            _ms(summary["ttft_s"], "p99"),
            _ms(summary["tpot_s"], "mean"),
            number(summary["accepted_tokens_per_s"], 0),
            percent(summary["attainment"]),
            "" if outcome is first else _difference(outcome, first),
        ]


def _moves(results: Results) -> Iterator[str]:
    """Yield a sentence for each policy with moves, with their numbers by reason and end."""
    for outcome in results.outcomes:
        if outcome.moves:
            counts = ", ".join(f"{count} {name}" for name, count in sorted(outcome.moves.items()))
            yield f"Moves with {outcome.policy}: {counts}."


def failed_policies(results: Results) -> Iterator[str]:
    """Yield a sentence for each method of a policy that failed, once for all rows.

    The log has the error, with its traceback.
    """
    found = {key: one for outcome in results.outcomes for key, one in outcome.failures.items()}
    for one in found.values():
        yield f"{one}, where a built-in policy decided instead."


def _ms(distribution: dict[str, Any] | None, value: str) -> str:
    if distribution is None:
        return "-"
    shown = distribution[value] * 1e3
    return f"{shown:.4g}" if shown < 1e4 else f"{shown:.0f}"


def _difference(outcome: ExperimentOutcome, first: ExperimentOutcome) -> str:
    ours, theirs = (one.samples["latency_s.mean"] for one in (outcome, first))
    found, base = estimate(differences(ours, theirs)), estimate(known(theirs))
    if found is None or base is None or not base.mean:
        return "-"
    half = "" if found.half is None else f" ± {found.half / base.mean:.1%}"
    return f"{found.mean / base.mean:+.1%}{half}"


def _answer(results: Results) -> str:
    """Return the policy with the lowest mean latency, in one sentence."""
    means = {
        outcome.policy: mean_summary(outcome.summaries)["latency_s"] for outcome in results.outcomes
    }
    ended = [outcome for outcome in results.outcomes if means[outcome.policy] is not None]
    if not ended:
        return "No request has ended."
    first, best = ended[0], min(ended, key=lambda one: means[one.policy]["mean"])
    lowest = "" if len(ended) == 1 else "lowest "
    answer = f"{best.policy} has the {lowest}mean latency of {_ms(means[best.policy], 'mean')} ms"
    if best is not first:
        answer += f", {_difference(best, first)} against {first.policy}"
    return answer + "." + (f" {CUT_SHORT}" if results.interrupted else "")


def simulation_page(setup: Setup, results: Results) -> str:
    """Return an HTML page that compares the policies and then describes each."""
    what = setup.load.workload or setup.load.trace or setup.load.prompt
    title = f"{what} on {setup.workers} x {setup.config.profile}, simulated"
    return html_page(title, _body(title, setup, results))


def _body(title: str, setup: Setup, results: Results) -> Iterator[str]:
    yield f"<h1>{escape(title)}</h1><p><strong>{escape(_answer(results))}</strong></p>"
    yield html_table(list(_HEAD), list(_rows(results)), _notes(results))
    charts = list(_charts(results))
    yield f'<h2>Plots</h2><div class="charts">{"".join(map(html_chart, charts))}</div>'
    for outcome in results.outcomes:
        if outcome.run is not None:
            yield f"<h2>{escape(outcome.policy)}</h2>" + _policy_part(outcome.run)
    yield "<h2>The simulation</h2>" + html_settings(settings_of(setup))


def _notes(results: Results) -> str:
    errors = {one.error for outcome in results.outcomes for one in outcome.failures.values()}
    return " ".join((NOTES, *_moves(results), *failed_policies(results), *sorted(errors)))


def _charts(results: Results) -> Iterator[Chart]:
    """Yield the distributions and the load over time, with one curve per policy."""
    runs = [(o.policy, o.run) for o in results.outcomes if o.run is not None and o.run.records]
    series = [ChartSeries(policy, run.records) for policy, run in runs]
    for key in ("latency_s", "ttft_s", "tpot_s", "chunk_gap_s"):
        chart = distribution_chart(METRICS[key], series)
        if chart.data:
            yield chart
    if runs:
        yield _load_chart(runs)


def _load_chart(runs: Sequence[tuple[str, LoadRun]]) -> Chart:
    """Return the completed and the open requests over time, with one curve per policy each."""
    data = []
    for place, (policy, run) in enumerate(runs):
        for trace in load_chart(run).data:
            if trace["name"] in {"completed/s", "open"}:
                group = {"legendgroup": policy, "showlegend": trace["name"] == "open"}
                line = {**trace["line"], "color": colour(place)}
                data.append({**trace, "name": policy, **group, "line": line})
    layout = {
        "xaxis": {"title": {"text": "s since the start"}, "anchor": "y2", **FROM_ZERO},
        "yaxis": {"title": {"text": "completed/s"}, "domain": [0.55, 1], **FROM_ZERO},
        "yaxis2": {"title": {"text": "open requests"}, "domain": [0, 0.45], **FROM_ZERO},
    }
    caption = "completed requests per second, and requests that have not ended"
    return Chart("Load", caption, data, layout, wide=True)


def _policy_part(run: LoadRun) -> str:
    tables = [metric_table(run), class_table(run)]
    if (speculation := total_speculation(run.records)) is not None:
        tables.append(speculation_table(speculation))
    return "".join(map(html_report_table, tables))
