"""The items of stored conversations, in the form in which clients get them back.

A stored response contains all items of its conversation. Continuing a response therefore needs one
look-up, also after earlier responses have been deleted.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import msgspec
from msgspec import Raw, Struct

from draftgate.gateway.http.requests.decoding import decode
from draftgate.gateway.http.requests.inventory import GENERATION
from draftgate.gateway.http.requests.responses import InputItem

encode: Final = msgspec.json.Encoder().encode


class StoredResponse(Struct):
    """A response, and the JSON array of the input items of its conversation, oldest first."""

    items: Raw
    response: Raw


class _Output(Struct):
    """The part of a response that its conversation continues with."""

    output: list[dict[str, Any]]


class _Sent(Struct):
    """The part of a request that becomes part of its conversation."""

    input: str | list[dict[str, Any]]


_stored: Final = msgspec.json.Decoder(StoredResponse)
_sent: Final = msgspec.json.Decoder(_Sent)
_output: Final = msgspec.json.Decoder(_Output)
_raw_items: Final = msgspec.json.Decoder(list[Raw])
_input_items: Final = msgspec.json.Decoder(list[InputItem])

_PREFIXES: Final = {
    "message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs",
}  # fmt: skip
"""The prefixes of item ids, by the type of the item."""


def decode_stored(value: bytes) -> StoredResponse:
    """Return the stored response of a value in the store."""
    return _stored.decode(value)


def items_of(stored: bytes) -> list[InputItem]:
    """Return the items that the next input of a stored response follows, for the prompt."""
    return decode(conversation_after(stored), _input_items, GENERATION, "input.")


def conversation_after(stored: bytes) -> bytes:
    """Return the JSON array of the items up to the output of a stored response."""
    found = _stored.decode(stored)
    output = _output.decode(found.response).output
    for item in output:
        for part in item.get("content") or ():
            part.pop("logprobs", None)  # large, and not part of a prompt
    return encode([*_raw_items.decode(found.items), *output])


def conversation(body: bytes, stored: bytes | None, request_id: str) -> bytes:
    """Return the JSON array of the items of a request and of the conversation that it continues.

    Args:
        body: a body of `/v1/responses` that `parse_responses` accepts. It ignores unknown fields.
        stored: the response that the request continues, if any.
        request_id: the id of the request, which becomes part of the ids of its items.

    Raises:
        InvalidRequest: an unknown field of an item is not valid JSON.
    """
    earlier: Iterable[Raw] = () if stored is None else _raw_items.decode(conversation_after(stored))
    return encode([*earlier, *_sent_items(decode(body, _sent).input, request_id)])


def _sent_items(sent: str | list[dict[str, Any]], request_id: str) -> list[dict[str, Any]]:
    """Return the items of an input with their ids and the fields that OpenAI's types require."""
    if isinstance(sent, str):
        sent = [{"role": "user", "content": sent}]
    return [_item(item, f"{request_id}_in{index}") for index, item in enumerate(sent)]


def _item(sent: dict[str, Any], name: str) -> dict[str, Any]:
    """Return an item with an id, a type, a status and a list of parts."""
    given = {field: value for field, value in sent.items() if value is not None}
    kind = given.get("type", "message")
    item = {"id": f"{_PREFIXES[kind]}_{name}", "type": kind, "status": "completed", **given}
    item["id"] = str(item["id"])
    if kind == "message":
        text = "output_text" if item["role"] == "assistant" else "input_text"
        content = item.get("content", [])
        parts = [{"type": text, "text": content}] if isinstance(content, str) else content
        item["content"] = [_part(part, text) for part in parts]
    elif kind == "reasoning":
        item.setdefault("summary", [])
    return item


def _part(sent: dict[str, Any], text: str) -> dict[str, Any]:
    """Return a part whose type is the author's type of text, with the fields of this type."""
    part = {**sent, "type": text} if sent["type"] == "text" else sent
    return {"annotations": [], **part} if part["type"] == "output_text" else part
