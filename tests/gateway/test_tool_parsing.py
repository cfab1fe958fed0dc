"""Tests of function calls in generated text, for any division of the text."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from draftgate.gateway.http.requests.tools import calls_grammar
from draftgate.gateway.tools.dialects import (
    DESCRIBED,
    HERMES,
    LLAMA,
    MISTRAL,
    Dialect,
    dialect_of,
)
from draftgate.gateway.tools.parsing import CallParser, Piece

TEMPLATES = Path(__file__).parents[1] / "tokenizer" / "templates"
NAMES = frozenset({"get", "get_weather", "now"})
DIALECTS = (HERMES, MISTRAL, LLAMA, DESCRIBED)

EXPECTED = {
    "chatml": None,
    "deepseek_r1_distill": None,
    "llama3": None,
    "llama3_1": LLAMA,
    "llama3_2": LLAMA,
    "mistral_v1": None,
    "mistral_v2v3": MISTRAL,
    "mistral_v3_tekken": MISTRAL,
    "qwen2_5": HERMES,
    "qwen3": HERMES,
    "qwen3_instruct_2507": HERMES,
    "qwen3_training": HERMES,
}


def parse(
    dialect: Dialect, parts: Iterable[str], *, several: bool = True
) -> tuple[str, list[tuple[str, str]], list[Piece]]:
    """Return the content, the calls as (name, arguments) and all pieces."""
    parser = CallParser(dialect, NAMES, several=several)
    pieces = [piece for part in parts for piece in parser.add(part)] + parser.finish()
    calls: list[tuple[str, str]] = []
    for piece in pieces:
        if piece.name:
            calls.append((piece.name, ""))
        if piece.arguments:
            calls[-1] = (calls[-1][0], calls[-1][1] + piece.arguments)
    return "".join(piece.content for piece in pieces), calls, pieces


def test_published_templates_have_the_expected_dialects() -> None:
    """The detection assigns the expected dialect, or None, to each published template."""
    found = {p.stem: dialect_of(p.read_text(encoding="utf-8")) for p in TEMPLATES.glob("*.jinja")}
    assert found == EXPECTED


@pytest.mark.parametrize(
    "template",
    [
        None,
        "{{ messages }}",
        "{{ tools }}",
        "{{ tools }}<tool_call>\n<function=example>",
        "{{ tools }}<tool_call>{name}<arg_key>",
        "{{ tools }}[TOOL_CALLS]name[ARGS]{}",
    ],
)
def test_template_with_an_unsupported_layout_has_no_dialect(template: str | None) -> None:
    """The detection assigns no dialect to a template with an unsupported layout."""
    assert dialect_of(template) is None


ARGS = '{"where": "Z\\"}ürich", "days": [1, {"a": 2}]}'
TEXTS = [
    (HERMES, f'<tool_call>\n{{"name": "get", "arguments": {ARGS}}}\n</tool_call>',
     "", [("get", ARGS)]),
    (HERMES, 'Sure. <tool_call>{"name":"now","arguments":{}}</tool_call>', "Sure.",
     [("now", "{}")]),
    (HERMES,
     ('<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n<tool_call>\n'
      f'{{"name": "get_weather", "arguments": {ARGS}}}\n</tool_call>\n'),
     "", [("now", "{}"), ("get_weather", ARGS)]),
    (HERMES, '<tool_call>\n{"type": "function", "name": "now", "arguments": {}}', "",
     [("now", "{}")]),
    (HERMES, '<tool_call>\n{"name": "now", "arguments": {"a', "", [("now", '{"a')]),
    (HERMES, '<tool_call>\n{"name": "now", "arguments": {}}\n</tool', "", [("now", "{}")]),
    *((HERMES, f'<tool_call>\n{{"name": "now", "arguments": {{}}}}\n</tool_call>{cut}', content,
       [("now", "{}")])
      for cut, content in [("\n<", ""), ("\n<tool_call>\n", ""), ('\n<tool_call>{"name": "g', ""),
                           (" Or <tool", " Or <tool"), ("<b", "<b")]),
    (MISTRAL, '[{"name": "get", "arguments": {}}, {"na', "", [("get", "{}")]),
    (LLAMA, '{"name": "get", "parameters": {}}; {"na', "", [("get", "{}")]),
    (HERMES, '<tool_call>\n{"name": "now", "arguments": {}}\nThen?', "\nThen?", [("now", "{}")]),
    (HERMES, '<tool_call>\n{"name": "now", "arguments": {"a": ]}} b', "]}} b",
     [("now", '{"a": ')]),
    (HERMES, '<tool_call>\n{"name": "other", "arguments": {}}\n</tool_call>',
     '<tool_call>\n{"name": "other", "arguments": {}}\n</tool_call>', []),
    (HERMES, '<tool_call>\n{"name": "now", "arguments": "x"}</tool_call>',
     '<tool_call>\n{"name": "now", "arguments": "x"}</tool_call>', []),
    (HERMES, '{"name": "now", "arguments": {}}', '{"name": "now", "arguments": {}}', []),
    (HERMES, "a < b <tool", "a < b <tool", []),
    (HERMES, " \n ", " \n ", []),
    (MISTRAL, f'[TOOL_CALLS][{{"name": "get", "arguments": {ARGS}}}]', "", [("get", ARGS)]),
    (MISTRAL, '[{"name": "get", "arguments": {}}, {"name": "now", "arguments": {"a": 1}}]', "",
     [("get", "{}"), ("now", '{"a": 1}')]),
    (MISTRAL, '[TOOL_CALLS] [{"name": "get", "arguments": {}, "id": "VvvODy9mT"}]', "",
     [("get", "{}")]),
    (MISTRAL, "[1, 2, 3]", "[1, 2, 3]", []),
    (MISTRAL, 'So [{"name": "get", "arguments": {}}]', 'So [{"name": "get", "arguments": {}}]',
     []),
    (LLAMA, f'{{"name": "get", "parameters": {ARGS}}}', "", [("get", ARGS)]),
    (LLAMA, '{"type": "function", "name": "now", "parameters": {}}', "", [("now", "{}")]),
    (LLAMA, '<|python_tag|>{"name": "get", "parameters": {}}; {"name": "now", "parameters": {}}',
     "", [("get", "{}"), ("now", "{}")]),
    (LLAMA, '{"name": "Ann", "age": 7}', '{"name": "Ann", "age": 7}', []),
    (LLAMA, 'It is {"name": "now", "parameters": {}}', 'It is {"name": "now", "parameters": {}}',
     []),
]  # fmt: skip


@pytest.mark.parametrize(("dialect", "text", "content", "calls"), TEXTS)
def test_calls_are_separated_from_content(
    dialect: Dialect, text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    """The parser separates calls of known functions from content, even letter by letter."""
    assert parse(dialect, [text])[:2] == (content, calls)
    assert parse(dialect, text)[:2] == (content, calls)


FRAGMENTS = st.lists(
    st.sampled_from(
        ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[", "]", "{", "}", '"', "\\", ", ", "; ",
         '{"name": "get", "arguments": {', '{"name":"get_weather",', '"parameters": {',
         '"arguments":{', '"id": "abc"', "\n", " " * 70, "<|python_tag|>", '"type": "function",',
         '{"name": "now", "parameters": {}}', "hello", '"x": 1', "}}", "}]"]
    )
    | st.text(max_size=3),
    max_size=12,
).map("".join)  # fmt: skip


@given(
    dialect=st.sampled_from(DIALECTS),
    text=st.one_of(FRAGMENTS, st.sampled_from([t for _, t, _, _ in TEXTS])),
    cuts=st.lists(st.integers(0, 200), max_size=8),
    several=st.booleans(),
)
@example(HERMES, " " * 200 + '<tool_call>{"name": "now", "arguments": {}}', [5, 80, 190], True)
def test_any_split_of_the_text_gives_the_same_calls(
    dialect: Dialect, text: str, cuts: list[int], several: bool
) -> None:
    """The parser finds the same calls for any split and assigns each character to one piece."""
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    parts = [text[a:b] for a, b in pairwise(bounds)]
    content, calls, pieces = parse(dialect, parts, several=several)
    assert (content, calls) == parse(dialect, [text], several=several)[:2]
    assert (content, calls) == parse(dialect, text, several=several)[:2]
    assert "".join(piece.source for piece in pieces) == text
    assert all(
        piece.source == piece.content + piece.arguments or not piece.content + piece.arguments
        for piece in pieces
    )


@given(text=st.text(alphabet=st.characters(exclude_characters="<{[ \t\r\n")))
def test_plain_text_is_passed_on_without_delay(text: str) -> None:
    """The parser holds back only text that may begin a call."""
    for dialect in DIALECTS:
        parser = CallParser(dialect, NAMES)
        assert "".join(piece.content for piece in parser.add(text)) == text


def test_second_call_is_text_without_parallel_calls() -> None:
    """The parser returns a second call as text if parallel calls are disabled."""
    call_text = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    content, calls, _ = parse(HERMES, [call_text + call_text], several=False)
    assert (content, calls) == (call_text, [("now", "{}")])


def test_held_back_white_space_is_bounded() -> None:
    """The parser holds back a bounded amount of white space."""
    parser = CallParser(HERMES, NAMES)
    content = "".join(piece.content for _ in range(500) for piece in parser.add(" "))
    assert len(content) > 400


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
@pytest.mark.parametrize("several", [False, True])
def test_forced_calls_are_parsed_as_calls(dialect: Dialect, several: bool) -> None:
    """The parser recognises the forced form of calls with and without the markers."""
    form = json.loads(calls_grammar(dialect, {"get": {"type": "object"}}, several=several).text)
    call = form["functions"][0]["head"] + '{"a": 1}' + form["functions"][0]["tail"]
    count = 3 if form["between"] is not None else 1
    text = form["opened"] + (form["between"] or "").join([call] * count) + form["closed"]
    assert parse(dialect, text)[:2] == ("", [("get", '{"a": 1}')] * count)
    if dialect is MISTRAL:  # the marker is a special token without text
        text = text.replace("[TOOL_CALLS]", "")
        assert parse(dialect, text)[:2] == ("", [("get", '{"a": 1}')] * count)


FORCED = {
    HERMES: '<tool_call>\n{"name": "get_weather", "arguments": {"a": 1}}\n</tool_call>',
    MISTRAL: '[TOOL_CALLS][{"name": "get_weather", "arguments": {"a": 1}}]',
    LLAMA: '{"name": "get_weather", "parameters": {"a": 1}}',
    DESCRIBED: '<tool_call>\n{"name": "get_weather", "arguments": {"a": 1}}\n</tool_call>',
}
"""A forced call in each dialect."""


@pytest.mark.parametrize("dialect", FORCED, ids=lambda dialect: dialect.name)
@pytest.mark.parametrize("names", [NAMES, {"get_weather"}], ids=["several", "one"])
def test_a_forced_call_that_is_cut_has_no_content(dialect: Dialect, names: set[str]) -> None:
    """However much of a forced call exists, it is a call with a part of its arguments.

    Without the name of the function, it is one if only one function can be meant.
    """
    whole = FORCED[dialect]
    for end in range(1, len(whole) + 1):
        parser = CallParser(dialect, names, forced=True)
        text = whole[:end]
        pieces = [piece for character in text for piece in parser.add(character)]
        pieces += parser.finish(cut=True)
        assert "".join(piece.source for piece in pieces) == text
        assert "".join(piece.content for piece in pieces) == ""
        found = [piece.name for piece in pieces if piece.name]
        is_clear = len(names) == 1 or "get_" in text
        assert found == (["get_weather"] if is_clear else [])
        assert '{"a": 1}'.startswith("".join(piece.arguments for piece in pieces))


@pytest.mark.parametrize("dialect", [HERMES, MISTRAL, DESCRIBED], ids=lambda dialect: dialect.name)
def test_a_call_that_max_tokens_cuts_is_no_content(dialect: Dialect) -> None:
    """With `auto`, text from the marker of calls on is no content once `max_tokens` cuts it.

    A text that ended otherwise is complete, so it is content.
    """
    whole = FORCED[dialect]
    begin, named = len(dialect.markers[0]), whole.index("get_weather") + len('get_weather"')
    for end in range(begin, len(whole)):
        parser = CallParser(dialect, NAMES)
        pieces = [*parser.add("Well: " + whole[:end]), *parser.finish(cut=True)]
        assert "".join(piece.content for piece in pieces).strip() == "Well:"
        found = [piece.name for piece in pieces if piece.name]
        assert found == (["get_weather"] if end >= named else [])
    parser = CallParser(dialect, NAMES)
    text = whole[:begin]
    assert "".join(piece.content for piece in [*parser.add(text), *parser.finish()]) == text
