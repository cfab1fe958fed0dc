"""Metrics of an overload: goodput, retry times, classes, and the optimum in hindsight."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, median
from typing import Any, Final

from bench.simulation.hindsight import QueuedRequest, earliest_starts_s
from bench.simulation.overload_clients import Client, Overload

WARM_SHARE: Final = 1 / 6
"""Fraction of the overload at which the goodput count starts."""


def goodput_rps(overload: Overload, clients: Sequence[Client]) -> float:
    """Return the requests per second that met their targets during the overload."""
    warm_s = WARM_SHARE * overload.seconds
    good = [
        client
        for client in clients
        if client.met(overload.service(client.planned.index))
        and warm_s <= (client.first_s or 0.0) < overload.seconds
    ]
    return len(good) / (overload.seconds - warm_s)


def most_running(clients: Sequence[Client]) -> int:
    """Return the maximum number of concurrent requests."""
    changes = sorted(
        change
        for client in clients
        if client.scheduled_s is not None and client.end_s is not None
        for change in ((client.scheduled_s, 1), (client.end_s, -1))
    )
    most = running = 0
    for _, change in changes:
        running += change
        most = max(most, running)
    return most


def idle_metrics(clients: Sequence[Client]) -> dict[str, float]:
    """Return how much of the server was idle while clients waited for their appointments.

    The result contains the seconds with such clients, the seconds of them in which no request ran,
    and the share of the concurrency that was unused.
    """
    changes = [change for client in clients for change in _changes(client)]
    capacity, running, waiting, last_s = max(most_running(clients), 1), 0, 0, 0.0
    waited_s = idle_s = unused_s = 0.0
    for at_s, started, refused in sorted(changes):
        if waiting:
            waited_s += at_s - last_s
            idle_s += (at_s - last_s) * (running == 0)
            unused_s += (at_s - last_s) * (1.0 - running / capacity)
        running, waiting, last_s = running + started, waiting + refused, at_s
    share = unused_s / waited_s if waited_s else 0.0
    return {"waited_s": waited_s, "idle_s": idle_s, "unused_share": share}


def _changes(client: Client) -> list[tuple[float, int, int]]:
    """Return the times of a client's changes, of the running and of the waiting clients."""
    changes = []
    if client.scheduled_s is not None and client.end_s is not None:
        changes += [(client.scheduled_s, 1, 0), (client.end_s, -1, 0)]
    for at_s, retry_s in client.refusals:
        changes += [(at_s, 0, 1), (at_s + retry_s, 0, -1)]
    return changes


def earliest_s(overload: Overload, clients: Sequence[Client]) -> list[tuple[Client, float]]:
    """Return each refused client with its shortest feasible retry delay, in seconds.

    The hindsight is a pool that never idles. It serves the clients in the order of their arrivals,
    with their actual service times and the maximum observed concurrency (`earliest_starts_s`). The
    result is the earliest retry after which a client starts just within its target.
    """
    queued = [client for client in clients if client.end_s is not None]
    requests = [_queued_request(overload, client) for client in queued]
    starts = earliest_starts_s(requests, max(most_running(clients), 1))
    return [
        (client, max(start_s - request.at_s - _allowed_s(overload, client), 0.0))
        for client, request, start_s in zip(queued, requests, starts, strict=True)
        if client.refusals
    ]


def _queued_request(overload: Overload, client: Client) -> QueuedRequest:
    """Return the request of a served client in hindsight."""
    assert client.scheduled_s is not None
    assert client.end_s is not None
    service_s = client.end_s - client.scheduled_s
    at_s = client.refusals[0][0] if client.refusals else client.admitted_s or 0.0
    return QueuedRequest(at_s, overload.service(client.planned.index).priority, service_s)


def _allowed_s(overload: Overload, client: Client) -> float:
    return overload.service(client.planned.index).ttft_s or 0.0


def _retries(feasible_retries: Sequence[tuple[Client, float]]) -> dict[str, Any]:
    """Return the medians of requested and of feasible retry delays, in seconds."""
    if not feasible_retries:
        return {"retry_after_s": None, "earliest_feasible_s": None, "retry_over_earliest": None}
    retry_s, feasible_s = (
        median(c.refusals[0][1] for c, _ in feasible_retries),
        median(f for _, f in feasible_retries),
    )
    return {
        "retry_after_s": {"p50": retry_s},
        "earliest_feasible_s": {"p50": feasible_s},
        "retry_over_earliest": retry_s / feasible_s if feasible_s else None,
    }


def overload_metrics(
    overload: Overload, rate_rps: float, clients: Sequence[Client]
) -> dict[str, Any]:
    """Return the metrics of a rate."""
    returns = [admitted for client in clients for _, admitted in client.retries]
    first = [client.retries[0][1] for client in clients if client.retries]
    feasible_retries = earliest_s(overload, clients)
    return {
        "rate_rps": rate_rps,
        "requests": len(clients),
        "goodput_rps": goodput_rps(overload, clients),
        "refused_at_first": sum(bool(client.refusals) for client in clients),
        "let_in_on_return": fmean(returns) if returns else None,
        "let_in_on_first_return": fmean(first) if first else None,
        **_retries(feasible_retries),
        "while_clients_wait": idle_metrics(clients),
        "classes": [
            _class(overload, clients, feasible_retries, place)
            for place in range(len(overload.services))
        ],
    }


def _class(
    overload: Overload,
    clients: Sequence[Client],
    feasible_retries: Sequence[tuple[Client, float]],
    place: int,
) -> dict[str, Any]:
    """Return the metrics of a class of requests."""
    service = overload.services[place]
    own = [c for c in clients if c.planned.index % len(overload.services) == place]
    returns = [admitted for client in own for _, admitted in client.retries]
    ended = [c for c in own if c.end_s is not None]
    waits_s = sorted((c.first_s or 0.0) - c.arrived_s for c in ended)
    in_time = [c for c in own if c.first_s is not None and c.first_s < overload.seconds]
    return {
        "priority": service.priority,
        "ttft_target_s": service.ttft_s,
        "tpot_target_s": service.tpot_s,
        "requests": len(own),
        "answered": len(ended),
        "answered_during_overload": len(in_time),
        "let_in_on_return": fmean(returns) if returns else None,
        **_retries(
            [
                one
                for one in feasible_retries
                if one[0].planned.index % len(overload.services) == place
            ]
        ),
        "attainment_of_answered": fmean(c.met(service) for c in ended) if ended else None,
        "arrival_to_first_token_s": {
            "p50": median(waits_s) if waits_s else None,
            "max": waits_s[-1] if waits_s else None,
        },
    }
