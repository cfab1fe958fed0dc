"""Token masks for JSON schemas, other grammars and function calls, compiled by llguidance.

The state of a grammar is the state of a parser that has read the output's tokens. The state is a
function of these tokens, whatever was drafted or masked before. Copies cost microseconds, because
they share the automaton, which grows as texts are explored.

JSON has the layout of `json.dumps`: one line with `, ` and `: `. So the text between values is
determined and costs no step (`Grammar.forced`), and models cannot produce endless white space. A
schema may set another layout with llguidance's `x-guidance`.

llguidance is imported with the first grammar, so the engine runs without it.
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

from draftgate.backends.call_form import call_problem, calls_as_lark, choice_as_lark
from draftgate.backends.core.drafts import ROOT, Draft
from draftgate.backends.errors import RequestRejected
from draftgate.backends.grammar_errors import (
    choice_problem,
    grammar_problem,
    pattern_problem,
    schema_problem,
)
from draftgate.backends.schema_bounds import check_grammar, check_pattern
from draftgate.backends.schema_probe import LAYOUT, STRICT
from draftgate.backends.schema_rewriting import prepare_schema
from draftgate.backends.tokenizer import Tokenizer
from draftgate.backends.types import GrammarKind, GrammarSpec

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MOST_COMPILED: Final = 64
"""Maximum number of compiled grammars in the cache, the usual number of sequences in a batch."""

MOST_LEXER_STATES: Final = 50_000
"""Maximum size of the automaton that all sequences of a grammar share, a fifth of llguidance's
limit."""

_WORDS: Final = {
    GrammarKind.JSON_SCHEMA: "JSON schema",
    GrammarKind.REGEX: "regular expression",
    GrammarKind.CHOICE: "choice",
    GrammarKind.GRAMMAR: "grammar",
    GrammarKind.CALLS: "functions",
}


class LlGrammar:
    """The grammar of one sequence, which implements `backends.core.grammar.Grammar`.

    A text may reach the limits of llguidance. Then only the end is allowed, and `is_complete` is
    false.
    """

    def __init__(self, matcher: LLMatcher, eos_ids: Collection[int]) -> None:
        """Take ownership of a matcher.

        Args:
            eos_ids: tokens that end a sequence.
        """
        self._matcher = matcher
        self._eos_ids = eos_ids

    @property
    def is_complete(self) -> bool:
        """Whether the sequence may end here."""
        return self._matcher.is_accepting()

    def accept(self, token_id: int) -> None:
        """Advance by a token. A token that is not allowed breaks the matcher."""
        self._matcher.consume_token(token_id)

    def legal(self, token_ids: Many[int]) -> int:
        """Return the length of the longest prefix that the grammar allows, without end tokens."""
        if self._matcher.is_stopped():  # the parser takes no tokens, not even the end
            return int(self.is_complete and bool(token_ids) and token_ids[0] in self._eos_ids)
        return self._matcher.validate_tokens(list(token_ids))

    def forced(self, max_tokens: int) -> tuple[int, ...]:
        """Return the tokens of the text that must follow, in the tokenizer's encoding.

        The mask would allow only these tokens.
        """
        return tuple(self._matcher.compute_ff_tokens()[:max_tokens])

    def masks(self, draft: Draft) -> list[bytes]:
        """Return the mask of each row."""
        at = {ROOT: self._matcher}
        # A token that is not allowed, such as a token after an end, does not advance its parser.
        for place, token in enumerate(draft.token_ids):
            at[place] = at[draft.parent(place)].deep_copy()
            at[place].try_consume_tokens([token])
        return [matcher.compute_bitmask() for matcher in at.values()]


class LlGrammars:
    """Compiles grammars for one tokenizer, and implements `backends.core.grammar.Grammars`.

    `eos_ids` beyond the vocabulary are ignored.
    """

    def __init__(self, tokenizer: Tokenizer, eos_ids: Collection[int]) -> None:
        self._plain = tokenizer
        self._eos_ids = sorted(i for i in eos_ids if 0 <= i < tokenizer.vocab_size)
        # Least recently used first.
        self._compiled: OrderedDict[GrammarSpec, LLMatcher] = OrderedDict()
        self._lock = Lock()

    def start(self, spec: GrammarSpec) -> LlGrammar:
        """Return a grammar in its initial state.

        Raises:
            RequestRejected: the grammar cannot be compiled.
        """
        with self._lock:
            compiled = self._compiled.get(spec)
        if compiled is None or (matcher := _initial(compiled)).is_error():
            # Its automaton has reached the limits, so the grammar is compiled again.
            compiled = self._compile(spec)
            matcher = _initial(compiled)
            _check(matcher, spec)
        with self._lock:
            self._compiled[spec] = compiled
            self._compiled.move_to_end(spec)
            while len(self._compiled) > MOST_COMPILED:
                self._compiled.popitem(last=False)
        return LlGrammar(matcher, self._eos_ids)

    def _compile(self, spec: GrammarSpec) -> LLMatcher:
        """Return a matcher to copy."""
        if not self._eos_ids:
            raise RequestRejected(
                "the model has no end-of-sequence token, which an output with a grammar needs",
                spec.param,
            )
        try:
            from llguidance import LLMatcher, LLParserLimits
        except ImportError:
            words = "structured output needs llguidance, which is not installed here"
            raise RequestRejected(words, spec.param) from None
        try:
            grammar = _grammar(spec, self._plain.vocabulary)
        except UnicodeError as error:  # half of a surrogate pair
            raise _rejected(spec, _problem(spec, str(error))) from None
        except ValueError as error:
            raise _rejected(spec, str(error)) from None
        try:
            tokenizer = self._tokenizer
        except ValueError as error:
            words = f"this model's tokenizer does not support structured output: {error}"
            raise RequestRejected(words, spec.param) from None
        limits = LLParserLimits(max_lexer_states=MOST_LEXER_STATES, verbose_errors=False)
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
        _check(matcher, spec)
        return matcher

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        """The vocabulary as a trie of bytes, built on first use because that takes up to a second.

        Raises:
            ValueError: this kind of tokenizer has no bytes.
        """
        from llguidance import LLTokenizer

        return LLTokenizer(
            _literal_tokenizer(self._plain.to_json()),
            n_vocab=self._plain.vocab_size,
            eos_token=self._eos_ids,
        )


def _literal_tokenizer(tokenizer_json: str) -> str:
    """Return a `tokenizer.json` that encodes text literally.

    Special tokens get secret names, so that `<|user|>` is plain text. Tokens between `<` and `>`
    also get such names, because llguidance treats them as special. A tokenizer for all bytes does
    not normalise, because a composed character differs from a decomposed character in a schema.
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
    """Return the grammar in llguidance's format.

    Raises:
        ValueError: the text is not JSON, or exceeds the bounds.
    """
    from llguidance import LLMatcher

    if spec.kind is GrammarKind.REGEX:
        check_pattern(spec.text)
        return LLMatcher.grammar_from_regex(spec.text)
    if spec.kind is GrammarKind.CHOICE:
        return LLMatcher.grammar_from_lark(f"start: {choice_as_lark(spec.text)}\n")
    if spec.kind is GrammarKind.GRAMMAR:
        return LLMatcher.grammar_from_lark(_as_lark(spec.text))
    if spec.kind is GrammarKind.CALLS:
        return LLMatcher.grammar_from_lark(calls_as_lark(spec.text, vocabulary, LAYOUT | STRICT))
    schema = prepare_schema(spec.text, strict=spec.strict)
    return LLMatcher.grammar_from_json_schema(schema, LAYOUT, STRICT)


def _as_lark(text: str) -> str:
    """Return a context-free grammar in the notation of llguidance.

    Raises:
        ValueError: the grammar exceeds a bound, contains a JSON schema, or is malformed GBNF.
    """
    from llguidance.gbnf_to_lark import any_to_lark

    check_grammar(text)
    try:
        return any_to_lark(text)
    except Exception as error:  # noqa: BLE001 - the library raises bare Exception
        raise ValueError(grammar_problem(text, str(error))) from None


def _initial(compiled: LLMatcher) -> LLMatcher:
    """Return a copy that has built its first mask, which shows whether limits are reached."""
    matcher = compiled.deep_copy()
    matcher.compute_bitmask()
    return matcher


def _check(matcher: LLMatcher, spec: GrammarSpec) -> None:
    """Check that llguidance supports the whole grammar.

    Raises:
        RequestRejected: llguidance does not support it.
    """
    error = matcher.get_error() or "; ".join(matcher.get_grammar_warnings())
    if error:
        raise _rejected(spec, _problem(spec, error))


def _rejected(spec: GrammarSpec, problem: str) -> RequestRejected:
    return RequestRejected(f"the {_WORDS[spec.kind]} cannot be used: {problem}", spec.param)


def _problem(spec: GrammarSpec, error: str) -> str:
    """Return the error of llguidance in the words of the notation that the client used."""
    match spec.kind:
        case GrammarKind.JSON_SCHEMA:
            return schema_problem(prepare_schema(spec.text, strict=spec.strict), error)
        case GrammarKind.REGEX:
            return pattern_problem(spec.text, error)
        case GrammarKind.CHOICE:
            return choice_problem(spec.text)
        case GrammarKind.CALLS:
            return call_problem(spec.text, error)
    return grammar_problem(spec.text, error)
