"""Deployments, which are numbers of machines by type and role.

All machines of a role have the same type, as in DistServe and Splitwise. `deployment_search` finds
the best deployment.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Final

from draftgate.lab.planning.bounds import RateBounds, pool_bound
from draftgate.policies.types import Role
from draftgate.policies.values import immutable, replace

_TOLERANCE: Final = 1e-9
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

    def scaled(self, factor: float) -> Deployment:
        """Multiply the machines of each group by a factor, and round up."""
        counts = (math.ceil(factor * one.count - _TOLERANCE) for one in self.groups)
        groups = (
            Group(one.profile, one.role, count)
            for one, count in zip(self.groups, counts, strict=True)
        )
        return replace(self, groups=tuple(groups))

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
