"""The OpenAPI 3.1 document of a node."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final

import msgspec
from aiohttp import web

from draftgate import __version__
from draftgate.backends.header_numbers import positive_pattern
from draftgate.gateway.errors import NotOffered, Unavailable
from draftgate.gateway.http.authentication import COOKIE
from draftgate.gateway.http.context import (
    BUDGET_HEADER,
    NODE,
    PRIORITY_HEADER,
    REQUEST_ID_HEADER,
    json_response,
)
from draftgate.gateway.http.openapi.operation import Operation
from draftgate.gateway.http.openapi.operations import OPERATIONS
from draftgate.gateway.http.openapi.schemas import components
from draftgate.gateway.http.requests.headers import (
    CLIENT_RATE_HEADER,
    FLOW_DEADLINE_HEADER,
    FLOW_HEADER,
    LONGEST_FLOW_ID,
    LONGEST_FLOW_S,
    LONGEST_NEXT_CALL_S,
    LONGEST_SESSION_ID,
    NEXT_CALL_HEADER,
    OUTPUT_HEADER,
    SESSION_HEADER,
    TPOT_HEADER,
    TTFT_HEADER,
)
from draftgate.gateway.offload import offload
from draftgate.gateway.served_model import ServedModel

JSON: Final = "application/json"

_INFO: Final = {
    "title": "Draftgate",
    "version": __version__,
    "description": (
        "OpenAI's API and Anthropic's Messages API, with a decision about speculation for every "
        "request."
    ),
    "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
}

_ERRORS: Final = {
    400: "A parameter is malformed or not supported. The error names it.",
    401: "API keys are required, and the request has no known key.",
    403: "The origin, the `Host` or the role of the API key is not accepted.",
    404: "The model, the stored response, the file, the batch or the worker does not exist.",
    408: "The body did not arrive in time.",
    409: "The worker cannot change its role while it runs, or a batch reads the file.",
    413: "The body is too large.",
    429: "The key's quota is used up, or the response would be too late. A retry may succeed.",
    501: "The node only forwards requests, or stores no files, so it does not have this endpoint.",
    503: "The node accepts no requests at present, but another node may.",
}

_REQUEST_ID: Final = {
    "description": "The request's id, either from the client or new.",
    "schema": {"type": "string", "minLength": 1, "maxLength": 128},
}

_SECONDS: Final = {"type": "integer", "minimum": 0}
_RETRY_HEADERS: Final = {
    "Retry-After": {
        "description": "Seconds after which a retry may succeed.",
        "schema": _SECONDS,
    },
    "retry-after-ms": {
        "description": "The delay in milliseconds, not rounded up to seconds.",
        "schema": _SECONDS,
    },
}

_SCHEMES: Final = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "key": {
        "type": "apiKey",
        "in": "header",
        "name": "x-api-key",
        "description": "The form of Anthropic's clients.",
    },
    "session": {
        "type": "apiKey",
        "in": "cookie",
        "name": COOKIE,
        "description": "The session of a browser, from `POST /session`.",
    },
}


async def get_document(request: web.Request) -> web.Response:
    """Return the OpenAPI document.

    The document has no bounds for model name and vocabulary until the model is loaded, or if the
    node serves several models.
    """
    try:
        node = request.app[NODE]
        served = node.served if len(node.models) == 1 else None
    except (Unavailable, NotOffered):  # the model is loading, or belongs to an upstream
        served = None
    return json_response(
        await offload(document, served)
    )  # the first call takes tens of milliseconds


@lru_cache(maxsize=2)
def document(served: ServedModel | None) -> bytes:
    """Return the document as JSON.

    Args:
        served: the model, once it is loaded. Its name and vocabulary become bounds.
    """
    parts = {part for one in OPERATIONS for part in (one.body, one.reply, one.events, one.error)}
    types = {part for part in parts if isinstance(part, type)}
    ordered = sorted(types, key=lambda one: one.__name__)
    refs, schemas = components(ordered, served)
    by_type = dict(zip(ordered, refs, strict=True))
    paths: dict[str, Any] = {}
    for operation in OPERATIONS:
        entry = _operation(operation, by_type, served)
        paths.setdefault(operation.path, {})[operation.method.lower()] = entry
    whole = {
        "openapi": "3.1.0",
        "info": _INFO,
        "servers": [{"url": "/"}],
        "paths": paths,
        "components": {
            "schemas": schemas,
            "headers": {REQUEST_ID_HEADER: _REQUEST_ID},
            "securitySchemes": _SCHEMES,
        },
    }
    return msgspec.json.encode(whole)


def _operation(
    operation: Operation, refs: Mapping[Any, Any], served: ServedModel | None
) -> dict[str, Any]:
    parameters = [_with_model(one, served) for one in operation.parameters]
    text = "An id for logs and the response. A long or unprintable id is replaced."
    parameters.append(_header(REQUEST_ID_HEADER, text, {"type": "string"}))
    if operation.generates:
        positive = {"type": "string", "pattern": positive_pattern()}
        for name, token in ((TTFT_HEADER, "first token"), (TPOT_HEADER, "each further token")):
            text = f"Target for the {token}, in milliseconds."
            parameters.append(_header(name, text, positive))
        text = "Tokens per second that the client can take, as an upper bound."
        parameters.append(_header(CLIENT_RATE_HEADER, text, positive))
        text = "The session of the request, which stays on its upstream server."
        session = {"type": "string", "minLength": 1, "maxLength": LONGEST_SESSION_ID}
        parameters.append(_header(SESSION_HEADER, text, session))
        text = "The number of output tokens that the client expects of each choice."
        number = {"type": "string", "pattern": "^[0-9]{1,15}$"}
        parameters.append(_header(OUTPUT_HEADER, text, number))
        text = "Seconds after the response within which the conversation continues, at most 3600."
        # The pattern covers all numbers with fewer digits than the longest time.
        short = positive_pattern(len(str(int(LONGEST_NEXT_CALL_S))) - 1)
        parameters.append(_header(NEXT_CALL_HEADER, text, {"type": "string", "pattern": short}))
    if 429 in operation.errors:
        parameters += _FLOW_HEADERS
    entry: dict[str, Any] = {
        "operationId": operation.name,
        "summary": operation.summary,
        "parameters": parameters,
        "responses": _responses(operation, refs),
    }
    if not operation.open:  # the empty scheme means a node without keys
        entry["security"] = [{}, *({name: []} for name in _SCHEMES)]
    if operation.body is not None:
        examples = {name: {"value": body} for name, body in operation.examples.items()}
        content = {JSON: {"schema": refs[operation.body], "examples": examples}}
        entry["requestBody"] = {"required": True, "content": content}
    if operation.form is not None:
        form: dict[str, Any] = {"type": "object", "additionalProperties": False}
        form |= {"properties": operation.form, "required": [*operation.form]}
        content = {"multipart/form-data": {"schema": form}}
        entry["requestBody"] = {"required": True, "content": content}
    return entry


def _with_model(parameter: Mapping[str, Any], served: ServedModel | None) -> Mapping[str, Any]:
    if (parameter["name"], parameter["in"]) != ("model", "path") or served is None:
        return parameter
    return {**parameter, "schema": {**parameter["schema"], "enum": [served.name]}}


def _header(name: str, description: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": name, "in": "header", "description": description, "schema": schema}


_FLOW_HEADERS: Final = (
    _header(
        FLOW_HEADER,
        "The flow that the request belongs to, which is unique within the API key.",
        {"type": "string", "minLength": 1, "maxLength": LONGEST_FLOW_ID, "pattern": "^[ -~]*$"},
    ),
    _header(
        FLOW_DEADLINE_HEADER,
        "Time from the arrival of the flow's first request to the end of its last response, in "
        "milliseconds. Only the value of the first request counts.",
        {"type": "string", "pattern": positive_pattern(len(str(int(LONGEST_FLOW_S * 1e3))) - 1)},
    ),
)


def _responses(operation: Operation, refs: Mapping[Any, Any]) -> dict[str, Any]:
    reply = operation.reply
    if isinstance(reply, type):
        content = {JSON: {"schema": refs[reply]}}
    else:
        content = {
            name: {"schema": {"type": "object" if name == JSON else "string"}} for name in reply
        }
    if operation.events is not None:
        event = refs[operation.events]
        content["text/event-stream"] = {
            "schema": _last_or(event) if operation.generates else _event(event)
        }
    found = {"200": _response(operation.summary, content)}
    if operation.generates:
        found["200"]["headers"] |= _NOTES
    if operation.unready:
        found["503"] = _response("The same body if the check fails.", content)
    error = {JSON: {"schema": refs[operation.error]}}
    for status in operation.errors if operation.open else sorted({401, 403, *operation.errors}):
        page = content if status == 404 and "text/html" in content else {}
        found[str(status)] = _response(_ERRORS[status], {**error, **page})
        if status in {429, 503}:
            found[str(status)]["headers"] |= _RETRY_HEADERS
    return found


_NOTES: Final = {
    PRIORITY_HEADER: {
        "description": "The priority of the request, if the client has asked for a more urgent one "
        "than its API key permits.",
        "schema": {"type": "integer"},
    },
    BUDGET_HEADER: {
        "description": "A warning about a soft budget, if the key or its team has exceeded it.",
        "schema": {"type": "string"},
    },
}
"""Headers that only some responses have."""


def _last_or(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of each event of a response, which ends with an event of its own."""
    text = (
        "An event of a stream (`stream: true`). The last event is `[DONE]`, or `message_stop` in "
        "Anthropic's format."
    )
    event = _event(data)
    event["properties"]["data"] = {"anyOf": [{"const": "[DONE]"}, event["properties"]["data"]]}
    return {"description": text, **event}


def _event(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of each event of a stream."""
    of_data = {"contentMediaType": JSON, "contentSchema": data}
    properties = {"event": {"type": "string"}, "data": of_data}
    return {"type": "object", "properties": properties, "required": ["data"]}


def _response(description: str, content: Mapping[str, Any]) -> dict[str, Any]:
    headers = {REQUEST_ID_HEADER: {"$ref": f"#/components/headers/{REQUEST_ID_HEADER}"}}
    return {"description": description, "headers": headers, "content": content}
