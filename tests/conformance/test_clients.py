"""The suites of client libraries against nodes on sockets.

Each folder of `clients/` has a suite, which runs in an environment of its own with the pinned
versions of the library. A suite uses three nodes: `SHIPPED` serves the shipped model, and
`SCRIPTED` has a worker that follows instructions (`assistant.py`). `TOOLLESS` has the same worker
with a chat template that does not render tools.

A suite marks a failure that the model or the server causes as expected, with a reason that begins
with `model:` or `server:`. Skipped tests do not apply. Every other failure fails the test.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
import pytest_asyncio

from tests.conformance.assistant import Assistant, assisting
from tests.conformance.environments import CLIENTS, ROOT, command_of, library_of, variables
from tests.gateway.harness import needs_engine, running

PAGE = ROOT / "docs" / "guide" / "clients.md"
PATIENCE_S = 900.0
TEMPLATES = {"SCRIPTED": "qwen2_5", "TOOLLESS": "chatml"}
"""The chat templates of the scripted nodes."""
NAMES = sorted(path.parent.name for path in CLIENTS.glob("*/suite.*"))
CAUSES = ("model", "server")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def nodes(
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[tuple[dict[str, str], list[Assistant]]]:
    """The URLs of the nodes by the variable that names them, and the scripted workers."""
    directory, assistants = tmp_path_factory.mktemp("scripted"), list[Assistant]()
    async with AsyncExitStack() as stack:
        shipped = running(backend="engine", kv_bytes=64 << 20, threads=1)
        urls = {"SHIPPED": (await stack.enter_async_context(shipped)).url}
        for name, template in TEMPLATES.items():
            node = assisting(directory / template, template)
            gateway, assistant = await stack.enter_async_context(node)
            urls[name] = gateway.url
            assistants.append(assistant)
        yield urls, assistants


@pytest.mark.long
@needs_engine
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", NAMES)
async def test_suite_of_a_client(
    name: str, nodes: tuple[dict[str, str], list[Assistant]], tmp_path: Path
) -> None:
    """The suite has the results that the documentation lists, and no unexpected failure."""
    urls, assistants = nodes
    for assistant in assistants:
        assistant.refused.clear()
    results = tmp_path / "results.xml"
    command, folder = await asyncio.to_thread(command_of, name, results)
    environment = variables(HOME=str(tmp_path), HF_HUB_OFFLINE="1", **urls)
    suite = await asyncio.create_subprocess_exec(
        *command, cwd=folder, env=environment,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    try:
        async with asyncio.timeout(PATIENCE_S):
            output, _ = await suite.communicate()
    finally:
        if suite.returncode is None:
            suite.kill()
            await suite.wait()
    assert suite.returncode == 0, output.decode()
    assert [assistant.refused for assistant in assistants] == [[] for _ in assistants]
    found = counts(results)
    columns = (found[outcome] for outcome in ("passed", *CAUSES, "does not apply"))
    row = f"| {library_of(name)} | " + " | ".join(map(str, columns)) + " |"
    assert row in PAGE.read_text(), "the documentation lacks this row"


@pytest.mark.parametrize("name", NAMES)
def test_page_lists_the_version_of_a_client(name: str) -> None:
    """The documentation has results of the version that the suite uses."""
    assert f"| {library_of(name)} |" in PAGE.read_text()


def counts(results: Path) -> Counter[str]:
    """Return the number of tests by outcome, of a report in JUnit's format."""
    found: Counter[str] = Counter()
    for case in ET.parse(results).iter("testcase"):
        skipped = case.find("skipped")
        if skipped is None:
            found["passed"] += 1
        elif skipped.get("type") == "pytest.xfail":
            cause = re.match(r"\w+", skipped.get("message", ""))
            assert cause is not None
            assert cause[0] in CAUSES
            found[cause[0]] += 1
        else:
            found["does not apply"] += 1
    return found
