"""Tests that all endpoints that generate text accept the same fields with the same effect."""

from __future__ import annotations

import json
from typing import Any

import pytest

from draftgate.backends.checkpoints import SHIPPED_MODEL
from draftgate.backends.tokenizer import Tokenizer
from draftgate.backends.types import GrammarKind
from draftgate.gateway.dispatch.job import Job
from draftgate.gateway.errors import InvalidRequest
from draftgate.gateway.http.requests.anthropic import parse_messages
from draftgate.gateway.http.requests.headers import Sender
from draftgate.gateway.http.requests.responses import parse_responses
from draftgate.gateway.http.requests.validation import parse_chat, parse_completion
from draftgate.gateway.served_model import ServedModel

SERVED = ServedModel("m", Tokenizer(SHIPPED_MODEL), 8192)
MESSAGES = [{"role": "user", "content": "one two three four"}]
ENDPOINTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "chats": (parse_chat, {"messages": MESSAGES}),
    "completions": (parse_completion, {"prompt": "one two three four"}),
    "responses": (parse_responses, {"input": MESSAGES}),
    "messages": (parse_messages, {"messages": MESSAGES, "max_tokens": 9}),
}


def job_of(endpoint: str, **fields: Any) -> Job:
    """Return the job of a request with these fields."""
    parse, body = ENDPOINTS[endpoint]
    if not {"n_predict", "max_new_tokens"}.isdisjoint(fields):
        body = {name: value for name, value in body.items() if name != "max_tokens"}
    job: Job = parse(json.dumps({**body, **fields}).encode(), SERVED, Sender("id")).job
    return job


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_sampling_fields_have_the_same_effect_on_every_endpoint(endpoint: str) -> None:
    """Sampling fields and their aliases reach the worker from every endpoint."""
    sampling = job_of(
        endpoint,
        stop=["x", "y"],
        stop_token_ids=[5],
        bad_words=["return"],
        logit_bias={"7": 2},
        repeat_penalty=1.5,
        frequency_penalty=0.5,
        presence_penalty=-0.5,
        min_length=3,
        ignore_eos=True,
        skip_special_tokens=False,
        min_p=0.1,
        top_k=4,
        seed=-5,
    ).sampling
    assert sampling.stop == ("x", "y")
    assert sampling.stop_token_ids == (5,)
    assert sampling.bad_words
    assert sampling.logit_bias == ((7, 2.0),)
    assert (sampling.repetition_penalty, sampling.frequency_penalty) == (1.5, 0.5)
    assert (sampling.presence_penalty, sampling.min_tokens) == (-0.5, 3)
    assert sampling.ignore_eos
    assert not sampling.skip_special_tokens
    assert (sampling.min_p, sampling.top_k, sampling.seed) == (0.1, 4, (1 << 64) - 5)


@pytest.mark.parametrize("endpoint", ENDPOINTS)
@pytest.mark.parametrize(
    ("fields", "kind", "param"),
    [
        ({"structured_outputs": {"regex": "a+"}}, GrammarKind.REGEX, "structured_outputs.regex"),
        ({"guided_regex": "a+"}, GrammarKind.REGEX, "guided_regex"),
        ({"guided_choice": ["a"]}, GrammarKind.CHOICE, "guided_choice"),
        ({"regex": "a+"}, GrammarKind.REGEX, "regex"),
        ({"grammar": 'root ::= "a"'}, GrammarKind.GRAMMAR, "grammar"),
        ({"ebnf": 'root ::= "a"'}, GrammarKind.GRAMMAR, "ebnf"),
        ({"json_schema": {"type": "null"}}, GrammarKind.JSON_SCHEMA, "json_schema"),
        ({"json_schema": '{"type": "null"}'}, GrammarKind.JSON_SCHEMA, "json_schema"),
        (
            {"response_format": {"type": "json_object", "schema": {"type": "null"}}},
            GrammarKind.JSON_SCHEMA,
            "response_format.schema",
        ),
        (
            {"response_format": {"type": "json_schema", "schema": {"type": "null"}}},
            GrammarKind.JSON_SCHEMA,
            "response_format.schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
            GrammarKind.JSON_SCHEMA,
            "response_format",
        ),
    ],
)
def test_every_name_of_a_form_sets_the_grammar(
    endpoint: str, fields: dict[str, Any], kind: GrammarKind, param: str
) -> None:
    """The formats of OpenAI, vLLM, SGLang and llama.cpp constrain the output of every endpoint."""
    grammar = job_of(endpoint, **fields).grammar
    assert grammar is not None
    assert grammar.kind is kind
    assert grammar.param == param
    if "null" in json.dumps(fields):
        assert json.loads(grammar.text) == {"type": "null"}
    with pytest.raises(InvalidRequest, match="cannot be combined"):
        job_of(endpoint, **fields, guided_grammar='root ::= "b"')


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_prompt_is_truncated_on_either_side(endpoint: str) -> None:
    """`truncate_prompt_tokens` keeps the end of a prompt, or its beginning."""
    (whole,) = job_of(endpoint).prompts
    (end,) = job_of(endpoint, truncate_prompt_tokens=3).prompts
    (begin,) = job_of(endpoint, truncate_prompt_tokens=3, truncation_side="right").prompts
    assert end.tolist() == whole.tolist()[-3:]
    assert begin.tolist() == whole.tolist()[:3]


@pytest.mark.parametrize("endpoint", ENDPOINTS)
@pytest.mark.parametrize("alias", ["n_predict", "max_new_tokens"])
def test_alias_sets_the_output_limit(endpoint: str, alias: str) -> None:
    """Other names of `max_tokens` limit the output of every endpoint."""
    assert job_of(endpoint, **{alias: 6}).max_tokens == 6
    with pytest.raises(InvalidRequest) as raised:
        job_of(endpoint, **{alias: -7})
    assert raised.value.param == alias


@pytest.mark.parametrize("endpoint", ENDPOINTS)
@pytest.mark.parametrize(
    "field",
    ["thinking_token_budget", "logprob_token_ids", "stop_regex", "mirostat", "use_beam_search"],
)
def test_field_that_changes_the_output_is_refused(endpoint: str, field: str) -> None:
    """A field without support is an error on every endpoint, which names the field."""
    with pytest.raises(InvalidRequest) as raised:
        job_of(endpoint, **{field: 1})
    assert raised.value.param == field
    job_of(endpoint, **{field: None})


@pytest.mark.parametrize("endpoint", ["responses", "messages"])
def test_several_choices_are_refused_where_a_response_has_one(endpoint: str) -> None:
    """`n` may be 1 in `/v1/responses` and `/v1/messages`, which return one output."""
    assert job_of(endpoint, n=1).n == 1
    with pytest.raises(InvalidRequest, match="one output") as raised:
        job_of(endpoint, n=2)
    assert raised.value.param == "n"


def test_nested_field_is_named_by_its_path() -> None:
    """A refused field of a nested object is named with the indexes of its place."""
    message = {"role": "assistant", "content": "a", "function_call": {"name": "f"}}
    with pytest.raises(InvalidRequest) as raised:
        job_of("chats", messages=[*MESSAGES, message, *MESSAGES])
    assert raised.value.param == "messages[1].function_call"
    with pytest.raises(InvalidRequest) as raised:
        job_of("messages", structured_outputs={"regex": "a", "structural_tag": "x"})
    assert raised.value.param == "structured_outputs.structural_tag"


def test_body_that_ends_early_is_invalid_json() -> None:
    """An unknown field does not hide that the rest of the body is not JSON."""
    with pytest.raises(InvalidRequest, match="not valid JSON"):
        parse_completion(b'{"unknown": 1, "prompt": "a"', SERVED, Sender("id"))
