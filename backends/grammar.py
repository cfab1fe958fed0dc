"""Grammars through llguidance: JSON schemas, regular expressions and calls, as masks over tokens.

A grammar's state is that of a parser which has read the output's tokens, so it is a function of
them, whatever was drafted, masked or asked for on the way. Copies share the automaton that is
built as texts are explored: they cost microseconds.

JSON is laid out as `json.dumps` does, on one line with `, ` and `: `. So the text between values
is certain and costs no step (`Grammar.forced`), and no model gets lost in white space. A schema
may ask for another layout with llguidance's own `x-guidance`.

llguidance is imported for the first grammar: the engine runs without it.
"""

from __future__ import annotations

import json
import re
import secrets
from collections import OrderedDict
from collections.abc import Collection, Mapping
from collections.abc import Sequence as Many
from functools import cached_property
from threading import Lock
from typing import TYPE_CHECKING, Final

from draftgate.backends.call_form import calls_as_lark
from draftgate.backends.core.drafts import ROOT, Draft
from draftgate.backends.errors import RequestRejected
from draftgate.backends.schema_bounds import check_pattern, check_schema
from draftgate.backends.tokenizer import Tokenizer
from draftgate.backends.types import GrammarKind, GrammarSpec

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from llguidance._lib import JsonCompileOptions

MOST_COMPILED: Final = 64
"""Grammars that are remembered: as many as a batch has sequences."""

MOST_LEXER_STATES: Final = 50_000
"""Of one automaton, shared by all who use the grammar; llguidance allows five times as many."""

_WORDS: Final = {
    GrammarKind.JSON_SCHEMA: "JSON schema",
    GrammarKind.REGEX: "regular expression",
    GrammarKind.CALLS: "functions",
}

_LAYOUT: Final[JsonCompileOptions] = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}

_STRICT: Final[JsonCompileOptions] = {"lenient": False, "coerce_one_of": False}
"""A schema that cannot be held to the letter is refused, whatever its `x-guidance` says."""


class LlGrammar:
    """What one sequence may say; satisfies `backends.core.grammar.Grammar`.

    A text may lead where llguidance's limits end: then nothing but the end is allowed, and
    `is_complete` is false.
    """

    def __init__(self, matcher: LLMatcher, eos_ids: Collection[int]) -> None:
        """Take a matcher that nobody else uses, and the tokens that end a sequence."""
        self._matcher = matcher
        self._eos_ids = eos_ids

    @property
    def is_complete(self) -> bool:
        """Whether the sequence may end here."""
        return self._matcher.is_accepting()

    def accept(self, token_id: int) -> None:
        """Go on by a token; one that is not allowed spoils the matcher."""
        self._matcher.consume_token(token_id)

    def legal(self, token_ids: Many[int]) -> int:
        """Return how many of the tokens may follow; one that ends the sequence is the last."""
        if self._matcher.is_stopped():  # the parser takes nothing more, not even the end
            return int(self.is_complete and bool(token_ids) and token_ids[0] in self._eos_ids)
        return self._matcher.validate_tokens(list(token_ids))

    def forced(self, max_tokens: int) -> tuple[int, ...]:
        """Return tokens of the text that must follow, as the tokenizer spells it.

        The mask allows the first of them alone, so they are certain.
        """
        return tuple(self._matcher.compute_ff_tokens()[:max_tokens])

    def masks(self, draft: Draft) -> list[bytes]:
        """Return the mask of each row."""
        at = {ROOT: self._matcher}
        # What may not follow, as anything behind an end, leaves its parser where it is.
        for place, token in enumerate(draft.token_ids):
            at[place] = at[draft.parent(place)].deep_copy()
            at[place].try_consume_tokens([token])
        return [matcher.compute_bitmask() for matcher in at.values()]


class LlGrammars:
    """Compiles grammars for one tokenizer; satisfies `backends.core.grammar.Grammars`."""

    def __init__(self, tokenizer: Tokenizer, eos_ids: Collection[int]) -> None:
        """Build nothing yet. `eos_ids` that the tokenizer does not have are left out."""
        self._plain = tokenizer
        self._eos_ids = sorted(i for i in eos_ids if 0 <= i < tokenizer.vocab_size)
        self._compiled: OrderedDict[GrammarSpec, LLMatcher] = OrderedDict()  # latest use last
        self._lock = Lock()

    def start(self, spec: GrammarSpec) -> LlGrammar:
        """Return a grammar at its start."""
        with self._lock:
            compiled = self._compiled.get(spec)
        if compiled is None or (matcher := _at_start(compiled)).is_error():
            # An automaton at its limits is of no more use to anybody: begin a new one.
            compiled = self._compile(spec)
            matcher = _at_start(compiled)
            _check(matcher, spec)
        with self._lock:
            self._compiled[spec] = compiled
            self._compiled.move_to_end(spec)
            while len(self._compiled) > MOST_COMPILED:
                self._compiled.popitem(last=False)
        return LlGrammar(matcher, self._eos_ids)

    def _compile(self, spec: GrammarSpec) -> LLMatcher:
        """Return the matcher to copy.

        Raises:
            RequestRejected: there is none.
        """
        if not self._eos_ids:
            raise RequestRejected(
                "the model has no end-of-sequence token, so what it writes in a format has no end",
                spec.param,
            )
        try:
            from llguidance import LLMatcher, LLParserLimits
        except ImportError:
            words = "formats need llguidance, which is not installed here"
            raise RequestRejected(words, spec.param) from None
        try:
            grammar = _grammar(spec, self._plain.vocabulary)
        except ValueError as error:
            words = f"the {_WORDS[spec.kind]} cannot be used: {error}"
            raise RequestRejected(words, spec.param) from None
        try:
            tokenizer = self._tokenizer
        except ValueError as error:
            words = f"this model's tokenizer cannot be held to a format: {error}"
            raise RequestRejected(words, spec.param) from None
        limits = LLParserLimits(max_lexer_states=MOST_LEXER_STATES, verbose_errors=False)
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
        _check(matcher, spec)
        return matcher

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        """The vocabulary as a tree of bytes; takes up to a second, so it waits for its first use.

        Raises:
            ValueError: this kind of tokenizer does not spell bytes.
        """
        from llguidance import LLTokenizer

        return LLTokenizer(
            _as_spelled(self._plain.to_json()),
            n_vocab=self._plain.vocab_size,
            eos_token=self._eos_ids,
        )


def _as_spelled(tokenizer_json: str) -> str:
    """Return a `tokenizer.json` that spells a text which must follow as it stands.

    Special tokens get names that nobody can write: `<|user|>` is a text here. So do those between
    `<` and `>`, which llguidance takes for special ones. And where all bytes can be spelled, none
    are rewritten first: composed characters are other ones than a schema's that are not.
    """
    settings = json.loads(tokenizer_json)
    secret = secrets.token_hex(16)
    names = {
        token["content"]: f"special {secret} {token['id']}"
        for token in settings["added_tokens"]
        if token["special"] or re.fullmatch("<.*>", token["content"], re.DOTALL)
    }
    for token in settings["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    model = settings["model"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {names.get(text, text): i for text, i in model["vocab"].items()}
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    if "ByteLevel" in json.dumps(settings["decoder"]):
        settings["normalizer"] = None
    return json.dumps(settings)


def _grammar(spec: GrammarSpec, vocabulary: Mapping[str, int]) -> str:
    """Return the grammar as llguidance reads it.

    Raises:
        ValueError: the text is no JSON, or beyond our bounds.
    """
    from llguidance import LLMatcher

    if spec.kind is GrammarKind.REGEX:
        check_pattern(spec.text)
        return LLMatcher.grammar_from_regex(spec.text)
    if spec.kind is GrammarKind.CALLS:
        return LLMatcher.grammar_from_lark(calls_as_lark(spec.text, vocabulary, _LAYOUT | _STRICT))
    check_schema(spec.text)
    return LLMatcher.grammar_from_json_schema(spec.text, _LAYOUT, _STRICT)


def _at_start(compiled: LLMatcher) -> LLMatcher:
    """Return a copy that has looked at what may come first: limits show where masks are built."""
    matcher = compiled.deep_copy()
    matcher.compute_bitmask()
    return matcher


def _check(matcher: LLMatcher, spec: GrammarSpec) -> None:
    """Return if the grammar is one, and all of it is understood.

    Raises:
        RequestRejected: it is not.
    """
    words = matcher.get_error() or "; ".join(matcher.get_grammar_warnings())
    if words:
        raise RequestRejected(f"the {_WORDS[spec.kind]} cannot be used: {words}", spec.param)
