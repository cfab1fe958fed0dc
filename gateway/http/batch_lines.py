"""The lines of batches as requests, which take the same path as those of clients."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from typing import Final

import httptools
import msgspec
from aiohttp import web
from multidict import CIMultiDict, CIMultiDictProxy

from draftgate.backends.header_numbers import header_count
from draftgate.gateway.accounts import ANONYMOUS, Account
from draftgate.gateway.batches.batch import Line
from draftgate.gateway.batches.run import Answer, Limits
from draftgate.gateway.batches.runner import BatchRunner
from draftgate.gateway.errors import (
    BodyTooLarge,
    GatewayError,
    Unauthorized,
    Unsupported,
    UpstreamBroken,
    as_gateway_error,
)
from draftgate.gateway.http.context import ACCOUNT, REQUEST_ID, new_id
from draftgate.gateway.http.direct import Direct, DirectRequest, Head
from draftgate.gateway.http.generation import WatchedEndpoint
from draftgate.gateway.lifecycle import NodeState
from draftgate.gateway.logs import AboutRequest, log
from draftgate.gateway.node import Node
from draftgate.policies.types import OFFLINE_PRIORITY
from draftgate.policies.values import replace

BATCHES: Final = web.AppKey("batches", BatchRunner)

_HEADERS: Final = CIMultiDictProxy(CIMultiDict({"Content-Type": "application/json"}))


class _Streaming(msgspec.Struct):
    """The field of a body that requests a stream."""

    stream: object = None


_streaming: Final = msgspec.json.Decoder(_Streaming)


def build_runner(
    node: Node, direct: Direct, endpoints: Mapping[str, WatchedEndpoint]
) -> BatchRunner | None:
    """Return the runner of a node's batches, or None if the node stores no files."""
    if node.files is None:
        return None
    limits = Limits(node.config.batch_concurrency, node.config.max_batch_lines)
    runner = BatchRunner(
        node.files,
        node.store,
        LineSender(node, direct, endpoints),
        limits,
        accepts=lambda: node.lifecycle.state is NodeState.READY,
    )
    node.on_accounts = runner.retry
    return runner


async def running_batches(app: web.Application) -> AsyncIterator[None]:
    """Run batches while the application runs."""
    task = asyncio.create_task(app[BATCHES].run(), name="run batches")
    yield
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


class LineSender:
    """A function that sends lines to the endpoints of a node."""

    def __init__(
        self, node: Node, direct: Direct, endpoints: Mapping[str, WatchedEndpoint]
    ) -> None:
        self._node = node
        self._direct = direct
        self._endpoints = endpoints

    async def __call__(self, tenant: str, batch_id: str, line: Line) -> Answer:
        """Send the line of a tenant, and return the response or an error in OpenAI's format.

        The id of the request begins with the id of the batch.
        """
        request_id = f"{batch_id}-{new_id()}"
        with AboutRequest(id=request_id):
            try:
                return await self._send(request_id, self._account(tenant), line)
            except Exception as error:  # noqa: BLE001 - every exception becomes a result
                shown = as_gateway_error(error)
                if type(shown) is GatewayError:
                    log(logging.ERROR, "internal error", error=error)
                retry_s = shown.retry_after_s
                return Answer(shown.status, shown.body(), request_id, shown.code, retry_s)

    def _account(self, tenant: str) -> Account:
        """Return the account of a tenant, with the priority of batches.

        Raises:
            Unauthorized: the tenant has no key any more.
        """
        accounts = self._node.accounts
        account = accounts.named(tenant) if accounts.required else ANONYMOUS
        if account is None:
            raise Unauthorized("the API key that created the batch does not exist any more")
        return replace(account, first_priority=OFFLINE_PRIORITY, ttft_ms=None, tpot_ms=None)

    async def _send(self, request_id: str, account: Account, line: Line) -> Answer:
        body, most_bytes = bytes(line.body), self._node.config.max_body_bytes
        if len(body) > most_bytes:
            raise BodyTooLarge(most_bytes)
        if _requests_stream(body):
            raise Unsupported("stream", advice="batches have no streams")
        collector = _Collector()
        carrier = _Carrier(self._direct, collector)
        request = DirectRequest(carrier, Head(line.url, _HEADERS), body)
        request[ACCOUNT], request[REQUEST_ID] = account, request_id
        await self._endpoints[line.url].handle(request)
        return collector.answer(request_id)


def _requests_stream(body: bytes) -> bool:
    try:
        return bool(_streaming.decode(body).stream)
    except (ValueError, RecursionError):
        return False  # the endpoint explains what is wrong


class _Carrier:
    """A `direct.Carrier` without a client."""

    ssl_context = peername = None
    writing_paused = False

    def __init__(self, direct: Direct, transport: asyncio.Transport) -> None:
        self.direct = direct
        self.transport: asyncio.Transport | None = transport
        self.keeps_alive = True

    async def drained(self) -> None:
        """Do nothing, because the response is collected in memory."""


class _Collector(asyncio.Transport):
    """Collects a response, and reads it as a client would."""

    def __init__(self) -> None:
        super().__init__()
        self._parser = httptools.HttpResponseParser(self)
        self._body: list[bytes] = []
        self._retry_after: float | None = None
        self._complete = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Take a part of the response."""
        self._parser.feed_data(data)

    def is_closing(self) -> bool:
        """Return False, because there is no client that could leave."""
        return False

    def abort(self) -> None:
        """Do nothing, because the response stays incomplete."""

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header."""
        if name.lower() == b"retry-after":
            self._retry_after = header_count(value.decode("latin-1"))

    def on_body(self, data: bytes) -> None:
        """Take a part of the body."""
        self._body.append(data)

    def on_message_complete(self) -> None:
        """Note the end."""
        self._complete = True

    def answer(self, request_id: str) -> Answer:
        """Return the response.

        Raises:
            UpstreamBroken: the response is incomplete, or not JSON.
        """
        body = b"".join(self._body)
        try:
            msgspec.json.decode(body, type=msgspec.Raw)
        except ValueError:
            self._complete = False
        if not self._complete:
            raise UpstreamBroken("the upstream's response is incomplete or not JSON")
        status = self._parser.get_status_code()
        return Answer(status, body, request_id, retry_after_s=self._retry_after)
