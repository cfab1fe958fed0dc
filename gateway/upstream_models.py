"""The models of a node's upstreams, which must be the same, because any of them may get a request.

At the start, different lists are a configuration error. Later, an upstream may come up with other
models, or change them. It is then excluded while it lacks a model of the others. Further models,
such as adapters that are being loaded on one upstream after another, are no reason.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any, Final

from draftgate.gateway.errors import ModelNotFound
from draftgate.gateway.logs import log

_MOST_NAMES: Final = 8
"""Maximum names in a message. An upstream may list hundreds of adapters."""


class UpstreamModels:
    """The names that all upstreams list, and the exclusion of upstreams that lack one.

    Upstreams without a list are not compared. A list stays known while its upstream does not
    respond.
    """

    def __init__(self) -> None:
        self._upstreams: Sequence[Any] = ()  # those that have `models`, `excluded`, ...
        self._common: frozenset[str] = frozenset()

    def watch(self, backends: Iterable[Any]) -> None:
        """Compare the started upstreams now, and after each change of a list.

        Raises:
            ValueError: two upstreams list different models.
        """
        self._upstreams = [one for one in backends if hasattr(one, "models_changed")]
        lists = {one.models: one for one in self._upstreams if one.models is not None}
        if len(lists) > 1:
            shown = "; ".join(
                f"{one.card.root} lists {_shown(one.models)}" for one in lists.values()
            )
            raise ValueError(
                f"the upstreams serve different models: {shown}. Start a gateway for each of them"
            )
        for one in self._upstreams:
            one.models_changed = self._compare
        self._compare()

    def check(self, name: str | None) -> None:
        """Check that no upstream lacks a model that another upstream lists.

        Names that no upstream lists are left to the upstreams, because some accept any name.

        Raises:
            ModelNotFound: an upstream lacks the model.
        """
        if name is None or name in self._common:
            return
        lists = [one.models for one in self._upstreams if one.models is not None]
        has = [name in models for models in lists if self._common <= models]
        if any(has) and not all(has):
            raise ModelNotFound(name, *sorted(self._common)[:_MOST_NAMES])

    def _compare(self) -> None:
        lists = [one.models for one in self._upstreams if one.models is not None]
        # If all upstreams have been replaced by others with one list, that list counts.
        if lists and not any(self._common <= models for models in lists) and len(set(lists)) == 1:
            log(logging.WARNING, "all upstreams serve other models", models=_shown(lists[0]))
            self._common = lists[0]
        if lists and not self._common:
            self._common = lists[0]
        for one in self._upstreams:
            missing = frozenset() if one.models is None else self._common - one.models
            one.excluded = None
            if missing:
                lists_and_lacks = f"it lists {_shown(one.models)} and lacks {_shown(missing)}"
                one.excluded = f"the other upstreams serve other models: {lists_and_lacks}"


def _shown(names: Iterable[str]) -> str:
    listed = sorted(names)
    more = len(listed) - _MOST_NAMES
    return ", ".join(listed[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
