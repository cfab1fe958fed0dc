"""Tests of renderings: every chunk is JSON, and the chunks of a stream add up to the whole
response."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftgate.backends.types import Delta, FinishReason, SamplingParams
from draftgate.gateway.dispatch.job import Job
from draftgate.gateway.errors import WorkerFailed
from draftgate.gateway.http.endpoints.anthropic import MESSAGES
from draftgate.gateway.http.generation import Endpoint
from draftgate.gateway.http.replies.completions import ChatRendering, CompletionRendering
from draftgate.gateway.http.replies.metric_shapes import ResponseMetrics, SpeculativeDecoding
from draftgate.gateway.http.replies.rendering import Rendering, WholeChoice
from draftgate.gateway.http.replies.shapes import PromptTokensDetails, Usage
from draftgate.gateway.http.requests.anthropic import call_input
from draftgate.gateway.http.requests.headers import Sender
from draftgate.gateway.http.requests.validation import ParsedRequest
from draftgate.gateway.routes import CHAT, COMPLETIONS, RESPONSES
from draftgate.gateway.served_model import ServedModel
from tests.gateway.tool_models import ANTHROPIC_TOOLS, NOW, TOOLS, WEATHER

USAGE = Usage(3, 4, 7, PromptTokensDetails(0))
METRICS = ResponseMetrics(
    1,
    None,
    "w",
    SpeculativeDecoding(
        "off", "auto", None, 0, "other", "test", None, 0, 0, 0, (), 0.0, 0, 0, 1.0, 0.0
    ),
)
MESSAGE = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 9}
FLAT = [{"type": "function", **tool["function"]} for tool in (WEATHER, NOW)]
BODIES: dict[str, tuple[Endpoint, dict[str, Any]]] = {
    "chat": (CHAT, {"messages": [{"role": "user", "content": "x"}], "tools": TOOLS}),
    "chat without tools": (CHAT, {"messages": [{"role": "user", "content": "x"}]}),
    "completion": (COMPLETIONS, {"prompt": "x"}),
    "response": (RESPONSES, {"input": "x", "tools": FLAT}),
    "response without tools": (RESPONSES, {"input": "x"}),
    "chat with reasoning": (CHAT, {"messages": [{"role": "user", "content": "x"}], "tools": TOOLS}),
    "response with reasoning": (RESPONSES, {"input": "x"}),
    "message": (MESSAGES, {**MESSAGE, "tools": ANTHROPIC_TOOLS}),
    "message without tools": (MESSAGES, MESSAGE),
    "message with reasoning": (MESSAGES, {**MESSAGE, "tools": ANTHROPIC_TOOLS}),
}
TEXTS = st.lists(
    st.sampled_from(
        ['<tool_call>\n{"name": "now", "arguments": {', '"a": 1', "}}", "\n</tool_call>", "Well. ",
         '<tool_call>{"name": "weather", "arguments": {}}</tool_call>', "<tool_", "\n", "}",
         "<think>", "</think>", "</", "think>"]
    )
    | st.text(max_size=5),
    max_size=8,
)  # fmt: skip
CHARACTERS = st.text(st.characters(exclude_categories=("Cs",)))
ENDS = st.sampled_from([FinishReason.STOP, FinishReason.LENGTH])


class QwenTokenizer:
    """The part of a tokenizer that parsing a request needs, with Qwen's template."""

    vocab_size = 9
    template_variables = frozenset[str]()

    def __init__(self, template: str) -> None:
        path = Path(__file__).parents[1] / "tokenizer" / "templates" / f"{template}.jinja"
        self.tool_template = path.read_text(encoding="utf-8")

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [1]

    def least_tokens(self, text: str) -> int:
        return 0

    def decode(self, ids: object, *, skip_special_tokens: bool = True) -> str:
        return "<|im_start|>assistant\n"

    def token_text(self, token_id: int) -> str:
        return "x"

    def render_chat(self, *_: object, **__: object) -> str:
        return "x"


@cache
def maker(kind: str) -> Callable[[], Rendering]:
    """Return a function that creates renderings of the same request."""
    api, body = BODIES[kind]
    template = "qwen3" if kind.endswith("with reasoning") else "qwen2_5"
    served = ServedModel("m", QwenTokenizer(template), 100)
    parsed = api.parse(json.dumps(body).encode(), served, Sender("id"))
    return lambda: api.rendering(parsed, 1)


def data_of(events: bytes) -> list[dict[str, Any]]:
    lines = [line for line in events.decode().split("\n") if line.startswith("data: {")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def combined(chunks: list[dict[str, Any]]) -> tuple[str, str, list[tuple[str, str]], str | None]:
    """Return the reasoning, the content, the calls and the finish reason of a stream."""
    reasoning, text, calls, reason = "", "", [], None
    for chunk in chunks:
        for choice in chunk["choices"]:
            delta = choice.get("delta", {"content": choice.get("text")})
            text += delta.get("content") or ""
            reasoning += delta.get("reasoning_content", "")
            reason = choice["finish_reason"] or reason
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    assert call["index"] == len(calls)
                    calls.append((call["id"], call["function"]["name"], ""))
                *named, arguments = calls[call["index"]]
                calls[call["index"]] = (*named, arguments + call["function"]["arguments"])
    return reasoning, text, calls, reason


def combined_message(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the message of a stream, whose events must open and close one block at a time."""
    begin, *middle, last, stop = events
    assert (begin["type"], stop) == ("message_start", {"type": "message_stop"})
    message, content, partial, is_open = begin["message"], [], "", False
    for event in middle:
        kind = event["type"].removeprefix("content_block_")
        if kind == "start":
            assert not is_open
            is_open, partial = True, ""
            content.append(event["content_block"])
            assert list(content[-1].values()) in (["text", ""], ["thinking", "", ""]) or (
                content[-1]["type"], content[-1]["input"]
            ) == ("tool_use", {})  # fmt: skip
        assert is_open
        assert event["index"] == len(content) - 1
        delta = event.get("delta", {})
        partial += delta.get("partial_json", "")
        for field in ("text", "thinking"):
            if f"{field}_delta" == delta.get("type"):
                assert content[-1]["type"] == field
                content[-1][field] += delta[field]
        if kind == "stop":
            is_open = False
            if content[-1]["type"] == "tool_use":
                content[-1]["input"] = call_input(partial)
    assert not is_open
    assert last.pop("type") == "message_delta"
    return {**message, "content": content, **last.pop("delta"), **last}


@pytest.mark.parametrize(
    ("rendering", "kind"),
    [(ChatRendering, "chat.completion.chunk"), (CompletionRendering, "text_completion")],
)
@given(
    model=CHARACTERS,
    text=CHARACTERS.filter(bool),
    choice=st.integers(0, 200),
    end=st.sampled_from([*FinishReason, None]),
)
def test_chunk_is_json_with_the_fields_of_delta_and_request(
    rendering, kind, model, text, choice, end
) -> None:
    """A chunk is valid JSON for any characters in the text and the model name."""
    job = Job("1f", (), SamplingParams(1, 0), None)
    parsed = ParsedRequest(job, ServedModel(model, None, 9))  # type: ignore[arg-type]
    sent = rendering(parsed, 7).chunk(Delta(choice, (1,), text, (), end))
    assert sent.startswith(b"data: ")
    assert sent.endswith(b"\n\n")
    chunk = json.loads(sent.removeprefix(b"data: "))
    (shown,) = chunk.pop("choices")
    assert chunk.pop("id").endswith("-1f")
    assert chunk == {"object": kind, "created": 7, "model": model}
    content = shown.pop("text", None) or shown.pop("delta")["content"]
    assert content == text
    ended = {} if end is None else {"stop_reason": None}
    expected = {"index": choice, "logprobs": None, "finish_reason": end and end.value}
    assert shown == {**expected, **ended}


@pytest.mark.parametrize("rendering", [ChatRendering, CompletionRendering])
@given(model=CHARACTERS, begin=CHARACTERS, text=CHARACTERS.filter(bool), choice=st.integers(0, 200))
def test_frame_gives_the_bytes_of_a_chunk(rendering, model, begin, text, choice) -> None:
    """A text in its frame is the chunk of a delta with this text, for any characters."""
    job = Job("1f", (), SamplingParams(1, 0), None)
    parsed = ParsedRequest(job, ServedModel(model, None, 9))  # type: ignore[arg-type]
    made = rendering(parsed, 7)
    assert made.text_frame(choice) is None  # the first chunk differs
    made.chunk(Delta(choice, (1,), begin, (), FinishReason.STOP))
    frame = made.text_frame(choice)
    assert frame is not None
    event = frame.event(text)
    assert event == made.chunk(Delta(choice, (1,), text))
    (shown,) = json.loads(event.removeprefix(b"data: "))["choices"]
    assert (shown.get("text") or shown["delta"]["content"]) == text


@pytest.mark.parametrize("kind", ["chat", "chat with reasoning", "message", "response"])
def test_text_that_is_parsed_has_no_frame(kind: str) -> None:
    """Calls and reasoning are found in all of the text, so no part of it bypasses the parsers."""
    rendering = maker(kind)()
    rendering.chunk(Delta(0, (1,), "x"))
    assert rendering.text_frame(0) is None


@pytest.mark.parametrize("kind", BODIES)
def test_stream_adds_up_to_the_whole_response(kind: str) -> None:
    """The chunks of a stream add up to the whole response for any division into deltas."""

    @given(parts=TEXTS, end=ENDS)
    def check(parts: list[str], end: FinishReason) -> None:
        whole = json.loads(
            maker(kind)().response([WholeChoice(["".join(parts)], [], end)], USAGE, METRICS)
        )
        rendering = maker(kind)()
        events = b"".join(rendering.chunk(Delta(0, (1,), part)) for part in parts)
        events += rendering.chunk(Delta(0, (1,), "", (), end))
        events += rendering.ending(USAGE, METRICS)
        found = data_of(events)
        if kind.startswith("response"):
            streamed = found[-1]["response"]
            # The clock may reach the next second in between.
            ends = [reply.pop("completed_at") is None for reply in (whole, streamed)]
            assert (streamed, ends[0]) == (whole, ends[1])
            assert [event["sequence_number"] for event in found] == list(range(len(found)))
            return
        if kind.startswith("message"):
            assert combined_message(found) == whole
            return
        (choice,) = whole["choices"]
        message = choice.get("message", {"content": choice.get("text")})
        calls = [
            (call["id"], call["function"]["name"], call["function"]["arguments"])
            for call in message.get("tool_calls", ())
        ]
        reasoning, text = message.get("reasoning_content", ""), message["content"] or ""
        assert combined(found) == (reasoning, text, calls, choice["finish_reason"])

    check()


@pytest.mark.parametrize("kind", BODIES)
def test_failure_is_the_last_event(kind: str) -> None:
    """The error event is the last event of a failed stream. Only responses end with `[DONE]`."""
    for parts in ([], ["half an ans"], ['<tool_call>\n{"name": "now", "arguments": {"a']):
        rendering = maker(kind)()
        for part in parts:
            rendering.chunk(Delta(0, (1,), part))
        sent = rendering.failure(WorkerFailed("device lost"), "req")
        last = data_of(sent)[-1]
        if kind.startswith("response"):
            assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
            last = last["response"]
        if kind.startswith("message"):
            assert (sent[:13], last["type"]) == (b"event: error\n", "error")
        assert last["error"]["message"] == "device lost"
        assert sent.endswith(b"data: [DONE]\n\n") is kind.startswith("response")
