"""An operation of the OpenAPI document: one method of one path."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from msgspec import UNSET, Struct, UnsetType


class ErrorDetail(Struct):
    """An error.

    The field `param` is the path of the invalid parameter. The field `retry_after_s` is Draftgate's
    extension.
    """

    message: str
    type: str
    param: str | None
    code: str | None
    retry_after_s: float | UnsetType = UNSET


class ErrorReply(Struct):
    """The body of errors in OpenAI's format."""

    error: ErrorDetail


@dataclass(frozen=True)
class Operation:
    """One method of one path.

    Attributes:
        reply: the body with status 200, as a struct or as content types.
        body: the struct of the request body.
        events: the data of its server-sent events, if it streams.
        form: the fields of a body that is a form, with their schemas.
        open: whether it needs no API key.
        unready: whether it returns the same body with status 503 if the check fails.
        errors: statuses of its errors.
        error: the body of its errors.
        parameters: parameters of path and query, as OpenAPI describes them.
        examples: bodies by name, each of which works with any model.
        alias: whether the path is another name of the operation before it.
    """

    method: str
    path: str
    summary: str
    reply: type | tuple[str, ...]
    body: type | None = None
    events: type | None = None
    form: Mapping[str, Mapping[str, Any]] | None = None
    open: bool = False
    unready: bool = False
    errors: tuple[int, ...] = ()
    error: type = ErrorReply
    parameters: tuple[Mapping[str, Any], ...] = ()
    examples: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    alias: bool = False

    @property
    def generates(self) -> bool:
        """Whether it generates a response, which may be a stream."""
        return self.body is not None and self.events is not None

    @property
    def name(self) -> str:
        """A unique name."""
        words = [w for w in self.path.replace("{", "").replace("}", "").split("/") if w != "v1"]
        return "_".join([self.method.lower(), *filter(None, words), *["alias"] * self.alias])


def in_path(name: str, **schema: Any) -> dict[str, Any]:
    """Return a parameter in the path."""
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string", **schema}}


def in_query(name: str, description: str, default: int, most: int) -> dict[str, Any]:
    """Return a whole number from 1 in the query."""
    schema = {"type": "integer", "minimum": 1, "maximum": most, "default": default}
    return {"name": name, "in": "query", "description": description, "schema": schema}


def in_query_text(name: str, description: str, **schema: Any) -> dict[str, Any]:
    """Return a text in the query."""
    text = {"type": "string", **schema}
    return {"name": name, "in": "query", "description": description, "schema": text}
