"""Access to a node's workers for nodes that prove knowledge of the cluster's secret."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import aclosing

import aiohttp
import httpx
import pytest
from yarl import URL

from draftgate.backends.delta_reader import generate
from draftgate.backends.framing import FrameChannel, framed
from draftgate.backends.peer.backend import PeerBackend
from draftgate.backends.peer.channel import MOST_COMMAND_BYTES
from draftgate.backends.peer.proof import WINDOW_S, ProofChecker, SharedSecret, is_answer, secret_of
from draftgate.backends.peer.upgrade import UPGRADE, PeerRefused, upgraded
from draftgate.backends.remote_worker import Report
from draftgate.backends.testing import make_request
from draftgate.gateway.app import Listening, StartError, build_node
from draftgate.gateway.cluster.access import NO_PROOF, PeerAccess, is_loopback, peer_access
from draftgate.gateway.config import ServeConfig
from tests.gateway.harness import client, running
from tests.peer.harness import SECRET, impostor, linked_to, ready_message

PATH = "/peer/v1/workers/0"
VARIABLE = "CLUSTER_SECRET"
OTHER = SharedSecret("a secret of another cluster")
KEY = "a client's own key"
UPGRADED = {"Connection": "Upgrade", "Upgrade": UPGRADE}


@pytest.fixture
async def where(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Listening]:
    """Yield a node with API keys for clients and the cluster's secret."""
    monkeypatch.setenv(VARIABLE, "a secret of the cluster")
    async with running(peer_secret_env=VARIABLE, api_keys=(KEY,)) as listening:
        yield listening


async def test_peer_with_the_secret_needs_no_api_key(where: Listening) -> None:
    """A gateway without an API key streams from the node after both nodes have proved the
    secret."""
    async with (
        linked_to(where.url, secret=SECRET) as backend,
        aclosing(generate(backend, make_request(backend))) as stream,
    ):
        assert (await anext(stream)).token_ids


@pytest.mark.parametrize("secret", [None, OTHER], ids=["none", "another"])
async def test_start_fails_at_once_with_another_secret(
    where: Listening, secret: SharedSecret | None
) -> None:
    """With another secret, the start fails immediately, because a second attempt would fail,
    too."""
    backend = PeerBackend(where.url, secret)
    with pytest.raises(PeerRefused, match="does not accept peers, or has another secret"):
        await backend.start()
    await backend.stop()


async def test_server_without_the_secret_gets_no_request() -> None:
    """The backend sends no request to a server that cannot prove the secret."""
    async with impostor(ready_message()) as peer:
        backend = PeerBackend(peer.url, SECRET)
        with pytest.raises(PeerRefused, match="has another secret, or none"):
            await backend.start()
        await backend.stop()
        assert peer.commands == []


async def test_peer_paths_look_missing_without_a_proof(where: Listening) -> None:
    """Without a proof, a peer path responds like an unknown path to any key, method and header."""
    proof = OTHER.proof(PATH, 0.0)
    tries = [{}, {"Authorization": f"Bearer {KEY}"}, {"Authorization": proof.header}]
    async with client(where) as http:
        for headers in (*tries, *({**header, **UPGRADED} for header in tries)):
            for method in ("GET", "POST", "OPTIONS"):
                peer = await http.request(method, PATH, headers=headers)
                missing = await http.request(method, "/peer/v1/nothing", headers=headers)
                assert comparable(peer, PATH) == comparable(missing, "/peer/v1/nothing")
                assert peer.status_code == (404 if KEY in str(headers) else 401)
        document = await http.get("/openapi.json", headers={"Authorization": f"Bearer {KEY}"})
        assert "peer" not in str(list(document.json()["paths"]))


def comparable(response: httpx.Response, path: str) -> tuple[object, ...]:
    """Return the comparable parts of a response to a request for this path."""
    headers = {k: v for k, v in response.headers.items() if k not in {"date", "x-request-id"}}
    headers.pop("content-length", None)
    return response.status_code, headers, response.text.replace(path, "PATH")


async def status_of(where: Listening, headers: dict[str, str]) -> int:
    """Return the status of a request to change a connection to frames."""
    async with aiohttp.ClientSession() as http:
        response = await http.get(where.url + PATH, headers={**UPGRADED, **headers})
        response.close()
        return response.status


async def test_proof_is_valid_once(where: Listening) -> None:
    """The node rejects a recorded proof."""
    headers = {"Authorization": SECRET.proof(PATH, time.time()).header}
    assert [await status_of(where, headers) for _ in range(2)] == [101, 401]


async def test_browser_page_is_not_a_peer() -> None:
    """The node rejects a connection with the origin of a browser page."""
    async with running() as where:
        assert await status_of(where, {"Origin": "http://example.com"}) == 404
        assert await status_of(where, {}) == 101


@pytest.mark.parametrize(
    "data",
    [framed(b"\xc1"), framed(b"\x90"), (MOST_COMMAND_BYTES + 1).to_bytes(4, "big")],
    ids=["undecodable", "unknown", "oversized"],
)
async def test_invalid_message_ends_only_its_connection(data: bytes) -> None:
    """An undecodable, unknown or oversized message ends only its own connection."""
    async with (
        running() as where,
        linked_to(where.url) as backend,
        aclosing(generate(backend, make_request(backend, max_tokens=60))) as stream,
        aiohttp.ClientSession() as http,
    ):
        await anext(stream)
        ended = asyncio.Event()
        channel = FrameChannel[Report](Report, 1 << 20, lambda _: None, ended.set)
        _, transport = await upgraded(http, URL(where.url + PATH), None)
        channel.take_over(transport)
        transport.write(data)
        async with asyncio.timeout(60):
            await ended.wait()
        assert [delta async for delta in stream][-1].finish_reason is not None


def test_proof_is_bound_to_path_minute_and_secret() -> None:
    """A proof is valid only for one path, one minute and one secret."""
    checker = ProofChecker(SECRET)
    proof = SECRET.proof(PATH, 1000.0)
    assert checker.answer(proof.header, "/peer/v1/workers/1", 1000.0) is None
    assert checker.answer(proof.header, PATH, 1002.0 + WINDOW_S) is None
    assert checker.answer(proof.header, PATH, 998.0 - WINDOW_S) is None
    assert ProofChecker(OTHER).answer(proof.header, PATH, 1000.0) is None
    answer = checker.answer(proof.header, PATH, 1000.0 + WINDOW_S)
    assert answer is not None
    assert is_answer(proof, answer)
    assert not is_answer(SECRET.proof(PATH, 1000.0), answer)
    assert checker.answer(proof.header, PATH, 1000.0 + WINDOW_S) is None


def test_nonces_are_kept_until_their_proofs_expire() -> None:
    """The checker forgets expired nonces, so memory does not grow with connections."""
    checker = ProofChecker(SECRET)
    ahead = SECRET.proof(PATH, 1000.0 + WINDOW_S)
    assert checker.answer(ahead.header, PATH, 1000.0) is not None
    assert checker.answer(ahead.header, PATH, 1000.0 + 2 * WINDOW_S) is None
    for number in range(100):
        now_s = 2000.0 + number * 10 * WINDOW_S
        assert checker.answer(SECRET.proof(PATH, now_s).header, PATH, now_s) is not None
        assert len(checker._expiry_by_nonce) == 1


@pytest.mark.parametrize(
    ("settings", "keys", "proofs"),
    [
        ({}, False, NO_PROOF),
        ({"host": "::1"}, False, NO_PROOF),
        ({"host": "localhost"}, False, NO_PROOF),
        ({}, True, None),
        ({"host": "0.0.0.0"}, False, None),
        ({"host": "10.0.0.5"}, False, None),
        ({"host": "node.example"}, False, None),
        ({"host": "0.0.0.0", "peer_secret_env": VARIABLE}, False, "asked for"),
        ({"peer_secret_env": VARIABLE}, True, "asked for"),
    ],
)
def test_without_a_secret_only_local_nodes_without_keys_serve_peers(
    settings: dict[str, str], keys: bool, proofs: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node on a public address serves no peers without a secret."""
    monkeypatch.setenv(VARIABLE, "a secret of the cluster")
    access = peer_access(ServeConfig(**settings), keys=keys)
    if proofs is None:
        assert access is None
        return
    assert isinstance(access, PeerAccess)
    assert access.admit(PATH, {}) == (NO_PROOF if proofs == NO_PROOF else None)


def test_only_literal_loopback_addresses_count_as_loopback() -> None:
    """Only literal loopback addresses and `localhost` count as loopback."""
    assert [is_loopback(host) for host in ("127.0.0.2", "::1", "localhost")] == [True] * 3
    assert not any(is_loopback(host) for host in ("0.0.0.0", "::", "192.168.1.4", "loopback"))


@pytest.mark.parametrize(("value", "reason"), [(None, "is not set"), ("short", "fewer than 16")])
def test_missing_or_short_secret_fails_the_start(
    value: str | None, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the setting and the variable and omits the secret."""
    monkeypatch.delenv(VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(VARIABLE, value)
    config = ServeConfig(backend="sim", peer_secret_env=VARIABLE)
    with pytest.raises(StartError, match=f"--peer-secret-env: .*{VARIABLE}.*{reason}") as stopped:
        build_node(config)
    assert value is None or value not in str(stopped.value).replace(VARIABLE, "")


def test_no_setting_means_no_secret() -> None:
    """A node without the setting has no secret."""
    assert secret_of(None) is None
