"""The plan of `draftgate plan mix` as a table on the terminal, and as a page with plots."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any, Final

import typer

from draftgate.lab.plan.load_question import Attempt
from draftgate.lab.plan.simulated import latency_charts
from draftgate.lab.planning.histogram import describe_range
from draftgate.lab.planning.load_mix import LoadPlanner
from draftgate.lab.planning.mix import Mix
from draftgate.lab.planning.throughput import Targets
from draftgate.loadgen.report.formatting import percent
from draftgate.loadgen.report.html import html_page, html_settings, html_table
from draftgate.loadgen.types import Record

UNSERVED: Final = "It cannot serve all requests of these lengths:"


def served_by(mix: Mix, rate_rps: float) -> str:
    """Return which machines serve a rate, and their price, without a full stop."""
    verb = "serves" if sum(mix.counts.values()) == 1 else "serve"
    return f"{mix} for {mix.cost_per_hour:.2f} USD per hour {verb} {rate_rps:g} requests/s"


def answer_of(plan: Mapping[str, Any], targets: Targets) -> str:
    """Return the answer of a plan in one sentence."""
    rate_rps = plan["rate_rps"]
    if not plan["feasible"]:
        return f"No mix within the limits serves {rate_rps:g} requests/s with {targets}."
    mix, simulated = Mix(plan["counts"], plan["cost_per_hour"]), plan["simulated"]
    if simulated is None:
        return f"{served_by(mix, rate_rps)} with {targets}, according to a prediction only."
    share = simulated["attainment"]
    if share < targets.share:
        return (
            f"No simulated mix serves {rate_rps:g} requests/s with {targets}: {mix} for"
            f" {mix.cost_per_hour:.2f} USD per hour comes nearest, with {share:.2%}."
        )
    return f"{served_by(mix, rate_rps)} with {targets}."


def _missing(plan: Mapping[str, Any]) -> str:
    """Return what an interruption left out, or an empty text."""
    if not plan["interrupted"]:
        return ""
    return "The search was interrupted, so a cheaper mix may exist."


def _unserved(plan: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lengths that no mix serves."""
    for bucket in plan["infeasible_buckets"]:
        prompt, output = (describe_range(bucket[f"{one}_tokens"]) for one in ("prompt", "output"))
        yield f"prompts of {prompt} tokens with outputs of {output}"


def print_plan(plan: Mapping[str, Any]) -> None:
    """Print the answer and the machines of a plan, or the lengths that no mix serves."""
    typer.echo(plan["answer"])
    if _missing(plan):
        typer.echo(_missing(plan))
    if not plan["feasible"]:
        typer.echo(UNSERVED)
        for lengths in _unserved(plan):
            typer.echo(f"  {lengths}")
        return
    print_counts(plan["counts"], plan["prices_per_hour"], plan["single_types"])
    simulated, targets, attempts = plan["simulated"], plan["targets"], plan["attempts"]
    if simulated is None:
        return
    share = simulated["attainment"]
    typer.echo(f"{share:.2%} of {simulated['requests']} simulated requests met their targets.")
    first = attempts[0]
    factor = plan["over_provisioning"]
    if factor is not None:
        typer.echo(
            f"The machines are planned for {factor:.2f} times the mean rate."
            f" The bursts of the load suggest {plan['bursts']:.2f}."
        )
    if first["attainment"] < targets["share"] <= share:
        typer.echo(
            f"Machines for {first['cost_per_hour']:.2f} an hour met {first['attainment']:.2%}, so"
            " the plan has more."
        )
    if share < targets["share"]:
        typer.echo(
            f"The plan misses the share of {targets['share']:.2%} after {len(attempts)}"
            " simulations. Raise the limits, or relax the targets."
        )


def attempt_line(attempt: Attempt) -> str:
    """Return the outcome of a simulation as a line."""
    _, machines, cost, met = _attempt_row(attempt.as_dict())
    return f"simulated {machines} for {cost} an hour: {met} met both targets"


def print_counts(
    counts: Mapping[str, int],
    prices: Mapping[str, float],
    alone: Mapping[str, Mapping[str, Any]],
) -> None:
    """Print the number and the price of each type, and of each type alone if known."""
    from rich.console import Console
    from rich.table import Table

    table = Table("GPU", "number", "cost per hour")
    if alone:
        table.add_column("alone")
    for name, count in counts.items():
        row = [name, str(count), f"{count * prices[name]:.2f}"]
        table.add_row(*row, *([_alone(alone[name])] if alone else []))
    table.add_section()
    total = sum(count * prices[name] for name, count in counts.items())
    table.add_row("all", str(sum(counts.values())), f"{total:.2f}")
    Console().print(table)
    if alone:
        typer.echo("alone: GPUs of one type, as simulated, or else for the same over-provisioning")


def _alone(one: Mapping[str, Any]) -> str:
    if one["cost_per_hour"] is None:
        return "cannot"
    return f"{one['count']} for {one['cost_per_hour']:.2f}"


def mix_page(plan: Mapping[str, Any], planner: LoadPlanner, records: Sequence[Record]) -> str:
    """Return an HTML page with the machines, the throughputs and the simulated latencies."""
    return html_page("Mix of GPUs", _body(plan, planner, records))


def _body(
    plan: Mapping[str, Any], planner: LoadPlanner, records: Sequence[Record]
) -> Iterator[str]:
    yield "<h1>Mix of GPUs</h1>"
    yield f"<p><strong>{escape(plan['answer'])}</strong> {_missing(plan)}</p>"
    if not plan["feasible"]:
        items = "".join(f"<li>{escape(lengths)}</li>" for lengths in _unserved(plan))
        yield f"<p>{UNSERVED}</p><ul>{items}</ul>"
    prices, alone = plan["prices_per_hour"], plan.get("single_types", {})
    rows = [
        [
            name,
            str(count),
            f"{count * prices[name]:.2f}",
            _alone(alone[name]) if alone else "",
        ]
        for name, count in plan["counts"].items()
    ]
    yield html_table(["GPU", "number", "USD per hour", "alone"], rows)
    if records:
        yield "<h2>Simulated mixes</h2>" + html_table(
            ["over-provisioning", "machines", "USD per hour", "met both targets"],
            [_attempt_row(one) for one in plan["attempts"]],
            words=(1,),
        )
        yield latency_charts(records)
    yield "<h2>Throughputs</h2>" + html_table(
        ["requests", "share", *prices],
        [
            [str(bucket), percent(bucket.share), *_rates(planner, place)]
            for place, bucket in enumerate(planner.buckets)
        ],
        "Requests per second of one GPU within the targets. d: draft tokens per step.",
        words=(0,),
    )
    settings = {key: plan[key] for key in ("rate_rps", "targets")}
    yield "<h2>The question</h2>" + html_settings(settings)


def _attempt_row(attempt: Mapping[str, Any]) -> list[str]:
    return [
        "-" if attempt["over_provisioning"] is None else f"{attempt['over_provisioning']:.2f}",
        str(Mix(attempt["counts"], attempt["cost_per_hour"])),
        f"{attempt['cost_per_hour']:.2f}",
        f"{attempt['attainment']:.2%}",
    ]


def _rates(planner: LoadPlanner, place: int) -> list[str]:
    cells = (planner.cells[name][place] for name in planner.offers)
    return [
        f"{one.rate_rps:.2f}" + (f" d {one.drafts.slots:.1f}" if one.drafts.slots else "")
        for one in cells
    ]
