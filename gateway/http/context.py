"""Helpers that handlers share, such as application keys, accounts, bodies and JSON responses."""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
from typing import Final

import msgspec
from aiohttp import web

from draftgate.backends.header_numbers import header_count
from draftgate.backends.types import Task
from draftgate.gateway.accounts import Account, Role, similar_name
from draftgate.gateway.config import ServeConfig
from draftgate.gateway.errors import (
    BodyTooLarge,
    ErrorFormat,
    Forbidden,
    InvalidRequest,
    ModelNotFound,
    RequestTimeout,
    Starting,
    invalid,
)
from draftgate.gateway.http.authentication import Session, Sessions
from draftgate.gateway.http.content_encoding import DECODING, body_encoding, read_decoded
from draftgate.gateway.http.direct import DirectRequest, Request
from draftgate.gateway.http.readers import Readers
from draftgate.gateway.lifecycle import RETRY_STARTING_S
from draftgate.gateway.model_service import ModelService
from draftgate.gateway.node import Node

NODE: Final = web.AppKey("node", Node)
READERS: Final = web.AppKey("readers", Readers)
SESSIONS: Final = web.AppKey("sessions", Sessions)

ACCOUNT: Final = web.RequestKey("account", Account)
"""The account of a request."""

SESSION: Final = web.RequestKey("session", Session)
"""The session of a browser. Only requests of logged-in browsers have this key."""

REQUEST_ID: Final = web.RequestKey("request_id", str)
"""The id of a request in logs and in the `x-request-id` header."""

MESSAGES_PATH: Final = "/v1/messages"
"""The path of Anthropic's API, below which errors have Anthropic's format."""

BODY: Final = web.RequestKey("body", bytes)
"""The decoded body of a request. Only requests whose body has been read have this key."""

ERROR_CODE: Final = web.RequestKey("error_code", str)
"""The code of the error that a request got. Only such requests have this key."""

NOTES: Final = web.RequestKey("notes", dict[str, str])
"""Further headers of the response, by name. Only requests with one have this key."""

PASSES_ON: Final = web.RequestKey("passes_on", bool)
"""Whether another model gets the request after an error. Only requests with a chain of models have
this key."""

BUDGET_HEADER: Final = "x-draftgate-budget-warning"
"""The header of responses beyond a soft budget."""

PRIORITY_HEADER: Final = "x-draftgate-priority"
"""The header with the priority of a request that has asked for a more urgent one than its key
permits."""

REQUEST_ID_HEADER: Final = "x-request-id"

ANTHROPIC_ID_HEADER: Final = "request-id"
"""The name of `REQUEST_ID_HEADER` in Anthropic's API, whose clients read only this one."""

_MODELS_PATH: Final = "/v1/models"
"""A path of both APIs. The headers of Anthropic's clients choose the format."""

_ANTHROPIC_HEADERS: Final = ("anthropic-version", "x-api-key")


class _Priority(msgspec.Struct):
    """The priority in the body of a request."""

    priority: int | None = None


class _Naming(msgspec.Struct):
    """The name of the model in the body of a request."""

    model: str | None = None


_naming: Final = msgspec.json.Decoder(_Naming)
_priority: Final = msgspec.json.Decoder(_Priority)
JSON_HEADERS: Final = {"Content-Type": "application/json"}
LONGEST_ID: Final = 128
"""Maximum characters of the id of a request."""


def client_request_id(request: web.BaseRequest | DirectRequest) -> str:
    """Return the request id that the client sent, or a new id if that id is long or unprintable."""
    sent = request.headers.get(REQUEST_ID_HEADER, "")
    if 0 < len(sent) <= LONGEST_ID and sent.isascii() and sent.isprintable():
        return sent
    return new_id()


def request_id_of(request: web.BaseRequest | DirectRequest) -> str:
    """Return the id of a request, which does not change from the first call on."""
    found = request.get(REQUEST_ID)
    if found is None:
        found = request[REQUEST_ID] = client_request_id(request)
    return found


def is_anthropic(request: web.BaseRequest | DirectRequest) -> bool:
    """Return whether a request is one of Anthropic's API, by its path or by its headers."""
    if isinstance(request, DirectRequest):
        return request.path == MESSAGES_PATH
    path = f"{request.path}/"
    if path.startswith(f"{_MODELS_PATH}/"):
        return any(name in request.headers for name in _ANTHROPIC_HEADERS)
    return path.startswith(f"{MESSAGES_PATH}/")


def error_format(request: web.BaseRequest | DirectRequest) -> ErrorFormat:
    """Return the format of the errors of a request."""
    return ErrorFormat.ANTHROPIC if is_anthropic(request) else ErrorFormat.OPENAI


def add_note(request: Request, name: str, text: str) -> None:
    """Add a header to the response. Characters other than ASCII, as in names, become `?`."""
    request.setdefault(NOTES, {})[name] = re.sub("[^ -~]", "?", text)


def note_priority(request: Request, wanted: int | None, priority: int) -> None:
    """Add a header if a request has a less urgent priority than the client has asked for."""
    if wanted is not None and wanted < priority:
        add_note(request, PRIORITY_HEADER, str(priority))


def new_id() -> str:
    """Return a unique id."""
    return os.urandom(12).hex()


def fingerprint(tenant: str, body: bytes) -> int:
    """Return a 64-bit hash that is equal for equal bodies of a tenant.

    The hash of a megabyte takes a millisecond.
    """
    digest = hashlib.blake2b(body, digest_size=8, key=tenant.encode()[:64])
    return int.from_bytes(digest.digest(), "big")


async def read_body(request: Request) -> bytes:
    """Return the body, decoded.

    Raises:
        BodyTooLarge: the body exceeds the limit.
        UnsupportedEncoding: the body has an encoding that the server does not decode.
        InvalidRequest: the transfer or content encoding of the body is broken.
        RequestTimeout: the body did not arrive in time.
    """
    if isinstance(request, DirectRequest):
        return request.body
    body = request.get(BODY)
    if body is None:
        body = request[BODY] = await _read_in_time(request, request.app[NODE].config)
    return body


def replace_body(request: Request, body: bytes) -> None:
    """Use another body of a request, whose body has been read, from now on."""
    if isinstance(request, DirectRequest):
        request.body = body
    else:
        request[BODY] = body


async def _read_in_time(request: web.Request, config: ServeConfig) -> bytes:
    """Return the body, as `read_body` does for its first call."""
    most, encoding = config.max_body_bytes, body_encoding(request.headers)
    if (request.content_length or 0) > most:
        raise BodyTooLarge(most)
    try:
        if encoding is None and request.content.is_eof():
            return await request.read()
        async with asyncio.timeout(config.body_timeout_s):
            if encoding is None:
                return await request.read()
            return await read_decoded(request.content, encoding, most, request.app[DECODING])
    except TimeoutError:
        seconds = f"{config.body_timeout_s:g} s"
        raise RequestTimeout(f"the body did not arrive within {seconds}") from None
    except web.HTTPRequestEntityTooLarge:
        raise BodyTooLarge(most) from None
    except web.RequestPayloadError as error:
        reason = " ".join(str(error).split()).removeprefix("400, message: ")
        raise InvalidRequest(f"the body cannot be read: {reason}") from None


async def requested_model(request: Request, node: Node, task: Task = Task.GENERATE) -> ModelService:
    """Return the model that a request names.

    A request without a name, or whose body cannot be read, gets the first model whose main task it
    needs, or else that offers the task. Its endpoint explains what is wrong with the body.

    Raises:
        ModelNotFound: the node serves several models, and none of this name.
        Starting: the model loads, no worker of it has been found yet, or the node has just started
            and may not know all models.
        BodyTooLarge, InvalidRequest, RequestTimeout: as in `read_body`.
    """
    first, *further = node.models
    if not further and not node.may_miss_models:
        return first  # the usual case
    name = await requested_name(request)
    if name is None:
        return _model_for(task, node)
    model = node.model_named(name)
    if model is not None and not model.is_known and model.fleet.size:
        raise model.starting()
    if node.may_miss_models if model is None else not model.is_known:
        why = f"this node has no worker of the model {name!r} yet"
        raise Starting(why, retry_after_s=RETRY_STARTING_S)
    if model is None:
        listed = (one for model in node.models for one in model.listed_names)
        raise ModelNotFound(name, *filter(request[ACCOUNT].allows, listed))
    return model


def _model_for(task: Task, node: Node) -> ModelService:
    """Return the model for requests that name none, which does not depend on what has loaded.

    Raises:
        Starting: a model that still loads may be the one.
    """
    offering = (model for model in node.models if task in model.tasks)
    found = min(offering, key=lambda model: model.tasks.index(task), default=None)
    for model in node.models:
        if not model.is_known and model.fleet.size:
            raise model.starting()
        if model is found and model.tasks[0] is task:
            break
    return found or node.models[0]


async def requested_name(request: Request) -> str | None:
    """Return the name of the model in the body, or None without one or if it is empty.

    Raises:
        BodyTooLarge, InvalidRequest, RequestTimeout: as in `read_body`.
    """
    try:
        return _naming.decode(await read_body(request)).model or None
    except (ValueError, RecursionError):
        return None  # the endpoint explains what is wrong


def requested_priority(body: bytes) -> int | None:
    """Return the priority in a body, or None without one."""
    try:
        return _priority.decode(body).priority
    except (ValueError, RecursionError):
        return None


def check_query(request: web.Request, *known: str) -> None:
    """Check that the query has no other parameters than these.

    A misspelt filter would return what it should exclude.

    Raises:
        InvalidRequest: a parameter is not one of them.
    """
    for name in request.query:
        if name not in known:
            hint = similar_name(name, known) if known else "it has none"
            raise invalid(name, f"is not a parameter of {request.path}; {hint}")


def node_of_operator(request: web.Request) -> Node:
    """Return the node, if the client is an operator.

    Raises:
        Forbidden: the API key does not belong to an operator.
    """
    if request[ACCOUNT].role is not Role.OPERATOR:
        raise Forbidden("this endpoint needs the API key of an operator")
    return request.app[NODE]


def query_number(request: web.Request, name: str, default: int, most: int) -> int:
    """Return a whole number from the query.

    Raises:
        InvalidRequest: the number is not between 1 and `most`.
    """
    text = request.query.get(name, str(default))
    number = header_count(text)
    if number is not None and 1 <= number <= most:
        return number
    raise invalid(name, f"must be a whole number from 1 to {most}, not {text!r}")


def json_response(reply: msgspec.Struct | bytes, status: int = 200) -> web.Response:
    """Return a response whose body is a struct or its JSON."""
    body = reply if isinstance(reply, bytes) else msgspec.json.encode(reply)
    return web.Response(body=body, status=status, headers=JSON_HEADERS)
