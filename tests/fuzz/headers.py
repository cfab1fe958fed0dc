"""Targets: the values of headers, and other short texts from the network."""

from __future__ import annotations

from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

from multidict import CIMultiDict

from draftgate.backends.openai.pauses import retry_after_s
from draftgate.backends.peer.proof import ProofChecker, SharedSecret, is_answer
from draftgate.gateway.accounts import Account, Accounts
from draftgate.gateway.config import ServeConfig
from draftgate.gateway.errors import ForbiddenHost, ForbiddenOrigin, InvalidRequest
from draftgate.gateway.http.browsers import BrowserAccess
from draftgate.gateway.http.context import client_request_id
from draftgate.gateway.http.requests.headers import flow_of, retry_count, service_level
from tests.fuzz.target import Target

NAMES = (
    "x-slo-ttft-ms", "x-slo-tpot-ms", "x-flow-id", "x-flow-deadline-ms", "x-request-id",
    "x-stainless-retry-count", "Host", "Origin",
)  # fmt: skip
BROWSERS = BrowserAccess(ServeConfig())
ACCOUNTS = Accounts([Account("a", "secret")])
PROOFS = SharedSecret("a secret of the cluster")


def text_of(data: bytes) -> str:
    """Return bytes as aiohttp decodes a header."""
    return data.decode("utf-8", "surrogateescape")


def request_headers(data: bytes) -> None:
    """Read every header of a request from the lines of the input."""
    values = text_of(data).split("\n")
    headers = dict(zip(NAMES, values, strict=False))
    level = service_level(headers)
    assert level.ttft_s is None or level.ttft_s > 0
    flow_of(headers)
    retry_count(headers)
    request: Any = SimpleNamespace(path="/v1/models", headers=CIMultiDict(headers))
    assert client_request_id(request)
    BROWSERS.check(request, keys=False)


def credentials(data: bytes) -> None:
    """Check an API key, the proof of a node and the answer of a peer, none of which is valid."""
    text = text_of(data)
    assert text == "secret" or ACCOUNTS.find(text) is None
    assert ProofChecker(PROOFS).answer(text, "/peer/v1/workers/0", 1e9) is None
    assert not is_answer(PROOFS.proof("/peer/v1/workers/0", 1e9), text)


def retry_after(data: bytes) -> None:
    """Read the pause that an upstream requests."""
    pause_s = retry_after_s(text_of(data), datetime(2026, 1, 1, tzinfo=UTC))
    assert pause_s is None or pause_s >= 0


TARGETS = [
    Target("request_headers", request_headers, (InvalidRequest, ForbiddenHost, ForbiddenOrigin)),
    Target("credentials", credentials),
    Target("retry_after", retry_after),
]
