"""Reasons against a grammar in one plain sentence that names the place.

llguidance reports errors of its own notation, into which all grammars are translated. Its positions
and names mean nothing to a client who sent a JSON schema, a regular expression or GBNF.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final

from draftgate.backends.schema_probe import schema_refusal
from draftgate.backends.schema_walk import Schema, children

_MOST_PROBES: Final = 200
"""Maximum number of parts that are compiled alone to find the place of an error. Each takes less
than a millisecond, unless it is large."""

_NO_MATCH: Final = "no text matches it"

_SENTENCES: Final[tuple[tuple[str, str], ...]] = (
    # JSON schemas
    (r'Unimplemented keys: \["([^"]*)"\]', r"\1 is not supported"),
    (r"Unimplemented keys: \[(.*)\]", r"\1 are not supported"),
    (r"Invalid type: (.*)", r"'\1' is not a type"),
    (r"Pointer '(.*)' does not exist", r"the reference '#\1' does not exist"),
    (r"Resource '(.*)' is not present .*", r"the schema '\1' is elsewhere, and is not fetched"),
    (r"Expected f64 for '?(\w+)'?, got (.*)", r"\1 must be a number, not \2"),
    (r"Expected positive integer for '(\w+)', got (.*)",
     r"\1 must be a whole number of at least 0, not \2"),
    (r"Expected string for '(\w+)' item, got (.*)", r"\1 must contain only strings, not \2"),
    (r"Expected (\w+) for '(\w+)', got (.*)", r"\2 must be of the type \1, not \3"),
    (r"patternProperty regexes /(.*)/ and /(.*)/ are not disjoint",
     r"the patterns \1 and \2 of patternProperties can match the same name"),
    (r"oneOf constraints are not supported.*",
     "oneOf is supported only if types, enum, const or a required property tell its options apart"),
    (r"min/maxProperties only supported .*",
     "minProperties and maxProperties are supported only if all properties are required"),
    (r"Failed to generate regex for (integer|float) range.*", "its bounds are too large"),
    (r"number out of range.*", "a number is out of range"),
    (r"unknown field `(.*)`, expected one of .*", r"x-guidance has no option '\1'"),
    (r"circular references with sibling keys .*",
     "a schema that contains itself cannot have other keywords beside its $ref"),
    (r"Unsatisfiable schema: Regex is empty.*",
     "no text satisfies its pattern, format and length together"),
    (r"Unsatisfiable schema: (All options in anyOf .*|No options in anyOf|anyOf is empty)",
     "no value satisfies it: anyOf, enum or type leaves no option"),
    (r"Unsatisfiable schema: incompatible (types|boolean values)",
     "no value satisfies it: its types or values exclude each other"),
    (r"Unsatisfiable schema: schema is false", "no value satisfies it: the schema is false"),
    (r"Unsatisfiable schema: (.*)", r"no value satisfies it: \1"),
    (r"Unable to determine if regex is empty.*",
     "its pattern, format and length together are too complex"),
    (r"((?:type|properties|enum|anyOf|allOf|oneOf|prefixItems|\$ref|schema) must be .*)", r"\1"),
    # regular expressions
    (r"lookarounds not supported yet; Word.*", r"word boundaries such as \\b are not supported"),
    (r"lookarounds not supported yet.*", "^ and $ are supported only at its ends"),
    # grammars
    (r'unknown name: "(.*)"', r"the rule '\1' is not defined"),
    (r"Rule '(.*)' not found", r"the rule '\1' is not defined"),
    (r"No '(.*)' rule found", r"the rule '\1' is not defined"),
    (r'duplicate rule: "(.*)"', r"the rule '\1' is defined twice"),
    (r"unknown grammar (@.*)", r"the grammar \1 is not defined"),
    (r'circular reference in token "(.*)" definition', r"the token '\1' refers to itself"),
    (r"& is only supported for tokens.*", "& is supported only for tokens, in capital letters"),
    (r"range end must be >= start.*", "the end of a repetition is below its start"),
    (r"[Tt]oken range end too large: (\d+)", r"the vocabulary has no token \1"),
    (r'unknown special token: "(.*?)".*', r"the vocabulary has no special token '\1'"),
    (r"Unknown common regex: ([\w.]+).*", r"\1 cannot be imported"),
    (r"lexer error", "a text or a regular expression is not closed, or a character is misplaced"),
    (r"Unexpected end of input.*", "the end is missing"),
    (r"Expected token '(.*?)', found .*", r"'\1' is missing"),
    (r"Expected (.{1,20})", r"\1 is missing"),
    (r".*NoExtension.*", _NO_MATCH),
    (r".*(?:[Tt]oo (?:big|large|many|complex|long)|limit|fuel|exceeded).*", "it is too complex"),
)  # fmt: skip

_UNKNOWN: Final = "it is malformed, or uses an unsupported feature"


def schema_problem(text: str, error: str) -> str:
    """Return why a JSON schema cannot be used, with the JSON pointer of the place.

    Args:
        text: the schema as compiled.
        error: the error of llguidance.
    """
    schema = json.loads(text)
    place, cause = _place(schema, error) if isinstance(schema, dict) else ("#", error)
    return f"{_sentence(cause)} (at {place})"


def pattern_problem(pattern: str, error: str) -> str:
    """Return why a regular expression cannot be used."""
    if _has_half_character(pattern):
        return "it contains half of a surrogate pair"
    return _sentence(error)


def grammar_problem(text: str, error: str) -> str:
    """Return why a context-free grammar cannot be used, with the line if it is known."""
    if _has_half_character(text):
        return "it contains half of a surrogate pair"
    found = re.match(r"(?:at )?(\d+)\((\d+)\): (.*)", error, re.DOTALL)
    if found:
        line, column, cause = found.groups()
        # llama.cpp's notation was translated, so only the text itself says where the error is.
        place = f" (line {line}, column {column})" if "::=" not in text else _quoted(cause)
        return _sentence(cause) + place
    found = re.match(r"(.*?) at line (\d+), '", error, re.DOTALL)
    if found:
        return f"{_sentence(found[1])} (line {found[2]})"
    return _sentence(error)


def choice_problem(text: str) -> str:
    """Return why a choice, which must be a JSON list of texts, cannot be used."""
    try:
        texts = json.loads(text)
    except (ValueError, RecursionError):
        return "it is not valid JSON"
    if not isinstance(texts, list):
        return "it must be a list of texts"
    for i, part in enumerate(texts):
        if not isinstance(part, str):
            return f"the entry {i} is not a text"
        if _has_half_character(part):
            return f"the text {i} contains half of a surrogate pair"
    return _UNKNOWN


def _sentence(error: str) -> str:
    """Return an error of llguidance in plain words."""
    error = re.sub(r"^(?:at )?\d+\(\d+\): ", "", error)
    error = re.sub(r'^invalid regex ".*?" \(in regex\): ', "", error, flags=re.DOTALL)
    parsed = re.search(r"regex parse error:\n(.*)\nerror: ([^\n]*)", error, re.DOTALL)
    if parsed:
        caret = re.search(r"^ {4}( *)\^", parsed[1], re.MULTILINE)
        where = f" (at character {len(caret[1]) + 1} of the regular expression)" if caret else ""
        return parsed[2] + where
    first = error.split("\n")[0].strip()
    for pattern, sentence in _SENTENCES:
        found = re.fullmatch(pattern, first)
        if found:
            return found.expand(sentence)
    return _UNKNOWN


def _quoted(error: str) -> str:
    found = re.match(r'invalid regex "(.*?)" \(in regex\)', error, re.DOTALL)
    return f" (in {found[1]})" if found else ""


def _has_half_character(text: str) -> bool:
    return any("\ud800" <= char <= "\udfff" for char in text)


def _place(root: Schema, error: str) -> tuple[str, str]:
    """Return the JSON pointer and the error of the innermost part that llguidance refuses alone."""
    shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
    left = _MOST_PROBES

    def search(schema: Schema, pointer: str, cause: str) -> tuple[str, str]:
        nonlocal left
        for place, part in children(schema, pointer):
            if not isinstance(part, dict | bool) or left <= 0:
                continue
            left -= 1
            alone: Any = {**shared, **part} if isinstance(part, dict) else part
            problem = schema_refusal(alone)
            if problem and (_kind(problem) == _kind(cause)):
                return search(part, place, problem) if isinstance(part, dict) else (place, problem)
        return pointer, cause

    return search(root, "#", error)


def _kind(error: str) -> str:
    """Return what two errors have in common if one is the cause of the other."""
    return "Unsatisfiable" if "nsatisfiable" in error else error.split("\n", maxsplit=1)[0]
