"""Outputs of finished requests, which n-gram lookups of the same owner may search.

SuffixDecoding (arXiv 2411.04975) keeps such outputs in a tree. A corpus keeps them as texts of a
`NgramLookup`. An owner is a tenant with a `cache_salt` and an adapter, as for cached prefixes. No
owner finds texts of another owner, so a draft reveals nothing about them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Final, Generic

from draftgate.backends.engine.proposers.ngram_lookup import NgramLookup, TextT
from draftgate.backends.token_ids import TokenIds, compact

IDLE_S: Final = 3600.0
"""Seconds after which an unused corpus is dropped. Idle tenants would otherwise take the memory of
active ones. This time does not depend on other owners, so it reveals nothing about them."""

_LEAST_TOKENS: Final = 64
"""Length below which the rest of a corpus is dropped whole."""

OWNER_BYTES: Final = 1024
"""Bound on the memory of a corpus without texts, apart from the name of its owner."""


class Corpus(Generic[TextT]):
    """The latest tokens of one owner, in at most two generations.

    The corpus adds tokens to the younger generation. A young generation at its limit becomes the
    older generation, and the corpus drops the previous older generation. No index ever moves or
    removes an entry.

    Attributes:
        tenant: tenant of the owner.
        generations: up to two texts, the younger first.
        size_bytes: bound on the memory of the corpus.
        used_s: time of its last use.
    """

    def __init__(self, tenant: str, owner: str, lookup: NgramLookup[TextT]) -> None:
        self.tenant = tenant
        self.generations: tuple[TextT, ...] = ()
        self.used_s = 0.0
        self._lookup = lookup
        self._own_bytes = self.size_bytes = OWNER_BYTES + 8 * len(owner)

    def add_text(self, tokens: TokenIds, max_tokens: int) -> None:
        """Add a text, or its end if it is too long.

        Args:
            max_tokens: limit of a generation.
        """
        tokens = tokens[-max_tokens:]
        if not self.generations:
            self.generations = (self._lookup.index(compact(())),)
        elif len(self.generations[0].tokens) + len(tokens) > max_tokens:
            self.generations = (self._lookup.index(compact(())), self.generations[0])
        self.generations[0].tokens.extend(tokens)
        self._count_bytes()

    def drop_oldest(self) -> None:
        """Drop the older generation, or the earlier half of the only one."""
        young = self.generations[0]
        if len(self.generations) > 1:
            self.generations = (young,)
        else:
            kept = young.tokens[len(young.tokens) // 2 :]
            self.generations = (self._lookup.index(kept),) if len(kept) >= _LEAST_TOKENS else ()
        self._count_bytes()

    def _count_bytes(self) -> None:
        text_bytes = self._lookup.text_bytes
        texts = sum([text_bytes(len(text.tokens)) for text in self.generations])
        self.size_bytes = self._own_bytes + texts


class Corpora(Generic[TextT]):
    """A corpus for each owner, within a bound on their memory.

    If the memory is full, the tenant with the most of it gives up the oldest texts of its least
    recently used corpus. So a tenant with less than its fair share, the bound over the number of
    tenants, never loses a text because of another tenant.

    Attributes:
        size_bytes: bound on the memory of all corpora.
    """

    def __init__(
        self, lookup: NgramLookup[TextT], max_bytes: int, clock: Callable[[], float]
    ) -> None:
        """Keep corpora in up to `max_bytes`, by the seconds of a clock. 0 keeps none."""
        self.size_bytes = 0
        self._lookup = lookup
        self._max_bytes = max_bytes
        self._clock = clock
        self._by_owner: OrderedDict[str, Corpus[TextT]] = OrderedDict()  # by their last use
        self._tenant_bytes: dict[str, int] = {}
        # The longest generation of which two fit into the memory, as a power of two, so that its
        # index has no unused space.
        most = 1
        while 2 * lookup.text_bytes(2 * most) <= max_bytes:
            most *= 2
        self._max_tokens = most

    def use(self, tenant: str, owner: str) -> Corpus[TextT] | None:
        """Return the corpus of an owner, now the last used one, or None if none fits."""
        now_s = self._clock()
        while self._by_owner:
            oldest = next(iter(self._by_owner))
            if now_s - self._by_owner[oldest].used_s < IDLE_S:
                break
            self._drop(oldest)
        corpus = self._by_owner.get(owner)
        if corpus is None:
            corpus = self._by_owner[owner] = Corpus(tenant, owner, self._lookup)
            self._add_bytes(tenant, corpus.size_bytes)
        self._by_owner.move_to_end(owner)
        corpus.used_s = now_s
        self._make_room()
        return self._by_owner.get(owner)

    def add_text(self, tenant: str, owner: str, tokens: TokenIds) -> None:
        """Add the text of a finished request."""
        corpus = self.use(tenant, owner)
        if corpus is not None:
            before = corpus.size_bytes
            corpus.add_text(tokens, self._max_tokens)
            self._add_bytes(tenant, corpus.size_bytes - before)
            self._make_room()

    def _make_room(self) -> None:
        """Drop the oldest texts of the tenant with the most memory until all corpora fit."""
        while self.size_bytes > self._max_bytes:
            tenant = max(self._tenant_bytes, key=self._tenant_bytes.__getitem__)
            owner = next(name for name, one in self._by_owner.items() if one.tenant == tenant)
            corpus = self._by_owner[owner]
            before = corpus.size_bytes
            if corpus.generations:
                corpus.drop_oldest()
                self._add_bytes(tenant, corpus.size_bytes - before)
            if not corpus.generations:
                self._drop(owner)

    def _drop(self, owner: str) -> None:
        corpus = self._by_owner.pop(owner)
        self._add_bytes(corpus.tenant, -corpus.size_bytes)
        # A running sequence may still search it.
        corpus.generations = ()

    def _add_bytes(self, tenant: str, size: int) -> None:
        self.size_bytes += size
        left = self._tenant_bytes.get(tenant, 0) + size
        if left:
            self._tenant_bytes[tenant] = left
        else:
            self._tenant_bytes.pop(tenant, None)
