"""The cheapest mix of machine types that serves a workload (Mélange, arXiv 2404.14527).

The workload is a histogram of requests by input and output length. A *bucket* of this histogram has
a rate, and each type of machine has a throughput for the bucket, within the latency targets. The
requests of a bucket are cut into equal slices, and every slice goes to one type of machine:

    minimise    sum_j  cost_j  machines_j
    subject to  sum_j  slices_ij = S                                   for each bucket i
                sum_i  slices_ij  rate_i / (S  throughput_ij) <= machines_j   for each type j

The slices of a bucket are equal, so the program counts them. The paper assigns each slice by a
variable of its own, and a solver then visits the same mix many times.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from draftgate.policies.values import immutable

_TOLERANCE: Final = 1e-6
"""Largest excess of a machine's load over 1. It equals the tolerance of the solver, HiGHS."""


_INFEASIBLE: Final = 2
"""Status of `scipy.optimize.milp` without a feasible solution."""


@immutable
class MachineType:
    """A type of machine that can be rented.

    Attributes:
        cost_per_hour: price of one machine.
        throughput_rps: requests per second of one machine within the latency targets, by bucket. It
            is 0 if the machine cannot meet the targets.
        most: largest number of machines, or None without a limit.
    """

    cost_per_hour: float
    throughput_rps: tuple[float, ...]
    most: int | None = None


@immutable
class BucketRates:
    """Requests by bucket.

    Attributes:
        rates_rps: requests per second, by bucket.
        slices: number of equal parts of each bucket, at least 1.
    """

    rates_rps: tuple[float, ...]
    slices: int = 1


@immutable
class Mix:
    """The cheapest mix, or the buckets for which there is none.

    Attributes:
        counts: number of machines by type. All numbers are 0 if no mix is feasible.
        cost_per_hour: price of all machines.
        infeasible_buckets: indices of buckets that cannot be served completely, in order.
    """

    counts: Mapping[str, int]
    cost_per_hour: float
    infeasible_buckets: tuple[int, ...] = ()

    @property
    def feasible(self) -> bool:
        """Whether the mix serves the workload."""
        return not self.infeasible_buckets

    def __str__(self) -> str:
        """Return, for example, `3 x a10g + 1 x a100`."""
        return " + ".join(f"{n} x {name}" for name, n in self.counts.items() if n) or "no machines"


def cheapest_mix(workload: BucketRates, types: Mapping[str, MachineType]) -> Mix:
    """Return the cheapest mix of machines for a workload.

    If no mix serves all buckets, the result names the buckets that would be left out of a mix
    that serves as many slices as possible.

    Raises:
        ValueError: a number is not finite or negative, or the lists have different lengths.
        ImportError: scipy is not installed.
        RuntimeError: the solver has failed.
    """
    _check(workload, types)
    program = _Program(workload, tuple(types.values()))
    machines = program.cheapest()
    if machines is None:
        return Mix(dict.fromkeys(types, 0), 0.0, program.unserved())
    counts = dict(zip(types, machines, strict=True))
    cost = math.fsum(types[name].cost_per_hour * count for name, count in counts.items())
    return Mix(counts, cost)


def _check(workload: BucketRates, types: Mapping[str, MachineType]) -> None:
    if workload.slices < 1:
        raise ValueError("a bucket has at least one slice")
    rows = {"the rates": workload.rates_rps}
    for name, machine in types.items():
        rows[f"the throughputs of {name}"] = machine.throughput_rps
        rows[f"the cost of {name}"] = (machine.cost_per_hour,)
        if len(machine.throughput_rps) != len(workload.rates_rps):
            raise ValueError(f"{name} has throughputs for another number of buckets")
        if machine.most is not None and machine.most < 0:
            raise ValueError(f"the limit of {name} is negative")
    for what, numbers in rows.items():
        if not all(math.isfinite(number) and number >= 0.0 for number in numbers):
            raise ValueError(f"{what} must be finite and at least 0")


class _Program:
    """The integer program of a workload.

    Its variables are the slices of each pair of a bucket and a type that can serve it, followed by
    the number of machines of each type.
    """

    def __init__(self, workload: BucketRates, types: Sequence[MachineType]) -> None:
        self._types = types
        self._slices = workload.slices
        self._buckets = [index for index, rate in enumerate(workload.rates_rps) if rate > 0.0]
        self._pairs = [
            (bucket, number)
            for bucket in self._buckets
            for number, machine in enumerate(types)
            if machine.throughput_rps[bucket] > 0.0
        ]
        self._loads = [
            workload.rates_rps[bucket] / workload.slices / types[number].throughput_rps[bucket]
            for bucket, number in self._pairs
        ]

    def cheapest(self) -> list[int] | None:
        """Return the cheapest numbers of machines, or None if no numbers are feasible."""
        costs = [0.0] * len(self._pairs) + [machine.cost_per_hour for machine in self._types]
        solution = self._solve(costs, least_slices=self._slices)
        return None if solution is None else self._machines(solution)

    def unserved(self) -> tuple[int, ...]:
        """Return the buckets of which a mix that serves the most slices leaves slices out."""
        values = [-1.0] * len(self._pairs) + [0.0] * len(self._types)
        solution = self._solve(values, least_slices=0)
        assert solution is not None  # no slices at all are always feasible
        served = dict.fromkeys(self._buckets, 0)
        for (bucket, _), slices in zip(self._pairs, solution, strict=False):
            served[bucket] += round(slices)
        return tuple(bucket for bucket, slices in served.items() if slices < self._slices)

    def _machines(self, solution: Sequence[float]) -> list[int]:
        """Return the machines of each type that the slices of a solution need."""
        loads: list[list[float]] = [[] for _ in self._types]
        for (_, number), load, slices in zip(self._pairs, self._loads, solution, strict=False):
            loads[number].append(load * round(slices))
        return [math.ceil(math.fsum(row) * (1.0 - _TOLERANCE)) for row in loads]

    def _solve(self, costs: Sequence[float], *, least_slices: int) -> Sequence[float] | None:
        """Return the variables with the least cost, or None if none are feasible.

        Args:
            least_slices: slices of each bucket that must be served.
        """
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import coo_array

        pairs, types = len(self._pairs), len(self._types)
        rows = {bucket: row for row, bucket in enumerate(self._buckets)}
        if not pairs:
            return [0.0] * types if not rows or least_slices == 0 else None
        columns = range(pairs)
        served = coo_array(
            ([1.0] * pairs, ([rows[bucket] for bucket, _ in self._pairs], columns)),
            shape=(len(rows), pairs + types),
        )
        owners = [number for _, number in self._pairs]
        load = coo_array(
            (
                [*self._loads, *[-1.0] * types],
                ([*owners, *range(types)], range(pairs + types)),
            ),
            shape=(types, pairs + types),
        )
        # Without this constraint, a load below the tolerance would need no machine. With a row for
        # each type, the slowest of 48 problems takes 1.8 s, and with a row for each pair 6.7 s
        # (docs/guide/planning.md, AMD EPYC with AVX2, 2026-11-24).
        every = float(self._slices * len(rows))
        rented = coo_array(
            (
                [*[1.0] * pairs, *[-every] * types],
                ([*owners, *range(types)], range(pairs + types)),
            ),
            shape=(types, pairs + types),
        )
        most = [math.inf if one.most is None else float(one.most) for one in self._types]
        result: Any = milp(
            costs,
            integrality=[1] * (pairs + types),
            bounds=Bounds(0.0, [float(self._slices)] * pairs + most),
            constraints=[
                LinearConstraint(served, least_slices, self._slices),
                LinearConstraint(load, -math.inf, 0.0),
                LinearConstraint(rented, -math.inf, 0.0),
            ],
            options={"mip_rel_gap": 0.0},
        )
        if result.x is None and result.status != _INFEASIBLE:
            raise RuntimeError(f"the solver found no solution: {result.message}")
        return None if result.x is None else list(result.x)
