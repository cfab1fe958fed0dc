"""Deployments, which are numbers of machines by type and role, and the search for the best one.

The search is a branch and bound. A bound (`bounds`) limits the rate of each deployment from above.
Short simulations of all deployments at equal rates per weight (`eliminate`) leave those that may be
the best, which longer simulations then measure. A deployment is not measured if its bound is
below the lower end of another interval.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum, StrEnum, auto
from typing import Final

from draftgate.lab.planning.bounds import RateBounds, pool_bound
from draftgate.policies.types import Role
from draftgate.policies.values import immutable, replace

_TOLERANCE: Final = 1e-9
"""Relative excess over a budget that counts as rounding."""

ROUNDS: Final = 8
"""Most rounds of tests, with rates down to 1/256 of the highest bound. Chosen, not tuned,
2026-11-27."""

_NARROW: Final = 1.25
"""Ratio of the highest upper to the highest lower end at which tests end. The verdict of a short
simulation is rarely clear within a quarter of the rate. Chosen, not tuned, 2026-11-27."""


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
        return deployment.total(self.each) <= self.most * (1.0 + _TOLERANCE)


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


def bound_rps(deployment: Deployment, machines: Mapping[str, RateBounds]) -> float:
    """Return the upper bound of a deployment's rate, from the bounds of its machines."""

    def of(role: Role) -> list[RateBounds]:
        return [
            machines[group.profile]
            for group in deployment.groups
            if group.role is role
            for _ in range(group.count)
        ]

    return pool_bound(of(Role.PREFILL), of(Role.DECODE), of(Role.ANY))


@immutable
class DeploymentCandidate:
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
        rate_rps: the estimate, or None if no bound was found on one side of it.
        low_rps, high_rps: the interval, with 0 and infinity for missing bounds.
        converged: whether the interval is as narrow as requested.
    """

    candidate: DeploymentCandidate
    rate_rps: float | None
    low_rps: float
    high_rps: float
    converged: bool = True

    @property
    def value(self) -> float:
        """The rate by weight, 0 without an estimate."""
        return (self.rate_rps or 0.0) / self.candidate.weight

    @property
    def undecided(self) -> bool:
        """Whether a search ended without an estimate, although the rate may be above 0."""
        return self.rate_rps is None and not self.converged

    @property
    def most_value(self) -> float:
        """The upper end of the interval by weight."""
        return self.high_rps / self.candidate.weight


_Measure = Callable[[Sequence[tuple[DeploymentCandidate, float]]], Iterable[Measured]]
"""Measures candidates, each beside a rate. A measurement may stop when its rate is certainly lower.
"""


@immutable
class DeploymentSearch:
    """The result of a search.

    Attributes:
        measured: the tested candidates. Those that were eliminated have no estimate.
        unmeasured: the candidates that the limit of tests leaves out.
        complete: whether every candidate that might be better has been measured.
    """

    measured: tuple[Measured, ...]
    unmeasured: tuple[DeploymentCandidate, ...]
    complete: bool

    @property
    def best(self) -> Measured | None:
        """The best candidate, or a simpler one that is not certainly worse.

        The layouts from the simplest to the most complex are together, apart and mixed.
        """
        least = _certain_value(self.measured)
        known = [one for one in self.measured if one.rate_rps]
        equal = [one for one in known if one.most_value >= least]
        return min(
            equal,
            key=lambda one: (one.candidate.deployment.layout.complexity, -one.value),
            default=None,
        )


def ranked(candidates: Iterable[DeploymentCandidate]) -> list[DeploymentCandidate]:
    """Return candidates in the order in which a search measures them.

    Simple layouts are first, because their simulations are the fastest, and then high bounds.
    """
    return sorted(
        candidates,
        key=lambda one: (one.deployment.layout.complexity, -one.bound_rps / one.weight),
    )


class Outcome(Enum):
    """Whether a candidate serves a rate, as far as a short simulation shows."""

    SERVES = auto()
    FAILS = auto()
    UNCLEAR = auto()


Test = Callable[[Sequence[tuple[DeploymentCandidate, float]]], Iterable[Outcome]]
"""Tests candidates, each at a rate."""


def eliminate(candidates: Sequence[DeploymentCandidate], test: Test) -> list[Measured]:
    """Return the range of each candidate's rate, after tests at equal rates per weight.

    The first tests are at half of the highest bound. While no candidate serves its rate, the next
    tests are at half of the rate. Otherwise they are between the highest rate that one serves and
    the highest upper end. If one candidate serves a rate, those that fail at it are not tested
    again. If all candidates fail at the lowest rate, their upper end is 0.
    """
    ranges = [Measured(one, None, 0.0, one.bound_rps) for one in candidates]
    value = 0.5 * max((one.most_value for one in ranges), default=0.0)
    for _ in range(ROUNDS):
        least = max(value, _certain_value(ranges))
        left = [index for index, one in enumerate(ranges) if one.most_value > least]
        pairs = [(candidates[index], value * candidates[index].weight) for index in left]
        for index, (_, rate_rps), outcome in zip(left, pairs, test(pairs), strict=True):
            ranges[index] = _tested(ranges[index], rate_rps, outcome)
        certain = _certain_value(ranges)
        most = max((one.most_value for one in ranges), default=0.0)
        if certain and most <= _NARROW * certain:
            return ranges
        lowest, value = value, math.sqrt(certain * most) if certain else 0.5 * value
    if certain:
        return ranges
    return [replace(one, high_rps=0.0) if one.most_value <= lowest else one for one in ranges]


def _tested(measured: Measured, rate_rps: float, outcome: Outcome) -> Measured:
    if outcome is Outcome.SERVES:
        return replace(measured, low_rps=max(rate_rps, measured.low_rps))
    return replace(measured, high_rps=rate_rps) if outcome is Outcome.FAILS else measured


def find_best(
    candidates: Iterable[DeploymentCandidate], test: Test, measure: _Measure, most: int
) -> DeploymentSearch:
    """Test candidates, and measure those that may be the best one, the most promising first.

    Args:
        most: the largest number of candidates to test.
    """
    possible = ranked(candidates)
    found = eliminate(possible[:most], test)
    least = _certain_value(found)
    left = [index for index, one in enumerate(found) if one.most_value > least]
    left.sort(key=lambda index: _promise(found[index]))
    certain = 0.0
    for group in (left[:1], left[1:]):  # the first measurement limits the others
        left = [index for index in group if found[index].most_value > certain]
        pairs = [
            (_limited(found[index]), certain * found[index].candidate.weight) for index in left
        ]
        for index, measured in zip(left, measure(pairs), strict=True):
            found[index] = replace(measured, candidate=found[index].candidate)
        certain = _certain_value(one for one in found if one.rate_rps)
    beyond = tuple(possible[most:])
    complete = all(one.bound_rps <= certain * one.weight for one in beyond)
    return DeploymentSearch(tuple(found), beyond, complete)


def _limited(measured: Measured) -> DeploymentCandidate:
    """Return a candidate with the upper end of its range as its bound."""
    return replace(measured.candidate, bound_rps=measured.high_rps)


def _promise(measured: Measured) -> tuple[float, int, float]:
    """Return a key that sorts the highest lower ends first, and then the simplest layouts."""
    low = measured.low_rps / measured.candidate.weight
    return -low, measured.candidate.deployment.layout.complexity, -measured.most_value


def _certain_value(measured: Iterable[Measured]) -> float:
    """Return the highest value that a candidate certainly reaches."""
    return max((one.low_rps / one.candidate.weight for one in measured), default=0.0)


def find_least(
    candidates: Iterable[DeploymentCandidate],
    rate_rps: float,
    holds: Callable[[DeploymentCandidate], bool],
    most: int,
) -> DeploymentSearch:
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
            return DeploymentSearch(tuple(measured), tuple(ranked[index:]), complete=False)
        if holds(candidate):
            measured.append(Measured(candidate, rate_rps, rate_rps, math.inf))
            return DeploymentSearch(tuple(measured), tuple(ranked[index + 1 :]), complete=True)
        measured.append(Measured(candidate, None, 0.0, rate_rps))
    return DeploymentSearch(tuple(measured), (), complete=True)
