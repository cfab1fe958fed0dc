"""`draftgate plan placement`, the deployment with the highest goodput for its price (DistServe)."""

from __future__ import annotations

from dataclasses import replace
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


def placement(  # noqa: PLR0913, PLR0917 - each is a flag
    profiles: Profiles,
    workload: WorkloadName = None,
    trace: TraceFile = None,
    rate: Rate = None,
    slo_ttft_ms: SloTtftMs = None,
    slo_tpot_ms: SloTpotMs = None,
    share: Share = 0.9,
    max_machines: Annotated[
        int, typer.Option(min=1, help="Machines of the largest deployment to compare.")
    ] = 4,
    max_cost: Annotated[
        float | None,
        typer.Option(
            min=0.0, help="Price of an hour of the most expensive deployment to compare, in USD."
        ),
    ] = None,
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
    """Find the deployment with the highest goodput for its price.

    Goodput is the highest rate at which the share of requests meets both targets. Simulations
    measure it. With --rate, the plan has as many copies of the deployment as serve the rate.
    """
    from draftgate.lab.plan.answer import Answer
    from draftgate.lab.plan.goodput import PLACEMENT
    from draftgate.lab.plan.planner import planner_of
    from draftgate.lab.planning.deployments import Budget, deployments

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
            phases=PLACEMENT,
            precision=precision,
            seed=seed,
        )
        prices = planner.machines.prices
        budgets = [] if max_cost is None else [Budget(prices, max_cost)]
        every = deployments(tuple(prices), budgets, max_machines)
        found = planner.search(planner.candidates(every, prices), max_simulations)
        answer = Answer("placement", planner, found, None, rate, per="USD")
        if found.best is not None:
            answer = replace(answer, deployment=found.best.candidate.deployment)
            if rate is not None:
                deployment, records = planner.enough(found.best, rate)
                answer = replace(answer, deployment=deployment, records=records)
        answer.show()
        write_plan(answer.as_plan(), json_out)
        write_page(answer.page, html_out)
        write_deployments(answer.as_plan(), compose, kubernetes)
    except (OSError, ValueError) as error:
        fail(error, BAD_USAGE)
