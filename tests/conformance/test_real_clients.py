"""The suites of client libraries against a real vLLM server, directly and through a gateway.

They need `vllm/` and `smollm2/` in the folder `REAL_MODELS`. The model is too small for many tests
of the suites, which then fail in both places. A test that has another result through the gateway is
a difference, and `DIFFERENCES` has the reason for each.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final
from xml.etree import ElementTree as ET

import pytest
import pytest_asyncio

from bench.harness.vllm import is_installed, vllm_server
from draftgate.backends.worker_config import UpstreamSettings
from tests.conformance.environments import command_of, variables
from tests.gateway.harness import running

REAL = Path(os.environ.get("REAL_MODELS", ""))
PATIENCE_S = 900.0
SERVED = ("draftgate-demo", "scripted")
"""The names of the model in the suites, both of which the server uses for its model."""

NAMES = ("anthropic_python", "openai_python")
DIFFERENCES: Final[dict[str, dict[str, str]]] = {name: {} for name in NAMES}
"""The reason for each test of a suite with another result through the gateway."""

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not is_installed(REAL), reason="needs vLLM in REAL_MODELS"),
    pytest.mark.asyncio(loop_scope="module"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def urls(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[str, str]]:
    """The URLs of the server and of a gateway in front of it."""
    log = tmp_path_factory.mktemp("vllm") / "log"
    options = ["--served-model-name", *SERVED, "--dtype", "bfloat16"]
    options += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    with vllm_server(REAL, log, *options) as server:
        async with running(
            backend="openai", upstream=(UpstreamSettings(url=server.url),)
        ) as gateway:
            yield server.url, gateway.url


@pytest.mark.parametrize("name", NAMES)
async def test_suite_has_the_results_of_the_server(
    name: str, urls: tuple[str, str], tmp_path: Path
) -> None:
    """Each test of a client has the same result at the server and through the gateway, but for the
    differences that are listed with their reasons."""
    direct, through = [await results_of(name, url, tmp_path) for url in urls]
    assert direct.keys() == through.keys()
    found = {
        case: (result, through[case]) for case, result in direct.items() if result != through[case]
    }
    assert found.keys() == DIFFERENCES[name].keys(), found


async def results_of(name: str, url: str, folder: Path) -> dict[str, str]:
    """Return `passed`, or the error of each test of a suite at a server."""
    report = folder / f"{url.rpartition(':')[2]}.xml"
    command, place = await asyncio.to_thread(command_of, name, report)
    nodes = dict.fromkeys(("SHIPPED", "SCRIPTED", "TOOLLESS"), url)
    suite = await asyncio.create_subprocess_exec(
        *command, cwd=place, env=variables(HOME=str(folder), **nodes),
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        async with asyncio.timeout(PATIENCE_S):
            await suite.wait()
    finally:
        if suite.returncode is None:
            suite.kill()
            await suite.wait()
    return {str(case.get("name")): _result(case) for case in ET.parse(report).iter("testcase")}


def _result(case: ET.Element) -> str:
    """Return the result of a test, with the error in a form that does not depend on its run."""
    failure = next(
        (one for kind in ("failure", "error") if (one := case.find(kind)) is not None), None
    )
    if failure is None:
        return "passed" if case.find("skipped") is None else "skipped"
    first = (failure.get("message") or "").partition("\n")[0]
    return re.sub(r"0x[0-9a-f]+|\b[0-9a-f-]{16,}\b|127\.0\.0\.1:\d+", "X", first)
