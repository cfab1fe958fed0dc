"""Training queries: the first sentences of docstrings.

The distillation needs no passages, because the document tower says where each query belongs.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from hashlib import sha256
from typing import Final, NamedTuple

from draftgate.loadgen.planning.pairs import named_nodes, parse_module
from training.towers.texts import Source

LEAST_WORDS: Final = 3
MOST_CHARACTERS: Final = 240

_WORD: Final = re.compile(r"[A-Za-z]{2,}")
_SENTENCE_END: Final = re.compile(r"(?<=[.!?])\s+|\n\n")
_SPACES: Final = re.compile(r"\s+")
_MARKUP: Final = re.compile(r"^\s*(?:>>>|\.\.|:|@|-{3}|={3}|\*|Args|Returns|Parameters|Notes)")


class Query(NamedTuple):
    """A training query.

    Attributes:
        unit, package: see `Source`.
    """

    text: str
    unit: str
    package: str


def training_queries(
    sources: Iterable[Source], held_out: Iterable[Source], most: int
) -> list[Query]:
    """Return distinct queries of sources, without those that held-out sources contain too.

    Queries are equal if they have the same words, whatever their case. They are in the order of
    their hashes, which mixes the packages.

    Args:
        most: maximum number of queries.
    """
    seen = {_words(query.text) for source in held_out for query in source_queries(source)}
    chosen = []
    for source in sources:
        for query in source_queries(source):
            words = _words(query.text)
            if words not in seen:
                seen.add(words)
                chosen.append(query)
    return sorted(chosen, key=lambda query: sha256(query.text.encode()).digest())[:most]


def source_queries(source: Source) -> Iterator[Query]:
    """Yield the queries of one file."""
    tree = parse_module(source.text)
    if tree is None:
        return
    for node in (tree, *named_nodes(tree)):
        summary = _SENTENCE_END.split((ast.get_docstring(node) or "").strip(), maxsplit=1)[0]
        text = _SPACES.sub(" ", summary)[:MOST_CHARACTERS]
        if len(_WORD.findall(text)) >= LEAST_WORDS and not _MARKUP.match(text):
            yield Query(text, source.unit, source.package)


def _words(text: str) -> str:
    return " ".join(_WORD.findall(text.lower()))
