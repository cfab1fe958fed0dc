"""`draftgate plan placement` and `draftgate plan pools`, which search for a deployment.

A placement has the highest goodput for its price (DistServe). Pools have numbers of machines for
prompts and for outputs (Splitwise).
"""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Final

import typer

from draftgate.gateway.cli.options import BAD_USAGE, fail
from draftgate.lab.plan.options import DeploymentFlags, PlanFiles

if TYPE_CHECKING:
    from draftgate.lab.plan.answer import PlanAnswer

INTERRUPTED: Final = 130
"""Exit status of a search that Ctrl-C or SIGTERM ended, whose plan has what is known."""


class Objective(StrEnum):
    """What a plan of pools optimises."""

    COST = "cost"
    POWER = "power"
    THROUGHPUT = "throughput"


def placement(
    flags: DeploymentFlags,
    max_machines: Annotated[
        int, typer.Option(min=1, help="Machines of the largest deployment to compare.")
    ] = 4,
    max_cost: Annotated[
        float | None,
        typer.Option(
            min=0.0, help="Price of an hour of the most expensive deployment to compare, in USD."
        ),
    ] = None,
    *,
    files: PlanFiles,
) -> None:
    """Find the deployment with the highest goodput for its price.

    Goodput is the highest rate at which the share of requests meets both targets. Simulations
    measure it. With --rate, the plan has as many copies of the deployment as serve the rate.
    """
    from draftgate.lab.plan.answer import PlanAnswer
    from draftgate.lab.plan.goodput import PLACEMENT
    from draftgate.lab.plan.planner import planner_of
    from draftgate.lab.plan.progress import interruptible
    from draftgate.lab.planning.deployments import Budget, deployments

    try:
        planner = planner_of(flags, PLACEMENT)
        prices = planner.machines.prices
        budgets = [] if max_cost is None else [Budget(prices, max_cost)]
        every = deployments(tuple(prices), budgets, max_machines)
        with interruptible():
            found = planner.search(planner.candidates(every, prices), flags.max_simulations)
            answer = PlanAnswer(
                "placement", planner, found, None, flags.rate, per="USD", load=flags.load
            )
            if found.best is not None:
                answer = replace(answer, deployment=found.best.candidate.deployment)
                if flags.rate is not None and not found.interrupted:
                    deployment, records = planner.enough(found.best, flags.rate)
                    answer = replace(answer, deployment=deployment, records=records)
        _finish(answer, files)
    except (OSError, ValueError) as error:
        fail(error, BAD_USAGE)


def pools(
    flags: DeploymentFlags,
    objective: Annotated[
        Objective,
        typer.Option(
            help="Least cost or power for --rate, or highest throughput.",
            metavar="cost|power|throughput",
        ),
    ] = Objective.COST,
    max_cost: Annotated[
        float | None, typer.Option(min=0.0, help="Price of all machines for an hour, in USD.")
    ] = None,
    max_power_kw: Annotated[
        float | None, typer.Option(min=0.0, help="Power of all machines, in kW.")
    ] = None,
    max_machines: Annotated[int, typer.Option(min=1, help="Number of all machines.")] = 16,
    *,
    files: PlanFiles,
) -> None:
    """Find the numbers of machines in pools for prompts, for outputs and for both.

    A simulation decides whether the share of requests meets both targets.
    """
    from draftgate.lab.plan.answer import PlanAnswer
    from draftgate.lab.plan.goodput import POOLS
    from draftgate.lab.plan.planner import planner_of
    from draftgate.lab.plan.progress import interruptible
    from draftgate.lab.planning.deployments import Budget, deployments, maximal

    try:
        planner, rate, most = planner_of(flags, POOLS), flags.rate, flags.max_simulations
        machines = planner.machines
        budgets = []
        if max_cost is not None:
            budgets.append(Budget(machines.prices, max_cost))
        if max_power_kw is not None:
            budgets.append(Budget(machines.powers, 1e3 * max_power_kw))
        every = deployments(machines.names, budgets, max_machines)
        with interruptible():
            if objective is Objective.THROUGHPUT:
                largest = maximal(every, budgets, max_machines)
                found = planner.search(planner.candidates(largest), most)
            else:
                if rate is None:
                    raise ValueError(f"--objective {objective} needs --rate")
                each = machines.prices if objective is Objective.COST else machines.powers
                found = planner.search_least(planner.candidates(every, each), rate, most)
            answer = PlanAnswer("pools", planner, found, None, rate, load=flags.load)
            if found.best is not None:
                answer = replace(answer, deployment=found.best.candidate.deployment)
                served_rps = rate or found.best.rate_rps
                if served_rps is not None and not found.interrupted:
                    records = planner.records(found.best.candidate.deployment, served_rps)
                    answer = replace(answer, rate_rps=served_rps, records=records)
        _finish(answer, files)
    except (OSError, ValueError) as error:
        fail(error, BAD_USAGE)


def _finish(answer: PlanAnswer, files: PlanFiles) -> None:
    """Print an answer and write its files, and exit if the search was interrupted.

    Raises:
        OSError: a file cannot be written.
        ValueError: the plan cannot be written in a requested form.
    """
    answer.show()
    files.write(answer.as_plan(), answer.page)
    if answer.search.interrupted:
        raise typer.Exit(INTERRUPTED)
