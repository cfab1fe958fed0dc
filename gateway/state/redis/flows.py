"""The flows of tenants in Redis, which the gateways of a pool share.

docs/guide/cluster.md describes the keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec

from draftgate.gateway.state.flow_store import (
    KEEP_S,
    MOST_FLOW_HOPS,
    MOST_FLOWS,
    FlowHop,
    FlowKey,
    HopArrival,
    HopLengths,
)
from draftgate.gateway.state.redis.client import Connected
from draftgate.gateway.state.redis.scripts import Scripts
from draftgate.policies.flows.types import HopKind, HopRecord

_SCRIPTS: Final = ("begin_hop", "end_hop", "cancel_flow", "take_flow")
_KIND: Final = msgspec.json.Decoder(HopKind)
_LENGTHS: Final = msgspec.json.Decoder(HopLengths)
_HOP_FIELDS: Final = 4


class RedisFlows:
    """A `FlowStore` in Redis, with one script and one round trip for each call.

    Attributes:
        scripts: its scripts.
    """

    def __init__(self, connected: Connected, pool: str, clock: str = "") -> None:
        """Use a client, which the owner of this store closes.

        Args:
            pool: name of the pool, which is part of the prefix of all keys.
            clock: Lua source that replaces `lua/clock.lua`.
        """
        self.scripts = Scripts(connected, pool, _SCRIPTS, ("pool", "flows"), clock=clock)

    async def begin_hop(self, key: FlowKey, arrival: HopArrival) -> FlowHop | None:
        """Add a hop to a flow, as `FlowStore.begin_hop` describes."""
        deadline_s = arrival.deadline_s
        args = (
            *(key.tenant, key.text, msgspec.json.encode(arrival.kind), _us(arrival.ago_s)),
            *(-1 if deadline_s is None else _us(deadline_s), _us(KEEP_S)),
            *(MOST_FLOWS, MOST_FLOW_HOPS),
        )
        found = await self.scripts.run("begin_hop", args)
        if found is None:
            return None
        number, age_us, deadline_us, life = found
        return FlowHop(number, age_us / 1e6, deadline_us / 1e6, life)

    async def end_hop(self, key: FlowKey, hop: FlowHop, lengths: HopLengths) -> None:
        """Record the end of a hop, as `FlowStore.end_hop` describes."""
        encoded = msgspec.json.encode(lengths)
        await self.scripts.run("end_hop", (key.tenant, key.text, hop.life, hop.number, encoded))

    async def cancel(self, key: FlowKey, hop: FlowHop) -> bool:
        """End a flow, as `FlowStore.cancel` describes."""
        return bool(await self.scripts.run("cancel_flow", (key.tenant, key.text, hop.life)))

    async def take(self, key: FlowKey, hop: FlowHop) -> tuple[HopRecord, ...] | None:
        """End a flow and return its hops, as `FlowStore.take` describes."""
        found = await self.scripts.run("take_flow", (key.tenant, key.text, hop.life))
        return None if found is None else tuple(_hops(found))


def _hops(fields: Sequence[Any]) -> Iterator[HopRecord]:
    for kind, begun_us, ended_us, lengths in zip(*[iter(fields)] * _HOP_FIELDS, strict=True):
        begun_s = begun_us / 1e6
        if ended_us < 0:
            yield HopRecord(_KIND.decode(kind), begun_s)
        else:
            yield HopRecord(_KIND.decode(kind), begun_s, ended_us / 1e6, *_LENGTHS.decode(lengths))


def _us(seconds: float) -> int:
    return round(seconds * 1e6)
