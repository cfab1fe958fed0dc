"""The search for the best deployment, a branch and bound with few simulations.

A bound (`bounds`) limits the rate of each deployment from above without a simulation. The search
for the highest rate by weight goes from cheap to expensive knowledge:

1. A deployment is left out if a multiple of it is a candidate too, because more machines that share
   their queue serve at least as many requests each.
2. Short simulations find a rate that one of the most promising deployments serves.
3. Deployments whose estimate (`forecast`) is far below this rate by weight are left out. One short
   simulation of each other deployment at this rate eliminates those that fail. Those that serve
   more raise the rate for all that follow. A simulation ends when its verdict is clear
   (`loadgen.search.sequential_test`).
4. Only the deployments that are left are measured precisely. A deployment with a more complex
   layout than the best one must first serve the upper end of its interval in a short simulation,
   because it is not recommended unless it is certainly better.

The search for the least weight that serves a rate is a bisection by weight. A deployment that fails
excludes all that have no more machines in any role.

An interrupted search returns what it knows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from enum import Enum, auto
from typing import Final

from draftgate.lab.planning.deployments import Deployment
from draftgate.policies.values import immutable, replace

ROUNDS: Final = 8
"""Rates that the leaders are tested at, down to 1/128 of the first. Chosen, not tuned, 2026-11-27.
"""

_FIRST: Final = 0.8
"""First rate as a share of the highest estimate. The estimates of the reference case of DistServe
are up to 1.3 times too high or too low. Chosen, not tuned, 2026-11-30."""

MARGIN: Final = 1.9
"""Factor by which an estimate must be below a rate that another deployment serves, for the
deployment to be left out. Chosen after the estimates of the reference case of DistServe,
2026-11-30."""

_RAISE: Final = 1.25
_LEAST_RAISE: Final = 1.05
"""Factor between the rates that a promising deployment is tested at. Each failure replaces it by
its square root, down to the least one. A higher rate of the best deployment makes the tests of all
others shorter, because they fail more clearly. Chosen, not tuned, 2026-11-30."""


@immutable
class DeploymentCandidate:
    """A deployment that may be the best one.

    Attributes:
        bound_rps: upper bound of its rate.
        weight: number by which its rate is divided for comparison, such as its price of an hour.
        expected_rps: estimate of its rate (`forecast`), or 0 without one.
    """

    deployment: Deployment
    bound_rps: float
    weight: float = 1.0
    expected_rps: float = 0.0


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
        unlikely: candidates that were left out, because their estimates are below those of the best
            one by more than a factor of `MARGIN`.
        least: the candidate with the least weight that serves the rate, if that was the question.
        interrupted: whether the user ended the search.
    """

    measured: tuple[Measured, ...]
    unmeasured: tuple[DeploymentCandidate, ...]
    complete: bool
    dominated: int = 0
    least: Measured | None = None
    interrupted: bool = False
    unlikely: tuple[DeploymentCandidate, ...] = ()

    @property
    def best(self) -> Measured | None:
        """The best candidate, or a simpler one that is not certainly worse.

        The layouts from the simplest to the most complex are together, apart and mixed.
        """
        if self.least is not None:
            return self.least
        return _recommended(self.measured)


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
    estimate: Callable[[DeploymentCandidate], float] | None = None,
    width: int = 1,
    report: Report = lambda _what, _done, _of: None,
) -> DeploymentSearch:
    """Return the search for the highest rate by weight.

    Args:
        most: the largest number of candidates to test.
        estimate: returns the estimated rate of a candidate that is tested. Without it, candidates
            have their estimates.
        width: number of tests that run at the same time.
    """
    every = list(candidates)
    possible = ranked(without_divisors(every))
    # Both steps replace elements of this list, so an interruption leaves what they know.
    tested = possible[:most]
    if estimate is not None:
        tested = [replace(one, expected_rps=estimate(one)) for one in tested]
    found = [Measured(one, None, 0.0, one.bound_rps) for one in tested]
    elimination, interrupted = _Elimination(found, test, report), False
    unlikely = elimination.unlikely
    try:
        elimination.run(width)
        _measure(found, unlikely, test, measure, report)
    except KeyboardInterrupt:
        interrupted = True
    beyond, certain = tuple(possible[most:]), _certain_value(found)
    complete = all(one.bound_rps <= certain * one.weight for one in beyond)
    return DeploymentSearch(
        tuple(one for index, one in enumerate(found) if index not in unlikely),
        beyond,
        complete and not interrupted,
        len(every) - len(possible),
        interrupted=interrupted,
        unlikely=tuple(found[index].candidate for index in sorted(unlikely)),
    )


class _Elimination:
    """Narrows the range of each candidate's rate until few may be the best one.

    Attributes:
        unlikely: places of the candidates that their estimates exclude.
    """

    def __init__(self, found: list[Measured], test: Test, report: Report) -> None:
        """Prepare without a test.

        Args:
            found: the candidates, which the tests replace.
        """
        self._found = found
        self._test = test
        self._report = report
        self._decided = set[int]()
        self.unlikely = set[int]()

    def run(self, width: int) -> None:
        """Test the leaders, and then each other candidate at the rate that the best one serves."""
        found = self._found
        order = sorted(range(len(found)), key=lambda index: _preference(found[index].candidate))
        layouts = {found[index].candidate.deployment.layout: index for index in reversed(order)}
        leaders = list(layouts.values())
        value = self._test_leaders(leaders)
        others = [index for index in order if index not in leaders]
        for begin in range(0, len(others), width):
            certain = _certain_value(found)
            value = certain or value
            chosen = others[begin : begin + width]
            if certain:
                self.unlikely.update(
                    one for one in chosen if _is_unlikely(found[one].candidate, value)
                )
            self._raise(self._serving(set(chosen) - self.unlikely, value), value)
        if not _certain_value(found):
            for index, one in enumerate(found):
                if one.most_value <= value:
                    found[index] = replace(one, high_rps=0.0)

    def _test_leaders(self, leaders: Sequence[int]) -> float:
        """Find a rate by weight that one of the leaders serves, and return the last one tested.

        The candidates with the highest estimate of each layout are tested at `_FIRST` of the
        highest estimate, then at half of that, and so on. If no candidate serves even the lowest
        of these rates, the upper ends of all are 0.
        """
        value = 0.0
        most = max((_expected_value(one.candidate) for one in self._found), default=0.0)
        for halvings in range(ROUNDS):
            value = _FIRST * most / 2.0**halvings
            serve = self._serving(leaders, value)
            self._raise(serve, value)
            if serve:
                break
        return value

    def _raise(self, serve: Sequence[int], value: float) -> None:
        """Test candidates that serve a rate at higher rates, and between the last two of them."""
        step, bracketed = _RAISE, False
        while serve and step > _LEAST_RAISE:
            better = self._serving(serve, value * step)
            if better:
                serve, value = better, value * step
            bracketed = bracketed or not better
            if bracketed:
                step = math.sqrt(step)

    def _serving(self, indices: Iterable[int], value: float) -> list[int]:
        serve = _serving(self._found, sorted(indices), value, self._test)
        self._decided.update(indices, self.unlikely)
        self._report("tested", len(self._decided), len(self._found))
        return serve


def _tested(measured: Measured, rate_rps: float, outcome: Outcome) -> Measured:
    if outcome is Outcome.SERVES:
        return replace(measured, low_rps=max(rate_rps, measured.low_rps))
    return replace(measured, high_rps=rate_rps) if outcome is Outcome.FAILS else measured


def _is_unlikely(candidate: DeploymentCandidate, value: float) -> bool:
    expected_rps = candidate.expected_rps
    return expected_rps > 0.0 and expected_rps * MARGIN < value * candidate.weight


def _measure(
    found: list[Measured], unlikely: set[int], test: Test, measure: Measure, report: Report
) -> None:
    """Measure the candidates that may be the best one, the most promising first."""
    least = _certain_value(found)
    possible = (index for index in range(len(found)) if index not in unlikely)
    left = [index for index in possible if found[index].most_value > least]
    left.sort(key=lambda index: _promise(found[index]))
    certain, done, total = 0.0, 0, len(left)

    def measure_all(indices: Iterable[int]) -> None:
        nonlocal certain, done
        chosen = [index for index in indices if found[index].most_value > certain]
        pairs = [
            (_limited(found[index]), certain * found[index].candidate.weight) for index in chosen
        ]
        for index, measured in zip(chosen, measure(pairs), strict=True):
            found[index] = replace(measured, candidate=found[index].candidate)
            done += 1
            report("measured", done, total)
        certain = _certain_value(one for one in found if one.rate_rps)

    def complexity(index: int) -> int:
        return found[index].candidate.deployment.layout.complexity

    measure_all(left[:1])  # the first measurement limits the others
    simplest = complexity(left[0]) if left else 0
    measure_all(index for index in left[1:] if complexity(index) <= simplest)
    others = [index for index in left[1:] if complexity(index) > simplest]
    best = _recommended(found)
    if best is not None and math.isfinite(best.most_value):
        # A candidate that did not clearly serve a lower rate would not serve this one.
        serving = [index for index in others if found[index].low_rps > 0.0]
        others = _serving(found, serving, best.most_value, test)
    measure_all(others)


def _recommended(found: Iterable[Measured]) -> Measured | None:
    """Return the best candidate, or a simpler one that is not certainly worse."""
    every = list(found)
    least = _certain_value(every)
    return min(
        (one for one in every if one.rate_rps and one.most_value >= least),
        key=lambda one: (one.candidate.deployment.layout.complexity, -one.value),
        default=None,
    )


def _serving(found: list[Measured], indices: Iterable[int], value: float, test: Test) -> list[int]:
    """Test candidates at a rate by weight, and return those that serve it."""
    left = [index for index in indices if found[index].most_value > value]
    pairs = [(found[index].candidate, value * found[index].candidate.weight) for index in left]
    serve = []
    for index, (_, rate_rps), outcome in zip(left, pairs, test(pairs), strict=True):
        found[index] = _tested(found[index], rate_rps, outcome)
        if outcome is Outcome.SERVES:
            serve.append(index)
    return serve


def _limited(measured: Measured) -> DeploymentCandidate:
    """Return a candidate with the upper end of its range as its bound."""
    return replace(measured.candidate, bound_rps=measured.high_rps)


def _expected_value(candidate: DeploymentCandidate) -> float:
    """Return the estimate by weight, or half of the bound without an estimate."""
    return (candidate.expected_rps or candidate.bound_rps / 2.0) / candidate.weight


def _preference(candidate: DeploymentCandidate) -> tuple[float, float]:
    """Return a key that sorts the highest estimates first, and then the highest bounds."""
    return -_expected_value(candidate), -candidate.bound_rps / candidate.weight


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
        report("decided", 0, total)
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
