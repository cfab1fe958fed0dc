"""The series that exist before their first event.

Dashboards find them from the start. A rate counts the first event only if the series was 0 before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import product
from typing import Final

from draftgate.backends.kv_transfer.transfer import TransferEnd
from draftgate.gateway.dispatch.kv_pulls import FetchCause
from draftgate.gateway.errors import QueueTimeout
from draftgate.gateway.telemetry import metric_definitions as metric
from draftgate.gateway.telemetry.ending import Ending
from draftgate.gateway.telemetry.metric_form import MetricDefinition
from draftgate.gateway.telemetry.metrics import Labels, Metrics
from draftgate.policies.admission.types import RefusalKind
from draftgate.policies.flows.outcome import FlowOutcome
from draftgate.policies.kv_transfer import PullReason
from draftgate.policies.moves import MoveEnd, MoveReason
from draftgate.policies.resilience.failover import Cause, GivenUp
from draftgate.policies.types import ANY_PROPOSER

ENDPOINTS: Final = ("/v1/chat/completions", "/v1/completions")
"""The endpoints that every model has. Series of other endpoints begin with their first request."""

_OPERATIONS: Final = ("chat", "text_completion")

RESUMED: Final = ("same_class", "other_class")


def create_series(metrics: Metrics, policy: str, proposers: Iterable[str]) -> None:
    """Create the series that a node is expected to need, with the value 0.

    Args:
        policy: name of the speculation policy.
        proposers: names of the proposers of the workers.
    """
    for definition, values in _expected(policy, proposers):
        if definition.buckets:
            metrics.histogram(definition, *values)
        else:
            metrics.scalar(definition, *values)


def _expected(policy: str, proposers: Iterable[str]) -> Iterator[tuple[MetricDefinition, Labels]]:
    yield metric.EVICTED_RESPONSES, ()
    for operation in _OPERATIONS:
        yield metric.TTFT, (operation,)
        yield metric.TPOT, (operation,)
    for endpoint, ending in product(ENDPOINTS, Ending):
        yield metric.REQUESTS, (endpoint, ending.value)
    for kind in (*RefusalKind, QueueTimeout.code):
        yield metric.REFUSED, (str(kind),)
    for flow_outcome in FlowOutcome:
        yield metric.FLOWS, (flow_outcome.value,)
    for proposer in ("none", ANY_PROPOSER, *proposers):
        yield metric.DECISIONS, (policy, proposer)
    for cause, outcome in product(Cause, (*RESUMED, *GivenUp)):
        yield metric.RESUMES, (cause.value, str(outcome))
    for preempted in ("restarted", "continued"):
        yield metric.PREEMPTIONS, (preempted,)
    for fetch, reason in product(FetchCause, PullReason):
        if (fetch is FetchCause.MOVED) is not (reason is PullReason.MOVE):
            continue
        pulls = TransferEnd if reason in {PullReason.FASTER, PullReason.MOVE} else ()
        computes = () if reason is PullReason.FASTER else ("none",)
        for end in (*pulls, *computes):
            yield metric.KV_FETCHES, (fetch.value, reason.value, str(end))
    for why, move_end in product(MoveReason, MoveEnd):
        yield metric.MOVES, (why.value, move_end.value)
    yield metric.ACCEPTED_AT, ("0",)
