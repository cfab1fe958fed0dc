"""The models of a node's upstreams, each of which may serve others."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final

from draftgate.backends.tokenizer import Tokenizer
from draftgate.gateway.errors import ModelNotFound

MOST_NAMES: Final = 8
"""Maximum names in a message. An upstream may list hundreds of adapters."""


class UpstreamModels:
    """The models of all upstreams, by the name that clients use.

    A list stays known while its upstream does not respond. An upstream without a list, such as one
    that has not responded yet, may serve any model.
    """

    def __init__(self) -> None:
        self._upstreams: Sequence[Any] = ()  # those that have `models`
        self._own_names: dict[str, set[str]] = {}  # by alias
        self._encoding: Sequence[Any] = ()  # those of them with a tokenizer

    def watch(self, backends: Iterable[Any]) -> None:
        """Use the models of those backends that are upstreams."""
        self._upstreams = [one for one in backends if hasattr(one, "serves")]
        self._own_names = {}
        for one in self._upstreams:
            for alias, name in one.aliases.items():
                self._own_names.setdefault(alias, set()).add(name)
        self._encoding = [one for one in self._upstreams if getattr(one, "tokenizer", None)]

    def tokenizer(self, name: str) -> Tokenizer | None:
        """Return the tokenizer of a model, or None if no upstream with this model has one.

        Args:
            name: the name of the model, or empty for any.
        """
        for one in self._encoding:
            if not name or one.serves(name):
                found: Tokenizer = one.tokenizer
                return found
        return None

    @property
    def longest_context(self) -> int:
        """The longest context of the first model of each upstream in tokens, or 0 if unknown."""
        longest = 0
        for one in self._upstreams:
            tokens: int = one.card.max_model_len
            if not tokens:
                return 0
            longest = max(longest, tokens)
        return longest

    def described(self) -> dict[str, Mapping[str, Any]]:
        """Return the models, as the first upstream that has each of them describes it."""
        found: dict[str, Mapping[str, Any]] = {}
        for one in self._upstreams:
            for name, model in (one.models or {}).items():
                found.setdefault(name, model)
        return found

    def own_models(self) -> set[str]:
        """Return the own names of the models that upstreams list or have in their settings.

        Adapters are left out, which run on the servers of their models.
        """
        found: set[str] = set()
        for one in self._upstreams:
            found.update(getattr(one, "declared", ()))
            for name, model in (one.models or {}).items():
                if not model.get("parent"):
                    found.add(name)
        return found

    def names_for_errors(self) -> list[str]:
        """Return the names of some models for a message. An upstream may have hundreds."""
        return list(self.described())[:MOST_NAMES]

    def may_serve(self, name: str) -> bool:
        """Return whether an upstream lists a model, or has not sent a list."""
        for one in self._upstreams:  # noqa: SIM110 - a generator takes several times as long
            if one.serves(name):
                return True
        return False

    def is_declared(self, name: str) -> bool:
        """Return whether an upstream lists a model, or has it in its settings."""
        return any(
            name in (one.models or ()) or name in one.aliases or name in one.declared
            for one in self._upstreams
        )

    def own_names(self, name: str) -> Collection[str]:
        """Return the upstreams' own names of a model that has this alias at some of them."""
        return self._own_names.get(name, ())

    def check(self, name: str) -> None:
        """Check that an upstream may serve a model, or that the request names none.

        Raises:
            ModelNotFound: all upstreams list other models.
        """
        if name and not self.may_serve(name):
            raise ModelNotFound(name, *self.names_for_errors())
