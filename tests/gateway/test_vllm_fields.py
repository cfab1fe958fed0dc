"""Fields of vLLM that choose the end of a prompt, the end of a text, and the allowed tokens."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from draftgate.backends.checkpoints import SHIPPED_MODEL
from draftgate.backends.errors import RequestRejected
from draftgate.backends.remote_worker import remote_admission
from draftgate.backends.token_ids import compact
from draftgate.backends.tokenizer import Tokenizer
from draftgate.backends.types import (
    SAMPLING_OPTIONS,
    Capabilities,
    Delta,
    FinishReason,
    GenerationRequest,
    ModelCard,
    SamplingParams,
)
from draftgate.gateway.app import Listening
from draftgate.gateway.dispatch.placement import UNDECIDED
from draftgate.gateway.http.requests.anthropic import parse_count_tokens, parse_messages
from draftgate.gateway.http.requests.headers import Sender
from draftgate.gateway.http.requests.reasoning import Reasoning
from draftgate.gateway.http.requests.validation import ParsedRequest, parse_chat
from draftgate.gateway.served_model import ServedModel
from draftgate.policies.values import replace
from tests.gateway.harness import ScriptedBackend, client, events, running
from tests.gateway.tool_models import TOOLS, with_template, with_text

TEXT, CHAT, MESSAGES = "/v1/completions", "/v1/chat/completions", "/v1/messages"
HI = [{"role": "user", "content": "hi"}]
BEGUN = [*HI, {"role": "assistant", "content": "def f(x):\n"}]
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def served(tmp_path: Path) -> ServedModel:
    """The shipped model with a template that shows each end of a prompt."""
    return ServedModel("m", Tokenizer(with_text(tmp_path / "model", TEMPLATE)), 8192)


def parsed(served: ServedModel, **fields: Any) -> ParsedRequest:
    return parse_chat(json.dumps({"messages": BEGUN, **fields}).encode(), served, Sender("id"))


def prompt(served: ServedModel, request: ParsedRequest) -> str:
    (ids,) = request.job.prompts
    return served.tokenizer.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize(
    ("fields", "end"),
    [
        ({}, "<assistant>def f(x):\n</assistant><assistant>"),
        ({"add_generation_prompt": None}, "<assistant>def f(x):\n</assistant><assistant>"),
        ({"add_generation_prompt": False}, "<assistant>def f(x):\n</assistant>"),
        ({"continue_final_message": True}, "<assistant>def f(x):\n"),
        ({"continue_final_message": True, "add_generation_prompt": False},
         "<assistant>def f(x):\n"),
        ({"continue_final_message": True, "tools": TOOLS}, "<assistant>def f(x):\n"),
    ],
)  # fmt: skip
def test_a_chat_chooses_the_end_of_its_prompt(
    served: ServedModel, fields: dict[str, Any], end: str
) -> None:
    """The prompt ends with a new response, with the last message, or inside the last message."""
    assert prompt(served, parsed(served, **fields)).endswith(f"<user>hi</user>{end}")


@pytest.mark.parametrize("content", ["def f(x):\n", [{"type": "text", "text": "def f(x):\n"}]])
def test_a_message_with_a_prefilled_answer_continues_it(
    served: ServedModel, content: object
) -> None:
    """A last message of the assistant in `/v1/messages` is the beginning of the response."""
    messages = [*HI, {"role": "assistant", "content": content}]
    body = json.dumps({"messages": messages, "max_tokens": 5}).encode()
    for parse in (parse_messages, parse_count_tokens):
        shown = prompt(served, parse(body, served, Sender("id")))
        assert shown == "<user>hi</user><assistant>def f(x):\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [("Yes", None), ("<think>\nHm", Reasoning.BEGUN), ("<think>\nHm</think>\n\nYes", None)],
)
def test_the_reasoning_of_a_continued_message_is_known(
    tmp_path: Path, text: str, expected: Reasoning | None
) -> None:
    """The response begins inside the reasoning exactly if the message to continue ends there."""
    served = ServedModel("m", Tokenizer(with_template(tmp_path / "model", "qwen3")), 8192)
    messages = [*HI, {"role": "assistant", "content": text}]
    request = parsed(served, messages=messages, continue_final_message=True)
    assert request.reasoning == expected


async def test_tokenize_has_the_ends_of_prompts(tmp_path: Path) -> None:
    """`/tokenize` counts the tokens of each end of a prompt."""
    model = str(with_text(tmp_path / "model", TEMPLATE))
    async with running(model=model) as gateway, client(gateway) as http:
        counts = [
            (await http.post("/tokenize", json={"messages": BEGUN, **fields})).json()["count"]
            for fields in (
                {"continue_final_message": True}, {"add_generation_prompt": False}, {}
            )
        ]  # fmt: skip
    assert counts == sorted(set(counts))


@pytest.fixture
async def node(scripted: ScriptedBackend) -> AsyncIterator[Listening]:
    """A node with a worker whose steps the test decides, and whose end token is 0."""
    scripted.card = replace(scripted.card, eos_ids=(0,))
    async with running(backends=[scripted]) as gateway:
        yield gateway


@pytest.fixture
async def http(node: Listening) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the node."""
    async with client(node) as opened:
        yield opened


BODIES = {TEXT: {"prompt": "x"}, CHAT: {"messages": HI}}
ENDS: dict[str, tuple[dict[str, Any], Any, Any]] = {
    "stop text": ({"stop": ["b"]}, {"stop_text": "b"}, "b"),
    "stop token": ({"stop_token_ids": [7]}, {}, 7),
    "end token": ({"stop_token_ids": [7]}, {"token_ids": (0,)}, None),
    "end token that is also a stop token": ({"stop_token_ids": [0]}, {"token_ids": (0,)}, None),
    "stop token that would end": (
        {"stop_token_ids": [0], "ignore_eos": True}, {"token_ids": (0,)}, 0,
    ),
    "length": ({"stop_token_ids": [7]}, {"finish_reason": FinishReason.LENGTH}, None),
}  # fmt: skip


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("end", ENDS)
async def test_choices_name_the_stop_that_ended_them(
    scripted: ScriptedBackend, http: httpx.AsyncClient, path: str, end: str
) -> None:
    """`stop_reason` is the stop text or the stop token of a choice, or null, once it has ended."""
    fields, changes, expected = ENDS[end]
    last = Delta(0, (7,), "a", (), FinishReason.STOP)._replace(**changes)
    for stream in (False, True):
        body = {**BODIES[path], **fields, "stream": stream}
        sent = asyncio.ensure_future(http.post(path, json=body))
        request = await scripted.submitted.get()
        for delta in (Delta(0, (7,), "a"), last):
            scripted.sinks.deliver([(request.request_id, delta)])
            await asyncio.sleep(0)
        response = await sent
        if stream:
            *chunks, _ = events(response.text)
            choices = [choice for chunk in chunks for choice in chunk["choices"]]
            assert all("stop_reason" not in one for one in choices if not one["finish_reason"])
        else:
            choices = response.json()["choices"]
        assert choices[-1]["stop_reason"] == expected


async def test_an_included_stop_is_part_of_the_text(tmp_path: Path) -> None:
    """With `include_stop_str_in_output`, the text of every choice ends with its stop text.

    Chunks add up to the same text, and the offsets of the tokens stay inside it.
    """
    async with running() as gateway, client(gateway) as http:
        plain = {"prompt": "def f(x):\n", "max_tokens": 60, "seed": 5, "n": 3, "logprobs": 0}
        whole = (await http.post(TEXT, json=plain)).json()["choices"]
        stops = [choice["text"][20:24] for choice in whole]
        body = {**plain, "stop": stops, "include_stop_str_in_output": True}
        choices = (await http.post(TEXT, json=body)).json()["choices"]
        for choice, full in zip(choices, whole, strict=True):
            assert choice["text"].endswith(choice["stop_reason"])
            assert choice["stop_reason"] in stops
            assert full["text"].startswith(choice["text"])
            lists = choice["logprobs"]
            assert len(lists["tokens"]) == len(lists["text_offset"])
            assert max(lists["text_offset"]) < len(choice["text"])
        for mode in ("auto", "off"):
            streamed = {**body, "stream": True, "speculation": {"mode": mode}}
            *chunks, _ = events((await http.post(TEXT, json=streamed)).text)
            for choice in choices:
                parts = [
                    part for chunk in chunks for part in chunk["choices"]
                    if part["index"] == choice["index"]
                ]  # fmt: skip
                assert "".join(part["text"] for part in parts) == choice["text"]
                assert parts[-1]["stop_reason"] == choice["stop_reason"]


async def test_only_allowed_tokens_are_sampled() -> None:
    """Each choice has only tokens of `allowed_token_ids`, in a stream too and with every draft."""
    async with running() as gateway, client(gateway) as http:
        body = {
            "prompt": "def", "max_tokens": 30, "n": 2, "seed": 1, "return_token_ids": True,
            "allowed_token_ids": [300, 301, 302, 300],
        }  # fmt: skip
        found = []
        for mode in ("auto", "off"):
            response = await http.post(TEXT, json={**body, "speculation": {"mode": mode}})
            choices = response.json()["choices"]
            assert all(set(choice["token_ids"]) <= {300, 301, 302} for choice in choices)
            found.append([choice["token_ids"] for choice in choices])
        assert found[0] == found[1]


@pytest.mark.parametrize("name", SAMPLING_OPTIONS)
def test_a_worker_of_an_earlier_version_gets_no_fields_that_it_ignores(name: str) -> None:
    """A request with a newer field is refused for a worker that would ignore it."""
    value: Any = (5,) if name == "allowed_token_ids" else True
    sampling = SamplingParams(5, 0, **{name: value})
    request = GenerationRequest("r", compact([5]), sampling, UNDECIDED)
    tokenizer = Tokenizer(SHIPPED_MODEL)
    for options in (SAMPLING_OPTIONS, ()):
        card = ModelCard("m", "m", 100, None, 0, Capabilities(options=options))
        admission = remote_admission(card, tokenizer)
        if options:
            admission.check(request)
        else:
            with pytest.raises(RequestRejected, match=name):
                admission.check(request)


async def test_a_prefilled_answer_is_not_part_of_the_response(
    scripted: ScriptedBackend, http: httpx.AsyncClient
) -> None:
    """The response of `/v1/messages` has only the text after the prefilled answer, and its stop."""
    body = {"messages": BEGUN, "max_tokens": 9, "stop_sequences": ["END"]}
    sent = asyncio.ensure_future(http.post(MESSAGES, json=body))
    request = await scripted.submitted.get()
    last = Delta(0, (7,), "    return x", (), FinishReason.STOP, stop_text="END")
    scripted.sinks.deliver([(request.request_id, last)])
    reply = (await sent).json()
    assert [block["text"] for block in reply["content"]] == ["    return x"]
    assert (reply["stop_reason"], reply["stop_sequence"]) == ("stop_sequence", "END")
