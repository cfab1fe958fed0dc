"""Tests of switches for reasoning, and of marked reasoning in chats and responses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import Response

from draftgate.backends.chat_template import DEFAULT, ChatTemplate
from draftgate.backends.tokenizer import Tokenizer
from draftgate.backends.types import Delta, FinishReason, GenerationRequest, TokenLogprob
from draftgate.gateway.http.replies.reasoning import ReasoningParser
from draftgate.gateway.http.requests.reasoning import Reasoning
from tests.gateway.harness import ScriptedBackend, client, events, running
from tests.gateway.tool_models import NOW, TEMPLATES, with_template

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
HI = [{"role": "user", "content": "Time?"}]
THOUGHT = "<think>\nLet me see.\n</think>\n\nNoon."
CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
EMPTY = "<think>\n\n</think>"


@pytest.fixture
def qwen3(scripted: ScriptedBackend, tmp_path: Path) -> ScriptedBackend:
    """A scripted worker whose model has the template of Qwen3."""
    scripted.tokenizer = Tokenizer(with_template(tmp_path / "qwen3", "qwen3"))
    scripted.kv_tokens = 1000
    return scripted


@pytest.fixture
async def http(qwen3: ScriptedBackend) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a node with that worker."""
    async with running(backends=[qwen3]) as gateway, client(gateway) as opened:
        yield opened


async def respond(
    backend: ScriptedBackend, http: httpx.AsyncClient, path: str, *texts: str, **body: Any
) -> tuple[str, httpx.Response]:
    """Send a request, and return its prompt and the response to these texts."""
    response = asyncio.create_task(http.post(path, json=body))
    request = await backend.submitted.get()
    for left, text in zip(range(len(texts), 0, -1), texts, strict=True):
        backend.emit(request, text, last=left == 1)
        await asyncio.sleep(0)
    return prompt_of(backend, request), await response


def prompt_of(backend: ScriptedBackend, request: GenerationRequest) -> str:
    return backend.tokenizer.decode(request.prompt_ids, skip_special_tokens=False)


@pytest.mark.parametrize(
    ("path", "fields", "thinks"),
    [
        (CHAT, {}, True),
        (CHAT, {"enable_thinking": False}, False),
        (CHAT, {"enable_thinking": True}, True),
        (CHAT, {"thinking": {"type": "disabled"}}, False),
        (CHAT, {"thinking": True}, True),
        (CHAT, {"chat_template_kwargs": {"enable_thinking": False}}, False),
        (CHAT, {"chat_template_kwargs": {"enable_thinking": True}, "thinking": False}, True),
        (CHAT, {"chat_template_kwargs": {"thinking": False}}, False),
        (CHAT, {"reasoning_effort": "none"}, False),
        (CHAT, {"reasoning_effort": "high"}, True),
        (RESPONSES, {"reasoning": {"effort": "none"}}, False),
        (RESPONSES, {"reasoning": {"effort": "low"}}, True),
        (RESPONSES, {"chat_template_kwargs": {"enable_thinking": False}}, False),
        (RESPONSES, {"thinking": {"type": "disabled"}}, False),
    ],
)
async def test_reasoning_is_switched_by_every_name(
    qwen3: ScriptedBackend, http: httpx.AsyncClient, path: str, fields: dict, thinks: bool
) -> None:
    """Every field that switches reasoning reaches the template, in both APIs."""
    asked = {"messages": HI} if path == CHAT else {"input": HI}
    prompt, response = await respond(qwen3, http, path, "Noon.", **asked, **fields)
    assert response.status_code == 200
    assert prompt.rstrip().endswith(EMPTY) != thinks
    tokenized = {"messages": HI, "chat_template_kwargs": {"enable_thinking": thinks}}
    tokens = (await http.post("/tokenize", json=tokenized)).json()["tokens"]
    assert qwen3.tokenizer.decode(tokens, skip_special_tokens=False) == prompt


@pytest.mark.parametrize(
    ("template", "fields", "param"),
    [
        ("qwen2_5", {"enable_thinking": True}, "enable_thinking"),
        ("qwen2_5", {"thinking": {"type": "enabled"}}, "thinking"),
        ("qwen2_5", {"chat_template_kwargs": {"thinking": True}}, "chat_template_kwargs.thinking"),
        ("qwen2_5", {"chat_template_kwargs": {"style": 1}}, "chat_template_kwargs.style"),
        ("qwen2_5", {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ("qwen3", {"thinking": {"type": "enabled", "budget_tokens": 9}}, "thinking.budget_tokens"),
        ("deepseek_r1_distill", {"enable_thinking": False}, "enable_thinking"),
        ("qwen2_5", {"enable_thinking": False, "reasoning_effort": "none"}, None),
        ("deepseek_r1_distill", {"thinking": True}, None),
    ],
)
async def test_switch_that_the_template_lacks_is_refused_unless_it_changes_nothing(
    scripted: ScriptedBackend, tmp_path: Path, template: str, fields: dict, param: str | None
) -> None:
    """The server refuses a variable without effect, and names it."""
    scripted.tokenizer = Tokenizer(with_template(tmp_path / "model", template))
    async with running(backends=[scripted]) as gateway, client(gateway) as http:
        response = asyncio.create_task(http.post(CHAT, json={"messages": HI, **fields}))
        if param is None:
            scripted.emit(await scripted.submitted.get(), "Noon.", last=True)
            assert (await response).status_code == 200
        else:
            assert ((await response).status_code, (await response).json()["error"]["param"]) == (
                400,
                param,
            )


async def test_chat_has_reasoning_and_content(
    qwen3: ScriptedBackend, http: httpx.AsyncClient
) -> None:
    """A chat returns the reasoning beside the content, whole and streamed."""
    for texts in ([THOUGHT], list(THOUGHT)):
        _, response = await respond(qwen3, http, CHAT, *texts, messages=HI)
        message = response.json()["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("Let me see.", "Noon.")
        _, response = await respond(qwen3, http, CHAT, *texts, messages=HI, stream=True)
        deltas = [one["choices"][0]["delta"] for one in events(response.text) if one != "[DONE]"]
        assert "".join(one.get("reasoning_content", "") for one in deltas) == "Let me see."
        assert "".join(one.get("content", "") for one in deltas) == "Noon."
        assert deltas[0]["role"] == "assistant"


async def test_calls_after_reasoning_are_recognised(
    qwen3: ScriptedBackend, http: httpx.AsyncClient
) -> None:
    """A call in the reasoning is text, and a call after the reasoning is a call."""
    text = f"<think>\nCall {CALL}?\n</think>\n\n{CALL}"
    _, response = await respond(qwen3, http, CHAT, text, messages=HI, tools=[NOW])
    (choice,) = response.json()["choices"]
    assert choice["message"]["reasoning_content"] == f"Call {CALL}?"
    assert len(choice["message"]["tool_calls"]) == 1
    assert (choice["message"]["content"], choice["finish_reason"]) == (None, "tool_calls")


async def test_text_without_marker_and_switched_off_reasoning_is_content(
    qwen3: ScriptedBackend, http: httpx.AsyncClient
) -> None:
    """Without the marker at its beginning, or with reasoning off, a response is content."""
    for text, fields in (("Noon <think>", {}), (THOUGHT, {"enable_thinking": False})):
        _, response = await respond(qwen3, http, CHAT, text, messages=HI, **fields)
        message = response.json()["choices"][0]["message"]
        assert message["content"] == text
        assert "reasoning_content" not in message


async def test_reasoning_that_the_prompt_begins_needs_no_marker(
    scripted: ScriptedBackend, tmp_path: Path
) -> None:
    """If the prompt ends with the marker, the response begins inside the reasoning."""
    scripted.tokenizer = Tokenizer(with_template(tmp_path / "r1", "deepseek_r1_distill"))
    async with running(backends=[scripted]) as gateway, client(gateway) as http:
        text = THOUGHT.removeprefix("<think>\n")
        prompt, response = await respond(scripted, http, CHAT, text, messages=HI)
        assert prompt.rstrip().endswith("<think>")
        message = response.json()["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("Let me see.", "Noon.")
        _, response = await respond(scripted, http, CHAT, "Let me", messages=HI)
        message = response.json()["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("Let me", None)


async def test_response_has_a_reasoning_item(
    qwen3: ScriptedBackend, http: httpx.AsyncClient
) -> None:
    """`/v1/responses` returns reasoning as an item before the message, whole and streamed."""
    for texts in ([THOUGHT], list(THOUGHT)):
        _, response = await respond(qwen3, http, RESPONSES, *texts, input="Time?")
        Response.model_validate(response.json(), strict=True)
        reasoning, message = response.json()["output"]
        assert (reasoning["type"], reasoning["status"]) == ("reasoning", "completed")
        assert reasoning["content"] == [{"type": "reasoning_text", "text": "Let me see."}]
        assert message["content"][0]["text"] == "Noon."
        _, response = await respond(qwen3, http, RESPONSES, *texts, input="Time?", stream=True)
        found = [one for one in events(response.text) if one != "[DONE]"]
        deltas = [one for one in found if one["type"] == "response.reasoning_text.delta"]
        assert "".join(one["delta"] for one in deltas) == "Let me see."
        (done,) = [one for one in found if one["type"] == "response.reasoning_text.done"]
        assert (done["text"], done["output_index"]) == ("Let me see.", 0)
        kinds = [(one["type"], one["item"]["type"]) for one in found if "item" in one]
        assert kinds == [
            ("response.output_item.added", "reasoning"),
            ("response.output_item.done", "reasoning"),
            ("response.output_item.added", "message"),
            ("response.output_item.done", "message"),
        ]


async def test_log_probabilities_of_a_response_are_those_of_its_content(
    qwen3: ScriptedBackend, http: httpx.AsyncClient
) -> None:
    """The log probabilities of reasoning are not part of the message."""
    body = {"input": "Time?", "top_logprobs": 1}
    response = asyncio.create_task(http.post(RESPONSES, json=body))
    request = await qwen3.submitted.get()
    entries = tuple(TokenLogprob(token, -0.5, ((token, -0.5),)) for token in (40, 41))
    for text, tokens, reason in (
        ("Noon", entries[:1], None),
        (".", entries[1:], FinishReason.STOP),
    ):
        delta = Delta(0, (1,), text, tokens, reason)
        qwen3.sinks.deliver([(request.request_id, delta)])
    (message,) = (await response).json()["output"]
    assert [one["logprob"] for one in message["content"][0]["logprobs"]] == [-0.5, -0.5]
    response = asyncio.create_task(http.post(RESPONSES, json=body))
    request = await qwen3.submitted.get()
    for text, tokens, reason in (
        ("<think>Hm", entries[:1], None),
        ("m</think>", (), None),
        ("Noon.", entries[1:], FinishReason.STOP),
    ):
        delta = Delta(0, (1,), text, tokens, reason)
        qwen3.sinks.deliver([(request.request_id, delta)])
    assert (await response).status_code == 200


async def test_reasoning_in_the_history_reaches_the_template(
    qwen3: ScriptedBackend, http: httpx.AsyncClient
) -> None:
    """Between a call and its result, the template keeps the reasoning, in both APIs."""
    _, response = await respond(
        qwen3, http, CHAT, f"<think>\nLet me see.\n</think>\n\n{CALL}", messages=HI, tools=[NOW]
    )
    message = response.json()["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "12:00"}
    chat, _ = await respond(
        qwen3, http, CHAT, "Noon.", messages=[*HI, message, result], tools=[NOW]
    )
    flat = [{"type": "function", **NOW["function"]}]
    _, response = await respond(
        qwen3,
        http,
        RESPONSES,
        f"<think>\nLet me see.\n</think>\n\n{CALL}",
        input=HI,
        tools=flat,
    )
    output = response.json()["output"]
    result = {"type": "function_call_output", "call_id": output[-1]["call_id"], "output": "12:00"}
    same, _ = await respond(
        qwen3, http, RESPONSES, "Noon.", input=[*HI, *output, result], tools=flat
    )
    assert "<think>\nLet me see.\n</think>\n\n<tool_call>" in chat
    assert chat == same


@given(
    parts=st.lists(
        st.sampled_from(["<think>", "</think>", "</th", "ink>", "\n", " ", "<", "a"])
        | st.text(max_size=3)
    ),
    reasoning=st.sampled_from(Reasoning),
)
def test_parts_of_a_text_do_not_depend_on_its_deltas(
    parts: list[str], reasoning: Reasoning
) -> None:
    """Any division of a text into deltas gives the same reasoning and the same content."""

    def split(texts: list[str]) -> tuple[str, str]:
        parser = ReasoningParser(reasoning)
        pieces = [*map(parser.add, texts), parser.finish()]
        return "".join(one for one, _ in pieces), "".join(other for _, other in pieces)

    text = "".join(parts)
    found, content = split([text])
    assert split(parts) == (found, content)
    assert found in text
    assert content in text


def test_template_lists_the_variables_that_requests_may_set() -> None:
    """Variables of a template exclude those of the server, of the environment and of tokens."""
    source = (TEMPLATES / "qwen3.jinja").read_text(encoding="utf-8")
    template = ChatTemplate({DEFAULT: source + "{{ bos_token }}"}, {"bos_token": "<s>"})
    assert "enable_thinking" in template.variables
    assert not template.variables & {"messages", "tools", "namespace", "bos_token"}
    text = template.render([{"role": "user", "content": "a"}], None, {"enable_thinking": False})
    assert text.removesuffix("<s>").endswith(f"{EMPTY}\n\n")
