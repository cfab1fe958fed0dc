"""Tests that every request field of other APIs is implemented, refused or harmless."""

from __future__ import annotations

import re
import tomllib
import types
import typing
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NotRequired, Required

import msgspec
import pytest
from msgspec.inspect import ListType, StructType, Type, UnionType, type_info
from typing_extensions import is_typeddict

from draftgate.gateway.errors import Unsupported
from draftgate.gateway.http.openapi.operations import OPERATIONS
from draftgate.gateway.http.requests.decoding import decode
from draftgate.gateway.http.requests.inventory import (
    EMBEDDING,
    GENERATION,
    SCORING,
    TOKENS,
    FieldLists,
)
from draftgate.gateway.http.requests.schemas import Body

SOURCES = tomllib.loads((Path(__file__).parent / "field_sources.toml").read_text("utf-8"))
BODIES: dict[str, type[Body]] = {
    operation.path: operation.body
    for operation in OPERATIONS
    if operation.body is not None and issubclass(operation.body, Body)
}
LISTS = {"GENERATION": GENERATION, "EMBEDDING": EMBEDDING, "SCORING": SCORING, "TOKENS": TOKENS}


def sdk_models() -> Iterator[tuple[str, str, Any]]:
    """Yield the bodies of the installed SDKs of OpenAI and Anthropic, by endpoint."""
    anthropic = pytest.importorskip("anthropic")
    openai = pytest.importorskip("openai")
    from anthropic.types import message_count_tokens_params, message_create_params
    from anthropic.types.beta import message_create_params as beta_params
    from openai.types import completion_create_params, embedding_create_params
    from openai.types.chat import completion_create_params as chat_params
    from openai.types.responses import input_token_count_params, response_create_params

    theirs, ours = f"OpenAI {openai.__version__}", f"Anthropic {anthropic.__version__}"
    yield from (
        (theirs, "/v1/chat/completions", chat_params.CompletionCreateParamsStreaming),
        (theirs, "/v1/completions", completion_create_params.CompletionCreateParamsStreaming),
        (theirs, "/v1/embeddings", embedding_create_params.EmbeddingCreateParams),
        (theirs, "/v1/responses", response_create_params.ResponseCreateParamsStreaming),
        (theirs, "/v1/responses/input_tokens", input_token_count_params.InputTokenCountParams),
        (ours, "/v1/messages", message_create_params.MessageCreateParamsStreaming),
        (ours, "/v1/messages", beta_params.MessageCreateParamsStreaming),
        (ours, "/v1/messages/count_tokens", message_count_tokens_params.MessageCountTokensParams),
    )


def all_fields() -> Iterator[tuple[str, str, set[str]]]:
    for source, path, params in sdk_models():
        yield source, path, set(typing.get_type_hints(params))
    for source, endpoints in SOURCES.items():
        for path, names in endpoints.items():
            yield source, path, set(names["fields"].split())


def implemented(body: type[Body]) -> set[str]:
    """Return the fields of a body, and the aliases of its fields."""
    fields = set(body.__struct_fields__)
    aliases = {alias for alias, names in body.lists.aliases.items() if not fields.isdisjoint(names)}
    return fields | aliases


def test_every_field_is_implemented_refused_or_harmless() -> None:
    """No request model has a field that the inventory does not know."""
    unlisted = {
        f"{source} {path}: {name}"
        for source, path, names in all_fields()
        if path in BODIES
        for name in names
        - implemented(BODIES[path])
        - BODIES[path].lists.refused.keys()
        - BODIES[path].lists.harmless.keys()
    }
    assert sorted(unlisted) == []


@pytest.mark.parametrize("name", LISTS)
def test_no_field_is_both_refused_and_harmless(name: str) -> None:
    """Each field has one group, and no body implements a field that is harmless."""
    lists: FieldLists = LISTS[name]
    assert lists.refused.keys() & lists.harmless.keys() == set()
    assert lists.aliases.keys() & lists.harmless.keys() == set()


def sent(body: type[Body], **fields: object) -> Body:
    """Return a decoded body with these fields."""
    required = {"query": "a", "documents": ["a"], "tokens": [1]}
    needed = {name: value for name, value in required.items() if name in body.__struct_fields__}
    return decode(msgspec.json.encode({**needed, **fields}), msgspec.json.Decoder(body))


@pytest.mark.parametrize("path", BODIES)
def test_refused_field_is_named_unless_its_value_changes_nothing(path: str) -> None:
    """A refused field is an error with its name and advice, and its neutral values are accepted."""
    body = BODIES[path]
    for name, (advice, neutral) in body.lists.refused.items():
        if name in implemented(body) or "." in name:
            continue
        for value in (None, *neutral):
            assert sent(body, **{name: value}) == sent(body)
        for value in ("x", 7, ["x"], {"x": 1}, True not in neutral):
            with pytest.raises(Unsupported, match=re.escape(advice)) as raised:
                sent(body, **{name: value})
            assert raised.value.param == name


@pytest.mark.parametrize("path", BODIES)
def test_harmless_field_has_no_effect(path: str) -> None:
    """A harmless field may have any value, and the rest of the body stays the same."""
    body = BODIES[path]
    for name in body.lists.harmless.keys() - implemented(body):
        for value in (None, True, "x", 7, ["x"], {"x": 1}):
            assert sent(body, **{name.removeprefix("*."): value}) == sent(body)


def kinds_of(hint: Any) -> Iterator[Any]:
    """Yield the alternatives of a type hint."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in {typing.Union, types.UnionType}:
        for one in args:
            yield from kinds_of(one)
    elif origin in {typing.Annotated, Required, NotRequired}:
        yield from kinds_of(args[0])
    else:
        yield hint


def tags_of(hints: dict[str, Any], field: str) -> set[str]:
    """Return the values of the field that names the kind of an object."""
    return {
        value
        for kind in kinds_of(hints.get(field))
        if typing.get_origin(kind) is typing.Literal
        for value in typing.get_args(kind)
    }


SUPPORTED_TYPES = {
    "ContentPart": {"text", "refusal"},
    "InputPart": {"input_text", "output_text", "text", "refusal", "reasoning_text"},
    "InputItem": {"message", "function_call", "function_call_output", "reasoning"},
    "CustomTool": {"custom"},
}
"""The values of `type` of untagged structs. Objects of other types are refused by their type."""


def nested(info: Type, hint: Any, path: str, above: tuple[type, ...] = ()) -> Iterator[str]:
    """Yield the fields of the objects in an SDK's type that our struct at their place lacks."""
    for ours in info.types if isinstance(info, UnionType) else (info,):
        for theirs in kinds_of(hint):
            if isinstance(ours, ListType) and typing.get_origin(theirs) in {list, Iterable}:
                yield from nested(ours.item_type, typing.get_args(theirs)[0], path, above)
            if not isinstance(ours, StructType) or not is_typeddict(theirs) or theirs in above:
                continue
            hints = typing.get_type_hints(theirs)
            tags = tags_of(hints, ours.tag_field or "type")
            known = {ours.tag} if ours.tag else SUPPORTED_TYPES.get(ours.cls.__name__, tags)
            if tags and not tags & known:
                continue
            fields = {field.encode_name: field.type for field in ours.fields}
            for name, kind in hints.items():
                if name in fields:
                    yield from nested(fields[name], kind, f"{path}{name}.", (*above, theirs))
                elif name != ours.tag_field and path:
                    yield path + name


def test_every_nested_field_of_the_sdks_is_implemented_refused_or_harmless() -> None:
    """No object within a body of an SDK has a field that the inventory does not know."""
    unlisted, count = set(), 0
    for _, path, params in sdk_models():
        lists = BODIES[path].lists
        for name in nested(type_info(BODIES[path]), params, ""):
            count += 1
            common = f"*.{name.rpartition('.')[2]}"
            if not {name, common} & (lists.refused.keys() | lists.harmless.keys()):
                unlisted.add(f"{path}: {name}")
    assert sorted(unlisted) == []
    assert count > 20
