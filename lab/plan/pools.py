"""`draftgate plan pools`, the numbers of machines in pools for prompts and outputs (Splitwise)."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from draftgate.gateway.cli.options import BAD_USAGE, fail
from draftgate.lab.plan.options import (
    ComposeFile,
    HtmlFile,
    JsonFile,
    KubernetesFolder,
    LinkGbps,
    MaxSimulations,
    Precision,
    Profiles,
    Proposer,
    Rate,
    Seed,
    Share,
    SloTpotMs,
    SloTtftMs,
    Speculation,
    TraceFile,
    WorkloadName,
    write_deployments,
    write_page,
    write_plan,
)


class Objective(StrEnum):
    """What a plan of pools optimises."""

    COST = "cost"
    POWER = "power"
    THROUGHPUT = "throughput"


def pools(  # noqa: PLR0913, PLR0917 - each is a flag
    profiles: Profiles,
    objective: Annotated[
        Objective,
        typer.Option(
            help="Least cost or power for --rate, or highest throughput.",
            metavar="cost|power|throughput",
        ),
    ] = Objective.COST,
    workload: WorkloadName = None,
    trace: TraceFile = None,
    rate: Rate = None,
    slo_ttft_ms: SloTtftMs = None,
    slo_tpot_ms: SloTpotMs = None,
    share: Share = 0.9,
    max_cost: Annotated[
        float | None, typer.Option(min=0.0, help="Price of all machines for an hour, in USD.")
    ] = None,
    max_power_kw: Annotated[
        float | None, typer.Option(min=0.0, help="Power of all machines, in kW.")
    ] = None,
    max_machines: Annotated[int, typer.Option(min=1, help="Number of all machines.")] = 16,
    speculation: Speculation = "auto",
    proposer: Proposer = "ngram",
    link_gbps: LinkGbps = None,
    precision: Precision = 0.05,
    max_simulations: MaxSimulations = 50,
    seed: Seed = 0,
    json_out: JsonFile = None,
    html_out: HtmlFile = None,
    compose: ComposeFile = None,
    kubernetes: KubernetesFolder = None,
) -> None:
    """Find the numbers of machines in pools for prompts, for outputs and for both.

    A simulation decides whether the share of requests meets both targets.
    """
    from draftgate.lab.plan.answer import Answer
    from draftgate.lab.plan.goodput import POOLS
    from draftgate.lab.plan.planner import planner_of
    from draftgate.lab.planning.deployments import Budget, deployments, maximal

    try:
        planner = planner_of(
            profiles,
            workload,
            trace,
            slo_ttft_ms,
            slo_tpot_ms,
            share,
            speculation=speculation,
            proposer=proposer,
            link_gbps=link_gbps,
            phases=POOLS,
            precision=precision,
            seed=seed,
        )
        machines = planner.machines
        budgets = []
        if max_cost is not None:
            budgets.append(Budget(machines.prices, max_cost))
        if max_power_kw is not None:
            budgets.append(Budget(machines.powers, 1e3 * max_power_kw))
        every = deployments(machines.names, budgets, max_machines)
        if objective is Objective.THROUGHPUT:
            largest = maximal(every, budgets, max_machines)
            found = planner.search(planner.candidates(largest), max_simulations)
        else:
            if rate is None:
                raise ValueError(f"--objective {objective} needs --rate")
            each = machines.prices if objective is Objective.COST else machines.powers
            found = planner.search_least(planner.candidates(every, each), rate, max_simulations)
        answer = Answer("pools", planner, found, None, rate)
        if found.best is not None and found.best.rate_rps:
            deployment, served_rps = found.best.candidate.deployment, rate or found.best.rate_rps
            records = planner.records(deployment, served_rps)
            answer = Answer("pools", planner, found, deployment, served_rps, records)
        answer.show()
        write_plan(answer.as_plan(), json_out)
        write_page(answer.page, html_out)
        write_deployments(answer.as_plan(), compose, kubernetes)
    except (OSError, ValueError) as error:
        fail(error, BAD_USAGE)
