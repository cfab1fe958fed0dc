"""From bytes to wire structs, with errors that name the parameter."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import msgspec

from draftgate.gateway.errors import InvalidRequest, Unsupported
from draftgate.gateway.http.requests.schemas import UnsupportedFields
from draftgate.policies.types import SpeculationMode

T = TypeVar("T")

_PATH = re.compile(
    r"^(?P<reason>.*) - at (?:`key` in )?`\$\.?(?P<path>.*?)(?:\[\.\.\.\])?`$", re.DOTALL
)

_TRUE_BY_DEFAULT = frozenset({"add_generation_prompt", "skip_special_tokens"})

ALSO_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(_TRUE_BY_DEFAULT, (True,)),
    "length_penalty": (1,),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "truncation": ("disabled",),
    "reasoning": ({"effort": None, "summary": None},),
}
"""Values that change nothing beside those that are empty."""

_KNOWN: dict[str, tuple[str, ...]] = {
    "speculation.mode": tuple(SpeculationMode),
    "response_format.type": ("text", "json_object", "json_schema", "regex"),
}
"""What a field may be, where msgspec does not say."""


def decode(body: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    """Return the struct that a JSON body holds.

    Raises:
        InvalidRequest: it is no JSON, or a field has the wrong type; `param` is the field's path.
    """
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _named(str(error)) from None
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply") from None
    except ValueError as error:  # malformed JSON, and text that is not UTF-8
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None


def reject_unsupported(wire: UnsupportedFields, n: int, *more: str) -> None:
    """Return if every field that cannot be honoured has a value that changes nothing.

    Args:
        n: choices, which `best_of` may equal.
        more: names of fields that only this endpoint cannot honour.

    Raises:
        Unsupported: one does; it is named.
    """
    neutral = {**ALSO_NEUTRAL, "best_of": (1, n)}
    reject_changing(wire, (*UnsupportedFields.__struct_fields__, *more), neutral)


def reject_changing(
    wire: msgspec.Struct, names: Iterable[str], neutral: Mapping[str, tuple[Any, ...]]
) -> None:
    """Return if fields have values that change nothing: none, what is empty, or `neutral` ones.

    Raises:
        Unsupported: one has not; it is named.
    """
    for name in names:
        value = getattr(wire, name)
        empty = not value and not (value is False and name in _TRUE_BY_DEFAULT)
        if not empty and not any(_same(value, one) for one in neutral.get(name, ())):
            raise Unsupported(name)


def _same(value: Any, other: Any) -> bool:
    """Return whether values are the same in JSON, where true is not 1."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def neutral_values(name: str) -> list[Any]:
    """Return the values that `reject_changing` lets pass for a field, `best_of` apart."""
    empty: list[Any] = [None, 0, "", [], {}]
    if name not in _TRUE_BY_DEFAULT:
        empty.append(False)
    return [*empty, *ALSO_NEUTRAL.get(name, (1,) if name == "best_of" else ())]


def _named(message: str) -> InvalidRequest:
    match = _PATH.match(message)
    reason, path = (match["reason"], match["path"]) if match else (message, "")
    if not match and (missing := re.search(r"missing required field `(\w+)`", message)):
        path = missing[1]
    reason = reason.replace("`", "")
    if path in _KNOWN:
        reason += f"; known: {', '.join(_KNOWN[path])}"
    where = path or "the body"
    return InvalidRequest(f"{where}: {reason[:1].lower()}{reason[1:]}", path or None)
