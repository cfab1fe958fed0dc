"""Speculation policies by name, including those of other packages (entry points).

The one place of `policies` that looks outside its arguments.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Final, TypeGuard

from policies.protocols import SpeculationPolicy
from policies.speculation import (
    AdaptiveVerification,
    Auto,
    Fixed,
    Off,
    SmartSpec,
    ThresholdByBatch,
)

SPECULATION_GROUP = "draftgate.policies.speculation"


def _fixed(argument: str) -> SpeculationPolicy:
    if not argument.isascii() or not argument.isdigit():
        raise ValueError(f"fixed:K needs a whole number K, as in fixed:4, not {argument!r}")
    return Fixed(int(argument))


def _threshold_by_batch(argument: str) -> SpeculationPolicy:
    if not argument:
        raise ValueError(
            "threshold_by_batch:FILE needs a JSON file of rows [first batch size, last batch size, "
            "draft tokens]"
        )
    try:
        rows = json.loads(Path(argument).read_bytes())
    except OSError as error:
        raise ValueError(f"cannot read {argument}: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{argument} is no JSON: {error}") from error
    if not _is_table(rows):
        raise ValueError(f"{argument} must hold rows of three whole numbers, as [[1, 8, 5]]")
    try:
        return ThresholdByBatch(
            f"threshold_by_batch:{argument}", tuple((row[0], row[1], row[2]) for row in rows)
        )
    except ValueError as error:
        raise ValueError(f"{argument}: {error}") from error


def _is_table(rows: object) -> TypeGuard[list[list[int]]]:
    return isinstance(rows, list) and all(
        isinstance(row, list) and len(row) == 3 and all(type(number) is int for number in row)
        for row in rows
    )


def _without_argument(
    factory: Callable[[], SpeculationPolicy],
) -> Callable[[str], SpeculationPolicy]:
    def build(argument: str) -> SpeculationPolicy:
        if argument:
            raise ValueError(f"this policy takes no argument, but got {argument!r}")
        return factory()

    return build


_BUILT_IN: dict[str, Callable[[str], SpeculationPolicy]] = {
    "off": _without_argument(Off),
    "fixed": _fixed,
    "auto": _without_argument(Auto),
    "smartspec": _without_argument(SmartSpec),
    "threshold_by_batch": _threshold_by_batch,
    "adaptive_verification": _without_argument(AdaptiveVerification),
}

_SPELT: Final = {"fixed": "fixed:K", "threshold_by_batch": "threshold_by_batch:FILE"}


def speculation_policy(spec: str) -> SpeculationPolicy:
    """Build the policy that `NAME` or `NAME:ARGUMENT` names, e.g. `auto` or `fixed:4`.

    A name that is not built in is looked up among the entry points of
    `draftgate.policies.speculation`: a factory called with the argument (empty if there is none).

    Raises:
        ValueError: no such policy, or the argument does not fit it. The message lists the names.
    """
    name, _, argument = spec.partition(":")
    if name in _BUILT_IN:
        return _BUILT_IN[name](argument)
    found = {entry.name: entry for entry in entry_points(group=SPECULATION_GROUP)}
    if name in found:
        policy: SpeculationPolicy = found[name].load()(argument)
        return policy
    known = ", ".join(sorted(_SPELT.get(one, one) for one in _BUILT_IN.keys() | found.keys()))
    raise ValueError(f"unknown speculation policy {spec!r}; known: {known}")
