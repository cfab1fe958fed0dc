"""Training examples of the towers: queries and the passages that they should find.

The first kind is that of the test collection: the summary of a docstring and the code of its
function, or a heading and its section. Standard-library modules outside the test collection have
only about two thousand of these, so further kinds are taken from the same texts.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from draftgate.loadgen.planning.pairs import NamedNode, named_nodes, parse_module, source_pairs
from training.towers.texts import Source

SUMMARY: Final = "summary"
SENTENCE: Final = "sentence"
DETAIL: Final = "detail"
NAME: Final = "name"
COMMENT: Final = "comment"

LEAST_WORDS: Final = 3
LEAST_CHARACTERS: Final = 150
MOST_QUERY_CHARACTERS: Final = 240
MOST_PASSAGE_CHARACTERS: Final = 1600
"""Limits of an example. The longest passage exceeds the tokens that a tower reads."""

COMMENTED_LINES: Final = 12
"""Lines after a comment that form its passage, about those of a short function."""

_WORD: Final = re.compile(r"[A-Za-z]{2,}")
_SENTENCE_END: Final = re.compile(r"(?<=[.!?])\s+")
_SPACES: Final = re.compile(r"\s+")
_NAME_PARTS: Final = re.compile(r"_+|(?<=[a-z0-9])(?=[A-Z])")
_MARKUP: Final = re.compile(r"^\s*(?:>>>|\.\.|:|@|-{3}|={3}|\*|Args|Returns|Parameters|Notes)")


class Example(NamedTuple):
    """A query and the passage that it should find.

    Attributes:
        kind: what the query is.
        unit, package: see `Source`.
    """

    query: str
    passage: str
    kind: str
    unit: str
    package: str


def source_examples(source: Source) -> list[Example]:
    """Return the examples of one file, of all kinds."""
    found = [(pair.question, pair.passage, SUMMARY) for pair in source_pairs([source.text])]
    tree = parse_module(source.text)
    if tree is not None:
        lines = source.text.splitlines()
        for node in named_nodes(tree):
            found += _definition_examples(node, lines)
        found += _comment_examples(lines)
    return [
        Example(_clean(query), passage[:MOST_PASSAGE_CHARACTERS], kind, source.unit, source.package)
        for query, passage, kind in found
        if len(_WORD.findall(query)) >= LEAST_WORDS and len(passage) >= LEAST_CHARACTERS
    ]


def distinct(examples: Iterable[Example]) -> list[Example]:
    """Return examples without equal queries or equal pairs of passage and kind, in order."""
    queries, passages, kept = set[str](), set[tuple[str, str]](), []
    for example in examples:
        key = (example.kind, example.passage)
        if example.query not in queries and key not in passages:
            queries.add(example.query)
            passages.add(key)
            kept.append(example)
    return kept


def _definition_examples(node: NamedNode, lines: list[str]) -> Iterator[tuple[str, str, str]]:
    """Yield further examples of a function or class."""
    if isinstance(node, ast.ClassDef):
        return
    docstring = ast.get_docstring(node) or ""
    body = node.body[1:] if docstring else node.body
    if not body:
        return
    code = "\n".join(line.strip() for line in lines[body[0].lineno - 1 : node.end_lineno])
    # The body alone, because the name is part of the signature.
    yield " ".join(_NAME_PARTS.split(node.name)), code, NAME
    summary, _, rest = docstring.partition("\n\n")
    if rest:
        yield summary, rest.strip(), DETAIL
        sentences = [s for s in _SENTENCE_END.split(rest.strip()) if not _MARKUP.match(s)]
        signature = lines[node.lineno - 1].strip()
        for sentence in sentences[:1]:
            yield sentence, f"{signature}\n{code}", SENTENCE


def _comment_examples(lines: list[str]) -> Iterator[tuple[str, str, str]]:
    """Yield blocks of comments with the code after them."""
    at = 0
    while at < len(lines):
        start = at
        while at < len(lines) and lines[at].lstrip().startswith("# "):
            at += 1
        if at > start:
            comment = " ".join(line.strip(" #") for line in lines[start:at])
            code = "\n".join(line.strip() for line in lines[at : at + COMMENTED_LINES])
            yield _SENTENCE_END.split(comment)[0], code, COMMENT
        at += 1


def _clean(query: str) -> str:
    return _SPACES.sub(" ", query).strip()[:MOST_QUERY_CHARACTERS]
