"""The errors about values of a wrong type or size, which use no names of Python's types."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec
import pytest

from draftgate.gateway.decoding_errors import plain_words
from draftgate.gateway.errors import InvalidRequest
from draftgate.gateway.http.openapi.operations import OPERATIONS
from draftgate.gateway.http.requests.decoding import decode
from draftgate.policies.quotas import Limit
from tests.gateway.harness import client, running
from tests.gateway.test_created_keys import FILE, bearer

JARGON = re.compile(r"`|regex|\bgot\b|\b(?:str|int|float|bool|array|enum|msgspec)\b|Expected|\$")
BODIES = sorted(
    {one.body for one in OPERATIONS if one.body is not None}, key=lambda one: one.__name__
)
WRONG: list[Any] = [7, -1e9, 2.5, True, "zzz", "", [], [None], {}, {"zzz": 1}, None, [[]], [{}]]


def messages(kind: type, body: bytes) -> list[str]:
    """Return the message of the error about a body, if it is wrong."""
    try:
        decode(body, msgspec.json.Decoder(kind))
    except InvalidRequest as error:
        return [error.message]
    return []


@pytest.mark.parametrize("kind", BODIES, ids=lambda one: one.__name__)
def test_messages_about_wrong_values_are_plain(kind: Any) -> None:
    """Each value of a wrong type gets a message that begins with the name of its field."""
    found = 0
    for name in kind.__struct_encode_fields__:
        for value in WRONG:
            for message in messages(kind, json.dumps({name: value}).encode()):
                found += 1
                reason = message.replace(name, "").partition("expected one of")[0]  # our values
                assert not JARGON.search(reason), message
                assert re.match(r"[\w.\[\]]+: ", message), message
    assert found


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"null", "the body: expected an object, not null"),
        (b"[]", "the body: expected an object, not a list"),
        (b'{"a": 1', "the body is not valid JSON: it ends too early"),
        (b"{a}", "the body is not valid JSON: object keys must be strings (byte 1)"),
        (b'{"a": "\xff"}', "the body is not valid JSON: "),
        (b'{"temperature": "x"}', "temperature: expected a number, not a string"),
        (b'{"max_tokens": 1.5}', "max_tokens: expected a whole number, not a fraction"),
        (b'{"messages": 5}', "messages: expected a list, not a number"),
        (b'{"messages": [null]}', "messages[0]: expected an object, not null"),
        (b'{"messages": [{"content": "x"}]}', "messages[0].role: is required"),
    ],
)
async def test_examples(body: bytes, message: str) -> None:
    """Clients get these messages."""
    async with running() as gateway, client(gateway) as http:
        response = await http.post("/v1/chat/completions", content=body)
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith(message)


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("Expected `int` >= 1", "expected a whole number of at least 1"),
        ("Expected `float` > 0.0", "expected a number above 0"),
        ("Expected `float | null`, got `str`", "expected a number, not a string"),
        (
            "Expected `str | array | null`, got `object`",
            "expected a string or a list, not an object",
        ),
        ("Expected `str` of length >= 1", "expected a string of at least 1 character"),
        ("Expected `array` of length <= 16", "expected a list of at most 16 elements"),
        ("Expected `array` of length 2", "expected a list of 2 elements"),
        ("Expected `str`, got `int`", "expected a string, not a number"),
        ("Number out of range", "the number is too large"),
    ],
)
def test_words_of_reasons(reason: str, words: str) -> None:
    """Each form of msgspec's messages has words."""
    assert plain_words(reason) == words


async def test_names_of_keys_are_described(tmp_path: Any) -> None:
    """The error about a name says which characters it may have, and shows no regular expression."""
    path = tmp_path / "keys.yaml"
    path.write_text(FILE)
    async with running(api_keys_file=str(path)) as gateway, client(gateway) as http:
        response = await http.post("/keys", json={"name": "a b"}, headers=bearer("sk-root"))
    assert response.json()["error"]["message"].startswith("name: expected 1 to 64 letters, digits")


def test_units_of_quotas_are_counted() -> None:
    """One request is no plural."""
    assert [Limit.REQUESTS.counted(n) for n in (0, 1, 2)] == [
        "0 requests",
        "1 request",
        "2 requests",
    ]
    assert Limit.TOKENS.counted(1) == "1 token"
