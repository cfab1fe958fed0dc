"""The latest tokens of each tenant's finished requests, which n-gram lookups may search.

SuffixDecoding (arXiv 2411.04975) keeps such requests in a tree. A corpus keeps them as texts of a
`NgramLookup`.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final, Generic

from draftgate.backends.engine.proposers.ngram_lookup import NgramLookup, TextT
from draftgate.backends.token_ids import TokenIds, compact

MAX_TENANTS: Final = 64
"""Maximum number of tenants with a corpus, which bounds the memory.

The least recently used corpus is dropped first.
"""


class Corpus(Generic[TextT]):
    """The latest tokens of one tenant, in two generations.

    The corpus adds tokens to the younger generation. A young generation with half of the limit
    becomes the older generation, and the corpus drops the previous older generation. The corpus
    therefore keeps between half and all of the limit, and no index moves or removes an entry.

    Attributes:
        generations: one or two texts, the younger first.
    """

    def __init__(self, lookup: NgramLookup[TextT], max_tokens: int) -> None:
        """Keep up to `max_tokens` tokens, at least 2."""
        self._lookup = lookup
        self._half = max(1, max_tokens // 2)
        self.generations: tuple[TextT, ...] = (lookup.index(compact(())),)

    def __len__(self) -> int:
        return sum(len(text.tokens) for text in self.generations)

    def add_text(self, tokens: TokenIds) -> None:
        """Add a text, or its end if it is too long."""
        tokens = tokens[-self._half :]
        young = self.generations[0]
        if len(young.tokens) + len(tokens) > self._half:
            self.generations = (self._lookup.index(compact(())), young)
        self.generations[0].tokens.extend(tokens)


class TenantCorpora(Generic[TextT]):
    """A corpus per tenant, so that no tenant's texts appear in drafts for other tenants."""

    def __init__(self, lookup: NgramLookup[TextT], max_tokens: int) -> None:
        """Keep up to `max_tokens` tokens for each tenant. 0 keeps no tokens."""
        self._lookup = lookup
        self._max_tokens = max_tokens
        self._by_tenant: OrderedDict[str, Corpus[TextT]] = OrderedDict()

    def add_text(self, tenant: str, tokens: TokenIds) -> None:
        """Add the text of a tenant's finished request."""
        if not self._max_tokens:
            return
        if tenant not in self._by_tenant:
            self._by_tenant[tenant] = Corpus(self._lookup, self._max_tokens)
        self._by_tenant.move_to_end(tenant)
        self._by_tenant[tenant].add_text(tokens)
        if len(self._by_tenant) > MAX_TENANTS:
            self._by_tenant.popitem(last=False)

    def texts(self, tenant: str) -> tuple[TextT, ...]:
        """Return the texts of a tenant's corpus, and mark the corpus as used."""
        corpus = self._by_tenant.get(tenant)
        if corpus is None:
            return ()
        self._by_tenant.move_to_end(tenant)
        return corpus.generations
