"""Requests that an upstream runs, forwarded as bytes with exactly one ending."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from http import HTTPStatus
from typing import Any, Final

import msgspec
from aiohttp import web

from draftgate.backends.base import UpstreamCall
from draftgate.backends.errors import BackendFailed, UpstreamFailed
from draftgate.backends.header_numbers import header_count, header_text
from draftgate.gateway.accounts import ANONYMOUS, Account
from draftgate.gateway.dispatch.admission import Entry
from draftgate.gateway.dispatch.upstreams.answer import UpstreamAnswer
from draftgate.gateway.dispatch.upstreams.error_bodies import is_missing_endpoint, read_error
from draftgate.gateway.dispatch.upstreams.forwarding import ForwardJob, RunningForward
from draftgate.gateway.errors import (
    ErrorFormat,
    UpstreamBroken,
    UpstreamRejection,
    as_gateway_error,
)
from draftgate.gateway.http.context import (
    ACCOUNT,
    NODE,
    READERS,
    REQUEST_ID,
    REQUEST_ID_HEADER,
    error_format,
    fingerprint,
    new_id,
    read_body,
    request_id_of,
)
from draftgate.gateway.http.direct import (
    Request,
    Response,
    begin_response,
    new_response,
    of_aiohttp,
    send_whole,
    target_of,
)
from draftgate.gateway.http.replies.rendering import error_event
from draftgate.gateway.http.requests.forwarded import (
    ForwardedFields,
    changed_fields,
    read_fields,
    rewrite_body,
)
from draftgate.gateway.http.requests.headers import (
    CLIENT_RATE_HEADER,
    FLOW_DEADLINE_HEADER,
    FLOW_HEADER,
    TPOT_HEADER,
    TTFT_HEADER,
    flow_of,
    retry_count,
    service_level,
)
from draftgate.gateway.http.stream import UNBUFFERED, EventStream, Heartbeats, OneEnding
from draftgate.gateway.model_service import ModelService
from draftgate.gateway.offload import offload
from draftgate.gateway.telemetry.answer_scan import AnswerScan
from draftgate.gateway.telemetry.watch import Ending, RequestWatch
from draftgate.policies.capacity import CapacityNeed
from draftgate.policies.types import RequestView, ServiceLevel
from draftgate.policies.values import replace

INLINE_BYTES: Final = 256 << 10
"""Larger bodies are parsed in a thread, because no callback may hold the event loop for longer than
5 ms. A body of 1 MB takes 7 ms, or 13 ms with a model name to replace. (Zen 4, two busy cores,
2026-11-21.)"""

WHOLE_BYTES: Final = 1 << 20
"""A whole response up to this size is sent once it is complete. The client then gets an error
instead of a part if the upstream breaks off. A completion of 32,000 tokens has 150 kB."""

_TRACE: Final = ("traceparent", "tracestate")
_ANTHROPIC: Final = ("anthropic-version", "anthropic-beta")
_FLOW: Final = (FLOW_HEADER, FLOW_DEADLINE_HEADER)
_PASSED_ON: Final = (
    *("Content-Type", "Accept", TTFT_HEADER, TPOT_HEADER, CLIENT_RATE_HEADER),
    *(*_FLOW, *_TRACE, *_ANTHROPIC),
)
"""Headers that the upstream gets, among them those of flows, because the upstream may be a
Draftgate. `Authorization` and `x-api-key` are excluded, because the client's key is for this node.
The node has its own key for the upstream (`--upstream-api-key-env`)."""


class _UpstreamError(UpstreamBroken):
    """The upstream responded with an error after comments were sent.

    The client gets the JSON of the error with `retry_after_s`, if the upstream has sent a time.
    """

    def __init__(self, json: bytes) -> None:
        super().__init__("the upstream responded with an error")
        self._json = json

    def body(self, wanted: ErrorFormat = ErrorFormat.OPENAI, request_id: str = "") -> bytes:
        """Return the upstream's JSON."""
        return self._json


async def forward(
    request: Request, model: ModelService, watch: RequestWatch, *, generates: bool = True
) -> Response:
    """Send a request to an upstream, and forward the response to the client.

    Args:
        generates: False for embeddings and scores, which have a prompt and no output.

    Raises:
        GatewayError: no upstream responds, and the client has not received anything.
        ConnectionResetError: the client has disconnected.
    """
    account = request[ACCOUNT]
    flow_of(request.headers)  # an invalid header is an error before the body is read
    wanted = service_level(request.headers)
    fields, body = await _read(request, model, account)
    if not generates:
        fields = replace(fields, stream=False, prompts=1, n=1, max_tokens=0)
    choices = fields.prompts * fields.n if generates else 0
    job = _job(request, body, fields, wanted)
    service = job.request.service
    watch.forwarding(fields.model or "", account.name, service, choices, stream=fields.stream)
    running = model.forwarder.run(job, watch.span)
    events = EventStream(request, request.app[READERS])
    whole = None
    async with OneEnding(events, watch, partial(error_event, wanted=error_format(request))):
        whole = await _send(request, running, events, watch, waits=fields.stream)
    return events.response if whole is None else whole


async def pass_on(
    request: web.Request, convert: Callable[[bytes], bytes] = lambda body: body
) -> web.StreamResponse:
    """Respond through an upstream to a request that generates nothing, such as `/v1/models`.

    Args:
        convert: a function that returns the body for the client. It gets that of a success.

    Raises:
        GatewayError: no upstream responds, and the client has not received anything.
    """
    model = request.app[NODE].models[0]  # a node with upstreams has one model
    with model.dispatcher.counted():
        _, body = await _read(request, model, ANONYMOUS)
        call = _call(request, body, service_level(request.headers))._replace(sequences=0)
        async with model.forwarder.run_uncounted(call) as answer:
            return of_aiohttp(await _send_whole(request, answer, convert=convert))


async def _send(
    request: Request,
    running: RunningForward,
    events: EventStream,
    watch: RequestWatch,
    *,
    waits: bool,
) -> Response | None:
    """Send the response. While a client waits for events, send comments first.

    Returns:
        The response if it was sent whole, or None if it was sent as events.
    """
    if not waits:
        async with running as answer:
            return await _respond(request, answer, events, watch)
    async with AsyncExitStack() as stack:
        with Heartbeats(events) as beats:
            answer = await stack.enter_async_context(running)
            await beats.sent()
        return await _respond(request, answer, events, watch)


async def _respond(
    request: Request, answer: UpstreamAnswer, events: EventStream, watch: RequestWatch
) -> Response | None:
    """Send the response as `_send` describes."""
    watch.forwarded(answer.worker_id, answer.plan)
    if answer.is_error:
        watch.fail(Ending.REJECTED, answer.status, None)
    # Sending here keeps the request in flight up to the last byte.
    try:
        if answer.exchange.streaming:
            await _send_events(events, answer, watch)
            return None
        if events.begun:
            raise await _error_after_comments(request, answer)
        return await _send_whole(request, answer, watch)
    finally:
        watch.settled(answer.usage())


async def _send_events(events: EventStream, answer: UpstreamAnswer, watch: RequestWatch) -> None:
    if not events.begun:
        events.response.headers.update({**answer.headers, **UNBUFFERED})
    events.reader.watch(None, lambda: answer.exchange.outputs)
    scan = AnswerScan() if watch.span.recording else None
    async for block in answer.blocks:
        if scan is not None:
            scan.read_events(block)
        # A comment means that the upstream itself waits. Events before the first output, such as
        # `response.created`, are no output.
        if answer.exchange.outputs and not block.startswith(b":"):
            watch.progressed(answer.exchange.outputs)
        await events.write(block)
        await events.coalesced()
    if scan is not None:
        watch.answered(scan)
    if answer.exchange.error_sent:
        reason = UpstreamFailed("the upstream sent an error event")
        watch.fail(Ending.FAILED, as_gateway_error(reason).status, reason)


async def _send_whole(
    request: Request,
    answer: UpstreamAnswer,
    watch: RequestWatch | None = None,
    convert: Callable[[bytes], bytes] = lambda body: body,
) -> Response:
    body = bytearray()
    async for block in answer.blocks:
        body += block
        if len(body) > WHOLE_BYTES:
            return await _send_large(request, answer, body, watch)
    headers, sent = answer.headers, bytes(body)
    if watch is not None and watch.span.recording and not answer.is_error:
        scan = AnswerScan()
        scan.read_whole(sent)
        watch.answered(scan)
    if not answer.is_error:
        sent = convert(sent)
    else:
        sent = _in_own_form(request, answer.status, sent)
        headers = {name: value for name, value in headers.items() if name.lower() != "content-type"}
        headers["Content-Type"] = "application/json"
    return await send_whole(request, sent, headers, answer.status)


async def _send_large(
    request: Request, answer: UpstreamAnswer, begun: bytearray, watch: RequestWatch | None
) -> Response:
    """Send a response as it arrives.

    The connection is cut if the upstream breaks off.
    """
    response = new_response(request, answer.headers, answer.status)
    await begin_response(request, response)
    try:
        await response.write(bytes(begun))
        async for block in answer.blocks:
            await response.write(block)
    except BackendFailed as error:
        if watch is not None:
            watch.fail(Ending.FAILED, as_gateway_error(error).status, error)
        response.force_close()
        if request.transport is not None:
            request.transport.abort()  # the client notices the missing last chunk
        return response
    await response.write_eof()
    return response


def _in_own_form(request: Request, status: int, body: bytes) -> bytes:
    """Return an error of the upstream unchanged, or in the form of the API if it has another."""
    wanted, found = error_format(request), read_error(body)
    is_openai = wanted is ErrorFormat.OPENAI
    if is_openai and found.has_openai_form:
        return body
    if not is_openai and found.has_anthropic_form:
        named = {**msgspec.json.decode(body), "request_id": request_id_of(request)}
        return msgspec.json.encode(named)
    message, code = found.message or f"the upstream responded with status {status}", found.code
    if is_missing_endpoint(status, found):
        message = f"the upstream does not support {request.method} {request.path}"
        code = "not_found" if status == HTTPStatus.NOT_FOUND else "not_offered"
    error = UpstreamRejection(message, status, kind=found.kind, param=found.param, code=code)
    return error.body(wanted, request_id_of(request))


async def _error_after_comments(request: Request, answer: UpstreamAnswer) -> UpstreamBroken:
    """Return the error for a response that is not a stream, after comments have been sent."""
    body = bytearray()
    async for block in answer.blocks:
        body += block
        if len(body) > WHOLE_BYTES:
            break
    if answer.is_error or read_error(bytes(body)).has_openai_form:
        found = msgspec.json.decode(_in_own_form(request, answer.status, bytes(body)))
        return _UpstreamError(msgspec.json.encode(_with_retry(found, answer)))
    return UpstreamBroken(
        f"the upstream responded with status {answer.status} instead of a stream of events"
    )


def _with_retry(found: dict[str, Any], answer: UpstreamAnswer) -> dict[str, Any]:
    """Return an error with the delay of a refusal, because the headers have been sent."""
    delay_s = header_count(answer.headers.get("Retry-After", ""))
    if delay_s is None:
        return found
    return {**found, "error": {**found["error"], "retry_after_s": float(delay_s)}}


async def _read(
    request: Request, model: ModelService, account: Account
) -> tuple[ForwardedFields, bytes]:
    """Return the fields of a request, and its body for the upstream."""
    body = await read_body(request)
    if len(body) <= INLINE_BYTES:
        return _read_fields(body, model, account)
    return await offload(_read_fields, body, model, account)


def _read_fields(
    body: bytes, model: ModelService, account: Account
) -> tuple[ForwardedFields, bytes]:
    card = model.fleet.card
    fields = read_fields(body, card.max_model_len)
    if not body:
        return fields, body
    names = (model.config.served_model_name, card.model_id)
    model.fleet.upstream_models.check(fields.model)
    return fields, rewrite_body(body, changed_fields(fields, names, account))


def _job(
    request: Request, body: bytes, fields: ForwardedFields, wanted: ServiceLevel
) -> ForwardJob:
    """Return the forwarder's job for a request, within the bounds of its account."""
    account = request[ACCOUNT]
    if fields.priority:
        wanted = replace(wanted, priority=fields.priority)
    service = account.capped(wanted)
    prompt, output = fields.prompt_tokens, fields.max_tokens
    choices = fields.prompts * fields.n
    most_tokens = prompt * fields.n + output * choices
    need = CapacityNeed(choices, prompt, most_tokens, service.tpot_s)
    admission = Entry(
        new_id(),
        (need,),
        output,
        service,
        account.name,
        account.share,
        fingerprint(account.name, body),
        retry_count(request.headers),
    )
    call = _call(request, body, service)._replace(sequences=choices)
    speculation = fields.mode, fields.max_draft_tokens
    view = RequestView(prompt, output, fields.temperature, *speculation, service)
    return ForwardJob(admission, call, view)


def _call(request: Request, body: bytes, service: ServiceLevel) -> UpstreamCall:
    """Return the call to the upstream, with the service level of the account."""
    headers = {name: request.headers[name] for name in _PASSED_ON if name in request.headers}
    client_service = service_level(request.headers)
    if service.ttft_s is not None and service.ttft_s != client_service.ttft_s:
        headers[TTFT_HEADER] = header_text(service.ttft_s * 1e3)
    if service.tpot_s is not None and service.tpot_s != client_service.tpot_s:
        headers[TPOT_HEADER] = header_text(service.tpot_s * 1e3)
    headers[REQUEST_ID_HEADER] = request[REQUEST_ID]
    path, mark, query = target_of(request).partition("?")
    return UpstreamCall(request.method, f"{path.rstrip('/')}{mark}{query}", headers, body)
