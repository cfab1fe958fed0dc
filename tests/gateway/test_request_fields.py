"""Tests of vLLM's request fields on the engine: tokens that end or may not occur, and token ids."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from draftgate.backends.checkpoints import SHIPPED_MODEL
from draftgate.backends.tokenizer import Tokenizer
from draftgate.gateway.http.requests.prompt_encoding import INFILLING_FORMATS
from tests.gateway.harness import client, events, needs_engine, running

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "def add(a, b):"}]
PROMPT = "import os\nimport sys\n\ndef main(argv):\n"
TOKENIZER = Tokenizer(SHIPPED_MODEL)

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    needs_engine,
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def http() -> AsyncIterator[httpx.AsyncClient]:
    """A client of a node with the engine, which drafts up to four tokens per step."""
    settings = {"kv_bytes": 32 << 20, "threads": 1, "max_model_len": 2048, "speculation": "fixed:4"}
    async with running(backend="engine", **settings) as listening, client(listening) as http:
        yield http


async def whole(http: httpx.AsyncClient, path: str = TEXT, **fields: Any) -> dict[str, Any]:
    """Return the response to a greedy request of 24 tokens with token ids."""
    prompt = {"prompt": PROMPT} if path == TEXT else {"messages": HELLO}
    body = {**prompt, "max_tokens": 24, "temperature": 0, "return_token_ids": True, **fields}
    response = await http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def choice(http: httpx.AsyncClient, path: str = TEXT, **fields: Any) -> dict[str, Any]:
    return (await whole(http, path, **fields))["choices"][0]


async def streamed(http: httpx.AsyncClient, path: str, **fields: Any) -> list[dict[str, Any]]:
    """Return the chunks of a stream that has choices."""
    prompt = {"prompt": PROMPT} if path == TEXT else {"messages": HELLO}
    body = {**prompt, "max_tokens": 24, "temperature": 0, "return_token_ids": True, **fields}
    response = await http.post(path, json={**body, "stream": True})
    return [one for one in events(response.text) if one != "[DONE]" and one["choices"]]


async def test_stop_token_ends_the_output_without_its_text(http: httpx.AsyncClient) -> None:
    """A stop token ends the output where it first occurs, with and without drafts and streams."""
    plain = (await choice(http))["token_ids"]
    stop = plain[9]
    end = plain.index(stop)
    text = TOKENIZER.decode([*TOKENIZER.encode(PROMPT), *plain[:end]])
    for more in ({}, {"speculation": {"mode": "off"}}):
        ended = await choice(http, stop_token_ids=[stop], **more)
        assert ended["token_ids"] == plain[: end + 1]
        assert ended["finish_reason"] == "stop"
        assert text.endswith(ended["text"])
        assert len(ended["text"]) == len(text) - len(PROMPT)
        chunks = await streamed(http, TEXT, stop_token_ids=[stop], **more)
        assert "".join(one["choices"][0]["text"] for one in chunks) == ended["text"]


async def test_stop_token_is_not_sampled_before_min_tokens(http: httpx.AsyncClient) -> None:
    """With `min_tokens`, the first stop token follows at least that number of tokens."""
    stop = (await choice(http))["token_ids"][2]
    ids = (await choice(http, stop_token_ids=[stop], min_tokens=12, ignore_eos=True))["token_ids"]
    assert len(ids) > 12
    assert stop not in ids[:12]


async def test_bad_words_do_not_occur(http: httpx.AsyncClient) -> None:
    """The tokens of a bad word no longer occur in a row, with and without drafts."""
    plain = (await choice(http))["token_ids"]
    for length in (1, 2):
        parts = [plain[begin : begin + length] for begin in range(2, len(plain) - length)]
        spelled = [part for part in parts if encoded(TOKENIZER.decode(part)) == part]
        word = TOKENIZER.decode(spelled[0])
        outputs = [
            (await choice(http, bad_words=[word], **more))["token_ids"]
            for more in ({}, {"speculation": {"mode": "off"}})
        ]
        assert outputs[0] == outputs[1] != plain
        pieces = [outputs[0][begin : begin + length] for begin in range(len(outputs[0]))]
        assert spelled[0] not in pieces


def encoded(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


async def test_bad_word_at_the_beginning_of_a_text_is_also_forbidden_after_a_space(
    http: httpx.AsyncClient,
) -> None:
    """A bad word without a space is forbidden with one, and the other words remain."""
    forced = {str(TOKENIZER.encode(" return", add_special_tokens=False)[0]): 100}
    assert " return" in (await choice(http, logit_bias=forced))["text"]
    text = (await choice(http, logit_bias=forced, bad_words=["return"]))["text"]
    assert "return" not in text


async def test_grammar_of_bad_words_alone_still_ends(http: httpx.AsyncClient) -> None:
    """If the format allows only a bad word, the output is that word."""
    regex = {"type": "regex", "pattern": "(yes)"}
    ended = await choice(http, response_format=regex, bad_words=["yes", "y", "ye", "e", "s", "es"])
    assert (ended["text"], ended["finish_reason"]) == ("yes", "stop")


async def test_special_tokens_are_part_of_the_text_on_request(http: httpx.AsyncClient) -> None:
    """Special tokens have no text, unless `skip_special_tokens` is false."""
    special = TOKENIZER.vocabulary["<|user|>"]
    forced = {"logit_bias": {str(special): 100}, "max_tokens": 3, "ignore_eos": True}
    assert (await choice(http, **forced))["text"] == ""
    assert (await choice(http, **forced, skip_special_tokens=False))["text"] == "<|user|>" * 3
    chunks = await streamed(http, CHAT, **forced, skip_special_tokens=False)
    texts = [one["choices"][0]["delta"].get("content", "") for one in chunks]
    assert "".join(texts) == "<|user|>" * 3


async def test_completions_return_the_token_ids_of_prompt_and_output(
    http: httpx.AsyncClient,
) -> None:
    """Each choice of a completion has the tokens of its prompt and output, whole and streamed."""
    prompts = [[5, 6, 7], [8, 9]]
    replies = (await whole(http, prompt=prompts, n=2, seed=1, temperature=0.7))["choices"]
    assert [one["prompt_token_ids"] for one in replies] == [prompts[0]] * 2 + [prompts[1]] * 2
    assert all(len(one["token_ids"]) == 24 for one in replies)
    chunks = await streamed(http, TEXT, prompt=prompts, n=2, seed=1, temperature=0.7)
    for index, reply in enumerate(replies):
        own = [one["choices"][0] for one in chunks if one["choices"][0]["index"] == index]
        assert [token for one in own for token in one["token_ids"]] == reply["token_ids"]
        prompt_ids = [one.get("prompt_token_ids") for one in own]
        assert prompt_ids == [reply["prompt_token_ids"], *[None] * (len(own) - 1)]


async def test_chats_return_the_token_ids_of_prompt_and_output(http: httpx.AsyncClient) -> None:
    """A chat has the tokens of its prompt, and each choice those of its output, also streamed."""
    reply = await whole(http, CHAT, n=2)
    tokenized = (await http.post("/tokenize", json={"messages": HELLO})).json()["tokens"]
    assert reply["prompt_token_ids"] == tokenized
    chunks = await streamed(http, CHAT, n=2)
    prompt_ids = [one.get("prompt_token_ids") for one in chunks]
    assert prompt_ids == [tokenized, *[None] * (len(chunks) - 1)]
    for expected in reply["choices"]:
        index = expected["index"]
        own = [one["choices"][0] for one in chunks if one["choices"][0]["index"] == index]
        assert [token for one in own for token in one["token_ids"]] == expected["token_ids"]
    without = await whole(http, CHAT, return_token_ids=False)
    assert "prompt_token_ids" not in without
    assert "token_ids" not in without["choices"][0]


async def test_log_probabilities_name_tokens_by_id_on_request(http: httpx.AsyncClient) -> None:
    """With `return_tokens_as_token_ids`, log probabilities name each token by its id."""
    text = await choice(http, logprobs=2, return_tokens_as_token_ids=True)
    plain = await choice(http, logprobs=2)
    names = [f"token_id:{token}" for token in text["token_ids"]]
    assert text["logprobs"]["tokens"] == names
    assert text["logprobs"]["text_offset"] == plain["logprobs"]["text_offset"]
    assert names[0] in text["logprobs"]["top_logprobs"][0]
    chat = await choice(http, CHAT, logprobs=True, top_logprobs=1, return_tokens_as_token_ids=True)
    entries = chat["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == [f"token_id:{i}" for i in chat["token_ids"]]
    assert entries[0]["top_logprobs"][0]["token"] == entries[0]["token"]


async def test_truncated_prompt_keeps_its_end(http: httpx.AsyncClient) -> None:
    """`truncate_prompt_tokens` keeps the last tokens, and -1 keeps those that fit the context."""
    kept = await choice(http, prompt=list(range(5, 50)), truncate_prompt_tokens=7)
    assert kept["prompt_token_ids"] == list(range(43, 50))
    context = (await http.get("/v1/models")).json()["data"][0]["max_model_len"]
    long = [5 + index % 50 for index in range(context + 9)]
    assert (await http.post(TEXT, json={"prompt": long})).status_code == 400
    fitting = await choice(http, prompt=long, truncate_prompt_tokens=-1, max_tokens=2)
    assert fitting["prompt_token_ids"] == long[-(context - 2) :]
    text = "x = [1, 2]\n" * 20_000
    ids = TOKENIZER.encode(text)
    fitting = await choice(http, prompt=text, truncate_prompt_tokens=100, echo=True, max_tokens=2)
    assert fitting["prompt_token_ids"] == ids[-100:]
    assert fitting["text"].startswith(TOKENIZER.decode(ids[-100:]))
    messages = [{"role": "user", "content": text}]
    chat = await whole(http, CHAT, messages=messages, truncate_prompt_tokens=-1, max_tokens=2)
    assert chat["prompt_token_ids"] == ids[-(context - 2) :]


async def test_best_of_returns_the_likeliest_choices(http: httpx.AsyncClient) -> None:
    """Of `best_of` choices, each prompt keeps the `n` with the highest mean log probability."""
    fields = {"prompt": ["import ", "class "], "temperature": 1.2, "seed": 4}
    everything = await whole(http, **fields, n=5, logprobs=0)
    best = await whole(http, **fields, n=2, best_of=5)
    assert best["usage"]["completion_tokens"] == everything["usage"]["completion_tokens"]
    assert [one["index"] for one in best["choices"]] == [0, 1, 2, 3]

    def mean(one: dict[str, Any]) -> float:
        values = one["logprobs"]["token_logprobs"]
        return sum(values) / len(values)

    expected = [
        one
        for begin in (0, 5)
        for one in sorted(everything["choices"][begin : begin + 5], key=mean, reverse=True)[:2]
    ]
    for ours, theirs in zip(best["choices"], expected, strict=True):
        assert ours["token_ids"] == theirs["token_ids"]
        assert ours["prompt_token_ids"] == theirs["prompt_token_ids"]
        assert ours["logprobs"] is None


@pytest.mark.parametrize("tokens", INFILLING_FORMATS, ids=["qwen", "starcoder", "deepseek"])
async def test_suffix_follows_the_prompt_in_the_format_of_the_model(
    tmp_path: Path, tokens: tuple[str, str, str]
) -> None:
    """A model with tokens for it gets a prompt to fill in the middle."""
    model = tmp_path / "model"
    model.mkdir()
    for path in SHIPPED_MODEL.iterdir():
        (model / path.name).symlink_to(path)
    (model / "tokenizer.json").unlink()
    text = (SHIPPED_MODEL / "tokenizer.json").read_text(encoding="utf-8")
    for old, new in zip(("<|user|>", "<|assistant|>", "<|end|>"), tokens, strict=True):
        text = text.replace(old, new)
    (model / "tokenizer.json").write_text(text, encoding="utf-8")
    async with running(model=str(model)) as listening, client(listening) as http:
        filled = await choice(http, prompt="def f(", suffix="):\n", max_tokens=2)
        encode = Tokenizer(model).encode
        ids = Tokenizer(model).vocabulary
        first, second, third = (ids[token] for token in tokens)
        expected = [first, *encode("def f("), second, *encode("):\n"), third]
        assert filled["prompt_token_ids"] == expected
        long = (await http.post(TEXT, json={"prompt": "a", "suffix": "x" * 1_000_000})).json()
        assert long["error"]["param"] == "suffix"
        assert "but the text has at least" in long["error"]["message"]
        body = {"prompt": "a", "suffix": "b", "truncate_prompt_tokens": 3}
        refused = (await http.post(TEXT, json=body)).json()["error"]
        assert refused["param"] == "truncate_prompt_tokens"


@pytest.mark.parametrize("path", [TEXT, CHAT, "/v1/responses"])
async def test_only_requests_with_the_same_salt_share_prefixes(
    http: httpx.AsyncClient, path: str
) -> None:
    """A request finds cached tokens only of requests with its `cache_salt`, or without one."""
    prompt = f"# salted on {path}\n" + "value = value + 1\n" * 20
    content: dict[str, Any] = {
        TEXT: {"prompt": prompt, "max_tokens": 1},
        CHAT: {"messages": [{"role": "user", "content": prompt}], "max_tokens": 1},
    }.get(path, {"input": prompt, "max_output_tokens": 1})

    async def cached_tokens(**fields: Any) -> int:
        response = await http.post(path, json={**content, **fields})
        usage = response.json()["usage"]
        details = usage.get("prompt_tokens_details") or usage["input_tokens_details"]
        return int(details["cached_tokens"])

    salted = {"cache_salt": "a"}
    for fields in ({}, salted, {"cache_salt": "b"}):
        assert await cached_tokens(**fields) == 0
    for fields in ({}, salted):
        assert await cached_tokens(**fields) > 0
    refused = await http.post(path, json={**content, "cache_salt": ""})
    assert refused.json()["error"]["param"] == "cache_salt"
