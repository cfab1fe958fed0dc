"""The plan of `draftgate plan mix` as a table on the terminal, and as a page with plots."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import typer

from draftgate.lab.plan.load_question import Attempt
from draftgate.lab.plan.simulated import latency_charts
from draftgate.lab.planning.histogram import describe_range
from draftgate.lab.planning.load_mix import LoadPlanner
from draftgate.loadgen.report.formatting import percent
from draftgate.loadgen.report.html import html_page, html_settings, html_table
from draftgate.loadgen.types import Record


def print_plan(plan: Mapping[str, Any]) -> None:
    """Print the machines of a plan, or the lengths that no mix serves."""
    if not plan["feasible"]:
        typer.echo("no mix within the limits serves")
        for bucket in plan["infeasible_buckets"]:
            ranges = bucket["prompt_tokens"], bucket["output_tokens"]
            prompt, output = map(describe_range, ranges)
            typer.echo(f"  prompts of {prompt} tokens with outputs of {output}")
        return
    print_counts(plan["counts"], plan["prices_per_hour"], plan.get("single_types", {}))
    simulated, targets, attempts = plan["simulated"], plan["targets"], plan["attempts"]
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


def print_attempt(attempt: Attempt) -> None:
    """Print the outcome of a simulation to stderr."""
    _, machines, cost, met = _attempt_row(attempt.as_dict())
    typer.echo(f"simulated {machines} for {cost} an hour: {met} met both targets", err=True)


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
    counts = attempt["counts"].items()
    return [
        "-" if attempt["over_provisioning"] is None else f"{attempt['over_provisioning']:.2f}",
        ", ".join(f"{count} {name}" for name, count in counts if count),
        f"{attempt['cost_per_hour']:.2f}",
        f"{attempt['attainment']:.2%}",
    ]


def _rates(planner: LoadPlanner, place: int) -> list[str]:
    cells = (planner.cells[name][place] for name in planner.offers)
    return [
        f"{one.rate_rps:.2f}" + (f" d {one.drafts.slots:.1f}" if one.drafts.slots else "")
        for one in cells
    ]
