"""Tools of models whose chat template has none in a known format."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

from draftgate.backends.errors import RequestRejected
from draftgate.backends.tokenizer import Tokenizer
from draftgate.gateway.app import Listening
from draftgate.gateway.errors import Unsupported
from draftgate.gateway.http.requests.headers import Sender
from draftgate.gateway.http.requests.validation import parse_chat
from draftgate.gateway.served_model import ServedModel
from tests.gateway.harness import (
    ScriptedBackend,
    client,
    events,
    needs_engine,
    running,
)
from tests.gateway.tool_models import (
    ANTHROPIC_TOOLS,
    TEMPLATES,
    TOOLS,
    WEATHER,
    with_template,
    with_text,
)

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
HI = [{"role": "user", "content": "Weather in Paris?"}]
CALL = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
HISTORY = [
    {"role": "system", "content": "Be brief."},
    *HI,
    {"role": "assistant", "content": "Let me see.",
     "tool_calls": [{"id": "a", **CALL}, {"id": "b", **CALL}]},
    {"role": "tool", "tool_call_id": "a", "content": "rain"},
    {"role": "tool", "tool_call_id": "b", "content": "sun"},
    {"role": "user", "content": "So?"},
]  # fmt: skip
PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"
ALTERNATING = """\
{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('roles must alternate user/assistant') }}{% endif %}\
<{{ m.role }}>{{ m.content | trim }}\n{% endfor %}<assistant>"""
WITHOUT_SYSTEM = """\
{% for m in messages %}{% if m.role in ['user', 'assistant'] %}<{{ m.role }}>{{ m.content }}
{% endif %}{% endfor %}<assistant>"""
OWN_FORMAT = (
    "{% if tools %}{{ tools | tojson }}<tool_call><function=name>{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no result') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"
)
TEXTS = {
    "plain": PLAIN,
    "alternating": ALTERNATING,
    "without_system": WITHOUT_SYSTEM,
    "own_format": OWN_FORMAT,
    **{
        name: (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
        for name in ("chatml", "llama3", "mistral_v1", "deepseek_r1_distill")
    },
}


def prompt_of(served: ServedModel, **fields: Any) -> str:
    """Return the text of the prompt of a chat."""
    body = json.dumps({"messages": HI, "tools": TOOLS, **fields}).encode()
    (prompt,) = parse_chat(body, served, Sender("id")).job.prompts
    return served.tokenizer.decode(prompt, skip_special_tokens=False)


@pytest.fixture(params=TEXTS)
def served(request: pytest.FixtureRequest, tmp_path: Path) -> ServedModel:
    """The shipped model with a template that has no tools in a known format."""
    directory = with_text(tmp_path / "model", TEXTS[request.param])
    return ServedModel("m", Tokenizer(directory), 8192)


def test_the_prompt_has_tools_calls_and_results(served: ServedModel) -> None:
    """The prompt describes each tool once, before the conversation with its calls and results."""
    messages = (
        HISTORY if "raise_exception('roles" not in served.tokenizer.tool_template else (HISTORY[1:])
    )
    prompt = prompt_of(served, messages=messages)
    described = [prompt.index(json.dumps(tool["function"])) for tool in TOOLS]
    parts = [
        *described,
        prompt.index("Weather in Paris?"),
        prompt.index("Let me see."),
        prompt.rindex('{"name": "weather", "arguments": {"city": "Paris"}}'),
        prompt.index("<tool_response>\nrain\n</tool_response>"),
        prompt.index("<tool_response>\nsun\n</tool_response>"),
        prompt.index("So?"),
    ]
    assert parts == sorted(parts)
    assert prompt.count('{"name": "weather", "arguments": {"city": "Paris"}}') == 2
    assert prompt.count(json.dumps(TOOLS[1]["function"])) == 1


def test_a_history_with_calls_needs_no_tools(served: ServedModel) -> None:
    """Calls and results stay part of the prompt after the client stops offering tools."""
    for fields in ({"tools": None}, {"tool_choice": "none"}):
        prompt = prompt_of(served, messages=HISTORY[1:], **fields)
        assert "<tool_response>\nsun\n</tool_response>" in prompt
        assert "# Tools" not in prompt


def test_the_prompt_depends_on_the_choice(tmp_path: Path) -> None:
    """The prompt says whether a response may have several calls, and omits tools not allowed."""
    served = ServedModel("m", Tokenizer(with_text(tmp_path / "model", PLAIN)), 8192)
    assert "For several calls" in prompt_of(served)
    assert "Call at most one function." in prompt_of(served, parallel_tool_calls=False)
    allowed = {"tools": [{"type": "function", "function": {"name": "now"}}], "mode": "auto"}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    assert '"weather"' not in prompt_of(served, tool_choice=choice)


def test_a_template_that_omits_the_tools_is_named(tmp_path: Path) -> None:
    """A template that renders neither the system nor the user gets an error, not a prompt."""
    served = ServedModel("m", Tokenizer(with_text(tmp_path / "model", "nothing")), 8192)
    with pytest.raises(Unsupported, match="tools"):
        prompt_of(served)


def test_a_model_without_a_template_gets_no_chats(tmp_path: Path) -> None:
    """A model without any chat template refuses tools with the reason for which it has no chats."""
    served = ServedModel("m", Tokenizer(with_text(tmp_path / "model", "x")), 8192)
    settings = json.loads((tmp_path / "model" / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps(settings))
    served = ServedModel("m", Tokenizer(tmp_path / "model"), 8192)
    with pytest.raises(RequestRejected, match="no chat template"):
        prompt_of(served)


@pytest.fixture
async def chatml(tmp_path: Path) -> AsyncIterator[Listening]:
    """A simulated worker whose template has no tools."""
    async with running(model=str(with_template(tmp_path / "model", "chatml"))) as gateway:
        yield gateway


def request_body(path: str, most: int, choice: str, *, stream: bool) -> dict[str, Any]:
    """Return a request whose response must be a call."""
    named = choice == "named"
    if path == MESSAGES:
        forced = {"type": "tool", "name": "weather"} if named else {"type": "any"}
        return {
            "messages": HI, "max_tokens": most, "tools": ANTHROPIC_TOOLS, "tool_choice": forced,
            "stream": stream, "seed": 1,
        }  # fmt: skip
    name = {"name": "weather"}
    if path == CHAT:
        forced_chat = {"type": "function", "function": name} if named else "required"
        return {
            "messages": HI, "max_tokens": most, "tools": TOOLS, "tool_choice": forced_chat,
            "stream": stream, "seed": 1,
        }  # fmt: skip
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
    flat = {"type": "function", **name} if named else "required"
    return {
        "input": "Weather?", "max_output_tokens": most, "tools": tools, "tool_choice": flat,
        "stream": stream, "seed": 1,
    }  # fmt: skip


def without_request(text: str) -> str:
    """Return a response without the tools that `/v1/responses` repeats."""
    return text.replace('"tool_choice"', "").replace('"tools"', "")


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
@pytest.mark.parametrize("choice", ["required", "named"])
async def test_a_forced_call_of_any_length_shows_no_framing(
    chatml: Listening, path: str, choice: str
) -> None:
    """A forced call that `max_tokens` cuts anywhere has no text, in streams neither."""
    async with client(chatml) as http:
        for most in (*range(1, 40, 3), 200):
            for stream in (False, True):
                body = request_body(path, most, choice, stream=stream)
                response = await http.post(path, json=body)
                assert response.status_code == 200, response.text
                assert "tool_call>" not in response.text
                assert '\\"name\\"' not in response.text
                found = calls_of(path, response.text, stream=stream)
                if choice == "named":
                    assert [name for name, _ in found] == ["weather"]
                if most == 200:
                    name, arguments = found[0]
                    if name == "weather":
                        schema = WEATHER["function"]["parameters"]
                        jsonschema.validate(json.loads(arguments), schema)
                elif path == CHAT and not stream:
                    (one,) = response.json()["choices"]
                    assert one["finish_reason"] == "length" or len(found) > 0


def calls_of(path: str, text: str, *, stream: bool) -> list[tuple[str, str]]:
    """Return the names and the arguments of the calls of a response."""
    if path == CHAT:
        return chat_calls(text, stream=stream)
    if path == RESPONSES:
        reply = events(text)[-2]["response"] if stream else json.loads(text)
        assert {item["type"] for item in reply["output"]} <= {"function_call", "message"}
        parts = [p for item in reply["output"] for p in item.get("content", ())]
        assert "".join(part["text"] for part in parts) == ""
        items = [item for item in reply["output"] if item["type"] == "function_call"]
        return [(item["name"], item["arguments"]) for item in items]
    if not stream:
        blocks = json.loads(text)["content"]
        assert {block["type"] for block in blocks} <= {"tool_use"}
        return [(block["name"], json.dumps(block["input"])) for block in blocks]
    found: list[tuple[str, str]] = []
    for event in events(text):
        if event["type"] == "content_block_start":
            found.append((event["content_block"]["name"], ""))
        elif event["type"] == "content_block_delta":
            found[-1] = (found[-1][0], found[-1][1] + event["delta"]["partial_json"])
    return found


def chat_calls(text: str, *, stream: bool) -> list[tuple[str, str]]:
    """Return the calls of a chat, which has no content."""
    if not stream:
        (choice,) = json.loads(text)["choices"]
        assert not choice["message"]["content"]
        calls = choice["message"].get("tool_calls") or []
        return [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
    found: list[tuple[str, str]] = []
    for chunk in events(text)[:-1]:
        for choice in chunk["choices"]:
            assert not choice["delta"].get("content")
            for call in choice["delta"].get("tool_calls", ()):
                if "name" in call["function"]:
                    found.append((call["function"]["name"], ""))
                arguments = found[-1][1] + call["function"]["arguments"]
                found[-1] = (found[-1][0], arguments)
    return found


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        '<tool_call>{"name":"now","arguments":{}}</tool_call>',
        '{"name": "now", "arguments": {}}',
    ],
)
async def test_calls_are_recognised_with_auto(tmp_path: Path, text: str) -> None:
    """The server recognises a call in the described form, also without its tags."""
    backend = ScriptedBackend()
    backend.tokenizer = Tokenizer(with_template(tmp_path / "model", "chatml"))
    async with running(backends=[backend]) as gateway, client(gateway) as http:
        body = {"messages": HI, "tools": TOOLS}
        response = asyncio.ensure_future(http.post(CHAT, json=body))
        request = await backend.submitted.get()
        assert request.grammar is None
        backend.emit(request, text, last=True)
        (choice,) = (await response).json()["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "now", "arguments": "{}"}


REAL = Path(os.environ.get("REAL_MODELS", "")) / "smollm2"
"""SmolLM2-135M-Instruct, whose template has no tools, below the folder in the variable."""


@needs_engine
@pytest.mark.long
@pytest.mark.skipif(not (REAL / "config.json").is_file(), reason="needs SmolLM2")
async def test_an_agent_runs_on_a_real_model_without_tools_in_its_template() -> None:
    """A real model makes forced calls, gets their results, and answers."""
    settings = {"backend": "engine", "model": str(REAL), "kv_bytes": 256 << 20}
    async with running(**settings) as gateway, client(gateway) as http:
        messages: list[dict[str, Any]] = list(HI)
        common = {"max_tokens": 120, "tools": TOOLS, "seed": 3, "parallel_tool_calls": False}
        for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
            body = {"messages": messages, "tool_choice": choice, **common}
            reply = await chat(http, body)
            (call,) = reply["message"]["tool_calls"]
            if call["function"]["name"] == "weather":
                schema = WEATHER["function"]["parameters"]
                jsonschema.validate(json.loads(call["function"]["arguments"]), schema)
            result = {"role": "tool", "tool_call_id": call["id"], "content": "sunny, 21 degrees"}
            messages += [reply["message"], result]
        reply = await chat(http, {"messages": messages, **common, "tool_choice": "auto"})
        assert reply["finish_reason"] in {"stop", "length", "tool_calls"}


async def chat(http: httpx.AsyncClient, body: dict[str, Any]) -> dict[str, Any]:
    """Return the only choice of a chat."""
    response = await http.post(CHAT, json=body, timeout=300)
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    return dict(choice)
