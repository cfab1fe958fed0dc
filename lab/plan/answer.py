"""The answer of a search for a deployment, as a plan, a table and a page with plots."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Final

from draftgate.lab.plan.goodput import speculation_of
from draftgate.lab.plan.planner import MOST_REQUESTS, Planner
from draftgate.lab.plan.simulated import latency_charts, summary_of
from draftgate.lab.planning.best_deployment import DeploymentSearch, Measured
from draftgate.lab.planning.deployments import Deployment, Layout
from draftgate.loadgen.measuring.slo import meets_slo
from draftgate.loadgen.report.charts import Chart, colour, scatter
from draftgate.loadgen.report.html import html_chart, html_page, html_settings, html_table
from draftgate.loadgen.types import Record

MOST_LEFT: Final = 5
"""Deployments that an interrupted search shows with their bounds. The JSON file has all of them."""

_HEAD_LEFT: Final = ("deployment that is left", "USD per hour", "bound, requests/s")


@dataclass(frozen=True, slots=True)
class PlanAnswer:
    """The result of a search.

    Attributes:
        question: `placement` or `pools`.
        deployment: the recommended machines, or None if no deployment meets the targets.
        rate_rps: the rate for which they are planned, or None for the highest rate.
        records: simulated requests of these machines at that rate, if any.
        per: the unit that the weights of deployments count per hour, such as USD, or empty.
        load: name of the workload or the trace.
    """

    question: str
    planner: Planner
    search: DeploymentSearch
    deployment: Deployment | None
    rate_rps: float | None
    records: Sequence[Record] = ()
    per: str = ""
    load: str = ""

    @property
    def sentence(self) -> str:
        """The answer in one sentence."""
        if self.deployment is None:
            return f"{self._no_deployment.capitalize()}."
        price = self.deployment.total(self.planner.machines.prices)
        best, targets = self.search.best, self.planner.targets
        if self.rate_rps is not None:
            served = f"{self.rate_rps:.2f} requests/s"
        else:
            assert best is not None
            served = f"{best.rate_rps:.2f} requests/s ({_interval(best)})"
        return (
            f"{self.deployment} ({self.deployment.layout}) for {price:.2f} USD per hour"
            f" {'serves' if self.deployment.machines == 1 else 'serve'} {served} with {targets}."
        )

    def as_plan(self) -> dict[str, Any]:
        """Return the plan in the form `plan/1` with its search."""
        machines, deployment, targets = self.planner.machines, self.deployment, self.planner.targets
        counts = Counter(dict.fromkeys(machines.names, 0))
        for group in deployment.groups if deployment else ():
            counts[group.profile] += group.count
        return {
            "format": "plan/1",
            "question": self.question,
            "answer": self.sentence,
            "feasible": deployment is not None,
            "cost_per_hour": deployment.total(machines.prices) if deployment else None,
            "counts": dict(counts),
            "machines": _machines(deployment, machines.files) if deployment else [],
            "phases": self.planner.simulation.phases[deployment.layout] if deployment else None,
            "infeasible_buckets": [],
            "simulated": summary_of(self.records) if self.records else None,
            "rate_rps": self.rate_rps,
            "targets": {
                "ttft_s": _finite(targets.ttft_s),
                "tpot_s": _finite(targets.tpot_s),
                "share": targets.share,
            },
            "prices_per_hour": machines.prices,
            "search": search_as_json(self.search),
        }

    def show(self) -> None:
        """Print the measured deployments and the plan."""
        from rich.console import Console
        from rich.table import Table

        console, best, ranked = Console(), self.search.best, _ranked(self.search)
        if ranked:
            table = Table(*self._head)
            for row in self._rows:
                table.add_row(*row)
            console.print(table)
        if self.deployment is None:
            console.print(self._no_deployment)
        else:
            console.print(f"recommended: {self.sentence}")
            if self.search.least is None and best is not ranked[0]:
                other = ranked[0].candidate.deployment
                console.print(f"{other} has a higher goodput, but the intervals overlap")
        if self.records:
            met = sum(map(meets_slo, self.records)) / len(self.records)
            console.print(f"{met:.1%} of {len(self.records)} simulated requests met both targets")
        doubtful = sum(not one.converged for one in self.search.measured)
        if doubtful:
            console.print(
                f"searches that did not converge within {MOST_REQUESTS} requests: {doubtful} of"
                f" {len(self.search.measured)}. Raise --precision, or use their intervals."
            )
        if self.search.unlikely:
            console.print(
                f"{len(self.search.unlikely)} deployments were not simulated, because their"
                f" estimated rates are far lower."
            )
        if self._missing:
            console.print(self._missing)
        if self._left:
            table = Table(*_HEAD_LEFT)
            for row in self._left:
                table.add_row(*row)
            console.print(table)

    @property
    def _missing(self) -> str:
        """What the search left out."""
        left = len(self.search.unmeasured)
        if self.search.interrupted:
            missing = "The search was interrupted, so a better deployment may exist."
            return f"{missing} {left:,} deployments are left.{self._least}" if left else missing
        if self.search.complete:
            return ""
        return f"--max-simulations ended the search before {left} deployments."

    @property
    def _least(self) -> str:
        """The least possible price of pools, if the search is for the least price."""
        first = self.search.unmeasured[0]  # they are sorted by weight
        price = first.deployment.total(self.planner.machines.prices)
        if self.question != "pools" or first.weight != price:
            return ""
        return f" None that costs less than {price:.2f} USD per hour serves the rate."

    @property
    def _left(self) -> list[list[str]]:
        """The first deployments that an interruption left out, with their bounds."""
        if not self.search.interrupted:
            return []
        prices = self.planner.machines.prices
        return [
            [str(one.deployment), f"{one.deployment.total(prices):.2f}", f"{one.bound_rps:.2f}"]
            for one in self.search.unmeasured[:MOST_LEFT]
        ]

    @property
    def _no_deployment(self) -> str:
        """Why no deployment is recommended."""
        if self.search.interrupted:
            return "no deployment was found before the interruption"
        if self.search.best is None and any(one.undecided for one in self.search.measured):
            return "no search found the highest rate, so no deployment is recommended"
        return "no deployment meets the targets"

    @property
    def _head(self) -> list[str]:
        head = ["deployment", "USD per hour", "bound, requests/s", "goodput, requests/s"]
        return [*head, "interval, requests/s", *([f"requests per {self.per}"] if self.per else [])]

    @property
    def _rows(self) -> list[list[str]]:
        """The measured deployments, the best one first."""
        prices = self.planner.machines.prices
        rows = [
            [
                str(one.candidate.deployment),
                f"{one.candidate.deployment.total(prices):.2f}",
                *_rates(one),
            ]
            for one in _ranked(self.search)
        ]
        if self.per:
            for row, one in zip(rows, _ranked(self.search), strict=True):
                row.append(f"{3600.0 * one.value:.0f}" if one.rate_rps else "-")
        return rows

    def page(self) -> str:
        """Return an HTML page with the machines, the simulated deployments and the latencies."""
        return html_page(f"Plan: {self.question}", self._body(self.as_plan()))

    def _body(self, plan: Mapping[str, Any]) -> Iterator[str]:
        yield f"<h1>Plan: {self.question} for {escape(self.load)}</h1>"
        yield f"<p><strong>{escape(self.sentence)}</strong> {escape(self._missing)}</p>"
        prices = self.planner.machines.prices
        if self.deployment is not None:
            rows = [
                [
                    group.profile,
                    group.role.value,
                    speculation_of(self.deployment, group.role),
                    str(group.count),
                    f"{group.count * prices[group.profile]:.2f}",
                ]
                for group in self.deployment.groups
            ]
            head = ["profile", "role", "speculation", "number", "USD per hour"]
            yield html_table(head, rows, f"Phases: {plan['phases']}", words=(0, 1, 2))
        if self.records:
            share = plan["simulated"]["attainment"]
            yield f"<h2>Simulated requests</h2><p>{share:.2%} met all of their targets.</p>"
            yield latency_charts(self.records)
        yield "<h2>Simulated deployments</h2>"
        chart = goodput_chart(self.search)
        if chart.data:
            yield f'<div class="charts">{html_chart(chart)}</div>'
        yield html_table(self._head, self._rows, words=(0,))
        if self._left:
            yield "<h2>Deployments that are left</h2>"
            yield html_table(list(_HEAD_LEFT), self._left, words=(0,))
        settings = {"load": self.load, **{key: plan[key] for key in ("rate_rps", "targets")}}
        yield "<h2>The question</h2>" + html_settings(settings)


def search_as_json(search: DeploymentSearch) -> dict[str, Any]:
    """Return the measured deployments, and the bounds of the others."""
    return {
        "complete": search.complete,
        "interrupted": search.interrupted,
        "dominated": search.dominated,
        "unlikely": [
            {
                "deployment": str(one.deployment),
                "bound_rps": one.bound_rps,
                "expected_rps": one.expected_rps,
            }
            for one in search.unlikely
        ],
        "measured": [
            {
                "deployment": str(one.candidate.deployment),
                "layout": one.candidate.deployment.layout.value,
                "bound_rps": one.candidate.bound_rps,
                "goodput_rps": one.rate_rps,
                "interval": [one.low_rps, _finite(one.high_rps)],
                "converged": one.converged,
                "weight": one.candidate.weight,
            }
            for one in search.measured
        ],
        "unmeasured": [
            {"deployment": str(one.deployment), "bound_rps": one.bound_rps, "weight": one.weight}
            for one in search.unmeasured
        ],
    }


def goodput_chart(search: DeploymentSearch) -> Chart:
    """Return the goodput of the measured deployments, with intervals, for each layout."""
    known = [one for one in _ranked(search) if one.rate_rps and one.high_rps < math.inf]
    data = []
    for place, layout in enumerate(Layout):
        shown = [one for one in known if one.candidate.deployment.layout is layout]
        rates = [one.rate_rps or 0.0 for one in shown]
        bars = {
            "type": "data",
            "symmetric": False,
            "array": [one.high_rps - rate for one, rate in zip(shown, rates, strict=True)],
            "arrayminus": [rate - one.low_rps for one, rate in zip(shown, rates, strict=True)],
        }
        names = [str(one.candidate.deployment) for one in shown]
        marker = {"color": colour(place), "size": 8}
        if shown:
            trace = scatter(rates, names, layout.value, "markers", error_x=bars, marker=marker)
            data.append(trace)
    layout_of_axes = {
        "xaxis": {"title": {"text": "requests/s"}, "rangemode": "tozero"},
        "yaxis": {
            "categoryarray": [str(one.candidate.deployment) for one in known],
            "autorange": "reversed",
            "automargin": True,
        },
    }
    caption = "highest rate at which the share of requests meets the targets, with 95% intervals"
    return Chart("Goodput", caption, data, layout_of_axes, wide=True)


def _machines(deployment: Deployment, files: Mapping[str, str]) -> list[dict[str, Any]]:
    return [
        {
            "profile": files[group.profile],
            "role": group.role.value,
            "count": group.count,
            "speculation": speculation_of(deployment, group.role),
        }
        for group in deployment.groups
    ]


def _ranked(search: DeploymentSearch) -> list[Measured]:
    """Return the tested deployments, the best one first."""
    if search.least is not None:
        return sorted(search.measured, key=lambda one: (not one.low_rps, one.candidate.weight))
    return sorted(search.measured, key=lambda one: (-one.value, -one.most_value))


def _rates(one: Measured) -> tuple[str, str, str]:
    """Return the bound, the goodput and its interval as text."""
    bound, goodput = f"{one.candidate.bound_rps:.2f}", one.rate_rps
    interval = _interval(one) + ("" if one.converged else ", not converged")
    return bound, "-" if goodput is None else f"{goodput:.2f}", interval


def _interval(one: Measured) -> str:
    if one.low_rps > 0.0 and one.high_rps < math.inf:
        return f"{one.low_rps:.2f} to {one.high_rps:.2f}"
    return f"below {one.high_rps:.2f}" if one.high_rps < math.inf else f"from {one.low_rps:.2f}"


def _finite(value: float) -> float | None:
    return value if value < math.inf else None
