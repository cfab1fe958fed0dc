"""Tests that clients get the same responses from chats as from this node's own engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from draftgate.backends.tokenizer import Tokenizer
from draftgate.backends.types import Delta, FinishReason, SpeculationOutcome
from draftgate.backends.worker_config import UpstreamSettings
from draftgate.gateway.app import Listening
from tests.gateway.harness import ScriptedBackend, client, running
from tests.gateway.tool_models import ANTHROPIC_TOOLS, NOW, WEATHER, with_template

MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 1}}\n</tool_call>'
HI = [{"role": "user", "content": "hi"}]
FLAT_TOOLS = [{"type": "function", **tool["function"]} for tool in (WEATHER, NOW)]
BODIES: dict[str, dict[str, Any]] = {
    MESSAGES: {"messages": HI, "max_tokens": 9},
    RESPONSES: {"input": "hi"},
}
TOOLS: dict[str, list[Any]] = {MESSAGES: ANTHROPIC_TOOLS, RESPONSES: FLAT_TOOLS}


class Output(NamedTuple):
    """The output of a worker.

    Attributes:
        texts: the text of each step.
        reason, stop_text: what ends the last step.
    """

    texts: Sequence[str]
    reason: FinishReason = FinishReason.STOP
    stop_text: str = ""


OUTPUTS = {
    "text": Output(["Well", ", then", "."]),
    "one step": Output(["Well."]),
    "nothing": Output([""]),
    "cut": Output(["Well", ", th"], FinishReason.LENGTH),
    "stopped": Output(["Well", ", and"], FinishReason.STOP, "then"),
    "reasoning": Output(["<think>\nLet me", " see.\n", "</think>\n\nNoon", "."]),
    "only reasoning": Output(["<think>\nLet me", " see."], FinishReason.LENGTH),
    "call": Output([CALL[:30], CALL[30:50], CALL[50:]]),
    "text and calls": Output(["Well. ", CALL[:30], CALL[30:60], CALL[60:], CALL]),
    "reasoning and call": Output(["<think>\nA", "\n</think>\n", CALL[:60], CALL[60:]]),
    "cut call": Output([CALL[:60]], FinishReason.LENGTH),
}


@pytest.fixture
def qwen3(scripted: ScriptedBackend, tmp_path: Path) -> ScriptedBackend:
    """A scripted worker whose model has the template of Qwen3."""
    scripted.tokenizer = Tokenizer(with_template(tmp_path / "qwen3", "qwen3"))
    scripted.kv_tokens = 2000
    scripted.card = replace(scripted.card, max_model_len=2000)
    return scripted


@asynccontextmanager
async def in_front_of(node: Listening) -> AsyncIterator[Listening]:
    """Run a node that sends only chats to another node."""
    settings = UpstreamSettings(url=node.url, chats_only=True)
    async with running(backend="openai", upstream=(settings,)) as gateway:
        yield gateway


async def respond(
    backend: ScriptedBackend, node: Listening, path: str, body: dict[str, Any], output: Output
) -> tuple[list[int], httpx.Response]:
    """Return the prompt that the worker gets for a request, and the response with its output."""
    async with client(node) as http:
        response = asyncio.create_task(http.post(path, json=body))
        request = await backend.submitted.get()
        for left, text in zip(range(len(output.texts) - 1, -1, -1), output.texts, strict=True):
            reason = None if left else output.reason
            outcome = None if left else SpeculationOutcome()
            end = (reason, outcome)
            ids = tuple(range(1, 2 + text.count(" ")))
            stop_text = "" if left else output.stop_text
            delta = Delta(0, ids, text, (), *end, stop_text=stop_text)
            backend.sinks.deliver([(request.request_id, delta)])
            await asyncio.sleep(0)
        return list(request.prompt_ids), await response


def events_of(response: httpx.Response) -> list[Any]:
    """Return the events of a stream, or the whole response, with the names of events."""
    assert response.status_code == 200, response.text
    if not response.headers["content-type"].startswith("text/event-stream"):
        return [response.json()]
    found = []
    for block in response.text.strip().split("\n\n"):
        *name, data = block.split("\n")
        decoded = data if data == "data: [DONE]" else json.loads(data.removeprefix("data: "))
        found.append([*name, decoded])
    return found


def comparable(found: Any, ids: dict[str, str]) -> Any:
    """Return JSON with the number of each id in place of the id, and without times and metrics."""
    if isinstance(found, list):
        return [comparable(one, ids) for one in found]
    if not isinstance(found, dict):
        return found
    plain = {}
    for name, value in found.items():
        if name in {"id", "item_id", "call_id"} and isinstance(value, str):
            plain[name] = ids.setdefault(value, f"id {len(ids)}")
        elif name not in {"metrics", "created_at", "completed_at", "store"}:
            plain[name] = comparable(value, ids)
    return plain


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("output", OUTPUTS.values(), ids=OUTPUTS)
@pytest.mark.parametrize("path", [MESSAGES, RESPONSES])
async def test_translated_response_equals_that_of_the_engine(
    qwen3: ScriptedBackend, path: str, output: Output, stream: bool
) -> None:
    """The events of a chat become those that a node sends whose engine has the same output. Only
    ids and times differ, and the usage at the beginning of a stream whose first text is held."""
    body = {**BODIES[path], "tools": TOOLS[path], "stream": stream}
    async with running(backends=[qwen3]) as node, in_front_of(node) as gateway:
        prompt, own = await respond(qwen3, node, path, body, output)
        same_prompt, translated = await respond(qwen3, gateway, path, body, output)
    assert same_prompt == prompt
    expected, found = (comparable(events_of(one), {}) for one in (own, translated))
    if path == MESSAGES and stream and not output.texts[0].startswith("Well"):
        for events in (expected, found):
            del events[0][1]["message"]["usage"]["output_tokens"]
    assert found == expected


REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "system": (MESSAGES, {"system": [{"type": "text", "text": t} for t in ("Be ", "kind.")]}),
    "several texts": (
        MESSAGES,
        {"messages": [{"role": "user", "content": [{"type": "text", "text": t} for t in "abc"]}]},
    ),
    "tools": (MESSAGES, {"tools": ANTHROPIC_TOOLS, "tool_choice": {"type": "auto"}}),
    "conversation": (
        MESSAGES,
        {
            "tools": ANTHROPIC_TOOLS,
            "messages": [
                *HI,
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "Hm.", "signature": ""},
                        {"type": "text", "text": "Let me look."},
                        {"type": "tool_use", "id": "c1", "name": "now", "input": {}},
                        {"type": "tool_use", "id": "c2", "name": "now", "input": {"a": [1]}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "c1", "content": "noon"},
                        {"type": "tool_result", "tool_use_id": "c2", "is_error": True},
                        {"type": "text", "text": "And now?"},
                    ],
                },
            ],
        },
    ),
    "prefill": (MESSAGES, {"messages": [*HI, {"role": "assistant", "content": "The time is"}]}),
    "thinking off": (MESSAGES, {"thinking": {"type": "disabled"}}),
    "thinking on": (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 1024}}),
    "instructions": (RESPONSES, {"instructions": "Be kind.", "input": HI}),
    "developer": (RESPONSES, {"input": [{"role": "developer", "content": "Be kind."}, *HI]}),
    "items": (
        RESPONSES,
        {
            "tools": FLAT_TOOLS,
            "input": [
                *HI,
                {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm."}]},
                {"type": "function_call", "call_id": "c1", "name": "now", "arguments": "{}"},
                {"type": "function_call", "call_id": "c2", "name": "now", "arguments": "{"},
                {"type": "function_call_output", "call_id": "c1", "output": "noon"},
                {"type": "function_call_output", "call_id": "c2", "output": "error"},
                {"role": "assistant", "content": [{"type": "output_text", "text": "Noon."}]},
                *HI,
            ],
        },
    ),
    "no reasoning": (RESPONSES, {"reasoning": {"effort": "none"}}),
    "template": (RESPONSES, {"chat_template_kwargs": {"enable_thinking": False}}),
}  # fmt: skip


@pytest.mark.parametrize("name", REQUESTS)
async def test_translated_request_has_the_prompt_of_the_engine(
    qwen3: ScriptedBackend, name: str
) -> None:
    """The worker gets the same prompt from a request and from its translation, and counts the same
    number of tokens."""
    path, fields = REQUESTS[name]
    body = {**BODIES[path], **fields}
    counted = {key: value for key, value in body.items() if key != "max_tokens"}
    count_path = f"{path}/{'count_tokens' if path == MESSAGES else 'input_tokens'}"
    async with running(backends=[qwen3]) as node, in_front_of(node) as gateway:
        prompt, _ = await respond(qwen3, node, path, body, OUTPUTS["one step"])
        translated, _ = await respond(qwen3, gateway, path, body, OUTPUTS["one step"])
        async with client(gateway) as http:
            response = await http.post(count_path, json=counted)
    assert translated == prompt
    assert response.status_code == 200, response.text
    if name != "no reasoning":  # `/tokenize` has no effort
        assert response.json()["input_tokens"] == len(prompt)
