"""Targets: JSON schemas, regular expressions, grammars and choices, compiled for a tokenizer."""

from __future__ import annotations

from functools import partial

from draftgate.backends.errors import RequestRejected
from draftgate.backends.grammar import LlGrammars
from draftgate.backends.types import GrammarKind, GrammarSpec
from tests.fuzz.http_bodies import TOKENIZER
from tests.fuzz.mutation import BYTES, JSON
from tests.fuzz.target import Target

GRAMMARS = LlGrammars(TOKENIZER, {0})


def compiled(kind: GrammarKind, data: bytes) -> None:
    """Compile a text, and advance by the first tokens that it allows."""
    spec = GrammarSpec(kind, data.decode("utf-8", "replace"), "response_format")
    grammar = GRAMMARS.start(spec)
    grammar.forced(16)
    for token in TOKENIZER.encode('{"a": 1}', add_special_tokens=False):
        if not grammar.legal([token]):
            break
        grammar.accept(token)


TARGETS = [
    Target(f"grammar_{kind.value}", partial(compiled, kind), (RequestRejected,), form)
    for kind, form in {
        GrammarKind.JSON_SCHEMA: JSON,
        GrammarKind.REGEX: BYTES,
        GrammarKind.GRAMMAR: BYTES,
        GrammarKind.CHOICE: JSON,
        GrammarKind.CALLS: JSON,
    }.items()
]
