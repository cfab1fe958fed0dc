"""The decoding of request bodies, with errors that use the client's names of parameters."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from operator import attrgetter
from typing import Any, TypeVar

import msgspec

from draftgate.backends.errors import RequestRejected
from draftgate.gateway.decoding_errors import allowed_values, description_of, malformed, plain_words
from draftgate.gateway.errors import InvalidRequest
from draftgate.gateway.http.requests.inventory import FieldLists
from draftgate.gateway.http.requests.unlisted import only_listed
from draftgate.policies.types import SpeculationMode

T = TypeVar("T")

_PATH = re.compile(
    r"^(?P<reason>.*) - at (?:`key` in )?`\$\.?(?P<path>.*?)(?:\[\.\.\.\])?`$", re.DOTALL
)

_STRING_OR_NUMBER = re.compile(
    rb'"(?:[^"\\]++|\\.)*+"|(?P<number>-?\d+(?:\.\d+)?[eE][-+]?\d+|-?\d+\.\d+)', re.DOTALL
)
"""A string, or a number that JSON writes with a fraction or an exponent."""

_INDEX = re.compile(r"\[\d+\]")

_FUNCTION = re.compile(r"(tools\[\d+\]|tool_choice(\.allowed_tools\.tools\[\d+\])?)\.function\b")

_KNOWN: dict[str, tuple[str, ...]] = {
    # of `/v1/messages`
    "messages.content.type": ("text", "thinking", "tool_result", "tool_use"),
    "messages.content.content.type": ("text",),
    "speculation.mode": tuple(SpeculationMode),
    "response_format.type": ("text", "json_object", "json_schema", "regex"),
}
"""The allowed values of fields whose messages from msgspec do not list them, by path without
indexes."""


def decode(
    body: bytes,
    decoder: msgspec.json.Decoder[T],
    lists: FieldLists | None = None,
    within: str = "",
) -> T:
    """Return the struct in a JSON body.

    Args:
        lists: the inventory for fields that the struct does not have, or None for the struct's own.
        within: path of the body in a larger one, with a trailing dot.

    Raises:
        InvalidRequest: the body is not JSON, or a field has the wrong type.
        Unsupported: a field is refused.
    """
    try:
        try:
            return _decode_whole_numbers(body, decoder)
        except msgspec.ValidationError as error:
            if "unknown field" not in str(error):
                raise
        kind: Any = decoder.type
        body = only_listed(body, kind, kind.lists if lists is None else lists, within)
        return _decode_whole_numbers(body, decoder)
    except msgspec.ValidationError as error:
        raise _named(str(error), decoder.type) from None
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply") from None
    except ValueError as error:  # malformed JSON, or text that is not UTF-8
        raise InvalidRequest(f"the body is not valid JSON: {malformed(error)}") from None


def _decode_whole_numbers(body: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    """Return the struct in a JSON body, in which `2.0` is an integer as in JSON Schema."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        if "got `float`" not in str(error):
            raise
    return decoder.decode(_STRING_OR_NUMBER.sub(_as_integer, body))


def _as_integer(token: re.Match[bytes]) -> bytes:
    """Return a number without a fraction as an integer, and each other token as it is."""
    if token["number"] is None:
        return token[0]
    number = float(token["number"])
    return b"%d" % number if number.is_integer() else token[0]


def values_of(wire: msgspec.Struct, names: tuple[str, ...]) -> tuple[Any, ...]:
    """Return the values of at least two fields, which is faster than reading each by its name."""
    values: tuple[Any, ...] = _reader(names)(wire)
    return values


@cache
def _reader(names: tuple[str, ...]) -> attrgetter[tuple[Any, ...]]:
    return attrgetter(*names)


def _named(message: str, kind: Any) -> InvalidRequest:
    match = _PATH.match(message)
    reason, path = (match["reason"], match["path"]) if match else (message, "")
    if missing := re.match(r"Object missing required field `(.*)`$", reason):
        field = f"{path}.{missing[1]}" if path else missing[1]
        return InvalidRequest(f"{field}: is required", path or missing[1])
    if wrong := re.match("Invalid (?:enum )?value (.*)$", reason, re.DOTALL):
        known = _KNOWN.get(_INDEX.sub("", path), ()) or allowed_values(kind, path)
        reason = f"expected one of {', '.join(known)}" if known else "expected another value"
        reason += f", not {wrong[1]}"
    elif "matching regex" in reason and (form := description_of(kind, path)) is not None:
        reason = f"expected {form}"
    else:
        reason = plain_words(reason)
    return InvalidRequest(f"{path or 'the body'}: {reason}", path or None)


class RenamedParams:
    """A context that names the parameter as the client does in errors that its block raises."""

    def __init__(self, params: Mapping[str, str]) -> None:
        """Begin a context.

        Args:
            params: the client's names of parameters and of parts of the request, by their paths.
        """
        self._params = params

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, InvalidRequest | RequestRejected):
            _rename_param(error, self._params)


def _rename_param(error: InvalidRequest | RequestRejected, params: Mapping[str, str]) -> None:
    if isinstance(error, RequestRejected) and "messages" in params:
        params = {**params, "prompt": params["messages"]}  # workers know only prompts
    name = client_name(error.param, params)
    if name is not None and error.param is not None and name != error.param:
        error.args = (str(error).replace(error.param, name), *error.args[1:])
        error.param = name
        if isinstance(error, InvalidRequest):
            error.message = str(error)


def client_name(param: str | None, params: Mapping[str, str]) -> str | None:
    """Return the client's name of a parameter.

    The longest entry of `params` that matches decides.

    Args:
        param: the path of the parameter, or None.
        params: the client's names, by path.
    """
    if param is None:
        return None
    if ".function" in params and _FUNCTION.match(param):
        param = param.replace(".function", params[".function"], 1)
    for name in sorted(params, key=len, reverse=True):
        if param == name or param.startswith((f"{name}.", f"{name}[")):
            return params[name] + param[len(name) :]
    return param
