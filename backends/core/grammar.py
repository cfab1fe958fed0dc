"""What a worker and its scheduler need to know of grammars. Compiling is the business of others."""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Protocol

from draftgate.backends.core.drafts import Draft
from draftgate.backends.types import GrammarSpec


class Grammar(Protocol):
    """What one sequence may say, and how far it has come: a function of the tokens it has."""

    @property
    def is_complete(self) -> bool:
        """Whether what the sequence has said is whole, so that it may end."""
        ...

    def accept(self, token_id: int) -> None:
        """Go on by a token of the sequence, no end-of-sequence token.

        Behind one that the grammar does not allow, nothing but the end is allowed, and nothing is
        complete.
        """
        ...

    def legal(self, token_ids: Many[int]) -> int:
        """Return how many of these tokens may follow one after the other. Changes nothing."""
        ...

    def forced(self, max_tokens: int) -> tuple[int, ...]:
        """Return up to so many tokens that spell what must follow; often none. Changes nothing.

        Their text is certain; where masks allow other spellings, a model may choose one.
        """
        ...

    def masks(self, draft: Draft) -> list[bytes]:
        """Return what may follow the sequence, and then each token of a draft. Changes nothing.

        Args:
            draft: legal and laid out (`Draft.depth_first`).

        Returns:
            1 + len(draft) masks; bit i of byte j, the lowest first, is that of token 8 * j + i.
            Each allows something: behind an end-of-sequence token, and where nothing else can
            follow, the end-of-sequence tokens.
        """
        ...


class Grammars(Protocol):
    """Compiles grammars for one tokenizer, and remembers some. For any thread."""

    def start(self, spec: GrammarSpec) -> Grammar:
        """Return a grammar at its start. Slow the first time, microseconds while remembered.

        Raises:
            RequestRejected: it cannot be compiled: malformed, beyond what is supported, too large,
                or the model has no end-of-sequence token; `param` is that of the spec.
        """
        ...
