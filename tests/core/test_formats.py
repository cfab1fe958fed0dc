"""Structured output: a worker with the grammars of its requests."""

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
from tests.core.test_worker import EOS, WorkerHarness, encode, text_of, tokenizer, tokens_of

SPEC = GrammarSpec(
    GrammarKind.JSON_SCHEMA,
    json.dumps({"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}}),
)
TEXT = "[1, 23, 4]"


def worker_for(*tokens: int, grammars: bool = True) -> WorkerHarness:
    """Build a worker whose device emits these tokens regardless of the masks."""
    harness = WorkerHarness(scripted(*tokens))
    known = LlGrammars(tokenizer(), {EOS}) if grammars else None
    harness.worker = WorkerCore(harness.worker._scheduler, tokenizer(), 200, known)
    return harness


def formatted(spec: GrammarSpec = SPEC, **settings: object) -> GenerationRequest:
    return replace(request(**settings), grammar=spec)


@pytest.mark.parametrize("drafts", [0, 4])
def test_end_token_ends_structured_output_despite_ignore_eos(drafts: int) -> None:
    """Complete output ends at an end-of-sequence token, also with `ignore_eos`."""
    ids = [*encode(TEXT), EOS, *encode(" more")]
    deltas = worker_for(*ids).run_one(
        formatted(max_tokens=len(ids), ignore_eos=True, drafts=drafts)
    )
    assert text_of(deltas) == TEXT
    assert tokens_of(deltas) == ids[: ids.index(EOS) + 1]
    assert deltas[-1].finish_reason is FinishReason.STOP


@pytest.mark.parametrize("stop_token_ids", [(), (EOS,)])
def test_output_that_its_grammar_cuts_is_aborted(stop_token_ids: tuple[int, ...]) -> None:
    """An end before the output is complete is no `stop` and no `length`."""
    ids = [*encode("[1, 2"), EOS]
    generation = formatted(max_tokens=20, stop_token_ids=stop_token_ids)
    deltas = worker_for(*ids).run_one(generation)
    assert text_of(deltas) == "[1, 2"
    assert deltas[-1].finish_reason is FinishReason.ABORT


def test_output_at_its_length_ends_with_length() -> None:
    """The finish reason is `length` if `max_tokens` ends an incomplete output."""
    ids = [*encode("[1, 2"), EOS]
    deltas = worker_for(*ids).run_one(formatted(max_tokens=len(ids) - 1))
    assert deltas[-1].finish_reason is FinishReason.LENGTH


def test_choices_have_grammars_of_their_own() -> None:
    """Each of n choices has its own grammar state."""
    tokens = {0: [*encode("[1]"), EOS], 1: [*encode("[23, 4]"), EOS]}
    harness = worker_for()
    harness._executor._true_token = lambda s, position: tokens[s.choice][position - s.prompt_tokens]
    generation = formatted(max_tokens=20, n=2)
    deltas_of = harness.run(generation)
    assert [text_of(deltas_of[generation.request_id, choice]) for choice in (0, 1)] == [
        "[1]",
        "[23, 4]",
    ]
    assert {d[-1].finish_reason for d in deltas_of.values()} == {FinishReason.STOP}


def test_resumed_tokens_must_match_the_format() -> None:
    """Resumed tokens that the format forbids are rejected, and allowed tokens continue the
    output."""
    ids = encode(TEXT)
    for done in range(len(ids)):
        begun = (ResumedChoice(0, tuple(ids[:done])),)
        generation = replace(formatted(max_tokens=len(ids) + 1), resumed=begun)
        deltas = worker_for(*ids, EOS).run_one(generation)
        assert tokens_of(deltas) == [*ids[done:], EOS]
        assert deltas[-1].finish_reason is FinishReason.STOP
    wrong = (ResumedChoice(0, tuple(encode("[1, x"))),)
    with pytest.raises(RequestRejected, match=r"choice 0 .* does not allow") as refused:
        worker_for().worker.admission.check(replace(formatted(max_tokens=20), resumed=wrong))
    assert refused.value.param == "response_format"


def test_structured_output_is_rejected_without_logits() -> None:
    """A worker that cannot enforce a format rejects the request."""
    harness = worker_for(grammars=False)
    with pytest.raises(RequestRejected, match="does not support structured output") as refused:
        harness.worker.admission.check(formatted())
    assert refused.value.param == "response_format"
    harness.worker.admission.check(request())


def test_invalid_format_is_rejected_by_check() -> None:
    """`check` compiles the grammar, so an invalid grammar cannot fail during a stream."""
    with pytest.raises(RequestRejected, match="frog"):
        worker_for().worker.admission.check(
            formatted(GrammarSpec(GrammarKind.JSON_SCHEMA, '{"type":"frog"}'))
        )
