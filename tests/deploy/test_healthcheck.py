"""Tests of the health check in the images, which also checks nodes with a certificate."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.deploy.compose import ROOT
from tests.gateway.certificates import make_certificate
from tests.gateway.harness import port_of, running

CHECK = json.loads(
    re.findall(r"^HEALTHCHECK .*\\\n +CMD (.*)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)[
        0
    ]
)
"""The command in the Dockerfile."""


async def status(port: int, path: str = "/health") -> int:
    """Run the command for a port and a path, and return its exit status."""
    python, *arguments, url = CHECK
    assert (python, url) == ("python", "http://127.0.0.1:8000/health")
    asked = f"http://127.0.0.1:{port}{path}"
    process = await asyncio.create_subprocess_exec(sys.executable, *arguments, asked)
    return await process.wait()


@pytest.mark.parametrize("client_ca", [False, True], ids=["server", "client_ca"])
@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
async def test_node_with_a_certificate_is_healthy(tmp_path: Path, client_ca: bool) -> None:
    """The check succeeds for a node with a certificate, also if the node requires one of its
    clients."""
    certificate = make_certificate(tmp_path, "first")
    settings = {"tls_certfile": str(certificate.cert), "tls_keyfile": str(certificate.key)}
    if client_ca:
        settings["tls_client_ca_file"] = str(certificate.cert)
    async with running(**settings) as gateway:
        assert await status(port_of(gateway)) == 0


async def test_only_a_node_that_responds_with_success_is_healthy() -> None:
    """The check fails for a status other than 200, and for a port without a node."""
    async with running(start=False) as gateway:
        assert await status(port_of(gateway)) == 0
        assert await status(port_of(gateway), "/ready") == 1
    assert await status(port_of(gateway)) == 1
