"""The OpenAPI 3.1 document of a node."""

from __future__ import annotations

import copy
from functools import lru_cache
from typing import Any, Final

import msgspec
from aiohttp import web
from msgspec import Struct

from draftgate import __version__
from draftgate.gateway.errors import NotOffered, Unavailable
from draftgate.gateway.http.context import NODE, json_response
from draftgate.gateway.http.openapi.operations import OPERATIONS, Operation
from draftgate.gateway.http.openapi.schemas import components
from draftgate.gateway.http.requests.headers import TPOT_HEADER, TTFT_HEADER
from draftgate.gateway.offload import offload
from draftgate.gateway.served import Served

JSON: Final = "application/json"

_INFO: Final = {
    "title": "Draftgate",
    "version": __version__,
    "description": "OpenAI's API, with a decision about speculation for every request.",
    "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
}

_ERRORS: Final = {
    400: "A parameter is malformed, or not supported; it is named.",
    401: "Keys are required here, and none was sent that is known.",
    404: "There is no such model.",
    413: "The body is too large.",
    429: "Not now: the key's quota is used up, or the answer would come too late.",
    503: "The node takes no requests now; another one, or this one later, may.",
}

_REQUEST_ID: Final = {
    "description": "The request's id: the client's, if it sent one, else a new one.",
    "schema": {"type": "string", "minLength": 1, "maxLength": 128},
}

_RETRY_AFTER: Final = {
    "description": "Seconds after which trying again may help.",
    "schema": {"type": "integer", "minimum": 0},
}


_RETRY_AFTER_MS: Final = {
    "description": "The same in milliseconds, not rounded up to seconds.",
    "schema": {"type": "integer", "minimum": 0},
}

_SCHEMES: Final = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "browser": {
        "type": "http",
        "scheme": "basic",
        "description": "Any name, and the key as password.",
    },
}


class ErrorDetail(Struct):
    """What went wrong; `param` is the path of the parameter at fault."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(Struct):
    """Every error has this shape."""

    error: ErrorDetail


async def get_document(request: web.Request) -> web.Response:
    """Return the OpenAPI document; without a model it names no model and no vocabulary."""
    try:
        served = request.app[NODE].served
    except (Unavailable, NotOffered):  # the model is loading, or belongs to an upstream
        served = None
    return json_response(await offload(document, served))  # takes tens of milliseconds, once


@lru_cache(maxsize=2)
def document(served: Served | None) -> bytes:
    """Return the document as JSON.

    Args:
        served: the model, once it is loaded: its name and vocabulary are bounds, too.
    """
    types = {ErrorReply}
    for operation in OPERATIONS:
        parts = (operation.body, operation.reply, operation.events)
        types |= {part for part in parts if part is not None and not isinstance(part, str | tuple)}
    ordered = sorted(types, key=lambda one: one.__name__)
    refs, schemas = components(ordered, served)
    by_type = dict(zip(ordered, refs, strict=True))
    paths: dict[str, Any] = {}
    for operation in OPERATIONS:
        entry = _operation(operation, by_type)
        if served is not None:
            _name_model(entry["parameters"], served)
        paths.setdefault(operation.path, {})[operation.method.lower()] = entry
    whole = {
        "openapi": "3.1.0",
        "info": _INFO,
        "servers": [{"url": "/"}],
        "paths": paths,
        "components": {
            "schemas": schemas,
            "headers": {"x-request-id": _REQUEST_ID},
            "securitySchemes": _SCHEMES,
        },
    }
    return msgspec.json.encode(whole)


def _operation(operation: Operation, refs: dict[Any, Any]) -> dict[str, Any]:
    parameters = [*map(copy.deepcopy, operation.parameters), _id_parameter()]
    entry: dict[str, Any] = {
        "operationId": operation.name,
        "summary": operation.summary,
        "parameters": parameters,
        "responses": _responses(operation, refs),
    }
    if not operation.open:  # where there are keys; where there are none, nobody needs one
        entry["security"] = [{}, *({name: []} for name in _SCHEMES)]
    if operation.events is not None:
        parameters += [_target(TTFT_HEADER, "first token"), _target(TPOT_HEADER, "further tokens")]
    if operation.body is not None:
        examples = {name: {"value": body} for name, body in operation.examples.items()}
        content = {JSON: {"schema": refs[operation.body], "examples": examples}}
        entry["requestBody"] = {"required": True, "content": content}
    return entry


def _name_model(parameters: list[dict[str, Any]], served: Served) -> None:
    for parameter in parameters:
        if parameter["name"] == "model":
            parameter["schema"]["enum"] = [served.name]


def _responses(operation: Operation, refs: dict[Any, Any]) -> dict[str, Any]:
    reply = operation.reply
    if isinstance(reply, str | tuple):
        names = (reply,) if isinstance(reply, str) else reply
        content: dict[str, Any] = {
            name: {"schema": {"type": "object" if name == JSON else "string"}} for name in names
        }
    else:
        content = {JSON: {"schema": refs[reply]}}
    if operation.events is not None:
        content["text/event-stream"] = {"schema": _event(refs[operation.events])}
    found = {"200": _response(operation.summary, content)}
    if operation.unready:
        found["503"] = _response("The same, while it is not so.", content)
    error = {JSON: {"schema": refs[ErrorReply]}}
    for status in operation.errors if operation.open else sorted({401, *operation.errors}):
        found[str(status)] = _response(_ERRORS[status], error)
        if status in {429, 503}:
            found[str(status)]["headers"] |= {
                "Retry-After": _RETRY_AFTER,
                "retry-after-ms": _RETRY_AFTER_MS,
            }
    return found


def _event(data: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of each event of a stream."""
    text = "An event of a stream (`stream: true`). Chats and completions end with `[DONE]`."
    of_data = {"anyOf": [{"const": "[DONE]"}, {"contentMediaType": JSON, "contentSchema": data}]}
    properties = {"event": {"type": "string"}, "data": of_data}
    return {"type": "object", "description": text, "properties": properties, "required": ["data"]}


def _response(description: str, content: dict[str, Any]) -> dict[str, Any]:
    headers = {"x-request-id": {"$ref": "#/components/headers/x-request-id"}}
    return {"description": description, "headers": headers, "content": content}


def _id_parameter() -> dict[str, Any]:
    text = "An id for logs and the answer; one that is long or not printable is replaced."
    schema = {"type": "string"}
    return {"name": "x-request-id", "in": "header", "description": text, "schema": schema}


def _target(name: str, what: str) -> dict[str, Any]:
    text = f"How soon the {what} should come, in milliseconds."
    schema = {"type": "number", "exclusiveMinimum": 0}
    return {"name": name, "in": "header", "description": text, "schema": schema}
