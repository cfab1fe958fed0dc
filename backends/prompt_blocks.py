"""The tokens of a request's prompt, as the chains of blocks by which caches know it."""

from __future__ import annotations

from collections.abc import Sequence

from draftgate.backends.core.prefix_cache import extend_chain


class PromptBlocks:
    """The prompt of a forwarded request, with hashes of its blocks for any block size.

    Attributes:
        token_ids: the tokens of the prompt, as the server will compute them.
        tokenizer: the object that encoded them. Servers with another tokenizer have other tokens.
        salt: the `cache_salt` of the request, or empty. Servers share blocks only within a salt.
    """

    __slots__ = ("_chains", "salt", "token_ids", "tokenizer")

    def __init__(self, token_ids: Sequence[int], tokenizer: object, salt: str = "") -> None:
        self.token_ids = token_ids
        self.tokenizer = tokenizer
        self.salt = salt
        self._chains: dict[tuple[str, int], list[bytes]] = {}

    def hashes(self, adapter: str, block_tokens: int) -> Sequence[bytes]:
        """Return the hashes of the prompt's full blocks, which are computed once.

        Args:
            adapter: name of the LoRA adapter that computes the prompt, or empty.
        """
        found = self._chains.get((adapter, block_tokens))
        if found is None:
            found = self._chains[adapter, block_tokens] = []
            owner = chain_owner(adapter, self.salt)
            extend_chain(found, owner, self.token_ids, block_tokens)
        return found


def chain_owner(adapter: str, salt: str) -> str:
    """Return the owner of a chain of blocks (`extend_chain`), where no two pairs are equal."""
    return f"{len(adapter)} {adapter}{salt}"
