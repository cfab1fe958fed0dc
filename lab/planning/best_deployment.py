"""The search for the best deployment, a branch and bound with few simulations.

A bound (`bounds`) limits the rate of each deployment from above without a simulation. The search
for the highest rate by weight goes from cheap to expensive knowledge:

1. A deployment is left out if a multiple of it is a candidate too, because more machines that share
   their queue serve at least as many requests each.
2. Short simulations find a rate that one of the most promising deployments serves.
3. One short simulation of each other deployment at this rate by weight eliminates those that fail.
   Those that serve more raise the rate for all that follow. A simulation ends when its verdict is
   clear (`loadgen.search.sequential_test`).
4. Only the deployments that are left are measured precisely.

The search for the least weight that serves a rate is a bisection by weight. A deployment that fails
excludes all that have no more machines in any role.

An interrupted search returns what it knows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import Enum, auto
from typing import Final

from draftgate.lab.planning.deployments import Deployment
from draftgate.policies.values import immutable, replace

ROUNDS: Final = 8
"""Most halvings of the first rate, down to 1/256 of the highest bound. Chosen, not tuned,
2026-11-27."""

_RAISE: Final = 1.25
"""Factor between the rates that a promising deployment is tested at. The verdict of a short
simulation is rarely clear within a quarter of the rate. Chosen, not tuned, 2026-11-27."""


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


class Outcome(Enum):
    """Whether a candidate serves a rate, as far as a short simulation shows."""

    SERVES = auto()
    FAILS = auto()
    UNCLEAR = auto()


Pairs = Sequence[tuple[DeploymentCandidate, float]]

Test = Callable[[Pairs], Iterable[Outcome]]
"""Tests candidates, each at a rate."""

Measure = Callable[[Pairs], Iterable[Measured]]
"""Measures candidates, each beside a rate. A measurement may stop when its rate is certainly lower.
"""

Report = Callable[[str, int, int], None]
"""Receives what the search does, and the number of candidates that are done and of all."""


@immutable
class DeploymentSearch:
    """The result of a search.

    Attributes:
        measured: the tested candidates. Those that were eliminated have no estimate.
        unmeasured: the candidates that the limit of tests or an interruption leaves out.
        complete: whether every candidate that might be better has been measured.
        dominated: number of candidates that were left out, because a multiple of them is one.
        least: the candidate with the least weight that serves the rate, if that was the question.
        interrupted: whether the user ended the search.
    """

    measured: tuple[Measured, ...]
    unmeasured: tuple[DeploymentCandidate, ...]
    complete: bool
    dominated: int = 0
    least: Measured | None = None
    interrupted: bool = False

    @property
    def best(self) -> Measured | None:
        """The best candidate, or a simpler one that is not certainly worse.

        The layouts from the simplest to the most complex are together, apart and mixed.
        """
        if self.least is not None:
            return self.least
        least = _certain_value(self.measured)
        known = [one for one in self.measured if one.rate_rps]
        equal = [one for one in known if one.most_value >= least]
        return min(
            equal,
            key=lambda one: (one.candidate.deployment.layout.complexity, -one.value),
            default=None,
        )


def ranked(candidates: Iterable[DeploymentCandidate]) -> list[DeploymentCandidate]:
    """Return candidates in the order in which a limit of tests admits them.

    Simple layouts are first, because their simulations are the fastest, and then high bounds.
    """
    return sorted(
        candidates,
        key=lambda one: (one.deployment.layout.complexity, -one.bound_rps / one.weight),
    )


def without_divisors(candidates: Iterable[DeploymentCandidate]) -> list[DeploymentCandidate]:
    """Return the candidates of which no multiple is a candidate."""
    every = list(candidates)
    known = {one.deployment for one in every}
    largest = max((one.deployment.machines for one in every), default=0)

    def has_multiple(one: Deployment) -> bool:
        times = range(2, largest // one.machines + 1)
        return any(one.repeated(count) in known for count in times)

    return [one for one in every if not has_multiple(one.deployment)]


def find_best(
    candidates: Iterable[DeploymentCandidate],
    test: Test,
    measure: Measure,
    most: int,
    *,
    width: int = 1,
    report: Report = lambda _what, _done, _of: None,
) -> DeploymentSearch:
    """Return the search for the highest rate by weight.

    Args:
        most: the largest number of candidates to test.
        width: number of tests that run at the same time.
    """
    every = list(candidates)
    possible = ranked(without_divisors(every))
    # Both steps replace elements of this list, so an interruption leaves what they know.
    found = [Measured(one, None, 0.0, one.bound_rps) for one in possible[:most]]
    interrupted = False
    try:
        _eliminate(found, test, width, report)
        _measure(found, measure, report)
    except KeyboardInterrupt:
        interrupted = True
    beyond, certain = tuple(possible[most:]), _certain_value(found)
    complete = all(one.bound_rps <= certain * one.weight for one in beyond)
    return DeploymentSearch(
        tuple(found),
        beyond,
        complete and not interrupted,
        len(every) - len(possible),
        interrupted=interrupted,
    )


def _eliminate(found: list[Measured], test: Test, width: int, report: Report) -> None:
    """Narrow the range of each candidate's rate until few may be the best one.

    The candidates with the highest bound of each layout are tested at half of the highest bound,
    then at a quarter, and so on, until one serves its rate. If no candidate serves even the lowest
    of these rates, their upper ends are 0.
    """
    order = sorted(range(len(found)), key=lambda index: -found[index].most_value)
    layouts = {found[index].candidate.deployment.layout: index for index in reversed(order)}
    leaders, value = list(layouts.values()), 0.0
    tested = set[int]()

    def serving(indices: Iterable[int], value: float) -> list[int]:
        """Test candidates at a rate by weight, and return those that serve it."""
        left = [index for index in indices if found[index].most_value > value]
        pairs = [(found[index].candidate, value * found[index].candidate.weight) for index in left]
        serve = []
        for index, (_, rate_rps), outcome in zip(left, pairs, test(pairs), strict=True):
            found[index] = _tested(found[index], rate_rps, outcome)
            tested.add(index)
            report("tested", len(tested), len(found))
            if outcome is Outcome.SERVES:
                serve.append(index)
        return serve

    def raise_rate(serve: list[int], value: float) -> None:
        while serve:
            value *= _RAISE
            serve = serving(serve, value)

    most = max((one.most_value for one in found), default=0.0)
    for halvings in range(1, ROUNDS + 1):
        value = most / 2.0**halvings
        serve = serving(leaders, value)
        raise_rate(serve, value)
        if serve:
            break
    others = [index for index in order if index not in leaders]
    for begin in range(0, len(others), width):
        value = _certain_value(found) or value
        raise_rate(serving(others[begin : begin + width], value), value)
    if not _certain_value(found):
        for index, one in enumerate(found):
            if one.most_value <= value:
                found[index] = replace(one, high_rps=0.0)


def _tested(measured: Measured, rate_rps: float, outcome: Outcome) -> Measured:
    if outcome is Outcome.SERVES:
        return replace(measured, low_rps=max(rate_rps, measured.low_rps))
    return replace(measured, high_rps=rate_rps) if outcome is Outcome.FAILS else measured


def _measure(found: list[Measured], measure: Measure, report: Report) -> None:
    """Measure the candidates that may be the best one, the most promising first."""
    least = _certain_value(found)
    left = [index for index, one in enumerate(found) if one.most_value > least]
    left.sort(key=lambda index: _promise(found[index]))
    certain, done, total = 0.0, 0, len(left)
    for group in (left[:1], left[1:]):  # the first measurement limits the others
        chosen = [index for index in group if found[index].most_value > certain]
        pairs = [
            (_limited(found[index]), certain * found[index].candidate.weight) for index in chosen
        ]
        for index, measured in zip(chosen, measure(pairs), strict=True):
            found[index] = replace(measured, candidate=found[index].candidate)
            done += 1
            report("measured", done, total)
        certain = _certain_value(one for one in found if one.rate_rps)


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
    report: Report = lambda _what, _done, _of: None,
) -> DeploymentSearch:
    """Return the search for the candidate with the least weight that serves a rate.

    Of equal weights, the simplest layout is preferred. `least` is the result, if there is one.

    Args:
        holds: tests whether a candidate serves the rate.
        most: the largest number of tests.
    """
    left = sorted(
        (one for one in candidates if one.bound_rps >= rate_rps),
        key=lambda one: (one.weight, one.deployment.layout.complexity, -one.bound_rps),
    )
    total, measured = len(left), list[Measured]()
    least: Measured | None = None
    interrupted = False
    try:
        while left and len(measured) < most:
            place = len(left) // 2
            tried = left[place]
            if holds(tried):
                least = Measured(tried, None, rate_rps, tried.bound_rps)
                measured.append(least)
                del left[place:]
            else:
                measured.append(Measured(tried, None, 0.0, rate_rps))
                left = [one for one in left if not _has_no_more(one, tried)]
            report("decided", total - len(left), total)
    except KeyboardInterrupt:
        interrupted = True
    return DeploymentSearch(
        tuple(measured), tuple(left), complete=not left, least=least, interrupted=interrupted
    )


def _has_no_more(one: DeploymentCandidate, other: DeploymentCandidate) -> bool:
    """Return whether a candidate has at most as many machines of each type and role."""
    if one.deployment.drafts != other.deployment.drafts:
        return False
    counts = {(group.profile, group.role): group.count for group in other.deployment.groups}
    return all(
        group.count <= counts.get((group.profile, group.role), 0) for group in one.deployment.groups
    )
