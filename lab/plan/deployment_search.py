"""`draftgate plan placement` and `draftgate plan pools`, which search for a deployment.

A placement has the highest goodput for its price (DistServe). Pools have numbers of machines for
prompts and for outputs (Splitwise).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from draftgate.gateway.cli.options import BAD_USAGE, fail
from draftgate.lab.plan.options import DeploymentFlags, PlanFiles

if TYPE_CHECKING:
    from draftgate.lab.plan.answer import PlanAnswer
    from draftgate.lab.planning.best_deployment import Measured, Report


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
    from draftgate.lab.planning.deployments import Budget, deployments

    def search(report: Report) -> PlanAnswer:
        planner = planner_of(flags, PLACEMENT)
        prices = planner.machines.prices
        budgets = [] if max_cost is None else [Budget(prices, max_cost)]
        every = deployments(tuple(prices), budgets, max_machines)
        candidates, most = planner.candidates(every, prices), flags.max_simulations
        found = planner.search(candidates, most, report)
        return PlanAnswer("placement", planner, found, None, flags.rate, per="USD", load=flags.load)

    def confirm(answer: PlanAnswer, best: Measured) -> PlanAnswer:
        if flags.rate is None:
            return answer
        deployment, records = answer.planner.enough(best, flags.rate)
        return replace(answer, deployment=deployment, records=records)

    _answer(search, confirm, files)


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
    from draftgate.lab.planning.deployments import Budget, deployments, maximal

    def search(report: Report) -> PlanAnswer:
        planner, rate, most = planner_of(flags, POOLS), flags.rate, flags.max_simulations
        machines = planner.machines
        budgets = []
        if max_cost is not None:
            budgets.append(Budget(machines.prices, max_cost))
        if max_power_kw is not None:
            budgets.append(Budget(machines.powers, 1e3 * max_power_kw))
        every = deployments(machines.names, budgets, max_machines)
        if objective is Objective.THROUGHPUT:
            largest = maximal(every, budgets, max_machines)
            found = planner.search(planner.candidates(largest), most, report)
        else:
            if rate is None:
                raise ValueError(f"--objective {objective} needs --rate")
            each = machines.prices if objective is Objective.COST else machines.powers
            found = planner.search_least(planner.candidates(every, each), rate, most, report)
        return PlanAnswer("pools", planner, found, None, rate, load=flags.load)

    def confirm(answer: PlanAnswer, best: Measured) -> PlanAnswer:
        served_rps = answer.rate_rps or best.rate_rps
        if served_rps is None:
            return answer
        records = answer.planner.records(best.candidate.deployment, served_rps)
        return replace(answer, rate_rps=served_rps, records=records)

    _answer(search, confirm, files)


def _answer(
    search: Callable[[Report], PlanAnswer],
    confirm: Callable[[PlanAnswer, Measured], PlanAnswer],
    files: PlanFiles,
) -> None:
    """Search, and print and write the answer, of which a signal leaves what is known.

    Args:
        confirm: simulates the best deployment, and returns the final answer.
    """
    from draftgate.loadgen.interruption import interruptible
    from draftgate.loadgen.report.progress import StepProgress

    first = "simulating the most promising deployments"
    with interruptible() as interruption:
        try:
            with StepProgress(first, "deployments") as progress:
                answer = search(progress.report)
            best = answer.search.best
            if best is not None:
                answer = replace(answer, deployment=best.candidate.deployment)
                if not answer.search.interrupted:
                    answer = _confirmed(answer, best, confirm)
                if answer.search.interrupted and answer.search.least is None:
                    # The rate of the question was not simulated with this deployment.
                    answer = replace(answer, rate_rps=None)
            answer.show()
            files.write(answer.as_plan(), answer.page)
        except (OSError, ValueError) as error:
            fail(error, BAD_USAGE)
        except KeyboardInterrupt:
            fail("interrupted before there was an answer", interruption.status)
    if answer.search.interrupted:
        raise typer.Exit(interruption.status)


def _confirmed(
    answer: PlanAnswer, best: Measured, confirm: Callable[[PlanAnswer, Measured], PlanAnswer]
) -> PlanAnswer:
    try:
        return confirm(answer, best)
    except KeyboardInterrupt:
        return replace(answer, search=replace(answer.search, interrupted=True))
