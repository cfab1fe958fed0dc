"""The plan of `draftgate plan mix` as a table on the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import typer


def print_plan(plan: Mapping[str, Any]) -> None:
    """Print the machines of a plan, or the lengths that no mix serves."""
    if not plan["feasible"]:
        typer.echo("no mix within the limits serves")
        for bucket in plan["infeasible_buckets"]:
            prompt, output = (_shown(bucket[key]) for key in ("prompt_tokens", "output_tokens"))
            typer.echo(f"  prompts of {prompt} tokens with outputs of {output}")
        return
    print_counts(plan["counts"], plan["prices_per_hour"], plan.get("single_types", {}))
    simulated, targets, attempts = plan["simulated"], plan["targets"], plan["attempts"]
    share = simulated["attainment"]
    typer.echo(f"{share:.2%} of {simulated['requests']} simulated requests met their targets.")
    first = attempts[0]
    typer.echo(
        f"The machines are planned for {plan['over_provisioning']:.2f} times the mean rate."
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


def _alone(one: Mapping[str, Any]) -> str:
    if one["cost_per_hour"] is None:
        return "cannot"
    return f"{one['count']} for {one['cost_per_hour']:.2f}"


def _shown(lengths: list[int | None]) -> str:
    first, last = lengths
    return f"{first:,} or more" if last is None else f"{first:,} to {last:,}"
