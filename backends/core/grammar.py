"""The interface of grammars, which `backends.grammar` compiles."""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Protocol

from draftgate.backends.core.drafts import Draft
from draftgate.backends.types import GrammarSpec


class Grammar(Protocol):
    """The constraint on the output of a sequence.

    The state is a function of the tokens so far.
    """

    def accept(self, token_id: int) -> None:
        """Advance by a token of the sequence other than an end-of-sequence token.

        After a token that the grammar forbids, only the end is allowed, and the output is never
        complete.
        """
        ...

    def legal(self, token_ids: Many[int]) -> int:
        """Return the length of the longest prefix that the grammar allows, without advancing."""
        ...

    def forced(self, max_tokens: int) -> tuple[int, ...]:
        """Return up to `max_tokens` tokens that spell the text which must follow, often none.

        The method does not change the state. The text is certain, but a model may choose another
        tokenization of the text if the masks allow it.
        """
        ...

    def masks(self, draft: Draft) -> list[bytes]:
        """Return the allowed tokens after the sequence and after each token of a draft.

        The method does not change the state.

        Args:
            draft: a legal draft, in the order of `Draft.depth_first`.

        Returns:
            1 + len(draft) masks. Bit i of byte j, lowest first, represents token 8 * j + i. Each
            mask allows at least one token. It allows the end-of-sequence tokens if no other token
            can follow, and after an end-of-sequence token.
        """
        ...


class Grammars(Protocol):
    """Compiles and caches grammars for one tokenizer. The object is thread-safe."""

    def start(self, spec: GrammarSpec) -> Grammar:
        """Return a grammar in its initial state.

        The call takes microseconds for a cached grammar and much longer for a new grammar.

        Raises:
            RequestRejected: the grammar is malformed, unsupported or too large, or the model has no
                end-of-sequence token. `param` is the parameter of the spec.
        """
        ...


def token_mask(token_ids: Many[int]) -> bytes:
    """Return a mask, in the form of `Grammar.masks`, that allows these tokens and no others.

    The result is empty for no tokens.
    """
    if not token_ids:
        return b""
    mask = bytearray(4 * -(-(max(token_ids) + 1) // 32))  # whole words
    for token in token_ids:
        mask[token >> 3] |= 1 << (token & 7)
    return bytes(mask)
