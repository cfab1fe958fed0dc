"""Runs of requests with a grammar, and checks of their output."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import jsonschema

from draftgate.backends.core.drafts import Draft
from draftgate.backends.core.pipeline import run_until_idle
from draftgate.backends.core.worker import WorkerCore
from draftgate.backends.grammar import LlGrammar, LlGrammars
from draftgate.backends.tokenizer import Tokenizer
from draftgate.backends.types import (
    FinishReason,
    GenerationRequest,
    GrammarKind,
    GrammarSpec,
    TokenLogprob,
)
from tests.engine.harness import MAX_MODEL_LEN, Engine, Model, Setup

_CHECK = jsonschema.Draft202012Validator


def schema_spec(schema: object) -> GrammarSpec:
    return GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(schema))


def regex_spec(pattern: str) -> GrammarSpec:
    return GrammarSpec(GrammarKind.REGEX, pattern)


def satisfies(schema: dict[str, Any], text: str) -> bool:
    """Return whether a text is valid JSON for the schema, including the formats of strings."""
    return _CHECK(schema, format_checker=_CHECK.FORMAT_CHECKER).is_valid(json.loads(text))


def tokens_in(mask: bytes) -> list[int]:
    """Return the tokens that a mask allows."""
    return [8 * i + j for i, byte in enumerate(mask) for j in range(8) if byte >> j & 1]


def next_mask(grammar: LlGrammar) -> bytes:
    return grammar.masks(Draft())[0]


def complete(grammar: LlGrammar, eos_ids: Iterable[int], rng: random.Random) -> list[int]:
    """Extend a text of the grammar with random tokens until the text may end, and return these
    tokens."""
    ends, tokens = set(eos_ids), []
    while not ends & set(allowed := tokens_in(next_mask(grammar))):
        tokens.append(rng.choice(allowed))
        grammar.accept(tokens[-1])
        assert len(tokens) < 1000
    return tokens


def sample(
    grammar: LlGrammar, tokenizer: Tokenizer, eos_ids: Iterable[int], rng: random.Random, most: int
) -> tuple[list[int], bool]:
    """Return random tokens that a grammar allows, and whether the text ended before `most` tokens.

    Ends of strings, arrays and objects are more likely than other tokens, so most texts end. Like
    a worker, the function takes the end token where a mask allows nothing else.
    """
    ends, tokens = set(eos_ids), list[int]()
    closing = set(tokenizer.encode('"}],:0', add_special_tokens=False))
    while len(tokens) < most:
        allowed = tokens_in(next_mask(grammar))
        if ends & set(allowed) and (ends >= set(allowed) or rng.random() < 0.5):
            return tokens, True
        likely = sorted(closing & set(allowed))
        choices = likely if likely and rng.random() < 0.5 else sorted(set(allowed) - ends)
        tokens.append(rng.choice(choices))
        grammar.accept(tokens[-1])
    return tokens, False


@cache
def grammars_of(model: Model) -> LlGrammars:
    return LlGrammars(model.tokenizer, model.config.eos_ids)


@dataclass
class GrammarOutput:
    """The tokens, text and finish reason of one choice."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    reason: FinishReason | None = None


@dataclass
class GrammarRun:
    """The outputs of a run by (request, choice) and its counters."""

    outputs: dict[tuple[str, int], GrammarOutput] = field(default_factory=dict)
    drafted: int = 0
    accepted: int = 0
    steps: int = 0
    preemptions: int = 0


def run_with_grammars(
    model: Model, requests: Iterable[GenerationRequest], setup: Setup
) -> GrammarRun:
    """Run all requests with grammars to completion on a new worker."""
    engine, run = Engine(model, setup), GrammarRun()
    worker = WorkerCore(engine.scheduler, model.tokenizer, MAX_MODEL_LEN, grammars_of(model))
    for request in requests:
        worker.admission.check(request)
        worker.submit(request)
    sequences = engine.scheduler.waiting
    for step in run_until_idle(worker, engine.runner):
        run.steps += 1
        for request_id, delta in step.deltas:
            output = run.outputs.setdefault((request_id, delta.choice), GrammarOutput())
            output.tokens += delta.token_ids
            output.text += delta.text
            output.logprobs += delta.logprobs
            output.reason = delta.finish_reason
            if delta.outcome is not None:
                run.drafted += delta.outcome.num_drafted_tokens
                run.accepted += delta.outcome.num_accepted_tokens
    run.preemptions = sum(sequence.preemptions for sequence in sequences)
    assert engine.blocks.num_free == engine.blocks.num_blocks
    return run


def with_grammar(request: GenerationRequest, grammar: GrammarSpec) -> GenerationRequest:
    """Return a copy of the request with a grammar."""
    return replace(request, grammar=grammar)


def check_output(model: Model, output: GrammarOutput, schema: dict[str, Any]) -> None:
    """Check that a complete output satisfies its schema, and that a cut output can be completed."""
    tokenizer: Tokenizer = model.tokenizer
    grammar = grammars_of(model).start(schema_spec(schema))
    text_tokens = [token for token in output.tokens if token not in model.config.eos_ids]
    assert grammar.legal(text_tokens) == len(text_tokens)
    if output.reason is FinishReason.STOP:
        assert output.tokens[-1] in model.config.eos_ids
        assert output.text == tokenizer.decode(text_tokens)
    else:
        assert output.reason is FinishReason.LENGTH
        assert text_tokens == output.tokens
        for token in text_tokens:
            grammar.accept(token)
        text_tokens += complete(grammar, model.config.eos_ids, random.Random(len(text_tokens)))
    assert satisfies(schema, tokenizer.decode(text_tokens))


def allowed_prefixes(
    grammars: LlGrammars, spec: GrammarSpec, eos: int, seed: int
) -> Iterator[list[int]]:
    """Yield every prefix of a random text that the grammar allows."""
    grammar, rng = grammars.start(spec), random.Random(seed)
    tokens: list[int] = []
    while len(tokens) < 60:
        yield list(tokens)
        allowed = [token for token in tokens_in(next_mask(grammar)) if token != eos]
        if not allowed:
            return
        tokens.append(rng.choice(allowed))
        grammar.accept(tokens[-1])
