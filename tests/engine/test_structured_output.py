"""Structured output of the shipped model, with and without drafts."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache

import pytest

from bench.harness.prompts import held_out_prompts
from draftgate.backends.core.proposer import Proposer
from draftgate.backends.engine.proposers.ngram import NgramProposer
from draftgate.backends.types import FinishReason, GenerationRequest, ResumedChoice
from draftgate.policies.registry import speculation_policy
from draftgate.policies.speculation.baselines import Off
from draftgate.policies.types import SpeculationMode
from tests.engine.grammar_runs import (
    GrammarOutput,
    GrammarRun,
    check_output,
    regex_spec,
    run_with_grammars,
    schema_spec,
    with_grammar,
)
from tests.engine.harness import Engine, HostileProposer, Model, RandomSlots, Setup, request
from tests.engine.published_schemas import Schema, random_schemas
from tests.engine.shipped_proposers import every_proposer, mode_of

SCHEMAS = 200
MOST_TOKENS = 200
CUT_TOKENS = 9
"""The limit of every fifth output, which tests incomplete texts."""

Proposers = Callable[[Engine], dict[str, Proposer]]


def ngrams(_: Engine) -> dict[str, Proposer]:
    return {"ngram": NgramProposer()}


def no_proposers(_: Engine) -> dict[str, Proposer]:
    return {}


def hostile(engine: Engine) -> dict[str, Proposer]:
    return {"ngram": HostileProposer(engine.model.config.vocab_size, random.Random(6))}


# Policy, proposers and batching of each mode. The small pools preempt sequences.
MODES: dict[str, tuple[str, Proposers, dict[str, int]]] = {
    "forced alone": ("fixed:8", no_proposers, {"max_num_seqs": 16}),
    "ngram": ("auto", ngrams, {"max_num_seqs": 16, "max_step_tokens": 120}),
    "fixed": ("fixed:5", ngrams, {"max_num_seqs": 32, "num_blocks": 90}),
    "every proposer": ("fixed:6", every_proposer, {"max_num_seqs": 16, "num_blocks": 160}),
    "hostile": ("random", hostile, {"max_num_seqs": 16, "num_blocks": 64}),
}


def setup_of(mode: str) -> Setup:
    policy, proposers, batch = MODES[mode]
    chaos = RandomSlots(random.Random(5))
    return Setup(chaos if policy == "random" else speculation_policy(policy), proposers, **batch)


@cache
def schemas() -> list[Schema]:
    return random_schemas(SCHEMAS)


def requests(model: Model, numbers: Iterable[int], setup: Setup) -> list[GenerationRequest]:
    prompts = held_out_prompts(model.tokenizer, SCHEMAS, least=20, most=80)
    return [
        with_grammar(
            request(
                str(i),
                prompts[i],
                setup.policy,
                mode=mode_of(i) if setup.proposers is every_proposer else SpeculationMode.AUTO,
                temperature=(0.0, 0.8)[i % 2],
                seed=i,
                max_tokens=CUT_TOKENS if i % 5 == 4 else MOST_TOKENS,
            ),
            schema_spec(schemas()[i]),
        )
        for i in numbers
    ]


@cache
def undrafted(model: Model, count: int) -> dict[tuple[str, int], GrammarOutput]:
    """Run the first schemas without speculation and return the expected outputs."""
    setup = Setup(Off(), max_num_seqs=48)
    return run_with_grammars(model, requests(model, range(count), setup), setup).outputs


def check_mode(model: Model, mode: str, count: int, record) -> GrammarRun:
    numbers = range(count)
    run = run_with_grammars(model, requests(model, numbers, setup_of(mode)), setup_of(mode))
    plain = undrafted(model, count)
    different = [key for key in plain if run.outputs[key] != plain[key]]
    assert not different, f"{mode} changed {different}"
    for i in numbers:
        check_output(model, run.outputs[str(i), 0], schemas()[i])
    finished = [i for i in numbers if run.outputs[str(i), 0].reason is FinishReason.STOP]
    uncut = [i for i in numbers if i % 5 != 4]
    record(f"{mode}: share completed", len(set(finished) & set(uncut)) / len(uncut))
    record(f"{mode}: slots accepted", run.accepted)
    record(f"{mode}: slots rejected", run.drafted - run.accepted)
    # Incomplete outputs are valid too, and this model tends to write long texts.
    assert len(set(finished) & set(uncut)) >= 0.85 * len(uncut)
    # The outputs are not trivial, because hardly any schema allows an object without properties.
    assert sum(run.outputs[str(i), 0].text == "{}" for i in finished) <= 0.05 * len(finished)
    return run


def check_drafts(mode: str, run: GrammarRun) -> None:
    """Check that the mode drafted as intended."""
    assert run.accepted > 0
    if mode == "forced alone":
        assert run.drafted == run.accepted, "a forced token is certain"
    if mode == "hostile":
        assert run.drafted > run.accepted
        assert run.preemptions > 0


@pytest.mark.parametrize("mode", ["forced alone", "hostile"])
def test_outputs_of_some_schemas_are_valid_in_every_mode(
    shipped: Model, mode: str, record_testsuite_property
) -> None:
    """Outputs for 24 schemas are valid, or completable after a cut, and equal in every mode."""
    check_drafts(mode, check_mode(shipped, mode, 24, record_testsuite_property))


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
def test_outputs_of_all_schemas_are_valid_in_every_mode(
    shipped: Model, mode: str, record_testsuite_property
) -> None:
    """Outputs for 200 schemas are valid, or completable after a cut, and equal in every mode."""
    check_drafts(mode, check_mode(shipped, mode, SCHEMAS, record_testsuite_property))


PERSON: Schema = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


def person(model: Model, name: str, setup: Setup, **settings: object) -> GenerationRequest:
    prompt = held_out_prompts(model.tokenizer, 1, seed=8)[0]
    settings = {"max_tokens": 120, "temperature": 1.0, "seed": 4, **settings}
    return with_grammar(request(name, prompt, setup.policy, **settings), schema_spec(PERSON))


@pytest.mark.parametrize("mode", [pytest.param("ngram", marks=pytest.mark.long), "hostile"])
@pytest.mark.parametrize(
    "settings",
    [
        {"n": 4, "logprobs": 2},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": -0.5},
        {"logit_bias": ((0, 100.0), (5, -100.0), (70, 100.0)), "temperature": 0.0},
        {"top_k": 5, "top_p": 0.8, "min_p": 0.05},
        {"min_tokens": 60},
        {"ignore_eos": False},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_sampling_settings_keep_outputs_valid(
    shipped: Model, mode: str, settings: dict[str, object]
) -> None:
    """Outputs stay valid and equal for several choices, penalties, biases and filters."""
    off = Setup(Off(), max_num_seqs=1)
    plain = run_with_grammars(shipped, [person(shipped, "p", off, **settings)], off)
    setup = setup_of(mode)
    drafted = run_with_grammars(shipped, [person(shipped, "p", setup, **settings)], setup)
    assert drafted.outputs == plain.outputs
    assert len(plain.outputs) == settings.get("n", 1)
    for output in plain.outputs.values():
        assert output.reason is FinishReason.STOP
        check_output(shipped, output, PERSON)
        assert len(output.logprobs) == (len(output.tokens) if "logprobs" in settings else 0)


def test_stop_string_cuts_a_structured_output_at_the_same_token(shipped: Model) -> None:
    """The output ends at the first stop string with and without drafts."""
    runs = []
    for setup in (Setup(Off()), setup_of("fixed")):
        one = person(shipped, "p", setup, stop=('", "age',))
        runs.append(run_with_grammars(shipped, [one], setup).outputs["p", 0])
    assert runs[0] == runs[1]
    assert runs[0].reason is FinishReason.STOP
    assert runs[0].text.startswith('{"name": "')
    assert "age" not in runs[0].text


@pytest.mark.parametrize("mode", [pytest.param("ngram", marks=pytest.mark.long), "hostile"])
def test_resumed_choice_continues_its_structured_output(shipped: Model, mode: str) -> None:
    """A choice resumed at any token ends like the undisturbed run."""
    setup = setup_of(mode)
    one = person(shipped, "p", setup, n=2)
    finished = run_with_grammars(shipped, [one], setup).outputs
    cuts = range(1, len(finished["p", 1].tokens), 3)
    begun = [
        replace(
            one,
            request_id=str(cut),
            resumed=(ResumedChoice(1, tuple(finished["p", 1].tokens[:cut])),),
        )
        for cut in cuts
    ]
    rest = run_with_grammars(shipped, begun, setup).outputs
    for cut in cuts:
        output = rest[str(cut), 1]
        assert output.tokens == finished["p", 1].tokens[cut:]
        assert finished["p", 1].text.endswith(output.text)
        assert output.reason is FinishReason.STOP


def test_output_matches_the_whole_regular_expression(shipped: Model) -> None:
    """An output matches its whole regular expression, also in a batch with requests without a
    grammar."""
    setup = setup_of("ngram")
    prompt = held_out_prompts(shipped.tokenizer, 1, seed=9)[0]
    free = request("free", prompt, setup.policy, max_tokens=40)
    date = with_grammar(replace(free, request_id="date"), regex_spec(r"20[0-9]{2}-(0[1-9]|1[0-2])"))
    empty = with_grammar(replace(free, request_id="empty"), regex_spec(""))
    together = run_with_grammars(shipped, [free, date, empty], setup).outputs
    assert together["free", 0] == run_with_grammars(shipped, [free], setup).outputs["free", 0]
    text = together["date", 0].text
    assert text[:2] + text[4] == "20-"
    assert len(text) == len("2026-11")
    assert together["date", 0].reason is FinishReason.STOP
    assert together["empty", 0].text == ""
    assert together["empty", 0].tokens == [0]


def test_parser_limits_cut_only_their_own_request(shipped: Model) -> None:
    """A text beyond the parser limits is aborted, and all other requests continue."""
    setup = setup_of("ngram")
    endless = {"type": "array", "items": {"type": "null"}, "minItems": 100_000}
    cut = replace(person(shipped, "cut", setup), grammar=schema_spec(endless))
    run = run_with_grammars(shipped, [cut, person(shipped, "p", setup)], setup).outputs
    assert run["cut", 0].reason is FinishReason.ABORT
    assert run["cut", 0].text == "["
    assert run["p", 0].reason is FinishReason.STOP
