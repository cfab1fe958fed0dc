"""Tests of validation: any bytes give a parsed request or a client error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftgate.backends.checkpoints import SHIPPED_MODEL
from draftgate.backends.errors import RequestRejected
from draftgate.backends.tokenizer import Tokenizer
from draftgate.gateway.config.schema import MAX_REQUEST_TOKENS
from draftgate.gateway.dispatch.job import Job
from draftgate.gateway.errors import InvalidRequest
from draftgate.gateway.http.requests.headers import Sender
from draftgate.gateway.http.requests.limits import LEAST_TOKENS
from draftgate.gateway.http.requests.responses import ResponsesBody, parse_responses
from draftgate.gateway.http.requests.sampling import GENERATED_SEED_BITS
from draftgate.gateway.http.requests.schemas import ChatBody, CompletionBody
from draftgate.gateway.http.requests.validation import (
    ServedModel,
    parse_chat,
    parse_completion,
)
from tests.examples import examples
from tests.gateway.tool_models import with_template

SERVED = ServedModel("m", Tokenizer(SHIPPED_MODEL), 8192)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner),
    max_leaves=8,
)
VALUES = (
    st.sampled_from(
        [[1, 2], ["a", [1]], "a", 1, 0, 0.5, True, None, "off", {"mode": "auto"}, {"mode": "off"},
         {"include_usage": True}, {"5": 1.5, "3": -100}, {"5": 101}, {"-5": 1}, -1.5, 2, 3,
         [{"role": "user", "content": "a"}],
         [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
         [{"type": "function", "function": {"name": "f"}}], "required",
         {"format": {"type": "text"}},
         [{"type": "function", "name": "f", "parameters": {}}],
         {"type": "function", "function": {"name": "f"}}, {"type": "function", "name": "f"},
         {"type": "allowed_tools", "tools": [{"type": "function", "name": "f"}]}, "auto",
         {"effort": "high", "summary": "auto"}, {"verbosity": "low"},
         ["message.output_text.logprobs"],
         [{"type": "reasoning", "content": [{"type": "reasoning_text", "text": "a"}]},
          {"role": "user", "content": "a"}],
         [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
          {"type": "function_call_output", "call_id": "c", "output": "o"}]]
    )
    | JSON
)  # fmt: skip


def bodies(schema: type) -> st.SearchStrategy[dict[str, object]]:
    """Return objects whose keys are fields of the schema, with plausible and invalid values."""
    fields = [name for name in schema.__struct_fields__ if name != "model"]
    return st.dictionaries(st.sampled_from(fields), VALUES, max_size=6)


SENDER = Sender("id")

PARSERS = [
    (parse_chat, ChatBody),
    (parse_completion, CompletionBody),
    (parse_responses, ResponsesBody),
]


@pytest.fixture(scope="module", params=["without tools", "with tools"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    """The shipped model, with and without a template that supports tools."""
    template = "chatml" if request.param == "without tools" else "qwen2_5"
    model = with_template(tmp_path_factory.mktemp("models") / template, template)
    return ServedModel("m", Tokenizer(model), 8192)


@pytest.mark.parametrize(("parse", "schema"), PARSERS)
def test_any_json_object_is_parsed_or_a_client_error(parse, schema, served: ServedModel) -> None:
    """The parser accepts any JSON object or raises a client error."""

    @given(bodies(schema))
    @settings(max_examples=examples(300))
    def check(body: dict[str, object]) -> None:
        try:
            call = parse(json.dumps(body).encode(), served, SENDER)
        except (InvalidRequest, RequestRejected):
            return
        job = call.job
        assert job.prompts
        assert all(prompt and all(type(t) is int for t in prompt) for prompt in job.prompts)
        assert 1 <= job.n * len(job.prompts) <= MAX_REQUEST_TOKENS // LEAST_TOKENS
        assert 0 <= job.sampling.seed < 1 << 64
        assert job.sampling.temperature >= 0
        assert 0 < job.sampling.top_p <= 1
        assert list(job.sampling.logit_bias) == sorted(dict(job.sampling.logit_bias).items())
        assert all(0 <= i < 4096 and abs(b) <= 100 for i, b in job.sampling.logit_bias)
        assert 0 < job.sampling.repetition_penalty < 1000
        assert abs(job.sampling.frequency_penalty) <= 2
        assert abs(job.sampling.presence_penalty) <= 2
        assert job.sampling.min_tokens >= 0
        assert job.max_tokens is None or job.max_tokens >= 0

    check()


@given(st.binary(max_size=60))
def test_any_bytes_are_parsed_or_a_client_error(body: bytes) -> None:
    """The parser raises only client errors for random bytes."""
    for parse, _ in PARSERS:
        with pytest.raises(InvalidRequest):
            parse(body, SERVED, SENDER)


def test_generated_seeds_differ_and_fit_a_double() -> None:
    """Generated seeds differ and fit into a double, which JavaScript needs."""
    body = b'{"prompt": "a"}'
    seeds = {parse_completion(body, SERVED, SENDER).job.sampling.seed for _ in range(50)}
    assert len(seeds) == 50
    assert max(seeds) < 1 << GENERATED_SEED_BITS


def test_empty_prompt_becomes_the_beginning_token() -> None:
    """The parser turns an empty prompt into the beginning-of-text token."""
    (prompt,) = parse_completion(b'{"prompt": ""}', SERVED, SENDER).job.prompts
    assert prompt.tolist() == [SERVED.tokenizer.special_id("bos_token")]


def test_developer_role_becomes_system() -> None:
    """The parser treats the role `developer` as `system`."""
    calls = [
        parse_chat(
            json.dumps({"messages": [{"role": role, "content": "be brief"}]}).encode(),
            SERVED,
            SENDER,
        )
        for role in ("developer", "system")
    ]
    assert calls[0].job.prompts == calls[1].job.prompts


def test_max_completion_tokens_overrides_max_tokens() -> None:
    """The newer field `max_completion_tokens` overrides `max_tokens`."""
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 5}
    body["max_completion_tokens"] = 7
    assert parse_chat(json.dumps(body).encode(), SERVED, SENDER).job.max_tokens == 7


def completion(**fields: object) -> Job:
    """Return the job of a completion with these fields."""
    return parse_completion(json.dumps({"prompt": "a", **fields}).encode(), SERVED, SENDER).job


def test_seed_of_minus_one_is_random() -> None:
    """A seed of -1 requests a random seed, and 0 is a seed."""
    seeds = {completion(seed=-1).sampling.seed for _ in range(50)}
    assert len(seeds) == 50
    assert 0 <= min(seeds) <= max(seeds) < 1 << GENERATED_SEED_BITS
    assert completion(seed=0).sampling.seed == 0


@pytest.mark.parametrize("top_p", [0, 0.0])
def test_top_p_of_zero_is_greedy(top_p: float) -> None:
    """A `top_p` of 0 samples greedily at any temperature."""
    sampling = completion(top_p=top_p, temperature=1.5).sampling
    assert (sampling.temperature, sampling.top_p) == (0.0, 1.0)


@pytest.mark.parametrize(("stop", "kept"), [("", ()), ([""], ()), (["a", "", "b"], ("a", "b"))])
def test_empty_stop_texts_are_ignored(stop: object, kept: tuple[str, ...]) -> None:
    """Only stop texts with characters end a choice."""
    assert completion(stop=stop).sampling.stop == kept


@given(st.text(), st.integers(1, 8000))
def test_whole_numbers_may_have_a_fraction(text: str, most: int) -> None:
    """A number such as 7.0 is an integer as in JSON Schema, unless it is part of a string."""
    prompt = f'{text}"\\7.0, {most}.0'
    body = json.dumps({"stop": prompt[-1000:], "prompt": "a", "max_tokens": float(most)})
    job = parse_completion(body.encode(), SERVED, SENDER).job
    assert (job.max_tokens, job.sampling.stop) == (most, (prompt[-1000:],))


@pytest.mark.parametrize("number", ["7e1", "70.00", "7.0E+1", "700e-1"])
def test_whole_number_is_read_in_every_notation(number: str) -> None:
    """A whole number with an exponent is an integer."""
    body = b'{"prompt": "a", "seed": %s}' % number.encode()
    assert parse_completion(body, SERVED, SENDER).job.sampling.seed == 70


@pytest.mark.parametrize("number", ["0.5", "1e-1", "1e400", '"7.0"'])
def test_other_numbers_are_not_integers(number: str) -> None:
    """The error of a number with a fraction names the field."""
    body = b'{"prompt": "a", "seed": %s}' % number.encode()
    with pytest.raises(InvalidRequest) as raised:
        parse_completion(body, SERVED, SENDER)
    assert raised.value.param == "seed"


@pytest.mark.parametrize(
    ("field", "value", "known"),
    [
        ("speculation", {"mode": "fast"}, "auto, off, ngram"),
        ("response_format", {"type": "xml"}, "json_schema"),
    ],
)
def test_invalid_value_of_a_list_is_refused_with_the_allowed_ones(
    field: str, value: object, known: str
) -> None:
    """The error of a value that is none of a fixed list names the values of the list."""
    with pytest.raises((InvalidRequest, RequestRejected)) as raised:
        completion(**{field: value})
    assert known in str(raised.value)


def test_bias_outside_the_vocabulary_is_named() -> None:
    """The error of a `logit_bias` outside the vocabulary names the range of token ids."""
    with pytest.raises(InvalidRequest, match="4095, the vocabulary of m, not 4096") as raised:
        completion(logit_bias={"4096": 1})
    assert raised.value.param == "logit_bias"


def test_add_special_tokens_is_honoured() -> None:
    """Texts of completions begin with the tokens that the tokenizer adds, and templates with none,
    unless the request says otherwise."""
    tokenizer = RecordingTokenizer(SHIPPED_MODEL)
    served = ServedModel("m", tokenizer, 8192)
    chat = {"messages": [{"role": "user", "content": "a"}]}
    for wanted, in_text, in_chat in [
        (None, True, False),
        (True, True, True),
        (False, False, False),
    ]:
        tokenizer.added.clear()
        fields = {"add_special_tokens": wanted}
        parse_completion(json.dumps({"prompt": ["a", "b"], **fields}).encode(), served, SENDER)
        parse_chat(json.dumps(chat | fields).encode(), served, SENDER)
        assert tokenizer.added == [in_text, in_text, in_chat]


class RecordingTokenizer(Tokenizer):
    """A tokenizer that records for which texts it adds special tokens."""

    def __init__(self, directory: Path) -> None:
        self.added: list[bool] = []
        super().__init__(directory)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        self.added.append(add_special_tokens)
        return super().encode(text, add_special_tokens=add_special_tokens)


def test_prediction_is_tokenised_and_bounded() -> None:
    """The prediction of a chat becomes tokens without special tokens, up to the context length."""
    body = {"messages": [{"role": "user", "content": "a"}]}
    parts = [{"type": "text", "text": "def f"}, {"type": "text", "text": "():\n"}]
    expected = tuple(SERVED.tokenizer.encode("def f():\n", add_special_tokens=False))
    for content in ("def f():\n", parts):
        body["prediction"] = {"type": "content", "content": content}
        job = parse_chat(json.dumps(body).encode(), SERVED, SENDER).job
        assert job.prediction_ids == expected
    short = ServedModel("m", SERVED.tokenizer, 2)
    assert parse_chat(json.dumps(body).encode(), short, SENDER).job.prediction_ids == expected[:2]
