"""Tests of evaluation over HTTP: lm-eval's requests, `echo` and `prompt_logprobs`."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st

from draftgate.backends.checkpoints import SHIPPED_MODEL
from draftgate.backends.tokenizer import Tokenizer
from draftgate.gateway.http.replies.prompts import prompt_offsets
from tests.gateway.harness import ScriptedBackend, client, events, needs_engine, running

TEXT = "/v1/completions"
CHAT = "/v1/chat/completions"
TOKENIZER = Tokenizer(SHIPPED_MODEL)


class Question(NamedTuple):
    """A multiple-choice question: a context, and continuations of which the first is right."""

    context: str
    continuations: tuple[str, ...]


QUESTIONS = (
    Question("def add(a, b):\n    return a", (" + b", " import b", "class b")),
    Question("import os\nimport sys\n\n\ndef main():\n", ("    ", "import", ")")),
    Question("for i in range(10):\n    print(", ("i)", "def", "import")),
    Question('with open(path, encoding="utf-8") as f:\n    text = f', (".read()", " lambda", "((")),
    Question("class A:\n    def __init__(self, x, y):\n        self.x =", (" x", " if", "yield")),
    Question("try:\n    value = int(text)\nexcept", (" ValueError:", " = 5", " + 1")),
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def http() -> AsyncIterator[httpx.AsyncClient]:
    """A client of a node with the engine."""
    settings = {"backend": "engine", "kv_bytes": 32 << 20, "threads": 1}
    async with running(**settings) as listening, client(listening) as opened:
        yield opened


def lm_eval_request(prompts: Sequence[Any]) -> dict[str, Any]:
    """Return the body that lm-eval's `local-completions` sends for loglikelihoods."""
    return {
        "model": "draftgate-demo",
        "prompt": prompts,
        "temperature": 0,
        "max_tokens": 1,
        "logprobs": 1,
        "seed": 1234,
        "echo": True,
    }


def lm_eval_results(reply: dict[str, Any], lengths: Sequence[int]) -> list[tuple[float, bool]]:
    """Return the log likelihood of each continuation and whether it is greedy.

    The function is lm-eval's `parse_logprobs`.

    Args:
        reply: response to `lm_eval_request`.
        lengths: tokens of each context.
    """
    found = []
    choices = sorted(reply["choices"], key=lambda choice: choice["index"])
    for choice, length in zip(choices, lengths, strict=True):
        logprobs = choice["logprobs"]["token_logprobs"][length:-1]
        top = choice["logprobs"]["top_logprobs"][length:-1]
        is_greedy = all(one == max(best.values()) for one, best in zip(logprobs, top, strict=True))
        found.append((sum(logprobs), is_greedy))
    return found


def expected_results(pairs: Sequence[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
    """Return the log likelihoods and greediness of continuations, by transformers in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    oracle = AutoModelForCausalLM.from_pretrained(SHIPPED_MODEL, dtype=torch.float32).eval()
    found = []
    for context, continuation in pairs:
        tokens = torch.tensor([context + continuation])
        with torch.no_grad():
            rows = torch.log_softmax(oracle(tokens).logits[0, len(context) - 1 : -1], dim=-1)
        own = rows.gather(1, torch.tensor(continuation)[:, None]).sum().item()
        found.append((own, rows.argmax(dim=-1).tolist() == continuation))
    return found


@needs_engine
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("tokenized", [True, False], ids=["tokens", "texts"])
async def test_lm_eval_loglikelihoods_equal_transformers(
    http: httpx.AsyncClient, tokenized: bool
) -> None:
    """A multiple-choice task gets the log likelihoods of transformers, and mostly right answers.

    lm-eval sends batches of token lists, or of texts.
    """
    pairs = [
        (
            context := TOKENIZER.encode(question.context),
            TOKENIZER.encode(question.context + continuation)[len(context) :],
        )
        for question in QUESTIONS
        for continuation in question.continuations
    ]
    prompts = [context + continuation for context, continuation in pairs]
    given = prompts if tokenized else [
        question.context + continuation
        for question in QUESTIONS
        for continuation in question.continuations
    ]  # fmt: skip
    found = []
    for begin in range(0, len(given), 4):  # lm-eval's batch_size
        response = await http.post(TEXT, json=lm_eval_request(given[begin : begin + 4]))
        lengths = [len(context) for context, _ in pairs[begin : begin + 4]]
        found += lm_eval_results(response.json(), lengths)
    expected = expected_results(pairs)
    assert [score for score, _ in found] == pytest.approx([s for s, _ in expected], abs=1e-3)
    assert [is_greedy for _, is_greedy in found] == [is_greedy for _, is_greedy in expected]
    scores = [score for score, _ in found]
    right = sum(max(scores[i : i + 3]) == scores[i] for i in range(0, len(scores), 3))
    assert right >= 5


def greedy_texts(prompts: Sequence[list[int]], tokens: int, stop: str) -> list[str]:
    """Return the greedy continuations of prompts up to a stop text, by transformers in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    oracle = AutoModelForCausalLM.from_pretrained(SHIPPED_MODEL, dtype=torch.float32).eval()
    found = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        output = oracle.generate(ids, do_sample=False, max_new_tokens=tokens)[0, len(prompt) :]
        found.append(TOKENIZER.decode(output.tolist()).split(stop)[0])
    return found


@needs_engine
@pytest.mark.asyncio(loop_scope="module")
async def test_lm_eval_generations_equal_transformers(http: httpx.AsyncClient) -> None:
    """A generation task gets the greedy texts of transformers, in the order of its prompts."""
    prompts = [TOKENIZER.encode(question.context) for question in QUESTIONS]
    body = {
        "prompt": prompts,
        "model": "draftgate-demo",
        "max_tokens": 24,
        "temperature": 0,
        "stop": ["\n\n", "<|endoftext|>"],
        "seed": 1234,
    }
    choices = (await http.post(TEXT, json=body)).json()["choices"]
    assert [choice["index"] for choice in choices] == list(range(len(prompts)))
    texts = [choice["text"] for choice in choices]
    assert texts == greedy_texts(prompts, 24, "\n\n")
    assert all(texts)


@needs_engine
@pytest.mark.asyncio(loop_scope="module")
async def test_echo_without_output_has_only_the_prompt(http: httpx.AsyncClient) -> None:
    """With `max_tokens` of 0, a text and its tokens give the same response, cached or not."""
    text = "import os\n\n\ndef read(path):\n    # café ☕\n    return open(path)\n" * 3
    body = {"max_tokens": 0, "echo": True, "logprobs": 2, "temperature": 0}
    replies = [
        (await http.post(TEXT, json={**body, "prompt": prompt})).json()
        for prompt in (text, text, TOKENIZER.encode(text))
    ]
    first, *others = (reply["choices"] for reply in replies)
    assert others == [first, first]
    (choice,) = first
    assert (choice["text"], choice["finish_reason"]) == (text, "length")
    usage = replies[-1]["usage"]
    assert usage["completion_tokens"] == 0
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0
    logprobs = choice["logprobs"]
    assert {len(column) for column in logprobs.values()} == {usage["prompt_tokens"]}
    assert (logprobs["token_logprobs"][0], logprobs["top_logprobs"][0]) == (None, None)
    for own, top in zip(logprobs["token_logprobs"][1:], logprobs["top_logprobs"][1:], strict=True):
        assert own <= max(top.values()) <= 0
        assert 1 <= len(top) <= 3  # tokens may have the same text
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert token.startswith("bytes:") or text.startswith(token, offset)


@needs_engine
@pytest.mark.asyncio(loop_scope="module")
async def test_streamed_echo_equals_the_whole(http: httpx.AsyncClient) -> None:
    """The first chunk begins with the prompt, and the chunks add up to the whole response."""
    body = {"prompt": "def f(x):\n", "max_tokens": 6, "echo": True, "logprobs": 1, "seed": 3}
    (whole,) = (await http.post(TEXT, json=body)).json()["choices"]
    sent = events((await http.post(TEXT, json={**body, "stream": True})).text)
    chunks = [chunk["choices"][0] for chunk in sent[:-1]]
    assert chunks[0]["text"].startswith("def f(x):\n")
    assert "".join(chunk["text"] for chunk in chunks) == whole["text"]
    for name, column in whole["logprobs"].items():
        assert [entry for chunk in chunks for entry in chunk["logprobs"][name]] == column


@needs_engine
@pytest.mark.asyncio(loop_scope="module")
async def test_every_choice_has_the_prompt(http: httpx.AsyncClient) -> None:
    """All choices of several prompts begin with the log probabilities of their own prompt."""
    prompts = ["import os\n", "x = 1\n"]
    body = {"max_tokens": 3, "echo": True, "logprobs": 1, "prompt_logprobs": 0, "seed": 3}
    both = (await http.post(TEXT, json={**body, "prompt": prompts, "n": 2})).json()["choices"]
    assert len({choice["text"] for choice in both}) == 4
    for index, prompt in enumerate(prompts):
        (alone,) = (await http.post(TEXT, json={**body, "prompt": prompt})).json()["choices"]
        first, second = both[2 * index : 2 * index + 2]
        assert {**first, "index": 0} == alone
        length = len(TOKENIZER.encode(prompt))
        assert second["text"].startswith(prompt)
        assert second["prompt_logprobs"] == alone["prompt_logprobs"]
        for name, column in alone["logprobs"].items():
            assert second["logprobs"][name][:length] == column[:length]
            assert len(second["logprobs"][name]) == length + 3


@needs_engine
@pytest.mark.asyncio(loop_scope="module")
async def test_prompt_logprobs_have_vllms_form(http: httpx.AsyncClient) -> None:
    """Completions and chats list each prompt token first, with rank, text and alternatives."""
    text = "def add(a, b):\n    return a + b\n"
    ids = TOKENIZER.encode(text)
    echoed = {"prompt": text, "max_tokens": 0, "echo": True, "logprobs": 0}
    reply = (await http.post(TEXT, json={**echoed, "prompt_logprobs": 2})).json()
    (choice,) = reply["choices"]
    first, *entries = choice["prompt_logprobs"]
    assert first is None
    for token, entry, logprob in zip(
        ids[1:], entries, choice["logprobs"]["token_logprobs"][1:], strict=True
    ):
        own = entry[str(token)]
        assert next(iter(entry)) == str(token)
        assert own["logprob"] == logprob
        assert own["decoded_token"] == TOKENIZER.token_text(token)
        ranks = sorted(other["rank"] for other in entry.values())
        assert ranks in ([1, 2], [1, 2, own["rank"]])
        ordered = sorted(entry.values(), key=lambda other: other["rank"])
        values = [other["logprob"] for other in ordered]
        assert values == sorted(values, reverse=True)
    plain = (await http.post(TEXT, json={**echoed, "prompt": ids})).json()
    assert "prompt_logprobs" not in plain["choices"][0]
    chat = {"messages": [{"role": "user", "content": "x = 1"}], "max_tokens": 2}
    whole = (await http.post(CHAT, json={**chat, "prompt_logprobs": 1})).json()
    assert len(whole["prompt_logprobs"]) == whole["usage"]["prompt_tokens"]
    assert whole["prompt_logprobs"][0] is None
    assert "prompt_logprobs" not in whole["choices"][0]
    assert "prompt_logprobs" not in (await http.post(CHAT, json=chat)).json()


@needs_engine
@pytest.mark.asyncio(loop_scope="module")
async def test_chat_without_output_is_empty(http: httpx.AsyncClient) -> None:
    """A chat with `max_tokens` of 0 computes its prompt, which the next request finds cached."""
    chat = {"messages": [{"role": "user", "content": "y = 2\n" * 20}], "seed": 1}
    warm = (await http.post(CHAT, json={**chat, "max_tokens": 0})).json()
    (choice,) = warm["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("", "length")
    assert warm["usage"]["completion_tokens"] == 0
    assert warm["metrics"]["speculative_decoding"]["max_draft_tokens"] == 0
    after = (await http.post(CHAT, json={**chat, "max_tokens": 1})).json()
    assert after["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    streamed = events((await http.post(CHAT, json={**chat, "max_tokens": 0, "stream": True})).text)
    assert [chunk["choices"][0]["finish_reason"] for chunk in streamed[:-1]] == ["length"]


async def test_streams_refuse_fields_that_they_cannot_contain() -> None:
    """A stream has neither `prompt_logprobs` nor the log probabilities of several choices."""
    async with running() as listening, client(listening) as http:
        for fields, param in (
            ({"prompt_logprobs": 0}, "prompt_logprobs"),
            ({"echo": True, "logprobs": 1, "n": 2}, "echo"),
        ):
            body = {"prompt": "a", "max_tokens": 2, **fields}
            refused = await http.post(TEXT, json={**body, "stream": True})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
            assert (await http.post(TEXT, json=body)).status_code == 200
        echoed = {"prompt": "ab\u2603", "max_tokens": 2, "echo": True, "n": 2, "stream": True}
        chunks = events((await http.post(TEXT, json=echoed)).text)[:-1]
        for index in range(2):
            texts = [c["text"] for chunk in chunks for c in chunk["choices"] if c["index"] == index]
            assert texts[0].startswith("ab\u2603")
            assert not any(text.startswith("ab\u2603") for text in texts[1:])


async def test_prompt_beyond_a_quota_is_named(tmp_path: Path) -> None:
    """A prompt without output that exceeds the whole quota is a client error of the prompt."""
    keys = tmp_path / "keys.yaml"
    account = {"name": "a", "key": "k", "tokens_per_minute": 5}
    keys.write_text(json.dumps({"keys": [account]}))
    settings = {"backends": [ScriptedBackend()], "api_keys_file": str(keys)}
    async with running(**settings) as listening, client(listening) as http:
        response = await http.post(
            TEXT,
            json={"prompt": [5] * 6, "max_tokens": 0},
            headers={"Authorization": "Bearer k"},
        )
    assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt")


@given(st.text())
def test_offsets_point_at_the_tokens(text: str) -> None:
    """Each token begins where the text of the tokens before it ends, in whole characters."""
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    decoded = TOKENIZER.decode(ids, skip_special_tokens=False)
    offsets = prompt_offsets(ids, decoded, TOKENIZER)
    assert offsets == sorted(offsets)
    for index, offset in enumerate(offsets):
        before = TOKENIZER.decode(ids[:index], skip_special_tokens=False)
        if decoded.startswith(before):  # otherwise, a character is incomplete
            assert offset == len(before)
        else:
            assert offset < len(before)


class LettersAfterBegin:
    """A tokenizer of letters, whose token 0 is special."""

    texts = ("", "a", "b")

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        begin = "" if skip_special_tokens else "<s>"
        return "".join((begin, "a", "b")[token] for token in token_ids)


def test_added_special_token_has_no_width() -> None:
    """A special token has a width only if it is part of the text."""
    assert prompt_offsets([0, 1, 2], "ab", LettersAfterBegin()) == [0, 0, 1]
    assert prompt_offsets([0, 1, 2], "<s>ab", LettersAfterBegin()) == [0, 3, 4]
    assert prompt_offsets([1, 0, 2], "a<s>b", LettersAfterBegin()) == [0, 1, 4]
