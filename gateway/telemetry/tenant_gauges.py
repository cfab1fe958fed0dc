"""The gauges of the tenants of a model: their waiting requests and their quotas."""

from __future__ import annotations

import asyncio
from collections import Counter
from itertools import islice

from draftgate.gateway.dispatch.queue import CentralQueue
from draftgate.gateway.dispatch.quotas import Quotas
from draftgate.gateway.telemetry import metric_definitions as metric
from draftgate.gateway.telemetry.metrics import MOST_VALUES, Labels, Metrics


def follow_queue(metrics: Metrics, queue: CentralQueue) -> None:
    """Count the waiting requests by tenant and class whenever the metrics become current."""

    def count() -> None:
        found = Counter[Labels]((one.tenant, str(one.priority)) for one in queue.places.values())
        metrics.set_all(metric.TENANT_QUEUED, found)

    metrics.folds.append(count)


async def read_quotas(metrics: Metrics, quotas: Quotas) -> None:
    """Read the quotas of the tenants, of which a metric can show `MOST_VALUES`.

    A store that does not answer leaves out what remains of them.
    """
    tenants = dict(islice(quotas.limited.items(), MOST_VALUES))
    rates: dict[Labels, float] = {}
    for tenant, quota in tenants.items():
        rates |= {(tenant, limit.value): rate for limit, (rate, _) in quota.limits().items()}
    remaining: dict[Labels, float] = {}
    levels = await asyncio.gather(*map(quotas.levels, tenants))
    for tenant, found in zip(tenants, levels, strict=True):
        remaining |= {(tenant, limit.value): level.remaining for limit, level in found.items()}
    metrics.set_all(metric.QUOTA, rates)
    metrics.set_all(metric.QUOTA_REMAINING, remaining)
