"""Tests of vLLM's `structured_outputs` and `guided_*` on the engine."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import jsonschema
import pytest
import pytest_asyncio

from tests.gateway.harness import client, needs_engine, running

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "def add(a, b):"}]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 9}, "pure": {"type": "boolean"}},
    "required": ["name", "pure"],
    "additionalProperties": False,
}
LARK = """
start: expr
expr: NAME (" + " NAME){1,3}
NAME: /[a-z]{1,4}/
"""
GBNF = """
root ::= name (" + " name){1,3}
name ::= [a-z] [a-z]? [a-z]?
"""
SUM = r"[a-z]{1,4}( \+ [a-z]{1,4}){1,3}"

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    needs_engine,
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def http() -> AsyncIterator[httpx.AsyncClient]:
    """A client of a node with the engine."""
    settings = {"backend": "engine", "kv_bytes": 32 << 20, "threads": 1}
    async with running(**settings) as listening, client(listening) as http:
        yield http


def is_valid(text: str) -> bool:
    return jsonschema.Draft202012Validator(SCHEMA).is_valid(json.loads(text))


@pytest.mark.parametrize(
    ("form", "matches"),
    [
        ({"json": SCHEMA}, is_valid),
        ({"json": json.dumps(SCHEMA)}, is_valid),
        ({"json_object": True}, lambda text: isinstance(json.loads(text), dict)),
        ({"regex": "(add|sub)[0-9]"}, re.compile("(add|sub)[0-9]").fullmatch),
        ({"choice": ["yes", 'no "x"', "é <|user|>"]}, ["yes", 'no "x"', "é <|user|>"].__contains__),
        ({"grammar": LARK}, re.compile(SUM).fullmatch),
        ({"grammar": GBNF}, re.compile(SUM).fullmatch),
    ],
    ids=["json", "json as text", "json object", "regex", "choice", "lark", "gbnf"],
)
async def test_output_has_the_form(http: httpx.AsyncClient, form: dict, matches: Any) -> None:
    """A complete output matches the form, under both names of vLLM and in both APIs."""
    ((name, value),) = form.items()
    names = [{"structured_outputs": form}]
    if name != "json_object":
        names.append({f"guided_{name}": value})
    for fields in names:
        body = {"max_tokens": 200, "seed": 2, "n": 3, **fields}
        response = await http.post(TEXT, json={"prompt": "x = ", **body})
        assert response.status_code == 200, response.text
        ended = [one for one in response.json()["choices"] if one["finish_reason"] == "stop"]
        assert ended or name == "json_object"
        assert all(matches(choice["text"]) for choice in ended)
        response = await http.post(CHAT, json={"messages": HI, **body})
        for choice in response.json()["choices"]:
            assert choice["finish_reason"] != "stop" or matches(choice["message"]["content"])


BAD: list[tuple[dict[str, Any], str]] = [
    ({"guided_json": 5}, "guided_json"),
    ({"guided_json": "[1]"}, "guided_json"),
    ({"guided_json": "{"}, "guided_json"),
    ({"guided_json": {"type": "array", "contains": {}}}, "guided_json"),
    ({"guided_regex": "a(?=b)"}, "guided_regex"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_choice": ["a", ""]}, "guided_choice"),
    ({"guided_choice": ["a"] * 1001}, "guided_choice"),
    ({"guided_grammar": "start: nothing"}, "guided_grammar"),
    ({"guided_grammar": "root ::= nothing"}, "guided_grammar"),
    ({"guided_grammar": 'start: %json {"type": "object"}'}, "guided_grammar"),
    ({"guided_grammar": "x" * 20_000}, "guided_grammar"),
    ({"guided_grammar": "root ::= " + "(" * 9000}, "guided_grammar"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
    ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice"),
    ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
    ({"structured_outputs": {"json": SCHEMA, "disable_additional_properties": True}},
     "structured_outputs.disable_additional_properties"),
    ({"structured_outputs": {"json": {"not": {}}}}, "structured_outputs.json"),
]  # fmt: skip


async def test_unusable_form_is_400_and_named(http: httpx.AsyncClient) -> None:
    """The server rejects a form that it cannot enforce, and names the parameter."""
    wrong = []
    for fields, param in BAD:
        for path, least in ((TEXT, {"prompt": "x"}), (CHAT, {"messages": HI})):
            response = await http.post(path, json={**least, "max_tokens": 2, **fields})
            error = response.json().get("error", {})
            if (response.status_code, error.get("param")) != (400, param):
                wrong.append((fields, response.status_code, error))
    assert wrong == []
