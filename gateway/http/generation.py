"""The path of a request to the workers and back, which is the same for all endpoints."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import Final, Self, TypeVar

from draftgate.backends.core.admission import refusal
from draftgate.backends.types import Task
from draftgate.gateway.accounts import Account
from draftgate.gateway.assembly import loop_time_s
from draftgate.gateway.dispatch.job import FlowTag
from draftgate.gateway.dispatch.upstreams.fallbacks import Turn
from draftgate.gateway.errors import (
    Draining,
    Forbidden,
    GatewayError,
    Starting,
    UnsupportedTask,
    as_gateway_error,
)
from draftgate.gateway.http.answer import Answer, StoreReply
from draftgate.gateway.http.chain import find_chain
from draftgate.gateway.http.context import (
    ACCOUNT,
    BUDGET_HEADER,
    JSON_HEADERS,
    NODE,
    REQUEST_ID,
    add_note,
    fingerprint,
    new_id,
    note_priority,
    read_body,
    requested_name,
    requested_priority,
)
from draftgate.gateway.http.direct import Request, Response, of_headers
from draftgate.gateway.http.forwarding import forward
from draftgate.gateway.http.rate_limits import QUOTAS
from draftgate.gateway.http.replies.rendering import Rendering
from draftgate.gateway.http.requests.decoding import RenamedParams
from draftgate.gateway.http.requests.headers import Sender, read_stated
from draftgate.gateway.http.requests.validation import ParsedRequest
from draftgate.gateway.http.sending import send_whole
from draftgate.gateway.http.stream import event_stream, stream_answer
from draftgate.gateway.http.translation.translations import ChatTranslation
from draftgate.gateway.logs import add_about_request
from draftgate.gateway.model_service import ModelService
from draftgate.gateway.node import Node
from draftgate.gateway.offload import offload
from draftgate.gateway.served_model import ServedModel
from draftgate.gateway.telemetry import metric_definitions as metric
from draftgate.gateway.telemetry.ending import FINISHED, Ending
from draftgate.gateway.telemetry.watch import RequestWatch
from draftgate.gateway.tracing import NO_SPAN, Span, Tracing
from draftgate.policies.flows.types import HopKind
from draftgate.policies.values import replace

T = TypeVar("T")

INLINE_BODY_BYTES: Final = 16 << 10
"""Larger bodies are parsed in a thread, because no callback may hold the event loop for longer than
5 ms. Tokenising 1 MB of text takes 0.4 s."""

Parse = Callable[[bytes, ServedModel, Sender], ParsedRequest]
"""A thread-safe parser of a body, with the model and the sender."""

NO_PARAMS: Final[Mapping[str, str]] = MappingProxyType({})

CLIENT_GONE: Final = 499
"""nginx's status for a request whose client disconnected, in logs and traces."""


class WatchedEndpoint:
    """An endpoint whose requests need a worker of this node, or an upstream.

    Attributes:
        operation: `gen_ai.operation.name` of its spans.
        task: the task that the model must offer.
        alternative: another task with which it can respond, or None.
        translate: the translation of requests for upstreams that have only chats, or None.
    """

    path: str
    operation: str
    task = Task.GENERATE
    alternative: Task | None = None
    translate: type[ChatTranslation] | None = None

    async def handle(self, request: Request) -> Response:
        """Respond to a request, which counts as in flight until its last byte."""
        node = request.app[NODE]
        span = NO_SPAN
        if node.tracing.records:
            span = _begin_span(node.tracing, request, self.path, self.operation)
        watch = RequestWatch(node.models[0].request_series, span, self.path, self.operation)
        spending = Spending(node, request[ACCOUNT], watch)
        watch.sent(request[REQUEST_ID], request[ACCOUNT].name)
        node.requests.add(watch)
        try:
            with spending, node.models[0].dispatcher.counted():
                model, chain = node.models[0], None
                if len(node.models) > 1 or model.members is not None or node.fallbacks:
                    chain = await find_chain(request, node, self.task)
                    model = chain.model
                if spending.budgets or request[ACCOUNT].models is not None:
                    watch.model = spending.model = await requested_name(request) or model.name
                    _check_model(request[ACCOUNT], spending.model)
                if spending.is_limited:
                    await spending.check(request)
                if chain is None:
                    response = await self._attempt(request, model, watch)
                else:
                    response = await chain.respond(request, watch, self._attempt)
        except (asyncio.CancelledError, ConnectionResetError) as error:
            watch.end(Ending.CANCELLED, CLIENT_GONE, error)
            raise
        except Exception as error:
            shown = as_gateway_error(error)
            watch.end(_ending(shown), shown.status, error)
            raise
        watch.end(FINISHED, response.status)
        return response

    def _attempt(
        self, request: Request, model: ModelService, watch: RequestWatch, turn: Turn | None = None
    ) -> Awaitable[Response]:
        """Respond to a request from an upstream or a worker of its model."""
        request[QUOTAS] = model.dispatcher.admission.quotas
        if model.forwards:
            generates = self.task is Task.GENERATE
            return forward(
                request, model, watch, generates=generates, translate=self.translate, turn=turn
            )
        self._check_task(model)
        return self.respond(request, model, watch)

    async def respond(self, request: Request, model: ModelService, watch: RequestWatch) -> Response:
        """Respond to a request from a worker of its model, and report to its watch."""
        raise NotImplementedError

    def _check_task(self, model: ModelService) -> None:
        """Check that the workers of a model offer the task.

        Raises:
            Starting: the model is still loading.
            UnsupportedTask: the model does not offer the task.
        """
        if not model.is_known:
            raise model.starting()
        offered = model.fleet.card.capabilities.tasks
        if self.task not in offered and self.alternative not in offered:
            raise UnsupportedTask(refusal(self.task, offered))


def _check_model(account: Account, name: str) -> None:
    """Check that an account may use a model.

    Raises:
        Forbidden: the key is for other models.
    """
    if not account.allows(name):
        allowed = ", ".join(map(repr, account.models or ()))
        raise Forbidden(f"this API key may not use the model {name!r}; it may use {allowed}")


class Spending:
    """What a request costs and uses, which is charged and counted at the end of the context.

    Attributes:
        budgets: the budgets of its key and team.
        model: the name of the model for its price, if the request needs one before it runs.
    """

    model = ""

    def __init__(self, node: Node, account: Account, watch: RequestWatch) -> None:
        self.budgets = node.accounts.budgets(account)
        self._node = node
        self._account = account
        self._watch = watch

    def __enter__(self) -> Self:
        """Charge nothing yet."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Charge and count the request, if it has a key."""
        if self._account.name:
            self._charge(succeeded=kind is None)

    @property
    def is_limited(self) -> bool:
        """Whether the request has to be checked before it runs."""
        return any(budget.is_limited for budget in self.budgets)

    async def check(self, request: Request) -> None:
        """Check the budgets before the request runs.

        Raises:
            QuotaExceeded: a budget is used up.
        """
        budgets = [budget for budget in self.budgets if budget.is_limited]
        warning = await self._node.budgets.check(budgets)
        if warning is not None:
            add_note(request, BUDGET_HEADER, warning)

    def _charge(self, *, succeeded: bool) -> None:
        """Charge and count the tokens of the request, if it has run."""
        watch = self._watch
        prompt, cached, output = watch.prompt_tokens, watch.cached_tokens, watch.output_tokens
        if not (output or (succeeded and prompt)):
            return
        node, account = self._node, self._account
        model = watch.model or self.model or node.models[0].name
        usd, accounts = watch.cost_usd, node.accounts
        if usd is None and accounts.prices:
            price = accounts.price(self.model or model)
            if price is not None:
                watch.cost_usd = usd = price.usd(prompt, cached, output)
                node.metrics.add(metric.COST, usd, account.name, model)
        if usd is not None and self.budgets:
            node.budgets.charge(self.budgets, usd)
        node.usage.count(account, model, (prompt, cached, output), usd)


class Endpoint(WatchedEndpoint):
    """An endpoint that generates text."""

    def __init__(
        self,
        path: str,
        operation: str,
        parse: Parse,
        rendering: Callable[[ParsedRequest, int], Rendering],
        params: Mapping[str, str] = NO_PARAMS,
        translate: type[ChatTranslation] | None = None,
    ) -> None:
        """Define an endpoint.

        Args:
            params: the endpoint's names of parameters, if they differ from the names in chats and
                completions.
        """
        self.path = path
        self.operation = operation
        self.parse = parse
        self.rendering = rendering
        self.params = params
        self.translate = translate

    def parsed(
        self, request: Request, served: ServedModel, watch: RequestWatch
    ) -> Awaitable[ParsedRequest]:
        """Return the parsed request, as `parse_request` does."""
        return parse_request(request, served, self.parse, watch)

    def store(self, node: Node, parsed: ParsedRequest) -> StoreReply | None:
        """Return the function that stores the response, or None if it is not stored."""
        return None

    async def respond(self, request: Request, model: ModelService, watch: RequestWatch) -> Response:
        """Respond to a request, as a whole or with a stream of events."""
        with RenamedParams(self.params):
            parsed = await self.parsed(request, model.served, watch)
            rendering = self.rendering(parsed, int(time.time()))
            watch.responds(rendering.response_id)
            answer = Answer(parsed, rendering, watch, self.store(request.app[NODE], parsed))
            running = model.dispatcher.run(parsed.job, watch.span, watch)
            if parsed.stream:
                events = event_stream(request)
                await stream_answer(events, answer, running)
                return events.response
            async with running as answer.run:
                body = await answer.whole()
        return await send_json(request, body)


async def send_json(request: Request, body: bytes) -> Response:
    """Send a whole response as `send_whole` does."""
    return await send_whole(request, body, JSON_HEADERS)


async def parse_request(
    request: Request,
    served: ServedModel,
    parse: Parse,
    watch: RequestWatch,
    more_bytes: int = 0,
) -> ParsedRequest:
    """Return the parsed request, within the bounds of its account.

    Args:
        more_bytes: bytes that the parser reads in addition to the body.

    Raises:
        GatewayError, RequestRejected: the request cannot run.
    """
    account = request[ACCOUNT]
    # An invalid header is an error before the body is read.
    stated = of_headers(request, read_stated)
    flow = None
    if stated.flow is not None:
        kind = HopKind(request.path, served.name)
        flow = FlowTag(*stated.flow, kind, loop_time_s(), account.capped)
    body = await read_body(request)
    internal_id = new_id()  # two clients may send the same id

    def work() -> ParsedRequest:
        hashed = fingerprint(account.name, body)
        sender = Sender(internal_id, account, stated.service, stated.retries, hashed)
        return parse(body, served, sender)

    short = len(body) + more_bytes <= INLINE_BODY_BYTES
    parsed = work() if short else await offload(work)
    if flow is not None:
        parsed = replace(parsed, job=replace(parsed.job, flow=flow))
    if watch.fallback is not None:
        parsed = replace(parsed, job=replace(parsed.job, fallback=watch.fallback.reason))
    if account.first_priority is not None and b'"priority"' in body:
        note_priority(request, requested_priority(body), parsed.job.service.priority)
    watch.parsed(parsed.job, parsed.served.name, stream=parsed.stream)
    return parsed


async def offload_if_long(parse: Callable[[], T], read_bytes: int) -> T:
    """Return the result of a parser, in a thread if the parser reads many bytes."""
    return parse() if read_bytes <= INLINE_BODY_BYTES else await offload(parse)


def _begin_span(tracing: Tracing, request: Request, route: str, operation: str) -> Span:
    """Start the SERVER span of a request, and add its trace id to the request's log lines."""
    # Samplers see only the route. The other attributes are computed only for recorded spans.
    span = tracing.server(f"{request.method} {route}", request.headers, {"http.route": route})
    if not span.recording:
        return span
    add_about_request(trace=span.trace_id)
    version = request.version
    span.set(
        {
            "http.request.method": request.method,
            "url.path": request.path,
            "url.scheme": request.scheme,
            "client.address": request.remote or "",
            "network.protocol.version": f"{version.major}.{version.minor}",
            "user_agent.original": request.headers.get("User-Agent", ""),
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "draftgate",
            "draftgate.request_id": request[REQUEST_ID],
        }
    )
    return span


def _ending(error: GatewayError) -> Ending:
    refused = error.status < 500 or isinstance(error, Starting | Draining)
    return Ending.REJECTED if refused else Ending.FAILED
