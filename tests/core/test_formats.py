"""A worker and the formats its requests are held to."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from draftgate.backends.core.worker import WorkerCore
from draftgate.backends.errors import RequestRejected
from draftgate.backends.grammar import LlGrammars
from draftgate.backends.types import (
    FinishReason,
    GenerationRequest,
    GrammarKind,
    GrammarSpec,
    ResumedChoice,
)
from tests.core.fakes import request, scripted
from tests.core.test_worker import EOS, Bench, encode, text_of, tokenizer, tokens_of

SPEC = GrammarSpec(
    GrammarKind.JSON_SCHEMA,
    json.dumps({"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}}),
)
TEXT = "[1, 23, 4]"


def bench_for(*tokens: int, grammars: bool = True) -> Bench:
    """A worker whose device says these tokens, whatever masks would say."""
    bench = Bench(scripted(*tokens))
    known = LlGrammars(tokenizer(), {EOS}) if grammars else None
    bench.worker = WorkerCore(bench.worker._scheduler, tokenizer(), 200, known)
    return bench


def formatted(spec: GrammarSpec = SPEC, **settings: object) -> GenerationRequest:
    return replace(request(**settings), grammar=spec)


@pytest.mark.parametrize("drafts", [0, 4])
def test_a_format_ends_with_the_end_token_even_if_that_is_to_be_ignored(drafts: int) -> None:
    """What is whole is over: an end-of-sequence token ends it under `ignore_eos`, too."""
    ids = [*encode(TEXT), EOS, *encode(" more")]
    deltas = bench_for(*ids).run_one(formatted(max_tokens=len(ids), ignore_eos=True, drafts=drafts))
    assert text_of(deltas) == TEXT
    assert tokens_of(deltas) == ids[: ids.index(EOS) + 1]
    assert deltas[-1].finish_reason is FinishReason.STOP


def test_an_end_where_nothing_is_whole_is_called_a_cut() -> None:
    """An end that the grammar's limits brought about is no `stop`: the text is a beginning."""
    ids = [*encode("[1, 2"), EOS]
    deltas = bench_for(*ids).run_one(formatted(max_tokens=20))
    assert text_of(deltas) == "[1, 2"
    assert deltas[-1].finish_reason is FinishReason.LENGTH


def test_choices_have_grammars_of_their_own() -> None:
    """Each of n choices goes its own way through the format."""
    tokens = {0: [*encode("[1]"), EOS], 1: [*encode("[23, 4]"), EOS]}
    bench = bench_for()
    bench._executor._true_token = lambda s, position: tokens[s.choice][position - s.prompt_tokens]
    one = formatted(max_tokens=20, n=2)
    got = bench.run(one)
    assert [text_of(got[one.request_id, choice]) for choice in (0, 1)] == ["[1]", "[23, 4]"]
    assert {d[-1].finish_reason for d in got.values()} == {FinishReason.STOP}


def test_a_resumed_choice_must_have_kept_to_its_format() -> None:
    """Tokens that the format does not allow are refused; those it allows go on where they were."""
    ids = encode(TEXT)
    for done in range(len(ids)):
        begun = (ResumedChoice(0, tuple(ids[:done])),)
        one = replace(formatted(max_tokens=len(ids) + 1), resumed=begun)
        deltas = bench_for(*ids, EOS).run_one(one)
        assert tokens_of(deltas) == [*ids[done:], EOS]
        assert deltas[-1].finish_reason is FinishReason.STOP
    wrong = (ResumedChoice(0, tuple(encode("[1, x"))),)
    with pytest.raises(RequestRejected, match=r"choice 0 .* does not allow") as refused:
        bench_for().worker.admission.check(replace(formatted(max_tokens=20), resumed=wrong))
    assert refused.value.param == "response_format"


def test_a_worker_without_logits_refuses_formats() -> None:
    """Nobody is told that a text is held to a format when it is not."""
    bench = bench_for(grammars=False)
    with pytest.raises(RequestRejected, match="does not support structured output") as refused:
        bench.worker.admission.check(formatted())
    assert refused.value.param == "response_format"
    bench.worker.admission.check(request())


def test_a_bad_format_is_refused_before_it_runs() -> None:
    """`check` compiles, so that nothing can go wrong in the middle of a stream."""
    with pytest.raises(RequestRejected, match="frog"):
        bench_for().worker.admission.check(
            formatted(GrammarSpec(GrammarKind.JSON_SCHEMA, '{"type":"frog"}'))
        )
