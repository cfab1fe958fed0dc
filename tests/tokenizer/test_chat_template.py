"""Tests of chat templates: their locations, features and limits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftgate.backends import chat_template
from draftgate.backends.chat_template import ChatTemplate, RawJson, template_sources
from draftgate.backends.errors import CheckpointError, RequestRejected
from tests.tokenizer.oracle import REFUSED, checkpoint, load

HELLO = [{"role": "user", "content": "<Hé & 'you'>"}]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "<é>"}}]

FEATURES = {
    "json": "{{ messages | tojson }}{{ messages | tojson(indent=2, sort_keys=true) }}",
    "json for ascii": "{{ messages | tojson(ensure_ascii=true, separators=(',', ':')) }}",
    "json of nothing": "{{ nothing | tojson }}",
    "break and continue": "{% for i in range(9) %}{% if i == 2 %}{% continue %}{% endif %}"
    "{% if i == 5 %}{% break %}{% endif %}{{ i }}{% endfor %}",
    "generation": "{% set x = 1 %}{% for m in messages %}{% generation %}{% set x = 2 %}"
    "{{ loop.index }}{{ m.content }}\n{% endgeneration %}\n{{ x }}{% endfor %}",
    "clock": "{{ strftime_now('%A %d %B %Y %H:%M:%S%Z') }}",
    "refusal": "{{ raise_exception('no ' + messages[0].role) }}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = 7 %}"
    "{% endfor %}{{ ns.n }}{{ dict(a=1) }}",
    "trimmed blocks": "  {% if true %}\n  a\n  {% endif %}\n{#- note -#}\n b\n",
    "absent tools": "{{ tools is not none }}{{ tools is defined }}{{ documents is none }}",
    "generation prompt": "{{ add_generation_prompt }}",
    "undefined": "[{{ pad_token }}{{ date_string }}]{{ date_string is defined }}",
    "attribute of undefined": "{{ date_string.year }}",
    "private attribute": "{{ messages.__class__.__mro__ }}",
    "change of messages": "{{ messages.append(1) }}",
    "too long a range": "{% for i in range(1000000) %}x{% endfor %}",
    "wrong type": "{{ 1 + 'a' }}",
    "division": "{{ 1 / 0 }}",
    "macro": "{% macro say(x) %}<{{ x }}>{% endmacro %}{{ say(messages[0].content) }}",
    "products": "{{ '-' * 3 }}{{ 3 * '-' }}{{ 2 ** 10 }}{{ [1] * 2 }}{{ 2.0 ** 3 }}{{ 6 * 7 }}",
}


@pytest.mark.parametrize("feature", FEATURES)
def test_template_features_match_transformers(feature: str, tmp_path: Path) -> None:
    """Every template feature gives the same prompt, or an error, as in `transformers`."""
    settings = {"bos_token": "<s>", "chat_template": FEATURES[feature]}
    pair = load(checkpoint(tmp_path, settings))
    ours, theirs = pair.render_both(HELLO)
    assert ours == theirs
    ours, theirs = pair.render_both(HELLO, TOOLS)
    assert ours == theirs


FIRST, SECOND, THIRD = "one {{ tools }}", "two {{ tools }}", "three"
PLACES: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "none": ({}, {}),
    "text in the settings": ({"chat_template": FIRST}, {}),
    "list with a default": (
        {
            "chat_template": [
                {"name": "default", "template": FIRST},
                {"name": "tool_use", "template": SECOND},
                {"name": "rag", "template": THIRD},
            ]
        },
        {},
    ),
    "list without a default": ({"chat_template": [{"name": "tool_use", "template": FIRST}]}, {}),
    "file": ({}, {"chat_template": FIRST}),
    "file beside settings": ({"chat_template": SECOND}, {"chat_template": FIRST}),
    "folder": ({}, {"chat_template": FIRST, "more__tool_use": SECOND}),
    "folder beside settings": ({"chat_template": SECOND}, {"more__rag": FIRST}),
    "default in the folder": (
        {},
        {"chat_template": FIRST, "more__default": SECOND},
    ),
}


@pytest.mark.parametrize("place", PLACES)
def test_chosen_template_matches_transformers(place: str, tmp_path: Path) -> None:
    """The tokenizer chooses the same template as `transformers`, with and without tools."""
    settings, files = PLACES[place]
    pair = load(checkpoint(tmp_path, settings, **files))
    ours, theirs = pair.render_both(HELLO)
    assert ours == theirs
    ours, theirs = pair.render_both(HELLO, TOOLS)
    assert ours == theirs


ROLES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
SHOW = "".join(
    f"{role}={{{{ {role} if {role} is defined else '-' }}}};"
    for role in (*ROLES, "image_token", "boi", "additional_special_tokens", "add_bos_token")
)
ADDED = {"content": "<map>", "lstrip": False, "rstrip": False, "normalized": False}
SPECIALS: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "settings": ({"bos_token": "<s>", "pad_token": "<pad>", "unk_token": None}, None),
    "objects": ({"eos_token": {"__type": "AddedToken", **ADDED, "special": True}}, None),
    "flags": ({"bos_token": "<s>", "add_bos_token": True}, None),
    "of the model": ({"image_token": "<img>", "extra_special_tokens": {"boi": "<boi>"}}, None),
    "list": ({"additional_special_tokens": ["<a>", "<b>"]}, None),
    "map": ({"bos_token": "<s>"}, {"bos_token": "<map>", "eos_token": ADDED, "cls_token": "<c>"}),
    "map that is out of date": (
        {"bos_token": "<s>", "added_tokens_decoder": {}},
        {"bos_token": "<map>", "eos_token": "<map>"},
    ),
}


@pytest.mark.parametrize("case", SPECIALS)
def test_special_tokens_match_transformers(case: str, tmp_path: Path) -> None:
    """Each special token has the same text as in `transformers`, and a missing token is
    undefined."""
    settings, legacy = SPECIALS[case]
    directory = checkpoint(tmp_path, settings | {"chat_template": SHOW})
    if legacy is not None:
        (directory / "special_tokens_map.json").write_text(json.dumps(legacy))
    ours, theirs = load(directory).render_both(HELLO)
    assert ours == theirs != REFUSED


BOMBS = {
    "endless text": "{% for i in range(90000) %}{% for j in range(90000) %}12345678"
    "{% endfor %}{% endfor %}",
    "repeated text": "{{ 'x' * 10 ** 12 }}",
    "text repeated from the left": "{{ 10 ** 12 * 'x' }}",
    "repeated list": "{{ (messages * 10 ** 12) | length }}",
    "tower of powers": "{{ 9 ** (9 ** 9) }}",
    "long range": "{{ range(10 ** 9) | list }}",
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_huge_template_results_are_rejected(bomb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The renderer rejects output, products, powers and ranges of excessive size."""
    monkeypatch.setattr(chat_template, "MAX_PROMPT_CHARS", 1 << 16)
    template = ChatTemplate({"default": BOMBS[bomb]}, {})
    with pytest.raises(
        RequestRejected, match=r"chat template: .*(large|than \d+ characters|too big)"
    ):
        template.render(HELLO)


DAMAGE = {
    "no text": ({"chat_template": 7}, {}, "damaged .*tokenizer_config.json: chat_template must"),
    "no names": ({"chat_template": [{"template": "x"}]}, {}, "damaged .*chat_template must be"),
    "no syntax": ({}, {"chat_template": "{% if %}"}, "damaged chat template 'default'"),
    "no such filter": ({"chat_template": "{{ 1 | shout }}"}, {}, "'default': No filter named"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_template_is_an_error_on_loading(damage: str, tmp_path: Path) -> None:
    """The loader rejects a damaged template and names the template."""
    settings, files, message = DAMAGE[damage]
    directory = checkpoint(tmp_path, settings, **files)
    with pytest.raises(CheckpointError, match=message):
        ChatTemplate(template_sources(directory, settings), {})


CALLS = {
    "arguments": "{{ messages[0].arguments | tojson }}",
    "call": "{{ messages[0] | tojson }}",
    "call for ascii": "{{ messages[0] | tojson(ensure_ascii=true, indent=2) }}",
    "two calls": "{{ messages | tojson }}",
    "no filter": "{{ messages[0].arguments }}",
}
NUMBER = 31415926535897932384


@pytest.mark.parametrize("place", CALLS)
@given(raw=st.text(), name=st.text() | st.just("\\udc80") | st.just('"\\udc80"'))
def test_raw_json_is_written_unchanged(place: str, raw: str, name: str) -> None:
    """A template writes raw JSON unchanged in the place of a JSON value."""
    template = ChatTemplate({"default": CALLS[place]}, {})
    call = {"name": name, "arguments": NUMBER}
    with_number = template.render([call, call])
    prompt = template.render([{**call, "arguments": RawJson(raw)}] * 2)
    assert prompt == with_number.replace(str(NUMBER), raw)
