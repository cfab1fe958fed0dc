"""`draftgate plan placement`, the deployment with the highest goodput for its price (DistServe)."""

from __future__ import annotations

from typing import Annotated

import typer

from draftgate.gateway.cli.options import BAD_USAGE, fail
from draftgate.gateway.cli.plan.options import (
    JsonFile,
    LinkGbps,
    MaxSimulations,
    Precision,
    Profiles,
    Rate,
    Seed,
    Share,
    SloTpotMs,
    SloTtftMs,
    TraceFile,
    WorkloadName,
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
    link_gbps: LinkGbps = None,
    precision: Precision = 0.05,
    max_simulations: MaxSimulations = 12,
    seed: Seed = 0,
    json_out: JsonFile = None,
) -> None:
    """Find the deployment with the highest goodput for its price.

    Goodput is the highest rate at which the share of requests meets both targets. Simulations
    measure it. With --rate, the plan has as many copies of the deployment as serve the rate.
    """
    from draftgate.gateway.cli.plan.goodput import PLACEMENT
    from draftgate.gateway.cli.plan.planner import plan_of, planner_of, print_search
    from draftgate.policies.planning.deployments import Budget, deployments

    try:
        planner = planner_of(
            profiles,
            workload,
            trace,
            slo_ttft_ms,
            slo_tpot_ms,
            share,
            link_gbps=link_gbps,
            phases=PLACEMENT,
            precision=precision,
            seed=seed,
        )
        machines, prices = planner.machines, planner.machines.prices
        budgets = [] if max_cost is None else [Budget(prices, max_cost)]
        found = planner.search(
            (
                planner.candidate(one, one.total(prices))
                for one in deployments(tuple(prices), budgets, max_machines)
            ),
            max_simulations,
        )
        best, deployment, summary = found.best, None, None
        if best is not None:
            deployment = best.candidate.deployment
            if rate is not None:
                deployment, summary = planner.enough(best, rate)
        write_plan(plan_of("placement", machines, found, deployment, summary), json_out)
    except (OSError, ValueError) as error:
        fail(error, BAD_USAGE)
    print_search(found, deployment)
