"""The messages between shared memory stores and their clients, in frames (`backends.framing`).

A call has a number, the names of a store and of its method, and the arguments. Replies have the
number of their call and come in the order of the calls. A notice is a call without a reply.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import msgspec

from draftgate.backends.framing import framed
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
        method: the names of a store and of its method, such as `leases.renew`.
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


def method_of(arguments: Any, result: Any) -> Method:
    """Return the decoders for the types of a method's arguments and result."""
    return Method(msgspec.msgpack.Decoder(arguments), msgspec.msgpack.Decoder(result))


METHODS: Final = {
    "leases.publish": method_of(tuple[WorkerReport], bool),
    "leases.withdraw": method_of(tuple[str, str, int], None),
    "leases.snapshot": method_of(tuple[()], Snapshot),
    "leases.reserve": method_of(
        tuple[str, int, tuple[LeaseCandidate, ...], float, QuotaReservation | None], Reservation
    ),
    "leases.claim": method_of(tuple[str, int, tuple[LeaseCandidate, ...], float], Lease | None),
    "leases.renew": method_of(tuple[tuple[Lease, ...], float], frozenset[str]),
    "leases.release": method_of(tuple[tuple[str, ...]], None),
    "leases.begin_move": method_of(tuple[str, tuple[str, ...], float], bool),
    "leases.end_move": method_of(tuple[str, tuple[str, ...]], None),
    "leases.exchange": method_of(tuple[Update], News),
    "quotas.reserve": method_of(tuple[QuotaReservation, float], Shortage | None),
    "quotas.renew": method_of(tuple[tuple[QuotaReservation, ...], float], int),
    "quotas.settle": method_of(tuple[tuple[Settlement, ...]], None),
    "quotas.totals": method_of(tuple[str], Totals),
    "quotas.levels": method_of(tuple[str], Levels),
    "flows.begin_hop": method_of(tuple[FlowKey, HopArrival], FlowHop | None),
    "flows.end_hop": method_of(tuple[FlowKey, FlowHop, HopLengths], None),
    "flows.cancel": method_of(tuple[FlowKey, FlowHop], bool),
    "flows.take": method_of(tuple[FlowKey, FlowHop], tuple[HopRecord, ...] | None),
    "responses.put_counted": method_of(tuple[str, str, bytes], tuple[bool, int]),
    "responses.get": method_of(tuple[str, str], bytes | None),
    "responses.delete": method_of(tuple[str, str], bool),
    "responses.usage": method_of(tuple[()], StoreUsage),
}
"""The methods that clients call, of `Store`, its quotas and its flows, and `ResponseStore`."""


def encoded(*fields: Any) -> bytes:
    """Return the fields of a `Call` or `Reply` as a frame.

    The fields are encoded together, including the arguments or the result.
    """
    return framed(_encode(fields))
