"""Tests of `response_format` over HTTP on the engine and the simulator."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import AsyncIterator
from typing import Any, Literal

import httpx
import jsonschema
import openai
import pydantic
import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from draftgate.backends.grammar import LlGrammars
from draftgate.backends.types import GrammarSpec
from draftgate.gateway.app import Listening
from tests.gateway.clients import openai_client
from tests.gateway.harness import client, events, is_idle, needs_engine, running, until

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    needs_engine,
]

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
MESSAGES = [{"role": "user", "content": "Describe the function add(a, b)."}]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "arguments": {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 1, "maxItems": 3},
        "returns": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/kind"}]},
    },
    "required": ["name", "arguments", "returns"],
    "additionalProperties": False,
    "$defs": {"kind": {"enum": ["int", "str"]}},
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "f", "schema": SCHEMA, "strict": True}}


class Function(pydantic.BaseModel):
    """The model that `parse` returns."""

    kind: Literal["function", "method"]
    is_pure: bool
    arguments: list[Literal["a", "b"]] = pydantic.Field(min_length=1, max_length=2)
    doc: str = pydantic.Field(max_length=20)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway() -> AsyncIterator[Listening]:
    """A node with the engine and the shipped model."""
    async with running(backend="engine", kv_bytes=32 << 20, threads=1) as listening:
        yield listening


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def api(gateway: Listening) -> AsyncIterator[AsyncOpenAI]:
    """OpenAI's client of the node."""
    async with openai_client(gateway.url) as opened:
        yield opened


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def http(gateway: Listening) -> AsyncIterator[httpx.AsyncClient]:
    """A plain HTTP client of the node."""
    async with client(gateway) as opened:
        yield opened


@pytest.fixture
def model(gateway: Listening) -> str:
    """The model's name for clients."""
    return gateway.node.served.name


def is_valid(text: str, schema: dict[str, Any] = SCHEMA) -> bool:
    return jsonschema.Draft202012Validator(schema).is_valid(json.loads(text))


async def test_chat_satisfies_its_schema(api: AsyncOpenAI, model: str) -> None:
    """Every choice of a chat satisfies the schema, and streaming and drafts do not change the
    text."""
    request_body = {"model": model, "messages": MESSAGES, "n": 3, "seed": 5, "max_tokens": 120,
           "response_format": FORMAT}  # fmt: skip
    whole = await api.chat.completions.create(**request_body)
    plain = await api.chat.completions.create(
        **request_body, extra_body={"speculation": {"mode": "off"}}
    )
    texts = [choice.message.content for choice in whole.choices]
    assert all(is_valid(text) for text in texts)
    assert [choice.finish_reason for choice in whole.choices] == ["stop"] * 3
    assert [choice.message.content for choice in plain.choices] == texts
    streamed = ["", "", ""]
    async for chunk in await api.chat.completions.create(**request_body, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts
    drafted = whole.metrics["speculative_decoding"]
    assert drafted["num_accepted_tokens"] > 0  # the schema fixes the text between values


async def test_parse_returns_a_pydantic_model(api: AsyncOpenAI, model: str) -> None:
    """The method `parse` sends the schema of a model and returns an instance of the model."""
    parsed = await api.chat.completions.parse(
        model=model, messages=MESSAGES, response_format=Function, seed=2, max_tokens=120
    )
    function = parsed.choices[0].message.parsed
    assert isinstance(function, Function)
    assert function.arguments
    with pytest.raises(openai.LengthFinishReasonError):
        await api.chat.completions.parse(
            model=model, messages=MESSAGES, response_format=Function, max_tokens=3
        )


async def test_json_object_gives_one_object(api: AsyncOpenAI, model: str) -> None:
    """The server returns one JSON object, or its beginning if the length limit ends the
    response."""
    for seed in range(3):
        response = await api.chat.completions.create(
            model=model, messages=MESSAGES, seed=seed, max_tokens=60,
            response_format={"type": "json_object"},
        )  # fmt: skip
        choice = response.choices[0]
        assert choice.message.content.startswith("{")
        if choice.finish_reason == "stop":
            assert isinstance(json.loads(choice.message.content), dict)
        else:
            assert choice.finish_reason == "length"


async def test_completions_match_the_regex(http: httpx.AsyncClient) -> None:
    """Every completion matches the requested pattern, whole or streamed."""
    pattern = r"(add|sub)\([a-z], [a-z]\)"
    body = {"prompt": ["x = ", "y = "], "max_tokens": 30, "seed": 1,
            "response_format": {"type": "regex", "pattern": pattern}}  # fmt: skip
    whole = (await http.post(TEXT, json=body)).json()["choices"]
    assert all(re.fullmatch(pattern, choice["text"]) for choice in whole)
    streamed = events((await http.post(TEXT, json={**body, "stream": True})).text)
    texts = ["", ""]
    for event in streamed[:-1]:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == [choice["text"] for choice in whole]
    free = await http.post(TEXT, json={**body, "response_format": {"type": "text"}})
    assert not any(re.fullmatch(pattern, c["text"]) for c in free.json()["choices"])


BAD: list[tuple[Any, str]] = [
    ("json_object", "response_format"),
    ({}, "response_format"),
    ({"type": 5}, "response_format.type"),
    ({"type": "xml"}, "response_format.type"),
    ({"type": "regex"}, "response_format"),
    ({"type": "regex", "pattern": None}, "response_format.pattern"),
    ({"type": "regex", "pattern": "("}, "response_format"),
    ({"type": "regex", "pattern": "a(?=b)"}, "response_format"),
    ({"type": "json_schema"}, "response_format.json_schema"),
    ({"type": "json_schema", "json_schema": "x"}, "response_format.json_schema"),
    ({"type": "json_schema", "json_schema": {"name": "x"}}, "response_format.json_schema"),
    ({"type": "json_schema", "json_schema": {"name": 5, "schema": {}}},
     "response_format.json_schema.name"),
    ({"type": "json_schema", "json_schema": {"name": "x", "schema": {}, "strict": "yes"}},
     "response_format.json_schema.strict"),
    ({"type": "json_schema", "json_schema": {"name": "x", "schema": [1]}},
     "response_format.json_schema.schema"),
    ({"type": "json_schema", "json_schema": {"name": "x", "schema": "{}"}},
     "response_format.json_schema.schema"),
    ({"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "frog"}}},
     "response_format"),
    ({"type": "json_schema", "json_schema": {"name": "x", "schema": {"contains": {}}}},
     "response_format"),
    ({"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#/nowhere"}}},
     "response_format"),
]  # fmt: skip


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_malformed_format_is_400_and_named(http: httpx.AsyncClient, stream: bool) -> None:
    """The server rejects a malformed format with 400 before a stream begins."""
    wrong = []
    for value, param in BAD:
        for path, request_body in ((CHAT, {"messages": MESSAGES}), (TEXT, {"prompt": "x"})):
            sent = {**request_body, "max_tokens": 4, "stream": stream, "response_format": value}
            response = await http.post(path, json=sent)
            error = response.json().get("error", {})
            if (response.status_code, error.get("param")) != (400, param) or not error["message"]:
                wrong.append((value, response.status_code, error))
    assert wrong == []


@pytest.mark.parametrize(
    ("strict", "refused"),
    [(True, {"contains", "uniqueItems"}), (None, {"contains"}), (False, set())],
    ids=["strict", "absent", "lenient"],
)
async def test_strict_of_a_schema_decides_about_keywords_without_enforcement(
    http: httpx.AsyncClient, strict: bool | None, refused: set[str]
) -> None:
    """Each endpoint passes `strict` on to the worker, which refuses or ignores the keywords."""
    for keyword, value in {"contains": {"type": "null"}, "uniqueItems": True}.items():
        options = {"name": "x", "schema": {"type": "array", keyword: value}, "strict": strict}
        wanted = {"type": "json_schema", "json_schema": options}
        flat = {"type": "json_schema", **options}
        for path, body in (
            (CHAT, {"messages": MESSAGES, "max_tokens": 4, "response_format": wanted}),
            (TEXT, {"prompt": "x", "max_tokens": 4, "response_format": wanted}),
            ("/v1/responses", {"input": "x", "max_output_tokens": 4, "text": {"format": flat}}),
        ):
            response = await http.post(path, json=body)
            assert response.status_code == (400 if keyword in refused else 200), (path, keyword)
            assert keyword not in refused or keyword in response.json()["error"]["message"]


async def test_schema_that_is_not_utf8_is_400(http: httpx.AsyncClient) -> None:
    """The server rejects a schema that is not UTF-8 and names the schema."""
    body = (b'{"prompt": "x", "response_format": {"type": "json_schema", "json_schema": '
            b'{"name": "x", "schema": {"\xff": 1}}}}')  # fmt: skip
    response = await http.post(TEXT, content=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "response_format.json_schema.schema"


async def test_error_lists_known_formats_or_names_the_keyword(http: httpx.AsyncClient) -> None:
    """The error lists the known formats, or names the unsupported keyword of a schema."""
    request_body = {"prompt": "x", "response_format": {"type": "xml"}}
    assert "json_schema" in (await http.post(TEXT, json=request_body)).json()["error"]["message"]
    schema = {"type": "array", "contains": {}}
    request_body["response_format"] = {
        "type": "json_schema",
        "json_schema": {"name": "x", "schema": schema},
    }
    assert "contains" in (await http.post(TEXT, json=request_body)).json()["error"]["message"]


async def test_schema_is_compiled_once_in_a_thread(
    gateway: Listening, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server compiles a schema once in a thread for all choices and requests."""
    compiled_in = []
    compile_spec = LlGrammars._compile

    def recorded_compile(self: LlGrammars, spec: GrammarSpec) -> object:
        compiled_in.append(threading.get_ident())
        return compile_spec(self, spec)

    monkeypatch.setattr(LlGrammars, "_compile", recorded_compile)
    schema = {"type": "object", "properties": {"new here": {"type": "boolean"}},
              "required": ["new here"], "additionalProperties": False}  # fmt: skip
    response_format = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    body = {"prompt": ["x", "y"], "n": 3, "max_tokens": 30, "response_format": response_format}
    for _ in range(2):
        response = (await http.post(TEXT, json=body)).json()
        assert all(is_valid(choice["text"], schema) for choice in response["choices"])
    assert len(compiled_in) == 1
    assert compiled_in[0] != threading.get_ident()
    await until(lambda: is_idle(gateway.node))


async def test_simulator_answers_in_the_requested_form() -> None:
    """The simulator's outputs satisfy every form, with the same text with and without drafts."""
    async with running() as gateway, client(gateway) as http:
        for form in (FORMAT, {"type": "json_object"}, {"type": "regex", "pattern": "a{3,9}b"}):
            texts = set()
            for mode in ("ngram", "off"):
                body = {"prompt": ["x", "y"], "n": 2, "max_tokens": 400, "seed": 5}
                fields = {"response_format": form, "speculation": {"mode": mode}}
                choices = (await http.post(TEXT, json={**body, **fields})).json()["choices"]
                assert {choice["finish_reason"] for choice in choices} == {"stop"}
                texts.add(tuple(choice["text"] for choice in choices))
            (same,) = texts
            for text in same:
                if form["type"] == "regex":
                    assert re.fullmatch("a{3,9}b", text)
                else:
                    assert is_valid(text, SCHEMA if form is FORMAT else {"type": "object"})
