"""Links between nodes of two versions, whose deltas have different fields."""

from __future__ import annotations

from contextlib import aclosing
from typing import Any, NamedTuple

import msgspec
import pytest

from draftgate.backends.delta_reader import generate
from draftgate.backends.framing import Codec
from draftgate.backends.peer import link
from draftgate.backends.remote_worker import ALIVE, Alive, Report
from draftgate.backends.testing import make_request
from draftgate.backends.types import Delta
from draftgate.gateway.http.peers.session import PeerSession
from tests.gateway.harness import ScriptedBackend, running
from tests.peer.harness import linked_to

EARLIER_FIELDS = 12

EarlierDelta = NamedTuple(  # type: ignore[misc]
    "EarlierDelta", [(name, Any) for name in Delta._fields[:EARLIER_FIELDS]]
)
"""A delta as versions before `drafts` read it."""


class EarlierUpdate(msgspec.Struct, tag="Update"):
    """An update as versions before `drafts` read it."""

    deltas: list[tuple[str, EarlierDelta]]


@pytest.mark.parametrize(
    ("greeting", "fields"), [(Alive(), EARLIER_FIELDS), (ALIVE, len(Delta._fields))]
)
async def test_a_gateway_gets_deltas_with_the_fields_that_it_knows(
    scripted: ScriptedBackend, monkeypatch: pytest.MonkeyPatch, greeting: Alive, fields: int
) -> None:
    """A worker omits newer fields of deltas for a gateway of an earlier version, whose decoder
    would reject the message. A gateway of this version gets all fields."""
    monkeypatch.setattr(link, "ALIVE", greeting)
    sent, make = list[bytes](), PeerSession._update

    def record(of: PeerSession) -> Any:
        update = make(of)
        sent.append(Codec[Report](Report).encode(update))
        return update

    monkeypatch.setattr(PeerSession, "_update", record)
    async with (
        running(backends=[scripted]) as peer,
        linked_to(peer.url) as linked,
        aclosing(generate(linked, make_request(linked, max_tokens=4))) as stream,
    ):
        scripted.emit(await scripted.submitted.get(), "text", last=True)
        assert (await anext(stream)).text == "text"
    deltas = [delta for data in sent for _, delta in msgspec.msgpack.decode(data)["deltas"]]
    assert [len(delta) for delta in deltas] == [fields]
    if fields == EARLIER_FIELDS:
        for data in sent:
            msgspec.msgpack.decode(data, type=EarlierUpdate)
