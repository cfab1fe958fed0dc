"""An exact index of passages, over embeddings by the server under load."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from math import log
from typing import Final

import numpy as np
import numpy.typing as npt

from draftgate.loadgen.checking.audit import Verdict
from draftgate.loadgen.planning.plan import Load
from draftgate.loadgen.sending.client import OpenAIClient
from draftgate.loadgen.types import PlannedRequest, RequestSpec
from draftgate.loadgen.workloads.base import TokenEstimator, WorkloadSettings
from draftgate.loadgen.workloads.rag import Rag, Retriever, indexed_passages

BATCH: Final = 32
"""Passages per request for embeddings, about 8,000 tokens, which a server computes in seconds."""

_VECTOR_DTYPE: Final = np.dtype("<f4")
_WORD: Final = re.compile(r"\w+")

_built: dict[tuple[str, str, tuple[str, ...]], PassageIndex] = {}


class PassageIndex:
    """Finds passages by the cosine of their vectors, or by the words they share with a text.

    Args:
        vectors: little-endian float32, one per passage.

    Raises:
        ValueError: the passages are empty, or the vectors differ in number or length.
    """

    def __init__(self, passages: Sequence[str], vectors: Sequence[bytes]) -> None:
        if not passages or len(passages) != len(vectors):
            raise ValueError(f"{len(passages)} passages, but {len(vectors)} vectors")
        self.passages = tuple(passages)
        self._units = _unit_vectors(vectors)
        self._words = [frozenset(_words(passage)) for passage in passages]
        seen = Counter(word for words in self._words for word in words)
        self._rarity = {word: log(len(passages) / count) for word, count in seen.items()}

    def nearest(self, vectors: Sequence[bytes], count: int) -> list[int]:
        """Return the positions of the passages with the largest cosine to any of the vectors.

        The best passage is first. The more popular passage is first if two passages are equal. The
        search compares every passage.

        Raises:
            ValueError: the vectors differ in length from those of the passages.
        """
        cosines = (self._units @ _unit_vectors(vectors).T).max(axis=1)
        return [int(place) for place in np.argsort(-cosines, kind="stable")[:count]]

    def by_words(self, text: str, count: int) -> list[int]:
        """Return the positions of the passages that share the rarest words with a text.

        A shared word counts log(passages / passages with the word) (Spaerck Jones, 1972).
        """
        query_words = [word for word in set(_words(text)) if word in self._rarity]
        shared = [
            sum(self._rarity[w] for w in sorted(query_words) if w in own) for own in self._words
        ]
        return sorted(range(len(shared)), key=lambda place: -shared[place])[:count]


async def build_retriever(
    client: OpenAIClient, load: Load, counter: TokenEstimator
) -> Retriever | None:
    """Return an index over the server's embeddings if the load retrieves passages, or None.

    Raises:
        ValueError: the server returns no embeddings.
    """
    if load.workload != Rag.name or (corpus := load.open_corpus()) is None:
        return None
    return await build_index(client, indexed_passages(WorkloadSettings(0, counter, corpus)))


async def build_index(client: OpenAIClient, passages: Sequence[str]) -> PassageIndex:
    """Return the index of passages by a server's embeddings, built once per process.

    Raises:
        ValueError: the server returns no embeddings, or none for some passage.
    """
    key = (client.url, client.model, tuple(passages))
    if key not in _built:
        vectors = list[bytes]()
        for first in range(0, len(passages), BATCH):
            inputs = tuple(passages[first : first + BATCH])
            spec = RequestSpec(None, (), max_tokens=0, seed=0, inputs=inputs)
            record = await client.send_request(PlannedRequest(0, None, spec))
            if record.verdict != Verdict.OK:
                raise ValueError(f"embeddings of passages: {record.verdict}: {record.detail}")
            vectors += record.vectors
        _built[key] = PassageIndex(passages, vectors)
    return _built[key]


def _unit_vectors(vectors: Sequence[bytes]) -> npt.NDArray[np.float32]:
    """Return vectors as rows of length 1. A vector of zeros stays as it is."""
    rows = np.stack([np.frombuffer(vector, _VECTOR_DTYPE) for vector in vectors])
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    return (rows / np.where(lengths > 0, lengths, 1.0)).astype(np.float32)


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())
