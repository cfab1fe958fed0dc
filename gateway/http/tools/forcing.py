"""Calls that a client insists on: the form by which nothing else can be written."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from draftgate.backends.call_form import CallForm, FunctionForm
from draftgate.backends.types import GrammarKind, GrammarSpec
from draftgate.gateway.http.tools.dialects import Dialect


def calls_grammar(
    dialect: Dialect, functions: Mapping[str, Mapping[str, Any]], *, several: bool
) -> GrammarSpec:
    """Return the grammar of an answer that is calls alone, each with arguments of its schema.

    Args:
        functions: schemas of arguments by name; objects.
        several: whether there may be more than one call, where the dialect knows that.
    """
    form = CallForm(
        tuple(
            FunctionForm(
                f'{{"name": {json.dumps(name)}, "{dialect.arguments}": ', dict(schema), "}"
            )
            for name, schema in functions.items()
        ),
        dialect.opened,
        dialect.between if several else None,
        dialect.closed,
        dialect.markers,
    )
    return GrammarSpec(GrammarKind.CALLS, msgspec.json.encode(form).decode())
