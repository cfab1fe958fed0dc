"""Encoded examples, and random batches of them."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from itertools import accumulate, pairwise
from pathlib import Path
from random import Random
from typing import Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from training.towers.examples import Example, distinct, source_examples
from training.towers.model import MAX_TOKENS
from training.towers.texts import (
    CopyFilter,
    Source,
    package_sources,
    stdlib_sources,
)

logger = logging.getLogger("towers")

QUERY_TOKENS: Final = 48
"""Maximum tokens of a training query: 97% are shorter."""

PASSAGE_TOKENS: Final = ((0.6, 96), (0.4, 256))
"""Shares of batches by the maximum tokens of their passages. A step takes as long as its tokens,
and the first lines of a function tell most about it. Layers that see few long passages fail on
those of the validation, which have up to 256 tokens."""

MOST_PASSAGE_TOKENS: Final = PASSAGE_TOKENS[-1][1]

NEIGHBOURS: Final = 4
"""Consecutive examples of a batch. They come from the same file mostly, so a tower learns to
distinguish functions of one module."""

WORD_DROPOUT: Final = 0.3
"""Share of the tokens of a training text that are left out. After 1,000 steps of the first phase,
the loss on validation is 2.036 with 0.3 and 2.080 nats with 0.1 (Zen 5, 2026-11-27)."""


Ids: TypeAlias = NDArray[np.uint16]


class EncodedExample(NamedTuple):
    """An example as token ids."""

    query: Ids
    passage: Ids
    kind: str


def read_examples(sources: Iterable[Source], held_out: CopyFilter) -> list[Example]:
    """Return the examples of sources without copies of held-out code."""
    found = (example for source in sources for example in source_examples(source))
    return distinct(example for example in found if not held_out.copies(example.passage))


def installed_examples(cache: Path) -> list[Example]:
    """Return the examples of the standard library and the packages, from a cache if it exists."""
    if not cache.exists():
        held_out = CopyFilter(source.text for source in stdlib_sources(held_out=True))
        found = read_examples([*stdlib_sources(), *package_sources()], held_out)
        cache.write_text("".join(json.dumps(example) + "\n" for example in found))
    return [Example(*json.loads(line)) for line in cache.read_text().splitlines()]


def is_selected(example: Example, share: float) -> bool:
    """Return whether an example is from the standard library or a share of the packages' files."""
    return not example.package or _fraction(example.unit) < share


def encode(tokenizer: Tokenizer, texts: Sequence[str], most: int = MAX_TOKENS) -> list[Ids]:
    """Return the token ids of texts, at least one and at most `most` for each."""
    found = tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
    return [np.array(item.ids[:most] or [1], np.uint16) for item in found]


def encode_examples(
    tokenizer: Tokenizer, examples: Sequence[Example], cache: Path | None = None
) -> list[EncodedExample]:
    """Return examples as token ids, from a cache if it exists."""
    if cache is None or not cache.exists():
        queries = encode(tokenizer, [e.query for e in examples], QUERY_TOKENS)
        passages = encode(tokenizer, [e.passage for e in examples])
        if cache is not None:
            np.savez(cache, queries=_joined(queries), passages=_joined(passages))
    else:
        stored = np.load(cache)
        queries, passages = (_divided(stored[name]) for name in ("queries", "passages"))
    return [
        EncodedExample(query, passage, example.kind)
        for query, passage, example in zip(queries, passages, examples, strict=True)
    ]


END_OF_TEXT: Final = 2**16 - 1


def _joined(texts: Sequence[Ids]) -> Ids:
    return np.concatenate([np.append(text, END_OF_TEXT).astype(np.uint16) for text in texts])


def _divided(joined: Ids) -> list[Ids]:
    ends = np.flatnonzero(joined == END_OF_TEXT)
    return [joined[start + 1 : end] for start, end in pairwise([-1, *ends.tolist()])]


class Batches:
    """Random batches. Kinds have weights, and examples of one file stay together."""

    def __init__(
        self, examples: Sequence[EncodedExample], weights: Mapping[str, float], seed: int
    ) -> None:
        by_kind: dict[str, list[EncodedExample]] = {}
        for example in examples:
            by_kind.setdefault(example.kind, []).append(example)
        self._kinds = list(by_kind.values())
        self._weights = list(accumulate(weights.get(kind, 0.0) for kind in by_kind))
        self._rng = Random(seed)
        self._noise = np.random.default_rng(seed)

    def draw(self, size: int) -> tuple[list[Ids], list[Ids]]:
        """Return the queries and the passages of a batch."""
        rng = self._rng
        lengths = rng.choices(
            [n for _, n in PASSAGE_TOKENS], [share for share, _ in PASSAGE_TOKENS]
        )
        drawn: list[EncodedExample] = []
        for kind in rng.choices(self._kinds, cum_weights=self._weights, k=size // NEIGHBOURS):
            start = rng.randrange(max(1, len(kind) - NEIGHBOURS + 1))
            drawn += kind[start : start + NEIGHBOURS]
        queries = [self._thinned(example.query) for example in drawn]
        return queries, [self._thinned(example.passage[: lengths[0]]) for example in drawn]

    def _thinned(self, tokens: Ids) -> Ids:
        kept = tokens[self._noise.random(len(tokens)) >= WORD_DROPOUT]
        return kept if len(kept) else tokens[:1]


def all_texts(examples: Iterable[Example]) -> Iterator[str]:
    """Yield the texts that train the tokenizer."""
    for example in examples:
        yield example.query
        yield example.passage


def _fraction(unit: str) -> float:
    return int(sha256(f"share {unit}".encode()).hexdigest()[:8], 16) / 16**8
