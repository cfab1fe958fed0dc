"""Requests with an empty name of a model, which are requests without a name."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from draftgate.backends.checkpoints import SHIPPED_MODEL
from draftgate.backends.worker_config import UpstreamSettings
from draftgate.gateway.http.endpoints import rerank, score
from tests.gateway.harness import client, running
from tests.gateway.upstreams import ScriptedUpstream, forwarding, upstream, whole

CHAT = [{"role": "user", "content": "x"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x", "max_tokens": 1},
    "/v1/chat/completions": {"messages": CHAT, "max_tokens": 1},
    "/v1/responses": {"input": "x", "max_output_tokens": 16},
    "/v1/responses/input_tokens": {"input": "x"},
    "/v1/messages": {"messages": CHAT, "max_tokens": 1},
    "/v1/messages/count_tokens": {"messages": CHAT},
    "/v1/embeddings": {"input": "x"},
    **{path: {"query": "x", "documents": ["y"]} for path in rerank.PATHS},
    **{path: {"text_1": "x", "text_2": "y"} for path in score.PATHS},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [1]},
}
"""A request for each endpoint whose body may name a model."""


@asynccontextmanager
async def node(kind: str) -> AsyncIterator[tuple[httpx.AsyncClient, ScriptedUpstream]]:
    """Run a node with one or two models of its own, with upstreams, or both."""
    async with upstream(whole) as server:
        server.models = ("remote", "second")
        servers = (UpstreamSettings(url=server.url),)
        settings: dict[str, Any] = {
            "own": {},
            "two own": {"models": (f"other={SHIPPED_MODEL}",)},
            "own and upstream": {"upstream": servers},
        }.get(kind, {})
        renamed = {"served_model_name": ("shown",)} if kind == "renamed upstream" else {}
        on = forwarding(server, backend="openai", **renamed) if "own" not in kind else None
        async with on or running(**settings) as gateway, client(gateway) as http:
            yield http, server


@pytest.mark.parametrize(
    "kind", ["own", "two own", "own and upstream", "upstream", "renamed upstream"]
)
async def test_empty_name_is_no_name_on_every_endpoint(kind: str) -> None:
    """The status and the model are those of the same request without the field."""
    async with node(kind) as (http, server):
        for path, body in BODIES.items():
            found = []
            for naming in ({}, {"model": None}, {"model": ""}):
                reply = await http.post(path, json={**body, **naming})
                fields = reply.json()
                code = (fields.get("error") or {}).get("code")
                found.append((reply.status_code, fields.get("model"), code))
            assert found[0] == found[1] == found[2], path
            assert found[0][2] != "model_not_found", path
        assert "" not in [json.loads(one).get("model") for one in server.bodies if one]


async def test_every_endpoint_with_a_model_is_tested() -> None:
    """The table above has each path of the document whose body has a model."""
    async with running() as gateway, client(gateway) as http:
        document = (await http.get("/openapi.json")).json()
    named = set()
    for path, operations in document["paths"].items():
        content = operations.get("post", {}).get("requestBody", {}).get("content", {})
        schema = content.get("application/json", {}).get("schema", {})
        name = schema.get("$ref", "").rpartition("/")[2]
        if "model" in document["components"]["schemas"].get(name, schema).get("properties", {}):
            named.add(path)
    assert named == BODIES.keys()
