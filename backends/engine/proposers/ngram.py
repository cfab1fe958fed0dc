"""Drafts by n-gram lookup: the continuations of earlier matches of a sequence's last tokens.

The method is prompt lookup (A. Saxena, 2023; "LLMA", arXiv 2304.04487) with an incremental index.
Matches that continue differently become branches of a tree, so each slot gets the likeliest
remaining token of any depth or branch.

If the sequence itself has no long match, the proposer also searches the tenant's finished requests,
if the worker keeps them (`ngram_corpus`).
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Any

from draftgate.backends.core.drafts import Draft
from draftgate.backends.core.proposer import DraftRequest
from draftgate.backends.core.sequence import Sequence
from draftgate.backends.engine.proposers.ngram_corpus import TenantCorpora
from draftgate.backends.engine.proposers.ngram_lookup import IndexedText, NgramLookup
from draftgate.backends.engine.proposers.ngram_native import native_lookup
from draftgate.backends.engine.proposers.ngram_python import PythonLookup


class NgramProposer:
    """Proposes the continuations of the longest matches of a sequence's end."""

    def __init__(self, *, corpus_tokens: int = 0, trees: bool = True, native: bool = True) -> None:
        """Create a proposer without sequences.

        Args:
            corpus_tokens: tokens of finished requests to keep for each tenant. 0 keeps none.
            trees: whether different continuations become branches. Without trees, the draft is the
                best continuation.
            native: whether to run lookups in C where C can be compiled. The drafts are the same.
        """
        found = native_lookup(trees=trees) if native else None
        self._lookup: NgramLookup[Any] = found or PythonLookup(trees=trees)
        self._texts: dict[int, IndexedText] = {}  # by sequence key
        self._keeps_texts = corpus_tokens > 0
        self._corpora: TenantCorpora[Any] = TenantCorpora(self._lookup, corpus_tokens)

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
        known = self._texts
        for request in requests:
            sequence = request.sequence
            text = known.get(sequence.key)
            if text is None or text.tokens is not sequence.token_ids:
                text = known[sequence.key] = self._lookup.index(sequence.token_ids)
            if self._keeps_texts and not sequence.request.cache_salt:
                texts.append((text, *self._corpora.texts(sequence.request.tenant)))
            else:
                texts.append((text,))
        return self._lookup.drafts(texts, [request.max_tokens for request in requests])

    def forget(self, sequence: Sequence) -> None:
        """Drop the sequence's index, and add its text to the tenant's corpus."""
        known = self._texts.pop(sequence.key, None) is not None
        if known and not sequence.request.cache_salt:
            self._corpora.add_text(sequence.request.tenant, sequence.token_ids)
