"""The scripts of the commands in Redis, with the codecs of their arguments and results.

docs/guide/cluster.md describes the keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec

from draftgate.gateway.state import commands
from draftgate.gateway.state.redis.exchange import exchange_arguments, news_of
from draftgate.gateway.state.values import (
    FORGET_S,
    GATEWAY_S,
    KEEP_S,
    MOST_FLOW_HOPS,
    MOST_FLOWS,
    STALE_S,
    FlowHop,
    HopLengths,
    Lease,
    PutResult,
    Refusal,
    Reservation,
    Snapshot,
    StoreUsage,
    WorkerReport,
    WorkerView,
)
from draftgate.policies.flows.types import HopKind, HopRecord
from draftgate.policies.quotas import (
    Levels,
    Limit,
    QuotaReservation,
    Shortage,
    Totals,
    shortage_of,
)

Argument: TypeAlias = bytes | str | int | float
"""An argument of a script."""

_REPORT: Final = msgspec.json.Decoder(WorkerReport)
_KIND: Final = msgspec.json.Decoder(HopKind)
_LENGTHS: Final = msgspec.json.Decoder(HopLengths)
_LIMITS: Final = tuple(Limit)
_VIEW_FIELDS: Final = 5
_HOP_FIELDS: Final = 4


class ResponseBounds(NamedTuple):
    """The bytes of all responses of a pool together, and the seconds after which one ends."""

    capacity_bytes: int = 0
    ttl_s: float = 0.0


class Caller(NamedTuple):
    """A node, as the scripts see it.

    Attributes:
        node_id: its id among the nodes that renew leases or quotas.
        is_gateway: whether it has got a lease since its last renewal.
        bounds: the bounds of responses.
    """

    node_id: str
    is_gateway: bool
    bounds: ResponseBounds


def _nothing(_command: object, _found: object) -> None:
    """Ignore the result of a script."""


def _as_bool(_command: object, found: object) -> bool:
    return bool(found)


def _as_found(_command: object, found: object) -> object:
    return found


def _plain(command: commands.StoreCommand[Any], _caller: Caller) -> Iterable[Argument]:
    """Return the fields of a command, and those of the values in them, in order."""
    return tuple(_flat(msgspec.structs.astuple(command)))


def _flat(value: Any) -> Iterator[Argument]:
    if isinstance(value, tuple | list):
        for one in value:
            yield from _flat(one)
    else:
        yield value


def _us(seconds: float) -> int:
    return round(seconds * 1e6)


class Script(NamedTuple):
    """The script of a command.

    Attributes:
        name: its name in `lua/`.
        helpers: names of the files with its helpers, in order.
        result: returns the result of the command from that of the script.
        arguments: returns the arguments.
    """

    name: str
    helpers: tuple[str, ...]
    result: Callable[[Any, Any], Any] = _nothing
    arguments: Callable[[Any, Caller], Iterable[Argument]] = _plain


# --- leases ---------------------------------------------------------------------------------------


def _publish(command: commands.PublishReport, _caller: Caller) -> Iterable[Argument]:
    report = command.report
    head = (report.worker_id, report.epoch, report.seq)
    return (*head, report.capacity_tokens, report.watermark, msgspec.json.encode(report))


def _list(_command: commands.ListWorkers, caller: Caller) -> Iterable[Argument]:
    return _us(FORGET_S), _us(STALE_S), _us(GATEWAY_S), caller.node_id


def _snapshot(_command: commands.ListWorkers, found: Sequence[Any]) -> Snapshot:
    """Return the live workers, without the reports that this version cannot read."""
    nodes, gateways, *fields = found
    rows = zip(*[iter(fields)] * _VIEW_FIELDS, strict=True)
    views = filter(None, (_view(*row) for row in rows))
    workers = tuple(sorted(views, key=lambda view: view.worker_id))
    return Snapshot(workers, gateways, nodes=max(1, nodes))


def _view(report: str, age_us: int, *tokens: int) -> WorkerView | None:
    try:
        return WorkerView(_REPORT.decode(report), age_us / 1e6, *tokens)
    except msgspec.MsgspecError:
        return None


def _reserve(command: commands.ReserveLease, _caller: Caller) -> Iterable[Argument]:
    args = [*_claim_head(command), len(command.offers)]
    for offer in command.offers:
        args += (offer.worker_id, offer.epoch, offer.watermark)
        args += (float(offer.score), float(offer.score_per_token))
    if command.quota is not None:
        args += _reservation(command.quota)
    return args


def _reserved(command: commands.ReserveLease, found: Sequence[Any]) -> Reservation:
    outcome, *rest = found
    if outcome == "short" and command.quota is not None:
        return Reservation(None, shortage=_shortage(command.quota, rest))
    if outcome == "refused":
        return Reservation(None, Refusal(rest[0]))
    index, number, behind_tokens = rest
    return Reservation(_lease(command, index, number), behind_tokens=behind_tokens)


def _claim(command: commands.ClaimWorker, _caller: Caller) -> Iterable[Argument]:
    args = _claim_head(command)
    for offer in command.offers:
        args += (offer.worker_id, offer.epoch)
    return args


def _claim_head(command: commands.ReserveLease | commands.ClaimWorker) -> list[Argument]:
    return [command.request_id, command.tokens, _us(command.ttl_s), _us(STALE_S)]


def _claimed(command: commands.ClaimWorker, found: Sequence[int] | None) -> Lease | None:
    return None if found is None else _lease(command, *found)


def _lease(command: commands.ReserveLease | commands.ClaimWorker, index: int, number: int) -> Lease:
    chosen = command.offers[index]
    return Lease(command.request_id, chosen.worker_id, chosen.epoch, command.tokens, number)


def _renew(command: commands.RenewLeases, caller: Caller) -> Iterable[Argument]:
    is_gateway = bool(command.leases) or caller.is_gateway
    args: list[Argument] = [caller.node_id, _us(command.ttl_s), int(is_gateway)]
    for lease in command.leases:
        args += (lease.request_id, lease.worker_id, lease.epoch, lease.tokens, lease.number)
    return args


def _hold_slots(command: commands.HoldSlots, _caller: Caller) -> Iterable[Argument]:
    return command.holder, _us(command.ttl_s), *command.names


# --- quotas ---------------------------------------------------------------------------------------


def _reservation(reservation: QuotaReservation) -> Iterable[Argument]:
    """Return the arguments of `reserve_quota` in `lua/quotas.lua`."""
    limits = reservation.quota.limits()
    args: list[Argument] = [*_reservation_fields(reservation)]
    for limit in _LIMITS:
        args += limits.get(limit, (0, 0))
    return args


def _reservation_fields(reservation: QuotaReservation) -> tuple[str, str, int, int]:
    return reservation.request_id, reservation.tenant, reservation.requests, reservation.tokens


def _shortage(reservation: QuotaReservation, found: Sequence[int]) -> Shortage | None:
    """Return the shortage that `reserve_quota` in `lua/quotas.lua` has found, if any."""
    if not found:
        return None
    index, wait_us = found
    return shortage_of(reservation, _LIMITS[index - 1], None if wait_us < 0 else wait_us)


def _reserve_quota(command: commands.ReserveQuota, _caller: Caller) -> Iterable[Argument]:
    return _us(command.ttl_s), *_reservation(command.reservation)


def _quota_reserved(command: commands.ReserveQuota, found: Sequence[int]) -> Shortage | None:
    return _shortage(command.reservation, found)


def _renew_quotas(command: commands.RenewQuotas, caller: Caller) -> Iterable[Argument]:
    args: list[Argument] = [_us(command.ttl_s), _us(GATEWAY_S), caller.node_id]
    for reservation in command.reservations:
        quota = reservation.quota
        args += _reservation_fields(reservation)
        args += (quota.requests_per_minute or 0, quota.tokens_per_minute or 0)
    return args


def _totals(_command: commands.ReadTotals, found: Sequence[int]) -> Totals:
    reserved, settled, released = found
    return Totals(reserved, settled, released, reserved - settled - released)


def _spending(command: commands.ExchangeSpending, _caller: Caller) -> Iterable[Argument]:
    args: list[Argument] = [command.source]
    for name, total, ttl_s in command.totals:
        args += (name, total, _us(ttl_s))
    return args


def _usage(command: commands.PutUsage, _caller: Caller) -> Iterable[Argument]:
    return command.source, command.period, command.counts, _us(command.ttl_s)


def _keys(_command: commands.ReadKeys, found: Sequence[str | None]) -> tuple[str, str | None]:
    revision, keys = found
    return revision or "", keys


# --- flows ----------------------------------------------------------------------------------------


def _begin_hop(command: commands.BeginHop, _caller: Caller) -> Iterable[Argument]:
    key, arrival = command.key, command.arrival
    deadline_us = -1 if arrival.deadline_s is None else _us(arrival.deadline_s)
    kind = msgspec.json.encode(arrival.kind)
    head = (key.tenant, key.text, kind, _us(arrival.ago_s), deadline_us)
    return (*head, _us(KEEP_S), MOST_FLOWS, MOST_FLOW_HOPS)


def _hop(_command: commands.BeginHop, found: Sequence[int] | None) -> FlowHop | None:
    if found is None:
        return None
    number, age_us, deadline_us, life = found
    return FlowHop(number, age_us / 1e6, deadline_us / 1e6, life)


def _end_hop(command: commands.EndHop, _caller: Caller) -> Iterable[Argument]:
    key, hop = command.key, command.hop
    return key.tenant, key.text, hop.life, hop.number, msgspec.json.encode(command.lengths)


def _flow(command: commands.CancelFlow | commands.TakeFlow, _caller: Caller) -> Iterable[Argument]:
    return command.key.tenant, command.key.text, command.hop.life


def _taken(
    _command: commands.TakeFlow, found: Sequence[Any] | None
) -> tuple[HopRecord, ...] | None:
    return None if found is None else tuple(_hops(found))


def _hops(fields: Sequence[Any]) -> Iterator[HopRecord]:
    for kind, begun_us, ended_us, lengths in zip(*[iter(fields)] * _HOP_FIELDS, strict=True):
        begun_s = begun_us / 1e6
        if ended_us < 0:
            yield HopRecord(_KIND.decode(kind), begun_s)
        else:
            yield HopRecord(_KIND.decode(kind), begun_s, ended_us / 1e6, *_LENGTHS.decode(lengths))


# --- responses ------------------------------------------------------------------------------------


def _put(command: commands.PutResponse, caller: Caller) -> Iterable[Argument]:
    capacity_bytes, ttl_s = caller.bounds
    return command.tenant, command.response_id, command.value, _us(ttl_s), capacity_bytes


def _placed(_command: commands.PutResponse, found: Sequence[int]) -> PutResult:
    return PutResult(bool(found[0]), found[1])


# --- tables ---------------------------------------------------------------------------------------

_LEASES: Final = ("pool", "leases")
_QUOTAS: Final = ("pool", "quotas")
_FLOWS: Final = ("pool", "flows")
_RESPONSES: Final = ("responses",)

SCRIPTS: Final[Mapping[commands.CommandType, Script]] = {
    commands.PublishReport: Script("report", _LEASES, _as_bool, _publish),
    commands.WithdrawWorker: Script("withdraw", _LEASES),
    commands.ListWorkers: Script("snapshot", _LEASES, _snapshot, _list),
    commands.ReserveLease: Script("reserve", (*_LEASES, "quotas"), _reserved, _reserve),
    commands.ClaimWorker: Script("claim_worker", _LEASES, _claimed, _claim),
    commands.RenewLeases: Script("renew", _LEASES, lambda _, found: frozenset(found), _renew),
    commands.ReleaseLeases: Script("release", _LEASES),
    commands.HoldSlots: Script("hold_slots", _LEASES, _as_bool, _hold_slots),
    commands.FreeSlots: Script("free_slots", _LEASES),
    commands.ExchangeNews: Script("exchange", _LEASES, news_of, exchange_arguments),
    commands.ReserveQuota: Script("reserve_quota", _QUOTAS, _quota_reserved, _reserve_quota),
    commands.RenewQuotas: Script("renew_quota", _QUOTAS, _as_found, _renew_quotas),
    commands.SettleQuotas: Script("settle_quota", _QUOTAS),
    commands.ReadTotals: Script("quota_totals", _QUOTAS, _totals),
    commands.ReadLevels: Script("quota_levels", _QUOTAS, lambda _, found: Levels(*map(int, found))),
    commands.ExchangeSpending: Script(
        "exchange_spending", ("pool",), lambda _, found: tuple(found), _spending
    ),
    commands.ReadKeys: Script("read_keys", ("pool",), _keys),
    commands.WriteKeys: Script("write_keys", ("pool",), _as_bool),
    commands.PutUsage: Script("put_usage", ("pool",), arguments=_usage),
    commands.ListUsage: Script("list_usage", ("pool",), lambda _, found: tuple(found)),
    commands.BeginHop: Script("begin_hop", _FLOWS, _hop, _begin_hop),
    commands.EndHop: Script("end_hop", _FLOWS, _nothing, _end_hop),
    commands.CancelFlow: Script("cancel_flow", _FLOWS, _as_bool, _flow),
    commands.TakeFlow: Script("take_flow", _FLOWS, _taken, _flow),
}
"""The scripts of the state of a pool."""

RESPONSE_SCRIPTS: Final[Mapping[commands.CommandType, Script]] = {
    commands.PutResponse: Script("put_response", _RESPONSES, _placed, _put),
    commands.GetResponse: Script("get_response", _RESPONSES, _as_found),
    commands.DeleteResponse: Script("delete_response", _RESPONSES, _as_bool),
    commands.ReadUsage: Script("response_usage", _RESPONSES, lambda _, found: StoreUsage(*found)),
}
"""The scripts of the stored responses of a pool."""
