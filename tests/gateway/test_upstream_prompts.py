"""Tests of the encoding of forwarded prompts, and of the ids of their sessions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from draftgate.backends.tokenizer import Tokenizer
from draftgate.gateway.http.requests.upstream_prompts import encode_forwarded, session_id
from tests.gateway.tool_models import with_text

CHAT = "/v1/chat/completions"
COMPLETION = "/v1/completions"
USER = {"role": "user", "content": "hello"}
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}!{{ call.function.arguments.x }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<go>{% endif %}{{ flavour or '' }}"
)
OFFERED = (
    '[{"type": "function", "function": {"name": "f", "description": null, "parameters": {}}}]'
    "<user>hello<go>"
)
PARTS = (
    "{% for m in messages %}{% for p in m['content'] %}[{{ p.text or p }}]{% endfor %}{% endfor %}"
)


def prompt(path: str, tokenizer: Tokenizer, **body: Any) -> str | None:
    """Return the text that a body encodes, or None if it cannot be encoded."""
    found = encode_forwarded(path, json.dumps(body).encode(), tokenizer)
    return found and tokenizer.decode(found.token_ids, skip_special_tokens=False)


@pytest.fixture
def plain(tmp_path: Path) -> Tokenizer:
    return Tokenizer(with_text(tmp_path / "model", TEMPLATE))


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"messages": [USER]}, "<user>hello<go>"),
        ({"messages": [USER], "add_generation_prompt": False}, "<user>hello"),
        ({"messages": [USER], "chat_template_kwargs": {"flavour": "x"}}, "<user>hello<go>x"),
        (
            {
                "messages": [USER, {"role": "assistant", "content": "he"}],
                "continue_final_message": True,
            },
            "<user>hello<assistant>he",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, "b"]}]},
            "<user>a\nb<go>",
        ),
        (
            {
                "messages": [
                    USER,
                    {
                        "role": "assistant",
                        "tool_calls": [{"id": "1", "function": {"arguments": '{"x": 5}'}}],
                    },
                    {"role": "tool", "content": [{"type": "text", "text": "t"}]},
                ]
            },
            "<user>hello<assistant>!5<tool>t<go>",
        ),
        (
            {
                "messages": [USER],
                "tools": [{"function": {"strict": None, "parameters": {}, "name": "f"}}],
            },
            OFFERED,
        ),
    ],
    ids=["chat", "message", "variables", "continued", "parts", "tools", "offered tools"],
)
def test_chat_is_encoded_as_the_server_does(
    plain: Tokenizer, body: dict[str, Any], expected: str
) -> None:
    """The tokens of a chat are those that vLLM renders with the same template."""
    assert prompt(CHAT, plain, **body) == expected


def test_template_that_loops_over_parts_gets_parts(tmp_path: Path) -> None:
    """A template that renders the parts of a content gets them, as vLLM decides by its source."""
    tokenizer = Tokenizer(with_text(tmp_path / "model", PARTS))
    content = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert prompt(CHAT, tokenizer, messages=[{"role": "user", "content": content}]) == "[a][b]"


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        {"messages": [{"role": "developer", "content": "x"}]},
        {"messages": [USER], "chat_template": "x"},
        {"messages": [USER], "reasoning_effort": "high"},
        {"messages": [USER], "documents": [{}]},
        {"messages": [{"role": "user", "content": 3}]},
        {"messages": [3]},
        {"messages": [{"role": "assistant", "tool_calls": [3]}]},
        {"messages": [USER], "tools": [{"function": 3}]},
        {},
    ],
)
def test_chat_that_only_the_server_can_render_is_unknown(
    plain: Tokenizer, body: dict[str, Any]
) -> None:
    """The gateway does not guess the tokens of images, other templates and malformed messages."""
    assert prompt(CHAT, plain, **body) is None


def test_completion_is_encoded_or_has_its_tokens(plain: Tokenizer) -> None:
    """A text is encoded, tokens are used as they are, and several prompts are unknown."""
    assert prompt(COMPLETION, plain, prompt="def f") == "def f"
    found = encode_forwarded(COMPLETION, b'{"prompt": [1, 2], "cache_salt": "s"}', plain)
    assert found is not None
    assert (found.token_ids, found.salt, found.tokenizer) == ([1, 2], "s", plain)
    assert prompt(COMPLETION, plain, prompt=["a", "b"]) is None
    assert encode_forwarded(COMPLETION, b"[", plain) is None
    assert encode_forwarded("/v1/embeddings", b'{"input": "x"}', plain) is None


def test_session_is_the_header_or_the_key_or_the_conversation() -> None:
    """A header precedes a cache key, and both precede the beginning of a conversation."""
    path, body = "/v1/messages", b'{"messages": [{"role": "user", "content": "hi"}]}'
    ids = [
        session_id(path, body, "tenant", "a", "b"),
        session_id(path, body, "tenant", "", "b"),
        session_id(path, body, "tenant", "", ""),
        session_id(path, body, "other", "a", ""),
        session_id(path, body, "tenant", "b", ""),
    ]
    assert len(set(ids)) == len(ids)
    assert ids[0] == session_id(CHAT, b"", "tenant", "a", "")
    assert {len(one) for one in ids} == {32}
    assert session_id(CHAT, body, "tenant", "", "") == ""
    assert session_id(path, b"{", "tenant", "", "") == session_id(path, b"{}", "", "", "") == ""


def test_conversation_keeps_its_session_as_it_grows() -> None:
    """Later turns, and marks of cached parts, do not change the session of a conversation."""

    def of(system: Any, *contents: Any) -> str:
        messages = [{"role": "user", "content": content} for content in contents]
        body = json.dumps({"system": system, "messages": messages}).encode()
        return session_id("/v1/messages", body, "", "", "")

    marked = [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]
    first = of("be brief", marked)
    assert first == of("be brief", "hi", "more") == of([{"text": "be brief"}], "hi")
    assert len({first, of("be long", "hi"), of("be brief", "ho"), of(None, "hi")}) == 4
