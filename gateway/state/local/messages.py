"""The messages between shared memory stores and their clients, in frames (`backends.framing`).

A call has a number, the names of a store and of its method, and the arguments. Replies have the
number of their call and come in the order of the calls. A notice is a call without a reply.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import msgspec

from draftgate.backends.framing import framed
from draftgate.gateway.processes.snapshots import ProcessSnapshot
from draftgate.gateway.state.exchange import News, Update
from draftgate.gateway.state.flow_store import FlowHop, FlowKey, HopArrival, HopLengths
from draftgate.gateway.state.response_store import StoreUsage
from draftgate.gateway.state.store import (
    Lease,
    LeaseCandidate,
    Reservation,
    Snapshot,
    WorkerReport,
)
from draftgate.gateway.telemetry.live import Activity
from draftgate.gateway.telemetry.metric_snapshots import Row
from draftgate.gateway.telemetry.worker_list import ProcessStreams
from draftgate.policies.flows.types import HopRecord
from draftgate.policies.quotas import Levels, QuotaReservation, Settlement, Shortage, Totals

MOST_BYTES: Final = 1 << 30
"""Maximum size of a message. Both ends belong to one node, so this limit only detects errors."""

NOTICE: Final = 0
"""The number of all notices."""

_encode: Final = msgspec.msgpack.Encoder().encode


class Call(msgspec.Struct, array_like=True, frozen=True):
    """A call of a method.

    Attributes:
        number: a number that distinguishes the open calls of a connection, or `NOTICE`.
        method: a key of `METHODS`.
        arguments: the encoded arguments, a tuple.
    """

    number: int
    method: str
    arguments: msgspec.Raw


class Reply(msgspec.Struct, array_like=True, frozen=True):
    """The result of a call.

    Attributes:
        result: the encoded result, which is None after an error.
        error: the error message, or an empty string.
    """

    number: int
    result: msgspec.Raw
    error: str = ""


class Method(NamedTuple):
    """The decoders of a method's arguments and result."""

    arguments: msgspec.msgpack.Decoder[Any]
    result: msgspec.msgpack.Decoder[Any]


def _method(arguments: Any, result: Any) -> Method:
    return Method(msgspec.msgpack.Decoder(arguments), msgspec.msgpack.Decoder(result))


METHODS: Final = {
    "leases.publish": _method(tuple[WorkerReport], bool),
    "leases.withdraw": _method(tuple[str, str, int], None),
    "leases.snapshot": _method(tuple[()], Snapshot),
    "leases.reserve": _method(
        tuple[str, int, tuple[LeaseCandidate, ...], float, QuotaReservation | None], Reservation
    ),
    "leases.claim": _method(tuple[str, int, tuple[LeaseCandidate, ...], float], Lease | None),
    "leases.renew": _method(tuple[tuple[Lease, ...], float], frozenset[str]),
    "leases.release": _method(tuple[tuple[str, ...]], None),
    "leases.begin_move": _method(tuple[str, tuple[str, ...], float], bool),
    "leases.end_move": _method(tuple[str, tuple[str, ...]], None),
    "leases.exchange": _method(tuple[Update], News),
    "quotas.reserve": _method(tuple[QuotaReservation, float], Shortage | None),
    "quotas.renew": _method(tuple[tuple[QuotaReservation, ...], float], int),
    "quotas.settle": _method(tuple[tuple[Settlement, ...]], None),
    "quotas.totals": _method(tuple[str], Totals),
    "quotas.levels": _method(tuple[str], Levels),
    "flows.begin_hop": _method(tuple[FlowKey, HopArrival], FlowHop | None),
    "flows.end_hop": _method(tuple[FlowKey, FlowHop, HopLengths], None),
    "flows.cancel": _method(tuple[FlowKey, FlowHop], bool),
    "flows.take": _method(tuple[FlowKey, FlowHop], tuple[HopRecord, ...] | None),
    "responses.put_counted": _method(tuple[str, str, bytes], tuple[bool, int]),
    "responses.get": _method(tuple[str, str], bytes | None),
    "responses.delete": _method(tuple[str, str], bool),
    "responses.usage": _method(tuple[()], StoreUsage),
    "snapshots.share": _method(tuple[str, str, ProcessSnapshot], None),
    "snapshots.metrics": _method(tuple[()], list[list[Row]]),
    "snapshots.activities": _method(tuple[str], list[Activity]),
    "snapshots.streams": _method(tuple[str], list[ProcessStreams]),
    "snapshots.decisions": _method(tuple[str, int, str | None], list[tuple[float, bytes]]),
}
"""The methods that clients call, of `Store`, its quotas and its flows, `ResponseStore` and
`SharedSnapshots`."""


def encoded(*fields: Any) -> bytes:
    """Return the fields of a `Call` or `Reply` as a frame.

    The fields are encoded together, including the arguments or the result.
    """
    return framed(_encode(fields))
