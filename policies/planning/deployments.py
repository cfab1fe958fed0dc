"""Deployments, which are numbers of machines by type and role, and the search for the best one.

The search is a branch and bound. A bound (`bounds`) limits the rate of each deployment from above,
and a simulation measures it. A deployment is not measured if its bound is below the lower end of
another interval. The intervals are rough at first, and the deployments that may still be the best
are then measured precisely.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Final

from draftgate.policies.planning.bounds import Bounds, pool_bound
from draftgate.policies.types import Role
from draftgate.policies.values import immutable, replace

TOLERANCE: Final = 1e-9
"""Relative excess over a budget that counts as rounding."""


class Layout(StrEnum):
    """How a deployment divides the phases of a request."""

    TOGETHER = "together"
    APART = "apart"
    MIXED = "mixed"

    @property
    def complexity(self) -> int:
        """The place from the simplest layout to the most complex."""
        return list(Layout).index(self)


@immutable
class Group:
    """Machines of one type in one role."""

    profile: str
    role: Role
    count: int


@immutable
class Deployment:
    """Groups of machines.

    Attributes:
        groups: each has at least one machine.
        drafts: whether machines that compute outputs speculate.
    """

    groups: tuple[Group, ...]
    drafts: bool = False

    @property
    def layout(self) -> Layout:
        """The layout that the roles give."""
        roles = {group.role for group in self.groups}
        if roles == {Role.ANY}:
            return Layout.TOGETHER
        return Layout.MIXED if Role.ANY in roles else Layout.APART

    @property
    def machines(self) -> int:
        """The number of machines."""
        return sum(group.count for group in self.groups)

    def total(self, each: Mapping[str, float]) -> float:
        """Return the sum of a quantity of all machines, given by profile."""
        return math.fsum(group.count * each[group.profile] for group in self.groups)

    def repeated(self, times: int) -> Deployment:
        """Return several of these deployments as one."""
        groups = tuple(Group(one.profile, one.role, one.count * times) for one in self.groups)
        return replace(self, groups=groups)

    def __str__(self) -> str:
        """Return, for example, `2 x a100 prefill + 1 x h100 decode with drafts`."""
        words = (
            f"{one.count} x {one.profile}" + ("" if one.role is Role.ANY else f" {one.role}")
            for one in self.groups
        )
        return " + ".join(words) + (" with drafts" if self.drafts else "")


@immutable
class Budget:
    """A limit of a quantity of all machines, such as their price of an hour.

    Attributes:
        each: the quantity of one machine, by profile.
        most: the limit, possibly infinite.
    """

    each: Mapping[str, float]
    most: float

    def admits(self, deployment: Deployment) -> bool:
        """Return whether a deployment is within the budget."""
        return deployment.total(self.each) <= self.most * (1.0 + TOLERANCE)


def deployments(
    profiles: Sequence[str], budgets: Sequence[Budget], most_machines: int
) -> Iterator[Deployment]:
    """Yield all deployments within the budgets that can serve both phases.

    All machines of a role have the same profile, as in DistServe and Splitwise.

    Args:
        profiles: the types of machines.
        most_machines: the largest number of machines.
    """

    def extended(begun: Deployment, roles: Sequence[Role]) -> Iterator[Deployment]:
        if not roles:
            yield begun
            return
        yield from extended(begun, roles[1:])
        for profile in profiles:
            for count in range(1, most_machines - begun.machines + 1):
                larger = Deployment((*begun.groups, Group(profile, roles[0], count)))
                if not all(budget.admits(larger) for budget in budgets):
                    break
                yield from extended(larger, roles[1:])

    for deployment in extended(Deployment(()), tuple(Role)):
        roles = {group.role for group in deployment.groups}
        if Role.ANY in roles or {Role.PREFILL, Role.DECODE} <= roles:
            yield deployment


def maximal(
    found: Iterable[Deployment], budgets: Sequence[Budget], most_machines: int
) -> Iterator[Deployment]:
    """Yield the deployments of which no group can have one more machine."""
    for deployment in found:
        larger = (_with_one_more(deployment, index) for index in range(len(deployment.groups)))
        if deployment.machines == most_machines or not any(
            all(budget.admits(one) for budget in budgets) for one in larger
        ):
            yield deployment


def _with_one_more(deployment: Deployment, index: int) -> Deployment:
    groups = list(deployment.groups)
    groups[index] = Group(groups[index].profile, groups[index].role, groups[index].count + 1)
    return Deployment(tuple(groups))


def bound_rps(deployment: Deployment, machines: Mapping[str, Bounds]) -> float:
    """Return the upper bound of a deployment's rate, from the bounds of its machines."""

    def of(role: Role) -> list[Bounds]:
        return [
            machines[group.profile]
            for group in deployment.groups
            if group.role is role
            for _ in range(group.count)
        ]

    return pool_bound(of(Role.PREFILL), of(Role.DECODE), of(Role.ANY))


@immutable
class Candidate:
    """A deployment that may be the best one.

    Attributes:
        bound_rps: upper bound of its rate.
        weight: number by which its rate is divided for comparison, such as its price of an hour.
    """

    deployment: Deployment
    bound_rps: float
    weight: float = 1.0


@immutable
class Measured:
    """A candidate and its rate, with a confidence interval.

    Attributes:
        rate_rps: the estimate, or None if the rate only has an upper limit.
        low_rps, high_rps: the interval.
    """

    candidate: Candidate
    rate_rps: float | None
    low_rps: float
    high_rps: float

    @property
    def value(self) -> float:
        """The rate by weight, 0 without an estimate."""
        return (self.rate_rps or 0.0) / self.candidate.weight


Measure = Callable[[Candidate, float], Measured]
"""Measures a candidate. A measurement may stop when its rate is certainly below the given one."""


@immutable
class Search:
    """The result of a search.

    Attributes:
        measured: the measured candidates, in the order of their measurement.
        unmeasured: the candidates whose bound is too low, or that the limit of measurements leaves
            out.
        complete: whether every candidate that might be better has been measured.
    """

    measured: tuple[Measured, ...]
    unmeasured: tuple[Candidate, ...]
    complete: bool

    @property
    def best(self) -> Measured | None:
        """The best candidate, or a simpler one that is not certainly worse.

        The layouts from the simplest to the most complex are together, apart and mixed.
        """
        least = _certain_value(self.measured)
        known = [one for one in self.measured if one.rate_rps]
        equal = [one for one in known if one.high_rps / one.candidate.weight >= least]
        return min(
            equal,
            key=lambda one: (one.candidate.deployment.layout.complexity, -one.value),
            default=None,
        )


def ranked(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Return candidates in the order in which a search measures them.

    Simple layouts are first, because their simulations are the fastest, and then high bounds.
    """
    return sorted(
        candidates,
        key=lambda one: (one.deployment.layout.complexity, -one.bound_rps / one.weight),
    )


def find_best(candidates: Iterable[Candidate], measure: Measure, most: int) -> Search:
    """Measure candidates in order, except for those that are certainly worse than the best one.

    Args:
        most: the largest number of measurements.
    """
    measured, unmeasured, complete = list[Measured](), list[Candidate](), True
    for candidate in candidates:
        beat_rps = _certain_value(measured) * candidate.weight
        if candidate.bound_rps <= beat_rps:
            unmeasured.append(candidate)
        elif len(measured) == most:
            unmeasured.append(candidate)
            complete = False
        else:
            measured.append(measure(candidate, beat_rps))
    return Search(tuple(measured), tuple(unmeasured), complete)


def refined(rough: Search, measure: Measure) -> Search:
    """Measure the candidates of a rough search again that may be the best, highest values first.

    The upper ends of the rough intervals are their bounds.
    """
    known = sorted((one for one in rough.measured if one.rate_rps), key=lambda one: -one.value)
    limited = [
        replace(one.candidate, bound_rps=min(one.candidate.bound_rps, one.high_rps))
        for one in known
    ]
    found = find_best(limited, measure, len(limited))
    again = {one.candidate.deployment: one for one in found.measured}
    measured = tuple(
        replace(again.get(one.candidate.deployment, one), candidate=one.candidate)
        for one in rough.measured
    )
    return Search(measured, rough.unmeasured, rough.complete)


def _certain_value(measured: Iterable[Measured]) -> float:
    """Return the highest value that a candidate certainly reaches."""
    return max((one.low_rps / one.candidate.weight for one in measured), default=0.0)


def find_least(
    candidates: Iterable[Candidate],
    rate_rps: float,
    holds: Callable[[Candidate], bool],
    most: int,
) -> Search:
    """Return the search for the candidate with the least weight that serves a rate.

    Candidates of one weight are tested from the simplest layout to the most complex. The last
    measured candidate is the result, if it has a rate.

    Args:
        holds: tests whether a candidate serves the rate.
        most: the largest number of tests.
    """
    ranked = sorted(
        (one for one in candidates if one.bound_rps >= rate_rps),
        key=lambda one: (one.weight, one.deployment.layout.complexity, -one.bound_rps),
    )
    measured: list[Measured] = []
    for index, candidate in enumerate(ranked):
        if len(measured) == most:
            return Search(tuple(measured), tuple(ranked[index:]), complete=False)
        if holds(candidate):
            measured.append(Measured(candidate, rate_rps, rate_rps, math.inf))
            return Search(tuple(measured), tuple(ranked[index + 1 :]), complete=True)
        measured.append(Measured(candidate, None, 0.0, rate_rps))
    return Search(tuple(measured), (), complete=True)
