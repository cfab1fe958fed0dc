"""Generated requests: valid, odd and invalid ones of all endpoints."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Callable
from copy import deepcopy
from random import Random
from typing import Any

from tests.differential.exchange import Case, Exchange
from tests.differential.faults import FAULTS
from tests.fuzz.mutation import JSON, mutated
from tests.gateway.test_bad_input import BAD_CHAT, BAD_TEXT
from tests.gateway.tool_models import ANTHROPIC_TOOLS, TOOLS

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"

SHARES = {"worker": 0.4, "keys": 0.2, "upstream": 0.2, "faulty": 0.2}
"""Share of each scenario in the cases."""

WORDS = (
    "the", "def", "return", "import", "list", "of", "cat", "naïve", "数据", "\U0001f600", "{}",
    "()", "\n", "for", "in", "class", "self",
)  # fmt: skip
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}

ENDS_CONNECTION = re.compile(
    rb"connection: *(close|upgrade)| HTTP/1\.0\r\n|^(BREW|post|TRACE) |^\S+ \*|//", re.IGNORECASE
)
"""Requests that end a connection. aiohttp rejects a whole pipeline if another request follows, and
answers none of the requests before."""

Body = dict[str, Any]
Option = tuple[float, Callable[[Random], Body]]


def _text(random: Random, most: int = 20) -> str:
    return " ".join(random.choices(WORDS, k=random.randint(1, most)))


def _number(low: float, high: float) -> Callable[[Random], float]:
    return lambda random: round(random.uniform(low, high), 2)


SAMPLING: list[Option] = [
    (0.5, lambda r: {"temperature": r.choice((0, 0.7, 1, 1.5))}),
    (0.2, lambda r: {"top_p": _number(0, 1)(r)}),
    (0.1, lambda r: {"top_k": r.choice((-1, 0, 1, 40))}),
    (0.1, lambda r: {"min_p": 0.1}),
    (0.4, lambda r: {"seed": r.choice((0, 1, 5, -1, 2**63 - 1))}),
    (0.15, lambda r: {"n": r.choice((1, 2, 3))}),
    (0.15, lambda r: {"stop": r.choice(("the", [" return", "cat"], []))}),
    (0.1, lambda r: {"frequency_penalty": _number(-2, 2)(r)}),
    (0.1, lambda r: {"presence_penalty": _number(-2, 2)(r)}),
    (0.05, lambda r: {"repetition_penalty": 1.1}),
    (0.05, lambda r: {"logit_bias": {"5": r.choice((-100, 3))}}),
    (0.05, lambda r: {"min_tokens": r.choice((0, 2))}),
    (0.05, lambda r: {"ignore_eos": True}),
    (0.05, lambda r: {"stop_token_ids": [5, 9]}),
    (0.05, lambda r: {"bad_words": ["cat"]}),
    (0.05, lambda r: {"return_token_ids": True}),
    (0.05, lambda r: {"return_tokens_as_token_ids": True}),
    (0.05, lambda r: {"skip_special_tokens": False}),
    (0.05, lambda r: {"include_stop_str_in_output": True}),
    (0.05, lambda r: {"truncate_prompt_tokens": 5}),
    (0.05, lambda r: {"allowed_token_ids": [5, 6, 7]}),
    (0.1, lambda r: {"priority": r.choice((-1, 0, 1, 5, 9))}),
    (0.2, lambda r: {"speculation": r.choice(({"mode": "off"}, {"mode": "ngram"}, {"mode": "auto"},
                                              {"mode": "ngram", "max_draft_tokens": 2}))}),
    (0.05, lambda r: {"user": _text(r, 1), "store": r.random() < 0.5, "metadata": {"a": "b"}}),
    (0.1, lambda r: {r.choice(("x_unknown", "logits_processors", "cache_salt")): "x"}),
    (0.05, lambda r: {"model": r.choice(("qwen", "gpt-9", ""))}),
    (0.05, lambda r: {"guided_regex": "[a-c]{1,4}"}),
    (0.03, lambda r: {"guided_choice": ["yes", "no"]}),
    (0.03, lambda r: {"guided_json": SCHEMA}),
    (0.03, lambda r: {"guided_grammar": 'start: "a" | "b"'}),
]  # fmt: skip

CHAT_ONLY: list[Option] = [
    (0.1, lambda r: {"logprobs": True, "top_logprobs": r.choice((0, 2, 20))}),
    (0.12, lambda r: {"tools": TOOLS, "tool_choice": r.choice(("auto", "none", "required"))}),
    (0.05, lambda r: {"response_format": {"type": "json_object"}}),
    (0.05, lambda r: {"response_format": {"type": "json_schema",
                                          "json_schema": {"name": "s", "schema": SCHEMA}}}),
    (0.05, lambda r: {"prediction": {"type": "content", "content": _text(r)}}),
    (0.05, lambda r: {"reasoning_effort": "low"}),
    (0.05, lambda r: {"chat_template_kwargs": {"enable_thinking": False}}),
    (0.05, lambda r: {"parallel_tool_calls": False}),
]  # fmt: skip

TEXT_ONLY: list[Option] = [
    (0.1, lambda r: {"logprobs": r.choice((0, 1, 5))}),
    (0.1, lambda r: {"echo": True}),
    (0.05, lambda r: {"best_of": 2}),
    (0.05, lambda r: {"prompt_logprobs": 1}),
    (0.05, lambda r: {"suffix": " end"}),
]


def _with(body: Body, options: list[Option], random: Random) -> Body:
    for share, option in options:
        # Most requests have few parameters, as those of clients.
        if random.random() < share * 0.5:
            body |= option(random)
    return body


def _streamed(body: Body, random: Random) -> Body:
    if random.random() < 0.45:
        body["stream"] = True
        if random.random() < 0.4:
            body["stream_options"] = {"include_usage": True}
            if random.random() < 0.3:
                body["stream_options"]["continuous_usage_stats"] = True
    return body


def _messages(random: Random) -> list[Body]:
    found: list[Body] = []
    if random.random() < 0.3:
        found.append({"role": random.choice(("system", "developer")), "content": _text(random)})
    for _ in range(random.choice((0, 0, 0, 1, 3))):
        found += [{"role": "user", "content": _text(random)},
                  {"role": "assistant", "content": _text(random)}]  # fmt: skip
    parts = [{"type": "text", "text": _text(random)}]
    found.append({"role": "user", "content": parts if random.random() < 0.1 else _text(random)})
    return found


def _chat(random: Random) -> Body:
    body = {"messages": _messages(random), "max_tokens": random.choice((1, 2, 5, 17))}
    return _streamed(_with(body, SAMPLING + CHAT_ONLY, random), random)


def _completion(random: Random) -> Body:
    many: list[Any] = [_text(random), [5, 6, 7], [_text(random), _text(random)], [[5], [6, 7]]]
    prompt = random.choices(many, (10, 2, 2, 1))[0]
    body = {"prompt": prompt, "max_tokens": random.choice((0, 1, 2, 5, 17))}
    return _streamed(_with(body, SAMPLING + TEXT_ONLY, random), random)


def _response(random: Random) -> Body:
    given = _text(random) if random.random() < 0.5 else _messages(random)
    body: Body = {"input": given, "max_output_tokens": random.choice((1, 5, 17))}
    if random.random() < 0.1:
        body["previous_response_id"] = "resp_unknown"
    if random.random() < 0.2:
        body["instructions"] = _text(random)
    if random.random() < 0.3:
        body["seed"] = 3
    if random.random() < 0.4:
        body["stream"] = True
    return body


def _message(random: Random) -> Body:
    body: Body = {
        "model": "qwen", "max_tokens": random.choice((1, 5, 17)),
        "messages": [{"role": "user", "content": _text(random)}],
    }  # fmt: skip
    if random.random() < 0.3:
        body["system"] = _text(random)
    if random.random() < 0.2:
        body["tools"] = ANTHROPIC_TOOLS
    if random.random() < 0.2:
        body["stop_sequences"] = ["cat"]
    if random.random() < 0.4:
        body["stream"] = True
    return body


POSTS: dict[str, tuple[float, Callable[[Random], Body]]] = {
    CHAT: (10, _chat),
    TEXT: (7, _completion),
    RESPONSES: (2, _response),
    MESSAGES: (2, _message),
    "/v1/messages/count_tokens": (0.5, _message),
    "/v1/responses/input_tokens": (0.3, _response),
    "/v1/embeddings": (0.5, lambda r: {"input": _text(r), "model": "qwen"}),
    "/v1/rerank": (0.2, lambda r: {"query": _text(r), "documents": [_text(r)]}),
    "/score": (0.2, lambda r: {"text_1": _text(r), "text_2": _text(r)}),
    "/tokenize": (1, lambda r: {"prompt": _text(r)}),
    "/detokenize": (0.5, lambda r: {"tokens": [5, 6, r.randint(0, 9999)]}),
}

GETS = (
    "/v1/models", "/v1/models/qwen", "/v1/models/none", "/health", "/ready", "/version", "/",
    "/decisions?limit=3", "/decisions?limit=x", "/workers", "/openapi.json", "/web/page.js",
    "/web/none", "/nothing", "/v1/responses/resp_none", "/v1/chat/completions?x=1", "/health/",
    "/v1/models?a=%20b", "//", "/%2e%2e/etc", "*", "http://localhost/health",
)  # fmt: skip

HEADERS = (
    ("Accept", "application/json"), ("Accept", "text/event-stream"), ("Accept-Encoding", "gzip"),
    ("User-Agent", "OpenAI/Python 2.8.1"), ("X-Stainless-Lang", "python"),
    ("x-stainless-retry-count", "1"), ("x-stainless-retry-count", "many"),
    ("x-request-id", "mine-1"), ("x-request-id", "x" * 200), ("x-request-id", "\xfc"),
    ("x-slo-ttft-ms", "800"), ("x-slo-ttft-ms", "0"), ("x-slo-tpot-ms", "50"),
    ("x-slo-tpot-ms", "soon"), ("x-flow-id", "flow-1"), ("x-flow-deadline-ms", "5000"),
    ("x-client-rate-tps", "30"), ("x-client-rate-tps", "-1"), ("Via", "1.1 proxy"),
    ("X-Forwarded-For", "10.0.0.1"), ("Origin", "https://chat.example.com"),
    ("Origin", "https://evil.example"), ("Origin", "null"), ("Sec-Fetch-Site", "cross-site"),
    ("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),
    ("traceparent", "junk"), ("tracestate", "a=b"), ("baggage", "k=v"),
    ("anthropic-version", "2023-06-01"), ("x-api-key", "sk-search"), ("Cookie", "a=b; c=d"),
    ("Expect", "100-continue"), ("Expect", "tea"), ("Connection", "close"),
    ("Connection", "keep-alive"), ("Connection", "upgrade, keep-alive"), ("Upgrade", "h2c"),
    ("Upgrade", "websocket"), ("TE", "trailers"), ("Range", "bytes=0-1"), ("If-None-Match", "x"),
    ("X-Empty", ""), ("X-Long", "v" * 8000), ("X-Latin", "\xe9\xfc"), ("Content-Language", "en"),
    ("Authorization", "Bearer none"), ("Idempotency-Key", "k-1"), ("Max-Forwards", "0"),
)  # fmt: skip

WRONG_LINES = (
    "x-slo-ttft-ms: 0", "x-slo-tpot-ms: soon", "x-client-rate-tps: -1", "x-flow-deadline-ms: 5000",
)  # fmt: skip

KEYS = (
    ("Authorization", "Bearer sk-search"), ("Authorization", "Bearer sk-boss"),
    ("Authorization", "Bearer sk-batch"), ("Authorization", "Bearer sk-batch"),
    ("x-api-key", "sk-search"), ("Authorization", "Basic dTpzay1zZWFyY2g="),
    ("Authorization", "Bearer wrong"), ("Authorization", "Bearer sk-metrics"),
    ("Authorization", "bearer  sk-search "),
)  # fmt: skip

TYPES = (
    "application/json; charset=utf-8", "text/plain", "application/x-www-form-urlencoded", "",
    "multipart/form-data; boundary=x", "APPLICATION/JSON", "application/octet-stream",
)  # fmt: skip

BAD_BODIES = (
    b"", b"{", b"[]", b"null", b'"text"', b"{} {}", b'{"prompt": "\xff"}', b"[" * 5000,
    b'{"messages": ' + b'[{"a":' * 3000, b'{"prompt": NaN}', b'{"prompt": 1e999}',
    b"\xef\xbb\xbf{}",
    b'{"prompt": "a", "prompt": "b", "max_tokens": 1}', b" " * 3000, b"\0", b'{"stream": true}',
    b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}", b'{"prompt": "\\ud800"}',
)  # fmt: skip

METHODS = ("GET", "HEAD", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "BREW", "post")


class Generator:
    """A source of cases that only depend on the seed."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)

    def cases(self, count: int) -> list[Case]:
        """Return cases with this number of requests in all."""
        found: list[Case] = []
        for scenario, share in SHARES.items():
            left = round(count * share)
            while left > 0:
                case = self._case(scenario, left)
                found.append(case)
                left -= sum(len(exchange.methods) for exchange in case.exchanges)
        return found

    def _case(self, scenario: str, most: int) -> Case:
        random, kind = self._random, self._random.random()
        if kind < 0.06 and most > 1:
            parts = self._pipeline(scenario, min(most, random.randint(2, 4)))
            names, methods = [part[0] for part in parts], [part[1] for part in parts]
            data = b"".join(part[2] for part in parts)
            return Case(f"pipeline: {'; '.join(names)}", scenario, [Exchange(data, methods)])
        if kind < 0.1 and most > 1:
            parts = [self._request(scenario) for _ in range(min(most, random.randint(2, 12)))]
            sent = [Exchange(data, [method], new=True) for _, method, data in parts]
            return Case(f"together: {'; '.join(part[0] for part in parts)}", scenario, sent)
        name, method, data = self._request(scenario)
        exchange = Exchange(data, [method], new=random.random() < 0.1)
        if kind < 0.16:
            exchange.cuts = sorted(random.choices(range(1, len(data)), k=random.randint(1, 4)))
            name += " in pieces"
        elif kind < 0.19:
            exchange.data, exchange.closes = data[: random.randint(1, len(data))], True
            name += " cut by the client"
        elif kind < 0.23:
            exchange.leave_after = random.choice((1, 150, 400, 700, 1500))
            name += " left by the client"
        return Case(name, scenario, [exchange])

    def _pipeline(self, scenario: str, count: int) -> list[tuple[str, str, bytes]]:
        """Return requests of which only the last one may end the connection."""
        parts: list[tuple[str, str, bytes]] = []
        while len(parts) < count:
            part = self._request(scenario)
            if len(parts) == count - 1 or not ENDS_CONNECTION.search(part[2]):
                parts.append(part)
        return parts

    def _request(self, scenario: str) -> tuple[str, str, bytes]:
        """Return a description, the method and the bytes of a request."""
        without = self._random.random() < 0.07
        found = self._without_body(scenario) if without else self._with_body(scenario)
        name, method, data = found
        head = data.partition(b"\r\n\r\n")[0].lower() + b"\r\n"
        if b"\r\nupgrade:" in head and b"\r\nconnection: upgrade" in head:
            name += " that asks for an upgrade"
        if b"\r\nexpect: tea" in head:
            name += " with an unknown expectation"
        if any(f"\r\n{line}\r\n".encode() in head for line in WRONG_LINES):
            name += " with a wrong header"
        return name, method, data

    def _without_body(self, scenario: str) -> tuple[str, str, bytes]:
        random = self._random
        target = random.choice(GETS)
        method = "GET" if random.random() < 0.7 else random.choice(METHODS)
        head = self._head(method, target, self._some_headers(scenario))
        return f"{method} {target}", method, head

    def _with_body(self, scenario: str) -> tuple[str, str, bytes]:
        random = self._random
        shares = [share for share, _ in POSTS.values()]
        path = random.choices(list(POSTS), shares)[0]
        if scenario == "faulty" and random.random() < 0.8:
            path = random.choice((CHAT, TEXT))
        name, body = self._body(path, scenario)
        headers = self._some_headers(scenario)
        method, target = "POST", path
        kind = random.random()
        if kind < 0.02:
            method = random.choice(METHODS)
        elif kind < 0.05:
            target += random.choice(("?x=1", "/", "?", "/more", "?a=b&c=%C3%BC", "#part"))
        elif kind < 0.08:
            coding = random.choice(("gzip", "deflate", "x-gzip", "br", "identity", "gzip, gzip"))
            headers.append(("Content-Encoding", coding))
            body = self._packed(body, coding)
            name += f" {coding}"
        headers.append(("Content-Type", "application/json"))
        if random.random() < 0.04:
            headers[-1] = ("Content-Type", random.choice(TYPES))
        if random.random() < 0.06:
            data = self._head(method, target, [*headers, ("Transfer-Encoding", "chunked")])
            return f"{method} {target} {name} chunked", method, data + self._chunked(body)
        headers.append(("Content-Length", str(len(body))))
        return f"{method} {target} {name}", method, self._head(method, target, headers) + body

    def _body(self, path: str, scenario: str) -> tuple[str, bytes]:
        random, kind = self._random, self._random.random()
        if kind < 0.03:
            return "bad", random.choice(BAD_BODIES)
        if kind < 0.11 and path in {CHAT, TEXT}:
            tree, param = random.choice(BAD_CHAT if path == CHAT else BAD_TEXT)
            found = _streamed(deepcopy(tree), random) if random.random() < 0.3 else tree
            return f"with a wrong {param}", json.dumps(found).encode()
        body = POSTS[path][1](random)
        if scenario == "faulty":
            body["user"] = random.choice(FAULTS)
            name = f"({body['user']}{', stream' if body.get('stream') else ''})"
        else:
            name = "(stream)" if body.get("stream") else ""
        if random.random() < 0.02:
            body["padding"] = "x" * random.choice((20_000, 70_000, 300_000))
        data = json.dumps(body, ensure_ascii=random.random() < 0.5).encode()
        if kind < 0.2:
            return f"{name} mutated", mutated(JSON, data, random) or data
        return name, data

    def _packed(self, body: bytes, coding: str) -> bytes:
        if self._random.random() < 0.2:
            return body
        return zlib.compress(body) if coding == "deflate" else gzip.compress(body, mtime=0)

    def _chunked(self, body: bytes) -> bytes:
        parts = []
        while body:
            size = self._random.randint(1, len(body))
            extension = b";x=y" if self._random.random() < 0.2 else b""
            parts.append(b"%x%s\r\n%s\r\n" % (size, extension, body[:size]))
            body = body[size:]
        trailer = b"X-Trailer: 1\r\n" if self._random.random() < 0.2 else b""
        return b"".join(parts) + b"0\r\n" + trailer + b"\r\n"

    def _some_headers(self, scenario: str) -> list[tuple[str, str]]:
        random = self._random
        found = random.sample(HEADERS, random.choice((0, 0, 0, 1, 1, 2, 5)))
        if scenario in {"upstream", "faulty"}:  # see `intended`
            found = [pair for pair in found if pair != ("x-client-rate-tps", "-1")]
        if scenario == "keys" and random.random() < 0.92:
            found = [pair for pair in found if pair[0] not in {"Authorization", "x-api-key"}]
            found.append(random.choices(KEYS, (6, 6, 6, 2, 2, 1, 1, 1, 1))[0])
        return found

    def _head(self, method: str, target: str, headers: list[tuple[str, str]]) -> bytes:
        random = self._random
        version = "HTTP/1.0" if random.random() < 0.02 else "HTTP/1.1"
        host = "localhost" if random.random() < 0.97 else random.choice(("evil.example", "", "a b"))
        pairs = [("Host", host), *headers]
        if random.random() < 0.05:
            pairs = [(name.lower() if random.random() < 0.5 else name.upper(), value)
                     for name, value in pairs]  # fmt: skip
        lines = [f"{method} {target} {version}", *(f"{name}: {value}" for name, value in pairs)]
        return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n"
