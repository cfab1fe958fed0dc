"""The cache of embeddings: what it holds within its bounds, and what it saves."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st

from draftgate.backends.token_ids import compact
from draftgate.gateway.app import Listening
from draftgate.gateway.embedding_cache import ENTRY_BYTES, EmbeddingCache, embedding_key
from draftgate.gateway.telemetry import metric_definitions as metric
from draftgate.gateway.telemetry.metric_form import MetricDefinition
from tests.engine.test_encoder import save_model
from tests.gateway.harness import client, needs_engine, running

MAX_BYTES = 3 * (ENTRY_BYTES + 8)
CALLS = st.lists(st.tuples(st.booleans(), st.integers(0, 6), st.integers(0, 30)), max_size=60)


@given(CALLS)
def test_cache_holds_the_entries_used_last(calls: list[tuple[bool, int, int]]) -> None:
    """The entries are those of a list in order of use, cut where its bytes exceed the maximum."""
    cache = EmbeddingCache(MAX_BYTES)
    model: OrderedDict[bytes, bytes] = OrderedDict()
    for stores, name, size in calls:
        key = bytes([name])
        if stores:
            model.pop(key, None)
            model[key] = bytes(size)
            cache.put(key, bytes(size))
        else:
            assert cache.get(key) == model.get(key)
            if key in model:
                model.move_to_end(key)
        while sum(len(value) + ENTRY_BYTES for value in model.values()) > MAX_BYTES:
            model.popitem(last=False)
        assert cache.num_bytes == sum(len(value) + ENTRY_BYTES for value in model.values())
    assert [cache.get(bytes([name])) for name in range(7)] == [
        model.get(bytes([name])) for name in range(7)
    ]


@pytest.mark.parametrize("max_bytes", [0, ENTRY_BYTES + 7])
def test_embedding_that_exceeds_the_cache_is_not_stored(max_bytes: int) -> None:
    """A cache of size 0 is off, and an entry never displaces others that fit if it does not."""
    cache = EmbeddingCache(max_bytes)
    cache.put(b"key", bytes(8))
    assert (cache.get(b"key"), cache.num_bytes) == (None, 0)
    assert cache.is_on is (max_bytes > 0)


def test_each_part_of_a_key_matters() -> None:
    """Keys differ by class, tenant, type and tokens, also if the parts form the same bytes."""
    ids = compact([1, 2])
    keys = {
        embedding_key("class", "tenant", "query", ids),
        embedding_key("classt", "enant", "query", ids),
        embedding_key("class", "tenantq", "", ids),
        embedding_key("class", "tenant", "", ids),
        embedding_key("class", "", "query", ids),
        embedding_key("class", "tenant", "query", compact([1, 2, 0])),
        embedding_key("class", "tenant", "query", compact([2, 1])),
    }
    assert len(keys) == 7


KEYS = {"a": "key-a", "b": "key-b"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Listening]:
    """A node with a random encoder and two tenants."""
    directory = tmp_path_factory.mktemp("encoder")
    save_model(directory)
    settings = {"model": str(directory), "threads": 1, "api_keys": tuple(KEYS.values())}
    async with running(backend="engine", **settings) as listening:
        yield listening


async def embedded(
    gateway: Listening, tenant: str, texts: object, **fields: object
) -> list[object]:
    headers = {"Authorization": f"Bearer {KEYS[tenant]}"}
    async with client(gateway) as http:
        body = {"input": texts, **fields}
        response = await http.post("/v1/embeddings", json=body, headers=headers)
    assert response.status_code == 200, response.text
    body = response.json()
    assert body["usage"]["prompt_tokens"] >= 3 * len(body["data"])
    return [entry["embedding"] for entry in body["data"]]


@needs_engine
@pytest.mark.asyncio(loop_scope="module")
async def test_only_new_texts_reach_a_worker(gateway: Listening) -> None:
    """A worker computes each text of a tenant once, and repeated texts get equal vectors."""
    node = gateway.node
    submitted: list[str] = []
    backend = node.fleet.workers[0].backend
    submit = backend.submit

    def counted(request, sink):
        submitted.append(request.request_id)
        submit(request, sink)

    backend.submit = counted
    first = await embedded(gateway, "a", ["w5", "w6", "w5"])
    assert (len(submitted), first[0]) == (2, first[2])
    assert await embedded(gateway, "a", ["w6", "w5"]) == [first[1], first[0]]
    assert len(submitted) == 2
    mixed = await embedded(gateway, "a", ["w7", "w5"])
    assert (len(submitted), mixed[1]) == (3, first[0])
    assert await embedded(gateway, "b", "w5") == [first[0]]
    assert len(submitted) == 4, "another tenant's entry was used"
    await embedded(gateway, "a", "w5", input_type="document")
    assert len(submitted) == 5

    def value(definition: MetricDefinition) -> float:
        return node.metrics.scalar(definition).value

    assert (value(metric.EMBEDDING_HITS), value(metric.EMBEDDING_MISSES)) == (3, 6)
    assert value(metric.EMBEDDING_BYTES) == node.embeddings.num_bytes > 0


@needs_engine
@pytest.mark.asyncio(loop_scope="module")
async def test_embeddings_report_their_place_in_a_flow(gateway: Listening) -> None:
    """A request of a flow has `metrics.flow`, unless all of its texts come from the cache."""
    key = {"Authorization": f"Bearer {KEYS['a']}"}
    headers = {**key, "x-flow-id": "question", "x-flow-deadline-ms": "60000"}
    texts = ["w8", "w8", "w9"]
    async with client(gateway) as http:
        replies = [
            (await http.post("/v1/embeddings", json={"input": text}, headers=headers)).json()
            for text in texts
        ]
        body = {"input": "w10"}
        alone = (await http.post("/v1/embeddings", json=body, headers=key)).json()
    first, cached, second = (reply.get("metrics") for reply in replies)
    assert cached is None
    assert len(alone["data"]) == 1
    assert "metrics" not in alone
    assert [each["flow"]["hop"] for each in (first, second)] == [1, 2]
    for flow in (first["flow"], second["flow"]):
        assert 0.0 < flow["budget_ms"] <= flow["remaining_ms"] <= 60_000
