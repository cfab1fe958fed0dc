"""Tests of the records of requests: contents, filters, tenants and other processes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from draftgate.backends.types import Phases
from draftgate.gateway.telemetry.request_facts import (
    LatestRequests,
    RecordedRequest,
    RequestDetail,
    RequestFacts,
    RequestList,
)
from tests.gateway.harness import ScriptedBackend, client, running, until
from tests.gateway.test_accounts import KEYS, bearer

BODY = {"prompt": "x", "max_tokens": 5}


async def test_a_record_follows_its_request(scripted: ScriptedBackend) -> None:
    """A record is available from the arrival on, by the id of the response or `x-request-id`, and
    has the phases of the worker and the decision."""
    async with running(backends=[scripted]) as gateway, client(gateway) as http:

        async def read(name: str) -> RequestDetail:
            return msgspec.json.decode(
                (await http.get(f"/records/{name}")).content, type=RequestDetail
            )

        headers = {"x-request-id": "mine"}
        sent = asyncio.create_task(http.post("/v1/completions", json=BODY, headers=headers))
        request = await scripted.submitted.get()
        found = (await read("mine")).record
        assert (found.ending, found.status, found.model) == ("running", None, "scripted")
        begin_s = gateway.node.requests.__iter__().__next__().arrival_s
        phases = Phases(begin_s + 1.0, begin_s + 2.0, (), begin_s + 4.0)
        scripted.emit(request, "one", last=False, phases=phases)
        scripted.emit(request, "two", last=True)
        response = (await sent).json()
        found = await read(response["id"])
        assert found.record.request_id == response["id"].removeprefix("cmpl-")
        assert (found.record.ending, found.record.status) == ("finished", 200)
        assert found.record.output_tokens == 2
        names = [(span.name, span.begin_s) for span in found.spans]
        assert names[1:] == [
            ("worker.queue", pytest.approx(1.0)),
            ("prefill", pytest.approx(2.0)),
            ("decode", pytest.approx(4.0)),
        ]
        assert names[0] == ("queue", 0.0)
        assert [one.worker_id for one in found.decisions] == found.record.workers
        missing = await http.get("/records/none")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "request_not_found")


async def test_records_are_searched_filtered_and_separate(
    scripted: ScriptedBackend, tmp_path: Path
) -> None:
    """Filters select by text, tenant, worker and ending. Tenants see only their own requests. A
    record has no text of the request, not even that of its error."""
    keys = tmp_path / "keys.yaml"
    keys.write_text(KEYS)
    async with (
        running(backends=[scripted], api_keys_file=str(keys)) as gateway,
        client(gateway) as http,
    ):
        secret = {"prompt": "x", "stop": {"secret": 1}}
        await http.post("/v1/completions", json=secret, headers=bearer("sk-search"))
        sent = [
            asyncio.create_task(
                http.post("/v1/completions", json=BODY, headers=bearer(f"sk-{name}"))
            )
            for name in ("search", "boss")
        ]
        for _ in sent:
            scripted.emit(await scripted.submitted.get(), "x", last=True)
        await asyncio.gather(*sent)
        await until(lambda: gateway.node.in_flight == 0)

        async def read(key: str, **query: str) -> RequestList:
            response = await http.get("/records", params=query, headers=bearer(key))
            assert "secret" not in response.text
            return msgspec.json.decode(response.content, type=RequestList)

        everything = await read("sk-boss")
        assert everything.tenants == ["boss", "search"]
        assert everything.endings == ["finished", "rejected"]
        worker = everything.workers[0]
        for query, number in (
            ({}, 3),
            ({"limit": "2"}, 2),
            ({"tenant": "search"}, 2),
            ({"tenant": "search", "ending": "rejected"}, 1),
            ({"worker": worker}, 2),
            ({"model": "other"}, 0),
            ({"q": " REJECTED "}, 1),
            ({"q": everything.records[0].client_id[:8]}, 1),
        ):
            assert len((await read("sk-boss", **query)).records) == number, query
        mine = await read("sk-search")
        assert [one.tenant for one in mine.records] == ["search", "search"]
        theirs = next(one for one in everything.records if one.tenant == "boss")
        path = f"/records/{theirs.request_id}"
        assert (await http.get(path, headers=bearer("sk-search"))).status_code == 404
        assert (await http.get(path, headers=bearer("sk-boss"))).status_code == 200


class OtherProcess:
    """The other process of a node, which has one request."""

    def __init__(self) -> None:
        facts = RequestFacts(lambda: 0.0)
        facts.client_id, facts.account = "theirs", "search"
        self.found = facts.recorded()

    async def records(
        self, kind: str, _most: int, _tenant: str | None
    ) -> list[tuple[float, bytes]]:
        return [(1.0, msgspec.json.encode(self.found))] if kind == "requests" else []


async def test_records_include_the_other_processes(scripted: ScriptedBackend) -> None:
    """A request of another process is listed and has a record."""
    async with running(backends=[scripted]) as gateway, client(gateway) as http:
        gateway.node.siblings = OtherProcess()
        assert [one["client_id"] for one in (await http.get("/records")).json()["records"]] == [
            "theirs"
        ]
        assert (await http.get("/records/theirs")).json()["record"]["tenant"] == "search"
        gateway.node.siblings = None


def test_changed_records_are_shared_once() -> None:
    """A request is shared when it has begun and when it has ended, and encodes as a record."""
    latest = LatestRequests()
    latest.add(facts := RequestFacts(lambda: 0.0))
    assert latest.take_changed() == [facts]
    assert latest.take_changed() == []
    encoded = msgspec.json.encode(facts.recorded())
    assert msgspec.json.decode(encoded, type=RecordedRequest).record.ending == "running"
