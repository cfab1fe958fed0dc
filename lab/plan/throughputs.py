"""The file of given throughputs, in the format of Mélange (arXiv 2404.14527)."""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from draftgate.lab.planning.mix import MachineType, Workload

Matrix = tuple[tuple[float, ...], ...]
"""A number for each range of input lengths (row) and output lengths (column)."""


class Gpu(msgspec.Struct, frozen=True):
    """A type of machine in the file of throughputs.

    Attributes:
        cost: price of an hour.
        tputs: requests per second by bucket, 0 for a bucket that the machine cannot serve.
    """

    cost: float
    tputs: Matrix


class Throughputs(msgspec.Struct, frozen=True):
    """A file of throughputs, in the format of Mélange.

    Attributes:
        workload_distribution: share of each bucket. The shares need not add up to 1.
        total_request_rate: requests per second of all buckets.
        slice_factor: number of parts of a bucket that different types may serve.
    """

    gpu_info: dict[str, Gpu]
    workload_distribution: Matrix
    total_request_rate: float
    slice_factor: float = 1

    @property
    def buckets(self) -> list[tuple[int, int]]:
        """Row and column of each bucket."""
        rows = enumerate(self.workload_distribution)
        return [(row, column) for row, shares in rows for column in range(len(shares))]

    def workload(self) -> Workload:
        """Return the rates of all buckets.

        Raises:
            ValueError: the shares do not have a positive sum, or `slice_factor` is a fraction.
        """
        if self.slice_factor % 1:
            raise ValueError(f"slice_factor must be a whole number, not {self.slice_factor}")
        shares = _flat(self.workload_distribution)
        total = math.fsum(shares)
        if not total > 0.0:
            raise ValueError("workload_distribution must have a positive sum")
        rates = tuple(self.total_request_rate * share / total for share in shares)
        return Workload(rates, int(self.slice_factor))

    def types(self, limits: Mapping[str, int]) -> dict[str, MachineType]:
        """Return the types of machines.

        Args:
            limits: number of available machines, by type.

        Raises:
            ValueError: a matrix has another shape than the distribution, or a limit is for an
                unknown type.
        """
        if unknown := limits.keys() - self.gpu_info.keys():
            raise ValueError(f"--limit {min(unknown)}: the file has no such GPU")
        widths = _widths(self.workload_distribution)
        for name, gpu in self.gpu_info.items():
            if _widths(gpu.tputs) != widths:
                raise ValueError(f"tputs of {name} and workload_distribution differ in shape")
        return {
            name: MachineType(gpu.cost, _flat(gpu.tputs), limits.get(name))
            for name, gpu in self.gpu_info.items()
        }


def _flat(matrix: Matrix) -> tuple[float, ...]:
    return tuple(number for row in matrix for number in row)


def _widths(matrix: Matrix) -> list[int]:
    return [len(row) for row in matrix]
