"""The cases of the Open Responses compliance suite against a node on a socket.

The suite sends its requests to a capable model. A scripted worker therefore decides what the model
says, and the node does everything else. `NOT_APPLICABLE` lists the cases that do not apply to
Draftgate, with the reason. The tests assert that the node refuses these requests clearly.

The suite's own runner is not in a package registry. A test runs it if the variable `OPEN_RESPONSES`
names a clone of https://github.com/openresponses/openresponses with installed packages.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from draftgate.backends.tokenizer import Tokenizer
from draftgate.gateway.app import Listening
from tests.conformance.open_responses import check_response, check_stream
from tests.gateway.harness import ScriptedBackend, client, running
from tests.gateway.tool_models import with_template

PATH = "/v1/responses"
RUNNER = Path("bin") / "compliance-test.ts"
RUNNER_S = 120.0

WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the current weather for a location",
    "parameters": {
        "type": "object",
        "properties": {
            "location": {
                "type": "string",
                "description": "The city and state, e.g. San Francisco, CA",
            }
        },
        "required": ["location"],
    },
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"location": "Rome"}}\n</tool_call>'
ASKS_FOR_WEATHER = [
    {"type": "message", "role": "user", "content": "What's the weather like in San Francisco?"}
]


def user(content: Any) -> dict[str, Any]:
    """Return a message of the user."""
    return {"type": "message", "role": "user", "content": content}


def assistant(content: Any, **fields: str) -> dict[str, Any]:
    """Return a message of the model, with further fields such as its phase."""
    return {"type": "message", "role": "assistant", "content": content, **fields}


def parts(kind: str, **fields: str) -> list[dict[str, Any]]:
    """Return a message of the user with a text and another part."""
    return [user([{"type": "input_text", "text": "What is this?"}, {"type": kind, **fields}])]


TEXT_CASES: dict[str, dict[str, Any]] = {
    "basic-response": {"input": [user("Say hello in exactly 3 words.")]},
    "string-input": {"input": "Say hello in exactly 3 words."},
    "streaming-response": {"input": [user("Count from 1 to 5.")], "stream": True},
    "system-prompt": {
        "input": [
            {
                "type": "message",
                "role": "system",
                "content": "You are a pirate. Always respond in pirate speak.",
            },
            user("Say hello."),
        ]
    },
    "multi-turn": {
        "input": [
            user("My name is Alice."),
            assistant("Hello Alice! Nice to meet you. How can I help you today?"),
            user("What is my name?"),
        ]
    },
    "assistant-phase": {
        "input": [
            assistant("I should answer with the saved number.", phase="commentary"),
            assistant("The number is four.", phase="final_answer"),
            user("Repeat only the number."),
        ]
    },
    "phase-of-parts": {
        "input": [
            user("Look it up."),
            assistant(
                [{"type": "output_text", "text": "I am looking.", "annotations": []}],
                phase="commentary",
            ),
            user("And?"),
        ]
    },
    "allowed-tools": {
        "input": [user("Say hello.")],
        "tools": [WEATHER],
        "tool_choice": {"type": "allowed_tools", "tools": [{"type": "function",
                                                            "name": "get_weather"}]},
    },
}  # fmt: skip
"""Requests whose response is a completed message, by the id of the case.

The suite does not have the cases `string-input`, `phase-of-parts` and `allowed-tools`, but the text
of the specification requires them. The suite's `response-output-phase-schema` sends no request."""

NOT_APPLICABLE: dict[str, tuple[str, dict[str, Any], str]] = {
    "image-input": (
        "The supported models read only text.",
        {"input": parts("input_image", image_url="data:image/png;base64,iVBORw0KGgo=")},
        "input[0].content[1].type",
    ),
    "file-input": (
        "The supported models read only text. The specification makes files optional.",
        {"input": parts("input_file", filename="a.pdf", file_data="data:application/pdf;base64,")},
        "input[0].content[1].type",
    ),
    "file-search": (
        "No tool runs in the server. The specification makes this tool optional.",
        {"input": "x", "tools": [{"type": "file_search", "vector_store_ids": ["vs"]}]},
        "tools[0].type",
    ),
    "offline-web-search": (
        "No tool runs in the server. The specification makes this tool optional.",
        {"input": "x", "tools": [{"type": "web_search", "external_web_access": False}]},
        "tools[0].type",
    ),
}
"""The reason, the request and the parameter that the error names, by the id of the case."""

NO_ROUTE: dict[str, tuple[str, str, str]] = {
    **dict.fromkeys(
        ("compact-response", "compact-missing-model"),
        (
            "The specification requires no server to compact. Draftgate truncates conversations.",
            "POST", f"{PATH}/compact",
        ),
    ),
    **dict.fromkeys(
        (
            "websocket-response", "websocket-sequential-responses", "websocket-continuation",
            "websocket-reconnect-store-false-recovery", "websocket-previous-response-not-found",
            "websocket-failed-continuation-evicts-cache", "websocket-compact-new-chain",
        ),
        ("The specification makes WebSockets optional.", "GET", PATH),
    ),
}  # fmt: skip
"""The reason, and the method and the path that do not exist, by the id of the case."""


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Listening]:
    """A node whose model calls the offered function once, and otherwise says hello."""
    backend = ScriptedBackend()
    backend.tokenizer = Tokenizer(with_template(tmp_path / "model", "qwen2_5"))

    async def answer() -> None:
        while True:
            request = await backend.submitted.get()
            prompt = backend.tokenizer.decode(request.prompt_ids)
            calls = "weather" in prompt.rpartition("user\n")[2]
            said = ["Well. ", CALL] if calls else ["Hello ", "there, ", "friend."]
            for step in said:
                backend.emit(request, step, last=step is said[-1])
                await asyncio.sleep(0)

    answering = asyncio.create_task(answer())
    async with running(backends=[backend]) as gateway:
        yield gateway
    answering.cancel()
    with suppress(asyncio.CancelledError):
        await answering


@pytest.fixture
async def http(node: Listening) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the node."""
    async with client(node) as opened:
        yield opened


@pytest.fixture
def runner() -> list[str]:
    """The command that runs the suite's own runner, without its arguments."""
    clone = Path(os.environ.get("OPEN_RESPONSES", ""))
    bun = shutil.which("bun") or shutil.which("bun", path=clone / "node_modules" / ".bin")
    if bun is None or not (clone / RUNNER).is_file():
        pytest.skip("needs bun, and OPEN_RESPONSES with a clone of the suite")
    return [bun, "run", str(clone.absolute() / RUNNER)]


def read_events(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Return the name and the data of each event before `[DONE]`."""
    found = []
    *blocks, done = text.strip().split("\n\n")
    assert done == "data: [DONE]"
    for block in blocks:
        name, data = block.split("\n")
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found


async def send(http: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    """Return the checked response to a request, which may be streamed."""
    response = await http.post(PATH, json={"model": "scripted", **body})
    assert response.status_code == 200, response.text
    kind = response.headers["content-type"].partition(";")[0]
    if body.get("stream"):
        assert kind == "text/event-stream"
        return check_stream(read_events(response.text))
    assert kind == "application/json"
    check_response(response.json())
    return response.json()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("case", TEXT_CASES)
async def test_request_gets_a_completed_message(
    http: httpx.AsyncClient, case: str, stream: bool
) -> None:
    """The response is complete, satisfies the specification and has a message."""
    found = await send(http, **{**TEXT_CASES[case], "stream": stream})
    assert found["status"] == "completed"
    (item,) = found["output"]
    assert (item["type"], item["status"], item["role"]) == ("message", "completed", "assistant")
    assert item["content"][0]["text"] == "Hello there, friend."


async def test_tool_calling(http: httpx.AsyncClient) -> None:
    """The case `tool-calling`: the output has the model's function call."""
    found = await send(http, input=ASKS_FOR_WEATHER, tools=[WEATHER])
    (call,) = [item for item in found["output"] if item["type"] == "function_call"]
    assert (call["name"], json.loads(call["arguments"])) == ("get_weather", {"location": "Rome"})


async def test_tool_calling_streaming(http: httpx.AsyncClient) -> None:
    """The case `tool-calling-streaming`: the events report the call from its name to its end."""
    body = {"model": "scripted", "input": ASKS_FOR_WEATHER, "tools": [WEATHER], "stream": True}
    events = read_events((await http.post(PATH, json=body)).text)
    check_stream(events)
    of_call = [
        name
        for name, data in events
        if "arguments" in name or data.get("item", {}).get("type") == "function_call"
    ]
    added, *deltas, done, ended = of_call
    assert (added, ended) == ("response.output_item.added", "response.output_item.done")
    assert set(deltas) == {"response.function_call_arguments.delta"}
    assert done == "response.function_call_arguments.done"


async def test_function_call_round_trip(http: httpx.AsyncClient) -> None:
    """The case `function-call-roundtrip`: the output of a call continues the response."""
    first = await send(
        http, input=ASKS_FOR_WEATHER, tools=[WEATHER],
        tool_choice={"type": "function", "name": "get_weather"},
    )  # fmt: skip
    (call,) = [item for item in first["output"] if item["type"] == "function_call"]
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "64 degrees"}
    second = await send(http, input=[output], previous_response_id=first["id"])
    assert (second["status"], second["output"][0]["type"]) == ("completed", "message")


async def test_previous_response_id(http: httpx.AsyncClient) -> None:
    """The case `previous-response-id`: the server keeps the conversation."""
    first = await send(http, input="Remember this code word: papaya. Reply with only OK.")
    body = {"input": "What code word?", "previous_response_id": first["id"]}
    second = await send(http, **body)
    assert second["previous_response_id"] == first["id"]
    assert second["usage"]["input_tokens"] > first["usage"]["input_tokens"]


async def test_missing_previous_response(http: httpx.AsyncClient) -> None:
    """A request that continues an unknown response gets the code of the specification."""
    body = {"model": "scripted", "input": "x", "previous_response_id": "resp_missing"}
    response = await http.post(PATH, json=body)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "previous_response_not_found"


@pytest.mark.parametrize("case", NOT_APPLICABLE)
async def test_case_that_does_not_apply_is_refused_by_its_parameter(
    http: httpx.AsyncClient, case: str
) -> None:
    """The server refuses what it does not support with 400, and names the parameter."""
    _, body, param = NOT_APPLICABLE[case]
    response = await http.post(PATH, json={"model": "scripted", **body})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("case", NO_ROUTE)
async def test_optional_endpoint_does_not_exist(http: httpx.AsyncClient, case: str) -> None:
    """The server answers requests for optional endpoints with an error in OpenAI's format."""
    _, method, path = NO_ROUTE[case]
    response = await http.request(method, path)
    assert response.status_code in {404, 405}
    assert response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.long
async def test_runner_of_the_suite_fails_only_cases_that_do_not_apply(
    node: Listening, runner: list[str]
) -> None:
    """The suite's own runner passes each case, except for those that do not apply to Draftgate."""
    options = ["-u", f"{node.url}/v1", "-k", "any", "-m", "scripted", "--json"]
    running_suite = await asyncio.create_subprocess_exec(
        *runner, *options, stdout=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(RUNNER_S):
            output, _ = await running_suite.communicate()
    finally:
        if running_suite.returncode is None:
            running_suite.kill()
            await running_suite.wait()
    found = {case["id"]: case for case in json.loads(output)["results"]}
    assert found.keys() >= {"basic-response", "streaming-response", "tool-calling"}
    failed = {name: case["errors"] for name, case in found.items() if case["status"] == "failed"}
    skipped = {name for name, case in found.items() if case["status"] == "skipped"}
    assert failed.keys() == (NOT_APPLICABLE | NO_ROUTE).keys() & found.keys() - skipped, failed
