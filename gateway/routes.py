"""The aiohttp application, with routes, request ids, accounts and errors."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Final, cast

from aiohttp import hdrs, web

from draftgate.gateway.accounts import ANONYMOUS, Account, Role, fingerprint_of_key
from draftgate.gateway.errors import (
    CertificateRequired,
    Forbidden,
    GatewayError,
    Unauthorized,
    as_gateway_error,
)
from draftgate.gateway.http.authentication import Sessions, key_of
from draftgate.gateway.http.batch_lines import BATCHES, build_runner, running_batches
from draftgate.gateway.http.browsers import BrowserAccess
from draftgate.gateway.http.connections import (
    add_headers,
    check_framing,
    ends_connection,
)
from draftgate.gateway.http.content_encoding import DECODING
from draftgate.gateway.http.context import (
    ACCOUNT,
    ERROR_CODE,
    NODE,
    NOTES,
    READERS,
    REQUEST_ID,
    SESSION,
    SESSIONS,
    client_request_id,
    error_format,
    request_id_of,
)
from draftgate.gateway.http.direct import (
    HANDOVERS,
    Direct,
    DirectRequest,
    Expected,
    Request,
    Response,
    of_headers,
)
from draftgate.gateway.http.endpoints import (
    batches,
    embeddings,
    files,
    health,
    input_tokens,
    keys,
    live,
    models,
    page,
    records,
    rerank,
    score,
    session,
    stored_responses,
    usage,
    worker_role,
)
from draftgate.gateway.http.endpoints.anthropic import COUNT_PATH, MESSAGES, count_message_tokens
from draftgate.gateway.http.endpoints.responses import RESPONSES
from draftgate.gateway.http.generation import CLIENT_GONE, Endpoint, WatchedEndpoint
from draftgate.gateway.http.openapi.document import get_document
from draftgate.gateway.http.peers.endpoint import add_peer_routes, is_peer
from draftgate.gateway.http.rate_limits import add_rate_limits
from draftgate.gateway.http.readers import Readers
from draftgate.gateway.http.replies.completions import ChatRendering, CompletionRendering
from draftgate.gateway.http.requests.validation import parse_chat, parse_completion
from draftgate.gateway.http.sending import convert_http_error, error_response, send_whole
from draftgate.gateway.lifecycle import NodeState
from draftgate.gateway.logs import AboutRequest, log, log_about_request
from draftgate.gateway.node import Node
from draftgate.gateway.telemetry import metric_definitions as metric
from draftgate.policies.pacing import PathState

CHAT: Final = Endpoint(
    "/v1/chat/completions", "chat", parse_chat, ChatRendering, {"messages": "messages"}
)
COMPLETIONS: Final = Endpoint(
    "/v1/completions", "text_completion", parse_completion, CompletionRendering
)

OPEN_PATHS: Final = frozenset({"/health", "/ready", "/version"})
"""Paths for orchestrators, which have no API key. Their responses contain no request data."""

_OPEN_TO_BROWSERS: Final = frozenset(
    {page.page, page.file, session.get_session, session.log_in, session.log_out}
)
"""Handlers for browsers that have not logged in."""

DIRECT: Final[Mapping[str, WatchedEndpoint]] = {
    endpoint.path: endpoint
    for endpoint in (CHAT, COMPLETIONS, RESPONSES, MESSAGES, embeddings.EMBEDDINGS)
}
"""The endpoints with most requests, by path, which connections read themselves."""

METRICS_PATH: Final = "/metrics"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def build_app(node: Node) -> web.Application:
    """Return the application that serves a node."""
    return build_served(node).app


def build_served(node: Node) -> Direct:
    """Return the application that serves a node, with its direct requests."""
    entrance = Entrance(node)
    app = web.Application(
        # a single one, because each adds coroutines to every request
        middlewares=[entrance.respond],
        client_max_size=node.config.max_body_bytes,
    )
    app[NODE] = node
    app[SESSIONS] = entrance.sessions
    app[DECODING] = asyncio.Lock()
    app[READERS] = readers = Readers(time.monotonic)
    node.metrics.read(metric.SLOW_READERS, lambda: readers.num_slow)
    for state in PathState:
        node.metrics.read(metric.CLIENT_PATHS, partial(readers.count, state), state.value)
    app.on_response_prepare.append(entrance.prepare_headers)
    app.cleanup_ctx.append(live.sampling)
    app.on_shutdown.append(live.end_streams)
    routes = _routes()
    # A path may end with a slash. This form is first, because {model:.+} also matches a slash.
    app.add_routes(
        web.RouteDef(route.method, f"{route.path}/", route.handler, route.kwargs)
        for route in routes
    )
    app.add_routes([web.get("/", page.page), *routes])
    add_peer_routes(app)
    expected = Expected(DIRECT, node.config.max_body_bytes)
    for reason in HANDOVERS:
        node.metrics.add(metric.HANDOVERS, 0.0, reason)  # the series exist from the start
    count = partial(node.metrics.add, metric.HANDOVERS, 1.0)
    direct = Direct(app, expected, entrance.serve, entrance.finish_headers, count)
    runner = build_runner(node, direct, DIRECT)
    if runner is not None:
        app[BATCHES] = runner
        app.cleanup_ctx.append(running_batches)
    return direct


def _routes() -> list[web.RouteDef]:
    """Return the routes of clients."""
    return [
        *(_post(api.path, api) for api in DIRECT.values()),
        web.post(COUNT_PATH, count_message_tokens),
        web.post(input_tokens.PATH, input_tokens.count_input_tokens),
        web.get(stored_responses.ROUTE, stored_responses.get_response),
        web.delete(stored_responses.ROUTE, stored_responses.delete_response),
        web.get(stored_responses.ITEMS_PATH, stored_responses.list_input_items),
        *(_post(path, rerank.RERANK) for path in rerank.PATHS),
        *(_post(path, score.SCORE) for path in score.PATHS),
        web.post(files.PATH, files.create_file),
        web.get(files.PATH, files.list_files),
        web.get(files.FILE_PATH, files.get_file),
        web.delete(files.FILE_PATH, files.delete_file),
        web.get(files.CONTENT_PATH, files.get_content),
        web.post(batches.PATH, batches.create_batch),
        web.get(batches.PATH, batches.list_batches),
        web.get(batches.BATCH_PATH, batches.get_batch),
        web.post(batches.CANCEL_PATH, batches.cancel_batch),
        web.get("/v1/models", models.list_models),
        web.get("/v1/models/{model:.+}", models.get_model),
        web.post("/tokenize", models.tokenize),
        web.post("/detokenize", models.detokenize),
        web.get("/health", health.health),
        web.get("/ready", health.ready),
        web.get("/version", health.version),
        web.get(METRICS_PATH, health.metrics),
        web.get("/decisions", live.list_decisions),
        web.get("/live", live.live, allow_head=False),
        web.get("/workers", live.list_workers),
        web.put(worker_role.PATH, worker_role.set_role),
        web.get(usage.PATH, usage.get_usage),
        web.get(usage.HISTORY_PATH, usage.get_history),
        web.get(keys.PATH, keys.list_keys),
        web.post(keys.PATH, keys.create_key),
        web.get(keys.KEY_PATH, keys.get_key),
        web.patch(keys.KEY_PATH, keys.change_key),
        web.delete(keys.KEY_PATH, keys.revoke_key),
        web.post(keys.ROTATE_PATH, keys.rotate_key),
        web.get(keys.AUDIT_PATH, keys.list_changes),
        web.get("/records", records.list_records),
        web.get(records.PATH, records.get_record),
        web.get(session.PATH, session.get_session),
        web.post(session.PATH, session.log_in),
        web.delete(session.PATH, session.log_out),
        *(web.get(path, page.page) for path in page.PAGES if path != "/"),
        web.get("/web/{name}", page.file),
        web.get("/openapi.json", get_document),
    ]


def _post(path: str, endpoint: WatchedEndpoint) -> web.RouteDef:
    # An endpoint responds to each kind of request with the same kind of response.
    return web.post(path, cast(Handler, endpoint.handle))


class Entrance:
    """The checks and headers that all requests have in common."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._browsers = BrowserAccess(node.config)
        self.sessions = Sessions(node.session_secret)
        self._wants_certificate = node.config.tls_client_ca_file is not None

    @web.middleware
    async def respond(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Check a request and respond to it. All its log lines contain its id."""
        request_id = request_id_of(request)
        response: web.StreamResponse | None = None
        with AboutRequest(id=request_id):
            try:
                check_framing(request)
                response = self._check_browser(request)
                if response is None:
                    self._authenticate(request)
                    response = await handler(request)
            except Exception as error:  # noqa: BLE001 - every exception becomes a response
                response = _failed(request, error)
            finally:
                self._record_use(request, CLIENT_GONE if response is None else response.status)
        return response

    async def serve(self, request: DirectRequest) -> None:
        """Check a direct request and respond to it, as `respond` does."""
        response: Response | None = None
        request[REQUEST_ID] = request_id = client_request_id(request)
        log_about_request(id=request_id)
        try:
            known, accounts = request.head.known, self._node.accounts
            if known.get(self) is accounts and not self._wants_certificate:
                request[ACCOUNT] = known[ACCOUNT]
            else:
                self._browsers.check(request, keys=accounts.required)
                request[ACCOUNT] = ANONYMOUS
                self._identify(request)
                # Equal heads have the same host and key.
                known[self], known[ACCOUNT] = accounts, request[ACCOUNT]
            response = await DIRECT[request.path].handle(request)
        except ConnectionResetError:
            pass
        except Exception as error:  # noqa: BLE001 - every exception becomes a response
            response = await self._fail(request, error)
        finally:
            if self._node.audit is not None:
                self._record_use(request, CLIENT_GONE if response is None else response.status)

    async def _fail(self, request: DirectRequest, error: Exception) -> Response | None:
        """Respond with an error, or end the connection if a response has begun."""
        shown = _shown(request, error)
        if request.begun:
            request.protocol.keeps_alive = False
            return None
        headers = [*shown.headers(), ("Content-Type", "application/json")]
        body = shown.body(error_format(request), request_id_of(request))
        try:
            return await send_whole(request, body, headers, shown.status)
        except ConnectionResetError:
            return None

    async def prepare_headers(self, request: web.Request, response: web.StreamResponse) -> None:
        """Complete the headers of a response of aiohttp."""
        if ends_connection(request, response, self._node.config.max_body_bytes):
            response.force_close()
        waiting = self.finish_headers(request, response)
        if waiting is not None:
            await waiting

    def finish_headers(self, request: Request, response: Response) -> Awaitable[None] | None:
        """Add the headers of every response, and announce the end of the connection.

        Returns:
            What has to be awaited for the headers of a quota, or None.
        """
        # The next connection of a client reaches another node while this node drains.
        if self._node.lifecycle.state is NodeState.DRAINING:
            response.force_close()
        add_headers(request, response)
        if self._browsers.origins:
            self._browsers.add_headers(request, response)
        if (notes := request.get(NOTES)) is not None:
            response.headers.update(notes)
        return add_rate_limits(request, response)

    def _check_browser(self, request: web.Request) -> web.Response | None:
        """Return the response to a preflight of a listed origin, or None for other requests.

        Raises:
            ForbiddenHost, ForbiddenOrigin: a foreign page sent the request.
        """
        self._browsers.check(request, keys=self._node.accounts.required)
        return self._browsers.preflight(request)

    def _authenticate(self, request: web.Request) -> None:
        """Find the account of a request, as `_identify` does.

        Other nodes have no account, because they prove that they are nodes.
        """
        request[ACCOUNT] = ANONYMOUS
        if is_peer(request) or request.path.rstrip("/") in OPEN_PATHS:
            return
        accounts = self._node.accounts
        if accounts.required and key_of(request.headers) is None:
            own_page = self._browsers.is_own_page(request)
            found = self.sessions.find(request, accounts, own_page=own_page)
            if found is not None:
                request[SESSION] = found
        if request.match_info.handler not in _OPEN_TO_BROWSERS:
            self._identify(request)
        elif self._wants_certificate:
            _check_certificate(request)

    def _identify(self, request: Request) -> None:
        """Find the account of a client by its API key or its session.

        Raises:
            Unauthorized: keys are required, and the request has no known key.
            CertificateRequired: the connection has no client certificate.
            Forbidden: the role of the key does not include the path.
        """
        if self._wants_certificate:
            _check_certificate(request)
        accounts = self._node.accounts
        if not accounts.required:
            return
        key, of_browser = of_headers(request, key_of), request.get(SESSION)
        account = None if key is None else accounts.find(key)
        if of_browser is not None:
            account = of_browser.account
        if account is None:
            sent = "no API key was sent" if key is None else self._node.keys.why_refused(key)
            raise Unauthorized(f"{sent}; send `Authorization: Bearer KEY` or `x-api-key: KEY`")
        request[ACCOUNT] = account  # before its role, because the audit log names the tenant
        _check_role(account, request.path.rstrip("/"))

    def _record_use(self, request: Request, status: int) -> None:
        """Record a refusal or the use of a key in the audit log, if one is configured."""
        audit = self._node.audit
        if audit is None:
            return
        account, key, of_browser = (
            request.get(ACCOUNT),
            key_of(request.headers),
            request.get(SESSION),
        )
        fingerprint = None if key is None else fingerprint_of_key(key)
        if of_browser is not None:
            fingerprint = of_browser.account.fingerprint
        audit.record(
            request[REQUEST_ID],
            request.remote or "",
            (request.method, request.path),
            status,
            request.get(ERROR_CODE),
            tenant=(account.name or None) if account is not None else None,
            key=fingerprint,
        )


def _failed(request: web.Request, error: Exception) -> web.Response:
    """Return the response to a request that caused an error."""
    if isinstance(error, ConnectionResetError):
        return web.Response(status=CLIENT_GONE)  # the client cannot read this response
    if isinstance(error, web.HTTPMethodNotAllowed) and request.method == hdrs.METH_OPTIONS:
        allowed = sorted({*error.allowed_methods, hdrs.METH_OPTIONS})
        return web.Response(status=204, headers={"Allow": ", ".join(allowed)})
    if isinstance(error, web.HTTPException):
        error = convert_http_error(error, request)
    return error_response(_shown(request, error), error_format(request), request_id_of(request))


def _shown(request: Request, error: Exception) -> GatewayError:
    """Return the error that the client gets, whose code the audit log records."""
    shown = as_gateway_error(error)
    if type(shown) is GatewayError:
        log(logging.ERROR, "internal error", error=error)
    request[ERROR_CODE] = shown.code
    return shown


def _check_role(account: Account, path: str) -> None:
    """Check that the role of a key includes a path. The metrics name all tenants."""
    reads_metrics = path == METRICS_PATH
    if account.role is Role.TENANT and reads_metrics:
        raise Forbidden("the role of this API key is tenant; use a key of an operator for /metrics")
    if account.role is Role.METRICS and not reads_metrics:
        raise Forbidden("the role of this API key is metrics, so it can only read /metrics")


def _check_certificate(request: Request) -> None:
    """Check that the client has shown a certificate.

    TLS has already verified the certificate of a client that has one.
    """
    if request.transport is None or not request.transport.get_extra_info("peercert"):
        raise CertificateRequired("this server requires a client certificate")
