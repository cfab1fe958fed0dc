"""Drafts by n-gram lookup: the continuations of earlier matches of a sequence's last tokens.

The method is prompt lookup (A. Saxena, 2023; "LLMA", arXiv 2304.04487) with an incremental index.
Matches that continue differently become branches of a tree, so each slot gets the likeliest
remaining token of any depth or branch.

If the sequence itself has no long match, the proposer also searches the outputs of finished
requests of the same owner (`ngram_corpus`). Earlier turns of a conversation are part of the prompt,
so the sequence itself contains them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Many
from typing import Any, Final, NamedTuple

from draftgate.backends.core.drafts import Draft
from draftgate.backends.core.proposer import DraftRequest
from draftgate.backends.core.sequence import Sequence
from draftgate.backends.engine.proposers.ngram_corpus import Corpora, Corpus
from draftgate.backends.engine.proposers.ngram_lookup import IndexedText, NgramLookup
from draftgate.backends.engine.proposers.ngram_native import native_lookup
from draftgate.backends.engine.proposers.ngram_python import PythonLookup

CONTEXT_TOKENS: Final = 32
"""Tokens of the prompt that a corpus keeps before the output.

The first tokens of another output can match only with these. With the whole prompt, 60 calls of
functions by SmolLM2 take 4.25 tokens per step in place of 4.46, and more memory (2026-11-28).
"""


class _Live(NamedTuple):
    """What the proposer keeps of a running sequence.

    Attributes:
        text: the tokens of the sequence.
        corpus: corpus of the owner, or None if the sequence neither reads nor feeds one.
    """

    text: IndexedText
    corpus: Corpus[Any] | None


class NgramProposer:
    """Proposes the continuations of the longest matches of a sequence's end."""

    def __init__(
        self,
        *,
        corpus_bytes: int = 0,
        trees: bool = True,
        native: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create a proposer without sequences.

        Args:
            corpus_bytes: maximum memory of all corpora with their indexes. 0 keeps none.
            trees: whether different continuations become branches. Without trees, the draft is the
                best continuation.
            native: whether to run lookups in C where C can be compiled. The drafts are the same.
            clock: returns the seconds by which an unused corpus ages.
        """
        found = native_lookup(trees=trees) if native else None
        self._lookup: NgramLookup[Any] = found or PythonLookup(trees=trees)
        self._live: dict[int, _Live] = {}  # by sequence key
        self._corpora: Corpora[Any] | None = None
        if corpus_bytes:
            self._corpora = Corpora(self._lookup, corpus_bytes, clock)

    def depth_s(self, sequences: int) -> float:
        """Return 0, because a lookup needs no forward pass."""
        return 0.0

    def catch_up_s(self, sequence: Sequence) -> float:
        """Return 0, because indexing new tokens takes microseconds."""
        return 0.0

    def propose(self, requests: Many[DraftRequest]) -> list[Draft]:
        """Return the continuations of each sequence's matches.

        Without a match, the draft is empty.
        """
        texts: list[tuple[IndexedText, ...]] = []
        known = self._live
        for request in requests:
            sequence = request.sequence
            live = known.get(sequence.key)
            if live is None or live.text.tokens is not sequence.token_ids:
                live = known[sequence.key] = self._begin(sequence)
            text, corpus = live
            texts.append((text,) if corpus is None else (text, *corpus.generations))
        return self._lookup.drafts(texts, [request.max_tokens for request in requests])

    def forget(self, sequence: Sequence) -> None:
        """Drop the sequence's index, and add its output to the corpus of its owner."""
        live = self._live.pop(sequence.key, None)
        if live is not None and live.corpus is not None and self._corpora is not None:
            begin = max(0, sequence.prompt_tokens - CONTEXT_TOKENS)
            request = sequence.request
            output = sequence.token_ids[begin:]
            self._corpora.add_text(request.tenant, request.cache_owner, output)

    def _begin(self, sequence: Sequence) -> _Live:
        request, corpora = sequence.request, self._corpora
        corpus = None
        if corpora is not None and request.corpus:
            corpus = corpora.use(request.tenant, request.cache_owner)
        return _Live(self._lookup.index(sequence.token_ids), corpus)
