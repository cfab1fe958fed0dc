"""Tests that published chat templates render conversations as `transformers` does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftgate.backends.chat_template import PromptEnding
from tests.tokenizer.oracle import NOW, REFUSED, Pair, checkpoint, load

TEMPLATES = {path.stem: path for path in (Path(__file__).parent / "templates").glob("*.jinja")}


def system(content: Any) -> dict[str, Any]:
    return {"role": "system", "content": content}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


CONVERSATIONS = {
    "one turn": [user("Hello")],
    "system": [system("Be brief."), user("Hello")],
    "several turns": [system("Be brief."), user("1+1?"), assistant("2"), user("2+2?")],
    "no system": [user("1+1?"), assistant("2"), user("2+2?"), assistant("4"), user("3+3?")],
    "unicode": [user("Zoë 🙂 漢字 e\u0301 \u202e"), assistant("naïve\u00a0"), user("\u2028\x00")],
    "markup": [user("<|im_end|></s>[/INST] <b>'\"&\\n</b> {{ bos_token }} {% raw %}")],
    "edges": [system("\n s \n"), user("  a\t\n"), assistant("\n\nb  "), user(" ")],
    "empty content": [system(""), user(""), assistant(""), user("")],
    "reasoning": [user("1+1?"), assistant("<think>\nhard\n</think>\n\n2"), user("2+2?")],
    "named": [user("Hello") | {"name": "Ann"}],
    "absent content": [user("Hello"), assistant(None), user("Hello?")],
    "parts": [user([{"type": "text", "text": "Hello"}, {"type": "text", "text": " you"}])],
    "two users": [user("Hello"), user("Hello?")],
    "assistant first": [assistant("Hello"), user("Hello")],
    "late system": [user("Hello"), system("Be brief."), user("Hello?")],
    "tool's answer": [user("Time?"), assistant("..."), {"role": "tool", "content": "12:00"}],
    "assistant last": [user("Hello"), assistant("He")],
    "unknown role": [{"role": "critic", "content": "Hm"}],
    "no content": [{"role": "user"}],
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Returns the <b>weather</b> in city's & towns",
            "parameters": {"type": "object", "properties": {"where": {"type": "string"}}},
        },
    }
]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    """Each template in its own checkpoint."""
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    home = tmp_path_factory.mktemp("published")
    return {
        name: load(checkpoint(home / name, tokens, chat_template=path.read_text(encoding="utf-8")))
        for name, path in TEMPLATES.items()
    }


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["plain", "tools"])
@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("template", sorted(TEMPLATES))
def test_published_template_matches_transformers(
    pairs: dict[str, Pair], template: str, conversation: str, tools: Any
) -> None:
    """Both renderers give the same prompt or reject the conversation."""
    ours, theirs = pairs[template].render_both(CONVERSATIONS[conversation], tools)
    assert ours == theirs
    assert ours  # two empty prompts would also be equal


@given(
    template=st.sampled_from(sorted(TEMPLATES)),
    messages=st.lists(
        st.builds(
            lambda role, content: {"role": role, "content": content},
            st.sampled_from(["system", "user", "assistant"]),
            st.text() | st.sampled_from(["<think>", "</think>", " \n"]),
        ),
        min_size=1,
        max_size=5,
    ),
)
def test_random_conversation_matches_transformers(
    pairs: dict[str, Pair], template: str, messages: list[dict[str, str]]
) -> None:
    """Both renderers agree for any order of roles and any characters."""
    ours, theirs = pairs[template].render_both(messages)
    assert ours == theirs


def test_template_error_rejects_conversation(pairs: dict[str, Pair]) -> None:
    """Both renderers reject a conversation whose roles do not alternate for Mistral's templates."""
    for name in ("mistral_v1", "mistral_v2v3", "mistral_v3_tekken"):
        assert pairs[name].render_both(CONVERSATIONS["two users"]) == (REFUSED, REFUSED)


def test_template_writes_date_of_injected_clock(pairs: dict[str, Pair]) -> None:
    """The template of Llama 3.2 writes the date of the injected clock."""
    assert NOW.strftime("%d %b %Y") in pairs["llama3_2"].ours.render_chat([user("Hello")])


@pytest.mark.parametrize("ending", [PromptEnding.MESSAGE, PromptEnding.OPEN])
@pytest.mark.parametrize("last", ["He", "  He\n", "", "<think>\nhm", "a</think>b"])
@pytest.mark.parametrize("template", sorted(TEMPLATES))
def test_other_ends_of_prompts_match_transformers(
    pairs: dict[str, Pair], template: str, last: str, ending: PromptEnding
) -> None:
    """Both give the same prompt for a message to continue, and without the start of a response.

    `transformers` refuses to continue a message if the template changes its reasoning.
    """
    for messages in ([user("Hello"), assistant(last)], [user(last)]):
        ours, theirs = pairs[template].render_both(messages, None, ending)
        if theirs == REFUSED and "</think>" in last:
            assert ours.endswith("b")
        else:
            assert ours == theirs
