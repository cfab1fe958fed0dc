"""Tests of the OpenAPI document: paths, enforced bounds and working examples."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import jsonschema
import pytest
import pytest_asyncio

from draftgate.backends.peer.channel import PREFIX
from draftgate.gateway.app import Listening
from draftgate.gateway.http.openapi.document import document
from draftgate.gateway.http.openapi.operations import OPERATIONS
from draftgate.gateway.http.openapi.schemas import components
from draftgate.gateway.http.requests.inventory import GENERATION
from draftgate.gateway.http.requests.limits import KEYWORDS, RANGES, REQUIRED
from draftgate.gateway.routes import build_app
from tests.gateway.harness import ScriptedBackend, client, events, running

pytestmark = pytest.mark.asyncio(loop_scope="module")

BODIES = {
    "ChatBody": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
    "CompletionBody": ("/v1/completions", {"prompt": "x"}),
    "ResponsesBody": ("/v1/responses", {"input": "x"}),
    "MessagesBody": ("/v1/messages", {"messages": [{"role": "user", "content": "x"}]}),
    "CountTokensBody": (
        "/v1/messages/count_tokens",
        {"messages": [{"role": "user", "content": "x"}]},
    ),
    "DetokenizeBody": ("/detokenize", {"tokens": [1]}),
    "TokenizeBody": ("/tokenize", {}),
}
SHORT = {"ChatBody": {"max_tokens": 1}, "CompletionBody": {"max_tokens": 1},
         "ResponsesBody": {"max_output_tokens": 1}, "MessagesBody": {"max_tokens": 1}}  # fmt: skip


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway() -> AsyncIterator[Listening]:
    """A node with a simulator that needs a millisecond per request."""
    async with running(sim_service_ms=1.0) as listening:
        yield listening


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def http(gateway: Listening) -> AsyncIterator[httpx.AsyncClient]:
    """A plain HTTP client of the node."""
    async with client(gateway) as opened:
        yield opened


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served_document(http: httpx.AsyncClient) -> dict[str, Any]:
    """The OpenAPI document of the node."""
    return (await http.get("/openapi.json")).json()


async def test_routes_and_operations_are_the_same(gateway: Listening) -> None:
    """The document describes all routes and no other paths."""
    routes = {
        (route.method, route.resource.canonical.rstrip("/") or "/")
        for route in build_app(gateway.node).router.routes()
        if route.method != "HEAD" and not route.resource.canonical.startswith(PREFIX)
    }
    documented = {(operation.method, operation.path) for operation in OPERATIONS}
    assert routes == documented
    assert len({operation.name for operation in OPERATIONS}) == len(OPERATIONS)


async def test_document_has_valid_schemas_and_references(served_document: dict[str, Any]) -> None:
    """The document has valid schemas and references, and every response has a request id header."""
    assert served_document["openapi"] == "3.1.0"
    schemas = served_document["components"]["schemas"]
    for schema in schemas.values():
        jsonschema.Draft202012Validator.check_schema(schema)
    text = json.dumps(served_document)
    named = {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}
    assert named <= set(schemas)
    for path in served_document["paths"].values():
        for operation in path.values():
            for response in operation["responses"].values():
                assert "x-request-id" in response["headers"]


async def test_loaded_model_becomes_a_bound(
    served_document: dict[str, Any], gateway: Listening
) -> None:
    """The document of a loaded model contains the model's name and its vocabulary size as
    bounds."""
    backend = ScriptedBackend()
    backend.gate.clear()
    async with running(backends=[backend], start=False) as starting, client(starting) as early:
        before = (await early.get("/openapi.json")).json()
    assert before == json.loads(document(None))
    assert before["paths"].keys() == served_document["paths"].keys()
    tokens = served_document["components"]["schemas"]["DetokenizeBody"]["properties"]["tokens"]
    assert tokens["items"]["maximum"] == gateway.node.served.tokenizer.vocab_size - 1
    name = served_document["components"]["schemas"]["ChatBody"]["properties"]["model"]["anyOf"][0]
    assert name["enum"] == [gateway.node.served.name]


async def test_every_example_works(
    http: httpx.AsyncClient, served_document: dict[str, Any]
) -> None:
    """Each example satisfies its schema, and its response satisfies the schema of the response."""
    schemas = {"components": served_document["components"]}
    count = 0
    for path, methods in served_document["paths"].items():
        for operation in methods.values():
            content = operation.get("requestBody", {}).get("content", {}).get("application/json")
            for example in (content or {"examples": {}})["examples"].values():
                count += 1
                body = example["value"]
                jsonschema.validate(body, {**content["schema"], **schemas})
                response = await http.post(path, json=body)
                assert response.status_code == 200, (path, body, response.text)
                kind = response.headers["content-type"].split(";")[0]
                assert kind == ("text/event-stream" if body.get("stream") else "application/json")
                reply = operation["responses"]["200"]["content"][kind]["schema"]
                if kind == "application/json":
                    jsonschema.validate(response.json(), {**reply, **schemas})
                else:
                    check_events(path, response.text, schemas)
    assert count >= 10


def check_events(path: str, text: str, schemas: dict[str, Any]) -> None:
    """Validate the data of every event against the schema of the operation's events."""
    (operation,) = (item for item in OPERATIONS if item.path == path)
    schema = {"$ref": f"#/components/schemas/{operation.events.__name__}", **schemas}
    found = [data for data in events(text) if data != "[DONE]"]
    assert found
    for data in found:
        jsonschema.validate(data, schema)


def branches(schema: dict[str, Any]) -> list[dict[str, Any]]:
    return schema.get("anyOf", [schema])


def probes(schema: dict[str, Any]) -> Iterator[tuple[Any, bool]]:
    """Yield values at each bound of a schema, and whether the bound permits the value."""
    integer = schema.get("type") == "integer"

    def beyond(bound: float, direction: int) -> float:
        return bound + direction if integer else math.nextafter(bound, direction * math.inf)

    if "minimum" in schema:
        yield schema["minimum"], True
        yield beyond(schema["minimum"], -1), False
    if "maximum" in schema:
        yield schema["maximum"], True
        yield beyond(schema["maximum"], 1), False
    for size in ("minLength", "maxLength"):
        if size in schema:
            yield "x" * schema[size], True
            yield "x" * (schema[size] + (1 if size == "maxLength" else -1)), False
    for value in schema.get("enum", ()):
        yield value, True
    if schema.get("type") == "string" and "enum" in schema:
        yield "something else", False
    yield from _sizes(schema)


def _sizes(schema: dict[str, Any]) -> Iterator[tuple[Any, bool]]:
    items = schema.get("items", {"type": "string"})
    if schema.get("type") == "array" and not items.keys() & {"$ref", "anyOf"}:
        item = {"string": "x", "integer": 1, "array": [1]}[items.get("type", "string")]
        yield from (([value], ok) for value, ok in probes(items))
        for size, by in (("minItems", -1), ("maxItems", 1)):
            if size in schema:
                yield [item] * schema[size], True
                yield [item] * (schema[size] + by), False
    if "maxProperties" in schema:
        value = {"string": "x", "number": 1}[schema["additionalProperties"]["type"]]
        yield {str(i): value for i in range(schema["maxProperties"])}, True
        yield {str(i): value for i in range(schema["maxProperties"] + 1)}, False
        yield from (({"1": v}, ok) for v, ok in probes(schema["additionalProperties"]))
        if "maxLength" in schema["propertyNames"]:
            yield from (({k: value}, ok) for k, ok in probes(schema["propertyNames"]))
        else:
            yield {"x": value}, False


async def test_every_documented_bound_is_enforced(
    http: httpx.AsyncClient, served_document: dict[str, Any]
) -> None:
    """The server accepts a value at each documented bound and rejects a value beyond the bound."""
    wrong, count = [], 0
    for name, (path, least) in BODIES.items():
        for field, schema in served_document["components"]["schemas"][name]["properties"].items():
            found = [probe for branch in branches(schema) for probe in probes(branch)]
            # Another alternative may accept the value: [1] is a list of ids, though not of texts.
            for value, allowed in found:
                if (value, True) in found and not allowed:
                    continue
                count += 1
                usual = GENERATION.aliases.get(field, ())  # an alias replaces the usual name
                short = {k: v for k, v in SHORT.get(name, {}).items() if k not in usual}
                response = await http.post(path, json={**short, **least, field: value})
                named = {field, *usual}
                refused = response.status_code in {400, 404} and _named_field(response) in named
                too_long = "tokens" in response.text and "context" in response.text
                if not (allowed and too_long) and refused == allowed and not _needs(field, value):
                    wrong.append((name, field, str(value)[:50], allowed, response.text[:200]))
    assert not wrong, "\n".join(map(str, wrong))
    assert count > 400


def _named_field(response: httpx.Response) -> str:
    """Return the field that an error names. Anthropic's errors name it only in the message."""
    error = response.json().get("error")
    if not error:
        return ""
    named = error.get("param") or error["message"].removeprefix("the ")
    return re.split(r"\W", named)[0]


def _needs(field: str, value: Any) -> bool:
    """Return whether the server rejects a permitted value because another field is missing."""
    needs_other = {"top_logprobs": RANGES["top_logprobs"].most, "tool_choice": "required"}
    return field in needs_other and value == needs_other[field]


async def test_every_number_has_a_documented_bound(served_document: dict[str, Any]) -> None:
    """The document contains a bound for every number and every entry of the bounds' tables."""
    schemas = served_document["components"]["schemas"]
    bounded = set()
    for name in (*BODIES, "RerankBody", "SpeculationOptions"):
        for field, schema in schemas[name]["properties"].items():
            for branch in branches(schema):
                if branch.get("type") in {"integer", "number"}:
                    assert "minimum" in branch, (name, field)
                    bounded.add(field)
    assert bounded - GENERATION.aliases.keys() == set(RANGES) - GENERATION.aliases.keys()
    fields = {f for schema in schemas.values() for f in schema.get("properties", {})}
    dotted = {f"{n}.{f}" for n, schema in schemas.items() for f in schema.get("properties", {})}
    assert set(KEYWORDS) | REQUIRED <= fields | dotted


async def test_nested_bounds_are_enforced(http: httpx.AsyncClient) -> None:
    """The server enforces the bounds of nested fields and names the nested field."""
    path, least = BODIES["ChatBody"]
    for fields, param in (
        ({"speculation": {"max_draft_tokens": -1}}, "speculation.max_draft_tokens"),
        ({"tools": [{"type": "function", "function": {"name": "x" * 129}}], "tool_choice": "none"},
         "tools[0].function.name"),
    ):  # fmt: skip
        response = await http.post(path, json={**least, **fields})
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_type_is_required_only_to_distinguish_kinds(
    http: httpx.AsyncClient, served_document: dict[str, Any]
) -> None:
    """The server requires the type of a response format, but not of a tool."""
    path, least = BODIES["ChatBody"]
    schemas = served_document["components"]["schemas"]
    assert "type" not in schemas["Tool"]["required"]
    assert "type" in schemas["JsonObjectFormat"]["required"]
    tool = {"tools": [{"function": {"name": "f"}}], "tool_choice": "none"}
    for fields, status in ((tool, 200), ({"response_format": {}}, 400)):
        assert (await http.post(path, json={**least, **fields})).status_code == status


async def test_405_lists_the_allowed_methods(http: httpx.AsyncClient) -> None:
    """The server lists the permitted methods in the Allow header of a 405 response."""
    responses = await asyncio.gather(http.put("/v1/completions"), http.post("/v1/models"))
    assert [response.status_code for response in responses] == [405, 405]
    assert [response.headers["allow"] for response in responses] == [
        "OPTIONS, POST",
        "GET, HEAD, OPTIONS",
    ]


def _lone_references(schema: Any) -> Iterator[str]:
    """Yield the names of the schemas that are not one of several alternatives."""
    if isinstance(schema, list):
        for part in schema:
            yield from _lone_references(part)
    if not isinstance(schema, dict):
        return
    if "$ref" in schema:
        yield schema["$ref"].rsplit("/", 1)[1]
    forms = schema.get("anyOf", [])
    alternatives = [form for form in forms if "$ref" in form]
    for key, part in schema.items():
        if key != "anyOf" or len(alternatives) < 2:
            yield from _lone_references(part)


async def test_type_with_one_value_is_optional_without_alternatives() -> None:
    """An object's `type` is required only if it has several values or selects one of several
    forms, as the node decodes it."""
    bodies = [operation.body for operation in OPERATIONS if operation.body is not None]
    _, schemas = components(bodies, None)
    lone = {name for schema in schemas.values() for name in _lone_references(schema)}
    required = {name for name in lone if "type" in schemas[name].get("required", ())}
    assert "Tool" in lone
    assert all(len(schemas[name]["properties"]["type"]["enum"]) > 1 for name in required)
