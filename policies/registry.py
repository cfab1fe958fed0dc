"""Speculation policies by name, including those of other packages (entry points).

The one place of `policies` that looks outside its arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points

from policies.protocols import SpeculationPolicy
from policies.speculation import Auto, Fixed, Off

SPECULATION_GROUP = "draftgate.policies.speculation"


def _fixed(argument: str) -> SpeculationPolicy:
    if not argument.isascii() or not argument.isdigit():
        raise ValueError(f"fixed:K needs a whole number K, as in fixed:4, not {argument!r}")
    return Fixed(int(argument))


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
}


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
    known = ", ".join(sorted({"off", "fixed:K", "auto"} | (set(found) - set(_BUILT_IN))))
    raise ValueError(f"unknown speculation policy {spec!r}; known: {known}")
