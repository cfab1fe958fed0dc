"""`/v1/embeddings` with an encoder: prompts and classes by `input_type`, errors."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import numpy as np
import pytest
import pytest_asyncio

from draftgate.backends.types import ModelCard
from draftgate.gateway.app import Listening
from draftgate.gateway.http.endpoints.embeddings import parse_embeddings
from draftgate.gateway.http.requests.headers import Sender
from draftgate.policies.types import BATCH_PRIORITY
from tests.engine.test_encoder import save_model, write
from tests.gateway.harness import client, needs_engine, running

pytestmark = [pytest.mark.asyncio(loop_scope="module"), needs_engine]

PROMPTS = {"query": "w10 w11", "document": "w20"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Listening]:
    """A node with a random encoder that has prompts."""
    directory = tmp_path_factory.mktemp("encoder")
    save_model(directory)
    prompts = {kind: f"{prompt} " for kind, prompt in PROMPTS.items()}
    write(directory / "config_sentence_transformers.json", {"prompts": prompts})
    async with running(backend="engine", model=str(directory), threads=1) as listening:
        yield listening


async def embedded(gateway: Listening, **body: object) -> dict[str, object]:
    """Return the response to an embedding request."""
    async with client(gateway) as http:
        response = await http.post("/v1/embeddings", json=body)
    found: dict[str, object] = response.json()
    return {**found, "status": response.status_code}


async def vectors(gateway: Listening, **body: object) -> np.ndarray:
    found = await embedded(gateway, **body)
    return np.array([entry["embedding"] for entry in found["data"]])


@pytest.mark.parametrize("kind", ["query", "document"])
async def test_input_type_selects_the_prompt(gateway: Listening, kind: str) -> None:
    """A text with an `input_type` has the vector of the prompt and the text together."""
    typed = await vectors(gateway, input=["w5 w6", "w7"], input_type=kind)
    prompt = PROMPTS[kind]
    plain = await vectors(gateway, input=[f"{prompt} w5 w6", f"{prompt} w7"])
    untyped = await vectors(gateway, input=["w5 w6", "w7"])
    assert np.array_equal(typed, plain)
    assert not np.allclose(typed, untyped, atol=1e-3)
    np.testing.assert_allclose(np.linalg.norm(typed, axis=1), 1.0, atol=1e-6)


async def test_token_ids_get_no_prompt(gateway: Listening) -> None:
    """A client that tokenises texts itself also adds the prompt itself."""
    ids = gateway.node.served.tokenizer.encode("w5 w6")
    typed = await vectors(gateway, input=ids, input_type="query")
    assert np.array_equal(typed, await vectors(gateway, input="w5 w6"))


async def test_usage_counts_the_prompt(gateway: Listening) -> None:
    """The usage includes the tokens of the prompt, which the worker computes."""
    found = await embedded(gateway, input="w5", input_type="query")
    assert found["usage"] == {"prompt_tokens": 5, "total_tokens": 5}


@pytest.mark.parametrize(
    ("fields", "priority"),
    [
        ({}, 0),
        ({"input_type": "query"}, 0),
        ({"input_type": "document"}, BATCH_PRIORITY),
        ({"input_type": "document", "priority": 0}, 0),
        ({"input_type": "query", "priority": 7}, 7),
    ],
)
async def test_documents_are_batch_work(
    gateway: Listening, fields: dict[str, object], priority: int
) -> None:
    """A document has the priority of batch work, unless the client sets another one."""
    card: ModelCard = gateway.node.fleet.card
    body = json.dumps({"input": "w5", **fields}).encode()
    parsed = parse_embeddings(card, body, gateway.node.served, Sender("id"))
    assert parsed.job.service.priority == priority


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": "w5", "input_type": "passage"}, "input_type"),
        ({"input": "w5 " * 65}, "input"),
        ({"input": "w5 " * 63, "input_type": "query"}, "input"),
        ({"input": [], "input_type": "query"}, "input"),
        ({"input": "w5", "dimensions": 49}, "dimensions"),
    ],
)
async def test_bad_request_is_named(
    gateway: Listening, body: dict[str, object], param: str
) -> None:
    """A text that does not fit with its prompt, and an unknown type, are errors by parameter."""
    found = await embedded(gateway, **body)
    assert (found["status"], found["error"]["param"]) == (400, param)


async def test_encoder_does_not_generate(gateway: Listening) -> None:
    """A completion names the endpoint that the model supports."""
    async with client(gateway) as http:
        response = await http.post("/v1/completions", json={"prompt": "w5", "max_tokens": 2})
    assert response.status_code == 400
    assert "use /v1/embeddings" in response.json()["error"]["message"]
