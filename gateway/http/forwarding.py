"""Requests that an upstream runs, forwarded as bytes with exactly one ending."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from http import HTTPStatus
from typing import Any, Final, TypeVar

import msgspec
from aiohttp import web

from draftgate.backends.base import UpstreamCall
from draftgate.backends.errors import BackendFailed, UpstreamFailed
from draftgate.backends.header_numbers import header_count, header_text
from draftgate.gateway.accounts import ANONYMOUS, Account
from draftgate.gateway.dispatch.admission import Entry
from draftgate.gateway.dispatch.upstreams.costs import UpstreamCosts
from draftgate.gateway.dispatch.upstreams.error_bodies import is_missing_endpoint, read_error
from draftgate.gateway.dispatch.upstreams.fallbacks import Turn
from draftgate.gateway.dispatch.upstreams.forward_state import LOST, NEW
from draftgate.gateway.dispatch.upstreams.forwarding import ForwardedRequest
from draftgate.gateway.dispatch.upstreams.prefixes import ForwardedPrompt
from draftgate.gateway.dispatch.upstreams.refusals import WHOLE_BYTES, read_begin
from draftgate.gateway.errors import (
    ErrorFormat,
    GatewayError,
    UpstreamBroken,
    UpstreamRejection,
    as_gateway_error,
)
from draftgate.gateway.http.context import (
    ACCOUNT,
    REQUEST_ID,
    error_format,
    fingerprint,
    new_id,
    note_priority,
    request_id_of,
)
from draftgate.gateway.http.direct import DirectRequest, Request, Response, of_headers
from draftgate.gateway.http.received import INLINE_BYTES, Received, read_received, read_request
from draftgate.gateway.http.replies.rendering import error_event
from draftgate.gateway.http.requests.forwarded import ForwardedFields
from draftgate.gateway.http.requests.headers import (
    HINTS,
    TPOT_HEADER,
    TTFT_HEADER,
    Stated,
    read_stated,
)
from draftgate.gateway.http.requests.upstream_prompts import (
    ENCODED_INLINE_BYTES,
    encode_forwarded,
    session_id,
)
from draftgate.gateway.http.sending import begin_response, new_response, of_aiohttp, send_whole
from draftgate.gateway.http.stream import (
    UNBUFFERED,
    EventStream,
    Heartbeats,
    OneEnding,
    event_stream,
)
from draftgate.gateway.http.translation.translations import ChatTranslation, Translation
from draftgate.gateway.model_service import ModelService
from draftgate.gateway.offload import offload
from draftgate.gateway.telemetry.answer_scan import AnswerScan
from draftgate.gateway.telemetry.ending import Ending
from draftgate.gateway.telemetry.watch import RequestWatch
from draftgate.policies.capacity import CapacityNeed
from draftgate.policies.types import RequestView, ServiceLevel
from draftgate.policies.values import replace

T = TypeVar("T")

_TRACE: Final = ("traceparent", "tracestate")
_ANTHROPIC: Final = ("anthropic-version", "anthropic-beta")
_PASSED_ON: Final = ("Content-Type", "Accept", *HINTS, *_TRACE, *_ANTHROPIC)
"""Headers that the upstream gets. `Authorization` and `x-api-key` are excluded, because the
client's key is for this node, which has its own key for the upstream (`--upstream-api-key-env`)."""


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
    request: Request,
    model: ModelService,
    watch: RequestWatch,
    *,
    generates: bool = True,
    translate: type[ChatTranslation] | None = None,
    turn: Turn | None = None,
) -> Response:
    """Send a request to an upstream, and forward the response to the client.

    Args:
        turn: the models of a chain that may respond, or None without a chain.
        generates: False for embeddings and scores, which have a prompt and no output.
        translate: the translation for upstreams that have only chats, or None without one.

    Raises:
        GatewayError: no upstream responds, and the client has not received anything.
        ConnectionResetError: the client has disconnected.
    """
    # An invalid header is an error before the body is read.
    stated = of_headers(request, read_stated)
    wanted = stated.service
    account = request[ACCOUNT]
    if isinstance(request, DirectRequest) and len(request.body) <= INLINE_BYTES:
        received = read_received(request.body, model, account)
    else:
        received = await read_request(request, model, account)
    fields = received.fields
    if not generates:
        fields = replace(fields, stream=False, prompts=1, n=1, max_tokens=0)
    prompt = None
    if generates and len(model.fleet.workers) > 1:
        prompt = await _read_prompt(request, model, received, stated)
    if prompt is not None and prompt.blocks is not None:
        fields = replace(fields, prompt_tokens=len(prompt.blocks.token_ids))
    entry = _entry(account, received, fields, stated)
    if fields.sent_priority is not None:
        note_priority(request, fields.priority, entry.service.priority)
    service, choices = entry.service, entry.needs[0].sequences
    stream, outputs = fields.stream, choices if generates else 0
    watch.forwarding(fields.model or "", entry.tenant, service, outputs, stream=stream)
    call = _call(request, received, service, wanted, sequences=choices, stream=stream)
    entry.shown_id = request[REQUEST_ID]
    failure: Callable[[GatewayError, str], bytes]
    failure = partial(error_event, wanted=error_format(request))
    if translate is not None:
        translation = translate(request.path, received.body, entry.request_id, failure)
        call, failure = call._replace(translation=translation), translation.failure
    sent = ForwardedRequest(
        model.forwarder,
        call,
        entry,
        RequestView(
            fields.prompt_tokens,
            fields.max_tokens,
            fields.temperature,
            fields.mode,
            fields.max_draft_tokens,
            service,
        ),
        watch.span,
        watch,
        prompt,
        turn,
    )
    costs = model.forwarder.costs
    if not fields.stream:
        await sent.start()
        if not sent.streaming:
            return await _ended(sent, watch, _send_whole(request, sent, watch), costs)
    events = event_stream(request)
    whole = None
    async with OneEnding(events, watch, failure):
        whole = await _ended(sent, watch, _send_events(request, sent, events, watch), costs)
    return events.response if whole is None else whole


async def pass_on(
    request: web.Request,
    model: ModelService,
    convert: Callable[[bytes], bytes] = lambda body: body,
    translate: type[Translation] | None = None,
) -> web.StreamResponse:
    """Respond through an upstream to a request that generates nothing, such as `/v1/models`.

    Args:
        model: the upstreams.
        convert: a function that returns the body for the client. It gets that of a success.
        translate: the translation for upstreams without the endpoint, or None without one.

    Raises:
        GatewayError: no upstream responds, and the client has not received anything.
    """
    with model.dispatcher.counted():
        received = await read_request(request, model, ANONYMOUS)
        wanted = of_headers(request, read_stated).service
        call = _call(request, received, wanted, wanted, sequences=0)
        if translate is not None:
            call = call._replace(translation=translate(request.path.rstrip("/"), call.body))
        sent = ForwardedRequest(model.forwarder, call)
        await sent.start()
        sending = _send_whole(request, sent, convert=convert)
        return of_aiohttp(await _ended(sent, None, sending))


async def _ended(
    sent: ForwardedRequest,
    watch: RequestWatch | None,
    sending: Coroutine[Any, Any, T],
    costs: UpstreamCosts | None = None,
) -> T:
    """Return the result of sending a response, and end the request at its upstream."""
    error = usage = None
    try:
        return await sending
    except BaseException as raised:
        error = raised
        raise
    finally:
        if watch is not None and sent.has_responded:
            watch.forwarded(sent.worker_id, sent.plan)
            if sent.is_error:
                watch.fail(Ending.REJECTED, sent.status, None)
            usage = sent.usage()
            watch.settled(usage)
            if costs is not None and not sent.is_error:
                watch.cost_usd = costs.charge(sent)
        await sent.end(error, usage)


async def _send_events(
    request: Request, sent: ForwardedRequest, events: EventStream, watch: RequestWatch
) -> Response | None:
    """Send a response as events, and comments while a client waits for it.

    Returns:
        The response if it was sent whole because it has no events, or None.
    """
    if sent.state is NEW:
        with Heartbeats(events) as beats:
            await sent.start()
            await beats.sent()
    if not sent.streaming:
        if events.begun:
            raise await _error_after_comments(request, sent)
        return await _send_whole(request, sent, watch)
    if not events.begun:
        events.response.headers.update({**sent.headers, **UNBUFFERED})
    events.reader.watch(None, lambda: sent.outputs)
    scan = AnswerScan() if watch.span.recording else None
    while block := await sent.read() or (
        await _resumed(sent, events) if sent.state is LOST else b""
    ):
        if scan is not None:
            scan.read_events(block)
        # A comment means that the upstream itself waits. Events before the first output, such as
        # `response.created`, are no output.
        outputs = sent.outputs
        if outputs and not block.startswith(b":"):
            watch.progressed(outputs)
        await events.write(block)
        if events.reader.pacing.hold_s:
            await events.coalesced()
    if scan is not None:
        watch.answered(scan)
    if sent.error_sent:
        reason = UpstreamFailed("the upstream sent an error event")
        watch.fail(Ending.FAILED, as_gateway_error(reason).status, reason)
    return None


async def _resumed(sent: ForwardedRequest, events: EventStream) -> bytes:
    """Return the next bytes of a stream whose upstream was lost, or nothing at its end."""
    block = b""
    while sent.state is LOST and not block:
        with Heartbeats(events) as beats:
            await sent.resume()
            await beats.sent()
        block = await sent.read()
    return block


async def _send_whole(
    request: Request,
    sent: ForwardedRequest,
    watch: RequestWatch | None = None,
    convert: Callable[[bytes], bytes] | None = None,
) -> Response:
    """Send a response once it is complete, unless it is large."""
    headers, body = sent.headers, sent.body
    if body is None:
        body, is_whole = await read_begin(sent.read, WHOLE_BYTES)
        if not is_whole:
            if sent.translation is not None:
                raise UpstreamBroken(f"the upstream's response exceeds {WHOLE_BYTES} bytes")
            return await _send_large(request, sent, body, watch)
    if sent.is_error:
        body = _in_own_form(request, sent, body)
        headers = {name: value for name, value in headers.items() if name.lower() != "content-type"}
        headers["Content-Type"] = "application/json"
    elif watch is not None and watch.span.recording:
        scan = AnswerScan()
        scan.read_whole(body)
        watch.answered(scan)
    elif convert is not None:
        body = convert(body)
    if sent.translation is not None and not sent.is_error:
        is_long = len(body) > INLINE_BYTES
        translate = sent.translation.convert
        body = await offload(translate, body) if is_long else translate(body)
    return await send_whole(request, body, headers, sent.status)


async def _send_large(
    request: Request, sent: ForwardedRequest, begin: bytes, watch: RequestWatch | None
) -> Response:
    """Send a response as it arrives, and cut the connection if the upstream breaks off."""
    response = new_response(request, sent.headers, sent.status)
    await begin_response(request, response)
    try:
        await response.write(begin)
        while block := await sent.read():
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


def _in_own_form(request: Request, sent: ForwardedRequest, body: bytes) -> bytes:
    """Return an error of the upstream unchanged, or in the form of the API if it has another."""
    wanted, found, status = error_format(request), read_error(body), sent.status
    is_openai = wanted is ErrorFormat.OPENAI
    if sent.translation is not None and found.param is not None:
        found = found._replace(param=sent.translation.name_param(found.param))
    elif is_openai and found.has_openai_form:
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


async def _error_after_comments(request: Request, sent: ForwardedRequest) -> UpstreamBroken:
    """Return the error for a response that is not a stream, after comments have been sent."""
    body = sent.body
    if body is None:
        body, _ = await read_begin(sent.read, WHOLE_BYTES)
    if sent.is_error or read_error(body).has_openai_form:
        found = msgspec.json.decode(_in_own_form(request, sent, body))
        return _UpstreamError(msgspec.json.encode(_with_retry(found, sent.headers)))
    return UpstreamBroken(
        f"the upstream responded with status {sent.status} instead of a stream of events"
    )


def _with_retry(found: dict[str, Any], headers: Mapping[str, str]) -> dict[str, Any]:
    """Return an error with the delay of a refusal, because the headers have been sent."""
    delay_s = header_count(headers.get("Retry-After", ""))
    if delay_s is None:
        return found
    return {**found, "error": {**found["error"], "retry_after_s": float(delay_s)}}


async def _read_prompt(
    request: Request, model: ModelService, received: Received, stated: Stated
) -> ForwardedPrompt | None:
    """Return what routing needs to know about a prompt, or None without a tokenizer and session."""
    body, name = received.body, received.model
    account, cache_key = request[ACCOUNT].name, received.fields.cache_key
    session = session_id(request.path, body, account, stated.session, cache_key)
    tokenizer = model.fleet.upstream_models.tokenizer(name)
    blocks = None
    if tokenizer is not None and len(body) <= ENCODED_INLINE_BYTES:
        blocks = encode_forwarded(request.path, body, tokenizer)
    elif tokenizer is not None:
        blocks = await offload(encode_forwarded, request.path, body, tokenizer)
    if not session and blocks is None:
        return None
    return ForwardedPrompt(name, blocks, session, stated.service.next_call_s)


def _entry(account: Account, received: Received, fields: ForwardedFields, stated: Stated) -> Entry:
    """Return the entry of a request at admission, within the bounds of its account."""
    stated_priority = None if fields.sent_priority is None else fields.priority
    service = account.service_level(stated.service, stated_priority)
    prompt, output, n = fields.prompt_tokens, fields.max_tokens, fields.n
    most_tokens, choices = (prompt + output * fields.prompts) * n, fields.prompts * n
    return Entry(
        new_id(),
        (CapacityNeed(choices, prompt, most_tokens, service.tpot_s, received.model),),
        output,
        service,
        account.name,
        account.share,
        fingerprint(account.name, received.body),
        stated.retries,
    )


def _call(
    request: Request,
    received: Received,
    service: ServiceLevel,
    wanted: ServiceLevel,
    *,
    sequences: int,
    stream: bool = False,
) -> UpstreamCall:
    """Return the call to the upstream.

    Args:
        service, wanted: the service level of the account, and that of the client.
    """
    headers = of_headers(request, _passed_on)
    if service.ttft_s is not None and service.ttft_s != wanted.ttft_s:
        headers = {**headers, TTFT_HEADER: header_text(service.ttft_s * 1e3)}
    if service.tpot_s is not None and service.tpot_s != wanted.tpot_s:
        headers = {**headers, TPOT_HEADER: header_text(service.tpot_s * 1e3)}
    if isinstance(request, DirectRequest):
        path = request.head.target
    else:
        path, mark, query = request.rel_url.raw_path_qs.partition("?")
        path = f"{path.rstrip('/')}{mark}{query}"
    return UpstreamCall(
        request.method,
        path,
        headers,
        received.body,
        sequences,
        request[REQUEST_ID],
        received.model,
        received.renamed,
        stream=stream,
    )


def _passed_on(headers: Mapping[str, str]) -> Mapping[str, str]:
    """Return the headers that the upstream gets."""
    return {name: headers[name] for name in _PASSED_ON if name in headers}
