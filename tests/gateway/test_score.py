"""`/score` with a cross-encoder and with an embedding model."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import numpy as np
import pytest
import pytest_asyncio

from draftgate.gateway.http.endpoints.score import FORMS, PATHS
from draftgate.gateway.http.requests.limits import MAX_RERANKED_DOCUMENTS
from tests.engine.test_cross_encoder import DOCUMENTS, QUERY, save_cross_encoder
from tests.gateway.harness import client, needs_engine, running
from tests.gateway.upstreams import forwarding, refusal, upstream

pytestmark = [pytest.mark.asyncio(loop_scope="module"), needs_engine]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cross(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a node with a random cross-encoder."""
    directory = tmp_path_factory.mktemp("cross")
    save_cross_encoder(directory)
    settings = {"model": str(directory), "served_model_name": ("judge",), "threads": 1}
    async with running(backend="engine", **settings) as gateway, client(gateway) as http:
        yield http


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def tower() -> AsyncIterator[httpx.AsyncClient]:
    """A client of a node with a shipped tower, which embeds texts."""
    settings = {"model": "draftgate-queries", "threads": 1}
    async with running(backend="engine", **settings) as gateway, client(gateway) as http:
        yield http


async def scored(http: httpx.AsyncClient, path: str = PATHS[0], **fields: Any) -> Any:
    """Return the response to a score request."""
    response = await http.post(path, json=fields)
    assert response.status_code == 200, response.text
    return response.json()


def scores(reply: Any) -> list[float]:
    assert [one["index"] for one in reply["data"]] == list(range(len(reply["data"])))
    assert {one["object"] for one in reply["data"]} == {"score"}
    return [one["score"] for one in reply["data"]]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("names", FORMS)
async def test_pairs_have_the_scores_of_reranking(
    cross: httpx.AsyncClient, path: str, names: tuple[str, str]
) -> None:
    """Each form of a request gives the scores of `/v1/rerank`, in the order of the documents."""
    ranking = await cross.post("/v1/rerank", json={"query": QUERY, "documents": DOCUMENTS})
    by_index = {one["index"]: one["relevance_score"] for one in ranking.json()["results"]}
    reply = await scored(cross, path, **{names[0]: QUERY, names[1]: DOCUMENTS})
    assert list(reply) == ["id", "created", "model", "data", "usage", "object"]
    assert (reply["id"][:6], reply["object"], reply["model"]) == ("score-", "list", "judge")
    assert scores(reply) == [by_index[index] for index in range(len(DOCUMENTS))]
    assert reply["usage"] == ranking.json()["usage"]


async def test_lists_of_one_length_are_scored_in_parallel(cross: httpx.AsyncClient) -> None:
    """Lists of one length are pairs, a single text counts for all, and a text alone is a pair."""
    firsts = [QUERY, QUERY, "another question"]
    parallel = scores(await scored(cross, text_1=firsts, text_2=DOCUMENTS[:3]))
    for first, second, score in zip(firsts, DOCUMENTS, parallel, strict=False):
        assert scores(await scored(cross, text_1=first, text_2=second)) == [score]
    one = await scored(cross, text_1=[QUERY], text_2=DOCUMENTS[:2])
    assert scores(one) == parallel[:2]


async def test_an_embedding_model_scores_by_cosine(tower: httpx.AsyncClient) -> None:
    """The score of an embedding model is the cosine of the vectors of `/v1/embeddings`."""
    texts = ["read a file", "def read(path):", "import os", "read a file"]
    body = {"input": texts, "encoding_format": "float"}
    found = (await tower.post("/v1/embeddings", json=body)).json()["data"]
    vectors = np.array([one["embedding"] for one in found])
    reply = await scored(tower, text_1=texts[0], text_2=texts[1:])
    np.testing.assert_allclose(scores(reply), vectors[1:] @ vectors[0], atol=1e-6)
    assert scores(reply)[2] == pytest.approx(1.0)


BAD: list[tuple[dict[str, Any], str]] = [
    ({}, "text_1"),
    ({"text_1": "a"}, "text_1"),
    ({"text_1": "a", "documents": ["b"]}, "text_1"),
    ({"text_1": "a", "text_2": []}, "text_2"),
    ({"text_1": [], "text_2": ["a"]}, "text_1"),
    ({"queries": ["a", "b"], "documents": ["c"]}, "queries"),
    ({"queries": ["a", "b"], "items": ["c", "d", "e"]}, "queries"),
    ({"text_1": "a", "text_2": ["b"] * (MAX_RERANKED_DOCUMENTS + 1)}, "text_2"),
    ({"text_1": "a", "text_2": 5}, "text_2"),
    ({"text_1": "", "text_2": "b"}, "text_1"),
    ({"text_1": "word " * 600, "text_2": "b"}, "text_1"),
    ({"text_1": "a", "text_2": "b", "use_activation": False}, "use_activation"),
]


@pytest.mark.parametrize(("fields", "param"), BAD)
async def test_a_malformed_request_is_400_and_named(
    cross: httpx.AsyncClient, fields: dict[str, Any], param: str
) -> None:
    """A missing part, different lengths, and texts that do not fit are errors with their names."""
    response = await cross.post(PATHS[0], json=fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


async def test_a_language_model_alone_has_no_scores() -> None:
    """A model with neither scores nor embeddings refuses the request with the reason."""
    async with running() as gateway, client(gateway) as http:
        response = await http.post(PATHS[0], json={"text_1": "a", "text_2": "b"})
    assert response.status_code == 400
    assert "does not rank documents" in response.json()["error"]["message"]


@pytest.mark.parametrize("path", PATHS)
async def test_an_upstream_gets_the_request_unchanged(path: str) -> None:
    """A gateway forwards a score request, and returns the response of the upstream."""
    reply = b'{"data": [], "usage": {"prompt_tokens": 9, "total_tokens": 9}}'
    async with (
        upstream(refusal(200, reply)) as engine,
        forwarding(engine) as gateway,
        client(gateway) as http,
    ):
        body = b'{"text_1": "a", "text_2": ["b"]}'
        response = await http.post(path, content=body)
        assert (response.status_code, response.content) == (200, reply)
    assert engine.bodies == [body]
