"""What a tenant's finished requests said, to draft from: bounded, and never another tenant's."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from collections.abc import Sequence as Many
from typing import Final

from draftgate.backends.engine.proposers.ngram_index import Match, NgramIndex

MOST_TENANTS: Final = 64
"""Tenants whose texts are kept, those asked for longest ago go first: it bounds the memory."""


class Corpus:
    """The latest tokens of one tenant, in two generations.

    Tokens are added to the younger one. Once that holds half of what is kept, it becomes the older
    one, and what was older is dropped: so between half and all of it is there, and nothing is ever
    moved or taken out of an index.
    """

    def __init__(self, most_tokens: int) -> None:
        """Keep up to `most_tokens` tokens, at least 2."""
        self._half = max(1, most_tokens // 2)
        self._generations: list[tuple[list[int], NgramIndex]] = [([], NgramIndex())]

    def __len__(self) -> int:
        """Return the tokens kept."""
        return sum(len(tokens) for tokens, _ in self._generations)

    def add(self, text: Many[int]) -> None:
        """Add a text; of one that is too long, its end."""
        text = text[-self._half :]
        if len(self._generations[0][0]) + len(text) > self._half:
            self._generations = [([], NgramIndex()), self._generations[0]]
        tokens, index = self._generations[0]
        tokens.extend(text)
        index.catch_up(tokens)

    def matches(self, behind: Many[int]) -> Iterator[tuple[Many[int], Match]]:
        """Yield where the end of a text stands in the corpus, with the tokens around it."""
        for tokens, index in self._generations:
            for match in index.matches(tokens, behind):
                yield tokens, match


class Corpora:
    """A corpus for each tenant."""

    def __init__(self, most_tokens: int) -> None:
        """Keep up to `most_tokens` tokens for each tenant; 0 keeps nothing."""
        self._most_tokens = most_tokens
        self._by_tenant: OrderedDict[str, Corpus] = OrderedDict()

    def add(self, tenant: str, text: Many[int]) -> None:
        """Keep a text of a tenant's finished request."""
        if not self._most_tokens:
            return
        if tenant not in self._by_tenant:
            self._by_tenant[tenant] = Corpus(self._most_tokens)
        self._by_tenant.move_to_end(tenant)
        self._by_tenant[tenant].add(text)
        if len(self._by_tenant) > MOST_TENANTS:
            self._by_tenant.popitem(last=False)

    def matches(self, tenant: str, behind: Many[int]) -> Iterator[tuple[Many[int], Match]]:
        """Yield where the end of a text stands in the tenant's corpus."""
        corpus = self._by_tenant.get(tenant)
        if corpus is not None:
            self._by_tenant.move_to_end(tenant)
            yield from corpus.matches(behind)
