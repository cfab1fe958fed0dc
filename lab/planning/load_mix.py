"""The cheapest mix of machines for a workload, with capacity for its bursts.

The throughputs of all buckets on all types of machines are predicted (`throughput`), and the
integer program (`mix`) chooses the machines for the mean rate multiplied by a factor. The factor
begins at the bursts of the workload (`histogram.burst_factor`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from draftgate.lab.planning.histogram import Bucket, PlannedLength, burst_factor, histogram
from draftgate.lab.planning.mix import BucketRates, MachineType, Mix, cheapest_mix
from draftgate.lab.planning.throughput import (
    DraftPoint,
    Machine,
    Targets,
    Throughput,
    throughput,
)
from draftgate.policies.values import immutable

SLICES: Final = 4
"""Parts of a bucket that different types may serve. Mélange finds 4 sufficient."""


@immutable
class Offer:
    """A type of machine that can be rented.

    Attributes:
        price: price of an hour.
        most: number that can be rented, or None without a limit.
        drafts: the ways to draft for a bucket, none without speculation.
    """

    machine: Machine
    price: float
    most: int | None
    drafts: Callable[[Bucket], Sequence[DraftPoint]]


@immutable
class LoadPlanner:
    """The throughputs of machine types for a workload.

    Attributes:
        cells: throughput of each type, by bucket.
        owners: bucket of each request.
    """

    buckets: tuple[Bucket, ...]
    owners: tuple[int, ...]
    offers: Mapping[str, Offer]
    cells: Mapping[str, tuple[Throughput, ...]]

    @classmethod
    def from_requests(
        cls, requests: Sequence[PlannedLength], offers: Mapping[str, Offer], targets: Targets
    ) -> LoadPlanner:
        """Predict all throughputs."""
        buckets, owners = histogram(requests)
        cells = {
            name: tuple(
                throughput(offer.machine, bucket.size, targets, offer.drafts(bucket))
                for bucket in buckets
            )
            for name, offer in offers.items()
        }
        return cls(tuple(buckets), tuple(owners), offers, cells)

    def mix(self, rate_rps: float, only: str | None = None) -> Mix:
        """Return the cheapest mix for a rate.

        Args:
            only: the only type to use, without its limit, or None for all types.
        """
        rates = tuple(rate_rps * bucket.share for bucket in self.buckets)
        types = {
            name: MachineType(
                offer.price,
                tuple(cell.rate_rps for cell in self.cells[name]),
                offer.most if only is None else None,
            )
            for name, offer in self.offers.items()
            if only in {None, name}
        }
        return cheapest_mix(BucketRates(rates, SLICES), types)

    def bursts(self, requests: Sequence[PlannedLength], targets: Targets) -> float:
        """Return the factor for the bursts of the requests.

        The work of a request is the price of its time on the cheapest machine for it. The windows
        are as long as a mean request may take within its targets.
        """
        works = [self._price(bucket) for bucket in range(len(self.buckets))]
        outputs = sum(one.size.output_tokens * one.share for one in self.buckets)
        limits_s = (targets.ttft_s, outputs * targets.tpot_s)
        window_s = math.fsum(limit_s for limit_s in limits_s if math.isfinite(limit_s))
        if not window_s:
            return 1.0
        arrivals_s = [one.at_s for one in requests]
        works = [works[owner] for owner in self.owners]
        return burst_factor(arrivals_s, works, window_s, targets.share)

    def _price(self, bucket: int) -> float:
        prices = [
            offer.price / self.cells[name][bucket].rate_rps
            for name, offer in self.offers.items()
            if self.cells[name][bucket].rate_rps > 0.0
        ]
        return min(prices, default=0.0)
