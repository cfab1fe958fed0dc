"""The errors of upstreams, in the forms of their web frameworks.

OpenAI     {"error": {"message": ..., "type": ..., "param": ..., "code": ...}}
Anthropic  {"type": "error", "error": {"type": ..., "message": ...}}
SGLang     {"object": "error", "message": ..., "type": ..., "param": ..., "code": ...}
FastAPI    {"detail": "Not Found"}, {"detail": [{"loc": ["body", "n"], "msg": ...}]}
others     {"error": "..."}, {"message": "..."}, HTML, plain text, nothing
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any, Final, NamedTuple

import msgspec

_LLAMA_CPP: Final = "file not found"
"""The message of llama.cpp's server for an unknown path, in lower case."""


class UpstreamErrorBody(NamedTuple):
    """An error as an upstream describes it.

    Attributes:
        message: the message, or an empty string without one.
        param: the path of the invalid parameter, or None.
        code, kind: the code and the type of an error in OpenAI's form, or None.
        has_openai_form, has_anthropic_form: whether clients of these APIs can read the body.
    """

    message: str = ""
    param: str | None = None
    code: str | None = None
    kind: str | None = None
    has_openai_form: bool = False
    has_anthropic_form: bool = False


def read_error(body: bytes) -> UpstreamErrorBody:
    """Return the error in the body of a response."""
    try:
        found = msgspec.json.decode(body)
    except (ValueError, RecursionError):
        return UpstreamErrorBody()
    if not isinstance(found, dict):
        return UpstreamErrorBody()
    if "detail" in found and "error" not in found:
        return _read_detail(found["detail"])
    error = found.get("error", found)
    if not isinstance(error, dict):
        return UpstreamErrorBody(_text(error) or "")
    message, kind = _text(error.get("message")), _text(error.get("type"))
    nested = error is not found and message is not None
    return UpstreamErrorBody(
        message or "",
        _text(error.get("param")),
        _text(error.get("code")),
        kind,
        has_openai_form=nested,
        has_anthropic_form=nested and kind is not None and found.get("type") == "error",
    )


def is_missing_endpoint(status: int, error: UpstreamErrorBody, path: str = "") -> bool:
    """Return whether a response means that the server has no such endpoint.

    A message that only repeats the status says nothing about a missing model.

    Args:
        path: the path of the endpoint, or empty to accept the form of OpenAI's errors only from
            endpoints. Servers whose errors all have this form name the path that they do not have,
            except llama.cpp's server.
    """
    if status not in {404, 405, 501}:
        return False
    message = error.message.casefold()
    if error.has_openai_form:
        names = path in error.message or message == _LLAMA_CPP
        return bool(path) and names and not error.has_anthropic_form
    return message in {"", HTTPStatus(status).phrase.casefold()}


def _read_detail(detail: Any) -> UpstreamErrorBody:
    """Return an error of FastAPI, which is a text or a list of invalid fields."""
    if isinstance(detail, dict):
        return UpstreamErrorBody(_text(detail.get("message")) or _text(detail.get("error")) or "")
    if not isinstance(detail, list):
        return UpstreamErrorBody(_text(detail) or "")
    fields = [one for one in detail if isinstance(one, dict) and _text(one.get("msg"))]
    paths = [_path(one.get("loc")) for one in fields]
    described = [
        f"{path}: {one['msg']}" if path else one["msg"]
        for path, one in zip(paths, fields, strict=True)
    ]
    return UpstreamErrorBody("; ".join(described), next(iter(paths), None) or None)


def _path(location: Any) -> str:
    """Return the path of a field, such as `messages[0].content`."""
    parts = location if isinstance(location, list) else []
    path = ""
    for part in parts[1:] if parts[:1] == ["body"] else parts:
        path += f"[{part}]" if isinstance(part, int) else f".{part}"
    return path.removeprefix(".")


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None
