"""An exact index of passages, over embeddings by the server under load."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from math import log
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from draftgate.loadgen.checking.audit import Verdict
from draftgate.loadgen.planning.pairs import Pair
from draftgate.loadgen.planning.plan import Load
from draftgate.loadgen.sending.client import OpenAIClient
from draftgate.loadgen.types import PlannedRequest, RequestSpec
from draftgate.loadgen.workloads.base import TokenEstimator, WorkloadSettings
from draftgate.loadgen.workloads.rag import Rag, indexed_pairs
from draftgate.loadgen.workloads.rag_search import FoundPassage, Retriever

BATCH: Final = 32
"""Passages per request for embeddings, about 8,000 tokens, which a server computes in seconds."""

_VECTOR_DTYPE: Final = np.dtype("<f4")
_WORD: Final = re.compile(r"\w+")

_built: dict[tuple[object, ...], PassageIndex] = {}


class PassageIndex:
    """Finds passages by the cosine of their vectors, or by the words they share with a text.

    Args:
        vectors: little-endian float32, one per passage.

    Searches return the best passage first, and of equal passages the more popular one. They compare
    every passage, or every passage of one source.

    Raises:
        ValueError: the passages are empty, or the vectors differ in number or length.
    """

    def __init__(self, pairs: Sequence[Pair], vectors: Sequence[bytes]) -> None:
        if not pairs or len(pairs) != len(vectors):
            raise ValueError(f"{len(pairs)} passages, but {len(vectors)} vectors")
        self.pairs = tuple(pairs)
        self._units = _unit_vectors(vectors)
        self._words = [frozenset(_words(pair.passage)) for pair in pairs]
        seen = Counter(word for words in self._words for word in words)
        self._rarity = {word: log(len(pairs) / count) for word, count in seen.items()}

    def nearest(self, vector: bytes, count: int, source: str = "") -> list[FoundPassage]:
        """Return the passages with the largest cosine to a vector, of one source or of all.

        The score is the cosine.

        Raises:
            ValueError: the vector differs in length from those of the passages.
        """
        cosines = self._units @ _unit_vectors([vector])[0]
        return self._best(cosines.tolist(), count, source)

    def by_words(self, text: str, count: int, source: str = "") -> list[FoundPassage]:
        """Return the passages that share the rarest words with a text, of one source or of all.

        A word counts log(passages / passages with the word) (Spaerck Jones, 1972). The score is the
        sum over the shared words, divided by that over all words of the text that any passage has.
        """
        query_words = sorted(word for word in set(_words(text)) if word in self._rarity)
        total = sum(self._rarity[word] for word in query_words) or 1.0
        scores = [
            sum(self._rarity[word] for word in query_words if word in own) / total
            for own in self._words
        ]
        return self._best(scores, count, source)

    def _best(self, scores: Sequence[float], count: int, source: str) -> list[FoundPassage]:
        found = (
            FoundPassage(place, score)
            for place, (pair, score) in enumerate(zip(self.pairs, scores, strict=True))
            if source in ("", pair.source)
        )
        return sorted(found, key=lambda one: -one.score)[:count]


async def build_retriever(
    client: OpenAIClient, load: Load, counter: TokenEstimator
) -> Retriever | None:
    """Return an index over the server's embeddings if the load retrieves passages, or None.

    Raises:
        ValueError: the server returns no embeddings.
    """
    if load.workload != Rag.name or (corpus := load.open_corpus()) is None:
        return None
    pairs = indexed_pairs(WorkloadSettings(0, counter, corpus))
    return await build_index(client, pairs, load.rag.document_fields())


async def build_index(
    client: OpenAIClient, pairs: Sequence[Pair], extra: tuple[tuple[str, Any], ...] = ()
) -> PassageIndex:
    """Return the index of passages by a server's embeddings, built once per process.

    Args:
        extra: further fields of the requests, such as another model.

    Raises:
        ValueError: the server returns no embeddings, or none for some passage.
    """
    key = (client.url, client.model, extra, tuple(pairs))
    if key not in _built:
        vectors = list[bytes]()
        for first in range(0, len(pairs), BATCH):
            inputs = tuple(pair.passage for pair in pairs[first : first + BATCH])
            spec = RequestSpec(None, (), max_tokens=0, seed=0, inputs=inputs, extra=extra)
            record = await client.send_request(PlannedRequest(0, None, spec))
            if record.verdict != Verdict.OK:
                raise ValueError(f"embeddings of passages: {record.verdict}: {record.detail}")
            vectors += record.vectors
        _built[key] = PassageIndex(pairs, vectors)
    return _built[key]


def _unit_vectors(vectors: Sequence[bytes]) -> npt.NDArray[np.float32]:
    """Return vectors as rows of length 1. A vector of zeros stays as it is."""
    rows = np.stack([np.frombuffer(vector, _VECTOR_DTYPE) for vector in vectors])
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    return (rows / np.where(lengths > 0, lengths, 1.0)).astype(np.float32)


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())
