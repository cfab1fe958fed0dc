"""Run the suites of client libraries against a real vLLM, directly and through a gateway.

vLLM serves SmolLM2 under the names that the suites use. Many of their tests need a model that
follows instructions, or what only Draftgate has, and fail in both places. Each test that passes at
vLLM itself has to pass through the gateway. The tests need `vllm/` and `smollm2/` in the folder
`REAL_MODELS`.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from bench.fleet.nodes import gateway
from bench.harness.vllm import is_installed, vllm_server
from tests.conformance.environments import command_of, variables

REAL = Path(os.environ.get("REAL_MODELS", ""))
SUITES = ("openai_python", "openai_node", "anthropic_python", "anthropic_node")
GAINED = {
    "anthropic_python": {
        # vLLM 0.32 sends no id of the request.
        "test_message_has_text_and_usage",
        "test_streamed_events_add_up_to_the_message",
        # Its 404 for an unknown path does not have Anthropic's form.
        "test_batches_are_refused",
    },
    "anthropic_node": {
        "a message has text, usage and the id of the request",
        "the events of a stream add up to the whole message",
        "batches are refused in Anthropic's form",
    },
}
"""The tests that pass only through the gateway."""

PATIENCE_S = 900.0
"""Longest time of a suite, on a busy machine."""

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not is_installed(REAL), reason="needs vLLM in REAL_MODELS"),
]


def outcomes(name: str, url: str, folder: Path) -> dict[str, str]:
    """Return the outcome of each test of a suite, by its name: "passed" or the error."""
    folder.mkdir()
    results = folder / "results.xml"
    command, directory = command_of(name, results)
    urls = dict.fromkeys(("SHIPPED", "SCRIPTED", "TOOLLESS"), url)
    environment = variables(HOME=str(folder), HF_HUB_OFFLINE="1", **urls)
    subprocess.run(
        command, cwd=directory, env=environment, timeout=PATIENCE_S, check=False,
        capture_output=True,
    )  # fmt: skip
    found = {}
    for case in ET.parse(results).iter("testcase"):
        faults = [one for one in case if one.tag in ("failure", "error", "skipped")]
        found[case.get("name", "")] = faults[0].get("message", "") if faults else "passed"
    return found


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """The URLs of vLLM and of a gateway in front of it."""
    folder = tmp_path_factory.mktemp("vllm")
    options = [
        "--served-model-name", "draftgate-demo", "scripted",
        "--enable-auto-tool-choice", "--tool-call-parser", "hermes",
        "--dtype", "bfloat16", "--max-model-len", "384",  # many tests do not limit their answers
    ]  # fmt: skip
    with ExitStack() as stack:
        server = stack.enter_context(vllm_server(REAL, folder / "vllm.log", *options))
        upstream = {"name": "vllm", "url": server.url}
        yield server.url, stack.enter_context(gateway(folder, [upstream]))


@pytest.mark.parametrize("name", SUITES)
def test_suite_has_the_results_of_the_server(
    name: str, urls: tuple[str, str], tmp_path: Path
) -> None:
    """The same tests of a suite pass through the gateway, apart from the listed ones."""
    alone, through = (
        outcomes(name, url, tmp_path / place)
        for url, place in zip(urls, ("alone", "through"), strict=True)
    )
    passed = {test for test, outcome in alone.items() if outcome == "passed"}
    assert alone.keys() == through.keys()
    assert passed, alone
    passed |= GAINED.get(name, set())
    assert {test for test, outcome in through.items() if outcome == "passed"} == passed, through
