"""An index of passages: their embeddings by the server itself, searched exactly."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from math import log
from typing import Final

import aiohttp
import numpy as np
import numpy.typing as npt

from draftgate.loadgen.checking.audit import Verdict
from draftgate.loadgen.sending.client import ClientTimeouts, ask
from draftgate.loadgen.sending.clock import start_clock
from draftgate.loadgen.sending.processes.wire import SenderJob
from draftgate.loadgen.types import PlannedRequest, RequestSpec
from draftgate.loadgen.workloads import Rag, Retriever, indexed_passages

BATCH: Final = 32
"""Passages embedded by one request: some 8,000 tokens, which a server computes in seconds."""

_WIRE: Final = np.dtype("<f4")
_WORD: Final = re.compile(r"\w+")

_built: dict[tuple[str, str, tuple[str, ...]], Index] = {}


class Index:
    """Passages, found by the cosine of their vectors or by the words they share with a text."""

    def __init__(self, passages: Sequence[str], vectors: Sequence[bytes]) -> None:
        """Take passages and their vectors, little-endian float32, in the same order.

        Raises:
            ValueError: there are none, not as many of one as of the other, or of several lengths.
        """
        if not passages or len(passages) != len(vectors):
            raise ValueError(f"{len(passages)} passages, but {len(vectors)} vectors")
        self.passages = tuple(passages)
        self._units = _unit(vectors)
        self._words = [frozenset(_words(passage)) for passage in passages]
        seen = Counter(word for words in self._words for word in words)
        self._rarity = {word: log(len(passages) / count) for word, count in seen.items()}

    def nearest(self, vectors: Sequence[bytes], count: int) -> list[int]:
        """Return the places of the passages with the largest cosine to any of the vectors.

        Best first; of equal ones the more popular first. Exact: every passage is compared.

        Raises:
            ValueError: the vectors are of another length than the passages'.
        """
        cosines = (self._units @ _unit(vectors).T).max(axis=1)
        return [int(place) for place in np.argsort(-cosines, kind="stable")[:count]]

    def by_words(self, text: str, count: int) -> list[int]:
        """Return the places of the passages that share the rarest words with a text.

        A shared word counts log(passages / passages that have it) (Spaerck Jones, 1972).
        """
        asked = [word for word in set(_words(text)) if word in self._rarity]
        shared = [sum(self._rarity[w] for w in sorted(asked) if w in own) for own in self._words]
        return sorted(range(len(shared)), key=lambda place: -shared[place])[:count]


async def retriever_of(session: aiohttp.ClientSession, job: SenderJob) -> Retriever | None:
    """Return what finds passages, if the load asks for any: an index by the server's embeddings.

    Raises:
        ValueError: the server gives none.
    """
    if job.load.workload != Rag.name:
        return None
    passages = indexed_passages(job.counter, job.load.text_file)
    return await open_index(session, job.url, job.model, passages, job.patience)


async def open_index(
    session: aiohttp.ClientSession,
    url: str,
    model: str,
    passages: Sequence[str],
    patience: ClientTimeouts,
) -> Index:
    """Return the index of passages by a server's embeddings; built once in a process.

    Raises:
        ValueError: the server gives no embeddings, or a passage none.
    """
    key = (url, model, tuple(passages))
    if key not in _built:
        clock, vectors = start_clock(), list[bytes]()
        for first in range(0, len(passages), BATCH):
            inputs = tuple(passages[first : first + BATCH])
            asked = RequestSpec(None, (), max_tokens=0, seed=0, inputs=inputs)
            planned = PlannedRequest(0, None, asked)
            told = await ask(session, url, model, planned, clock=clock, patience=patience)
            if told.verdict != Verdict.OK:
                raise ValueError(f"embeddings of passages: {told.verdict}: {told.detail}")
            vectors += told.vectors
        _built[key] = Index(passages, vectors)
    return _built[key]


def _unit(vectors: Sequence[bytes]) -> npt.NDArray[np.float32]:
    """Return vectors as rows of length 1; one of zeros stays as it is."""
    rows = np.stack([np.frombuffer(vector, _WIRE) for vector in vectors])
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    return (rows / np.where(lengths > 0, lengths, 1.0)).astype(np.float32)


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())
