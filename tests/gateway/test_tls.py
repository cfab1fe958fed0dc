"""Tests of TLS: HTTPS, certificates that change, and certificates of clients."""

from __future__ import annotations

import asyncio
import shutil
import socket
import ssl
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvloop

from draftgate.gateway import reloading
from draftgate.gateway.app import Listening, StartError
from draftgate.gateway.cluster.access import advertised_url
from draftgate.gateway.config import ServeConfig
from tests.gateway.certificates import Certificate, make_certificate
from tests.gateway.harness import PATIENCE_S, events, eventually, port_of, running

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")

BODY = {"prompt": "x", "max_tokens": 3, "ignore_eos": True}


@pytest.fixture
def first(tmp_path: Path) -> Certificate:
    """The certificate of the server."""
    return make_certificate(tmp_path, "first")


@pytest.fixture
def second(tmp_path: Path) -> Certificate:
    """Another certificate, of the server or of a client."""
    return make_certificate(tmp_path, "second")


@pytest.fixture(autouse=True)
def _frequent_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reloading, "CHECK_S", 0.01)


def files_of(certificate: Certificate) -> dict[str, str]:
    """Return the settings for a server with a certificate."""
    return {"tls_certfile": str(certificate.cert), "tls_keyfile": str(certificate.key)}


def https(gateway: Listening, context: ssl.SSLContext) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=gateway.url, verify=context, timeout=PATIENCE_S)


async def shown_name(gateway: Listening) -> str:
    """Return the common name in the certificate that a new connection gets."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    _, writer = await asyncio.open_connection("127.0.0.1", port_of(gateway), ssl=context)
    der = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    names = [name for name in (b"first", b"second") if name in der]
    return names[0].decode()


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_requests_and_streams_use_https(first: Certificate, stream: bool) -> None:
    """A node with a certificate serves HTTPS, and its URL says so."""
    async with running(**files_of(first)) as gateway:
        assert gateway.url.startswith("https://")
        async with https(gateway, first.trusting_context()) as http:
            response = await http.post("/v1/completions", json={**BODY, "stream": stream})
    assert response.status_code == 200
    if stream:
        assert events(response.text)[-1] == "[DONE]"
    else:
        assert response.json()["usage"]["completion_tokens"] == 3


async def test_plain_http_gets_no_response(first: Certificate) -> None:
    """A node with a certificate closes connections that do not begin with TLS."""
    async with running(**files_of(first)) as gateway:
        reader, writer = await asyncio.open_connection("127.0.0.1", port_of(gateway))
        writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        async with asyncio.timeout(PATIENCE_S):
            assert b"HTTP/" not in await reader.read()
        writer.close()


async def test_new_connections_get_a_changed_certificate(
    first: Certificate, second: Certificate
) -> None:
    """The node shows a changed certificate to new connections, and existing connections stay
    open."""
    async with running(**files_of(first)) as gateway:
        async with https(gateway, first.trusting_context()) as old:
            assert (await old.get("/health")).status_code == 200
            assert await shown_name(gateway) == "first"
            first.replace_by(second)
            await eventually(lambda: _shows(gateway, "second"))
            assert (await old.get("/health")).status_code == 200
        async with https(gateway, second.trusting_context()) as new:
            assert (await new.get("/health")).status_code == 200


async def test_a_reload_reads_certificates(
    first: Certificate, second: Certificate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGHUP applies changed certificates to new connections without waiting for the next check."""
    monkeypatch.setattr(reloading, "CHECK_S", 1e9)
    async with running(**files_of(first)) as gateway:
        assert await shown_name(gateway) == "first"
        first.replace_by(second)
        gateway.reload()
        await eventually(lambda: _shows(gateway, "second"))


async def test_the_old_certificate_stays_while_the_files_do_not_match(
    first: Certificate, second: Certificate, caplog: pytest.LogCaptureFixture
) -> None:
    """The node keeps its certificate while a new certificate has another key, logs one error, and
    uses the new certificate as soon as its key is there."""
    async with running(**files_of(first)) as gateway:
        first.cert.write_bytes(second.cert.read_bytes())
        await eventually(lambda: _logged(caplog, "cannot reload the TLS certificates"))
        await asyncio.sleep(5 * reloading.CHECK_S)
        assert await shown_name(gateway) == "first"
        errors = [one for one in caplog.records if "cannot reload" in one.getMessage()]
        assert len(errors) == 1
        first.key.write_bytes(second.key.read_bytes())
        await eventually(lambda: _shows(gateway, "second"))


async def _shows(gateway: Listening, name: str) -> bool:
    return await shown_name(gateway) == name


async def _logged(caplog: pytest.LogCaptureFixture, text: str) -> bool:
    return any(text in record.getMessage() for record in caplog.records)


async def test_clients_need_a_certificate_of_the_ca(
    first: Certificate, second: Certificate, tmp_path: Path
) -> None:
    """With a CA for clients, the node serves clients with a certificate of this CA. Clients without
    a certificate can use only the endpoints for probes."""
    stranger = make_certificate(tmp_path, "stranger")
    settings = {**files_of(first), "tls_client_ca_file": str(second.cert)}
    async with running(**settings) as gateway:
        async with https(gateway, second.client_context(first)) as known:
            assert (await known.post("/v1/completions", json=BODY)).status_code == 200
        async with https(gateway, first.trusting_context()) as bare:
            refused = await bare.post("/v1/completions", json=BODY)
            assert refused.status_code == 403
            assert refused.json()["error"]["code"] == "client_certificate_required"
            for path in ("/metrics", "/live", "/"):
                assert (await bare.get(path)).status_code == 403
            assert (await bare.get("/health")).status_code == 200
        async with https(gateway, stranger.client_context(first)) as unknown:
            with pytest.raises((httpx.ReadError, httpx.ConnectError, httpx.RemoteProtocolError)):
                await unknown.get("/v1/models")


async def test_an_added_ca_is_accepted_without_a_restart(
    first: Certificate, second: Certificate, tmp_path: Path
) -> None:
    """The node accepts clients of a CA that was added to the file while the node runs."""
    other = make_certificate(tmp_path, "other")
    authorities = tmp_path / "authorities.pem"
    authorities.write_bytes(other.cert.read_bytes())
    settings = {**files_of(first), "tls_client_ca_file": str(authorities)}
    async with running(**settings) as gateway:
        authorities.write_bytes(other.cert.read_bytes() + second.cert.read_bytes())
        await eventually(lambda: _accepts(gateway, second.client_context(first)))


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_removed_ca_is_rejected_without_a_restart(
    first: Certificate, second: Certificate, tmp_path: Path, loop: Any
) -> None:
    """A replaced CA applies to new connections, also to clients that resume a TLS session.
    Existing connections stay open."""
    authority = tmp_path / "authority.pem"
    authority.write_bytes(second.cert.read_bytes())
    settings = {**files_of(first), "tls_client_ca_file": str(authority)}
    removed, added = second.client_context(first), make_certificate(tmp_path, "added")

    async def scenario() -> None:
        async with running(**settings) as gateway, https(gateway, removed) as old:
            assert (await old.get("/v1/models")).status_code == 200
            session, _ = await asyncio.to_thread(_resume, gateway, removed, None)
            session, resumed = await asyncio.to_thread(_resume, gateway, removed, session)
            assert resumed
            assert not await _accepts(gateway, added.client_context(first))
            authority.write_bytes(added.cert.read_bytes())
            await eventually(lambda: _accepts(gateway, added.client_context(first)))
            assert not await _accepts(gateway, removed)
            with pytest.raises((ssl.SSLError, ConnectionError)):
                await asyncio.to_thread(_resume, gateway, removed, session)
            assert (await old.get("/v1/models")).status_code == 200

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(scenario())


def _resume(
    gateway: Listening, context: ssl.SSLContext, session: ssl.SSLSession | None
) -> tuple[ssl.SSLSession | None, bool]:
    """Get the models, and return the TLS session and whether the connection resumed `session`.

    Raises:
        OSError: the node closed the connection without a response.
    """
    with (
        socket.create_connection(("127.0.0.1", port_of(gateway)), PATIENCE_S) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1", session=session) as connection,
    ):
        connection.sendall(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n")
        response = connection.recv(1 << 16)
        if not response:
            raise ConnectionAbortedError
        assert response.startswith(b"HTTP/1.1 200")
        return connection.session, bool(connection.session_reused)


async def _accepts(gateway: Listening, context: ssl.SSLContext) -> bool:
    """Return whether a new connection of a client can list the models."""
    async with https(gateway, context) as http:
        try:
            return (await http.get("/v1/models")).status_code == 200
        except httpx.TransportError:
            return False


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"tls_certfile": "missing.pem"}, "missing.pem does not exist"),
        ({"tls_keyfile": "a.key"}, "need --tls-certfile"),
        ({"tls_client_ca_file": "a.pem"}, "need --tls-certfile"),
        ({"tls_certfile": "first.pem", "tls_keyfile": "second.key"}, "KEY_VALUES_MISMATCH"),
        ({"tls_certfile": "first.pem"}, "first.pem"),
    ],
    ids=["missing", "key-only", "ca-only", "mismatch", "no-key"],
)
async def test_bad_certificates_stop_the_start_with_one_line(
    first: Certificate, second: Certificate, tmp_path: Path, settings: dict[str, Any], words: str
) -> None:
    """The start fails with one line that names the files and the problem."""
    given = {name: str(tmp_path / file) for name, file in settings.items()}
    with pytest.raises(StartError, match=r"TLS|--tls") as caught:
        async with running(**given):
            pass
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


async def test_other_nodes_reach_the_node_by_https(first: Certificate) -> None:
    """A node with a certificate advertises an `https` URL to its pool."""
    config = ServeConfig(host="127.0.0.1", **files_of(first))
    assert await advertised_url(config, 8443) == "https://127.0.0.1:8443"
