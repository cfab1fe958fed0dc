"""Policies by name, including policies of other packages (entry points).

Only this module of `policies` reads files or package metadata.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Final, Generic, TypeVar

import msgspec

from draftgate.extensions import extensions, is_own, report_failure
from draftgate.policies.admission.bounded import Bounded, Unbounded
from draftgate.policies.admission.deadline import Deadline
from draftgate.policies.batching import FixedBudget, Slack
from draftgate.policies.guarded import GUARDS
from draftgate.policies.ordering.fair import Fair
from draftgate.policies.ordering.single import edf, fcfs
from draftgate.policies.phases.apart import OneWorker, Separate, Splitwise
from draftgate.policies.phases.auto import Cheaper
from draftgate.policies.protocols import (
    AdmissionPolicy,
    BatchingPolicy,
    OrderingPolicy,
    PhasesPolicy,
    ReschedulingPolicy,
    RoutingPolicy,
    SpeculationPolicy,
)
from draftgate.policies.rescheduling.least_time import LeastTime
from draftgate.policies.rescheduling.llumnix import Llumnix
from draftgate.policies.rescheduling.types import NoMoves
from draftgate.policies.routing.least_cost import LeastCost
from draftgate.policies.routing.scoring import (
    freest,
    least_loaded,
    power_of_two,
    prefix_affinity,
    round_robin,
    weighted,
)
from draftgate.policies.speculation.auto import Auto
from draftgate.policies.speculation.baselines import (
    Fixed,
    Off,
    ThresholdByBatch,
)

Policy = TypeVar("Policy")


def _whole_number(spelt: str, argument: str, example: str) -> int:
    if not argument.isascii() or not argument.isdigit():
        raise ValueError(f"{spelt} needs a whole number, as in {example}, not {argument!r}")
    return int(argument)


def _fixed(argument: str) -> SpeculationPolicy:
    return Fixed(_whole_number("fixed:K", argument, "fixed:4"))


def _auto(argument: str) -> SpeculationPolicy:
    if argument not in {"", "unweighted"}:
        raise ValueError(f"auto takes no argument but `unweighted`, not {argument!r}")
    return Auto(name="auto:unweighted", weighted=False) if argument else Auto()


def _threshold_by_batch(argument: str) -> SpeculationPolicy:
    if not argument:
        raise ValueError(
            "threshold_by_batch:FILE needs a JSON file of rows [first batch size, last batch size, "
            "draft tokens]"
        )
    try:
        rows = msgspec.json.decode(Path(argument).read_bytes(), type=list[tuple[int, int, int]])
        return ThresholdByBatch(f"threshold_by_batch:{Path(argument).name}", tuple(rows))
    except OSError as error:
        raise ValueError(f"cannot read {argument}: {error.strerror}") from error
    except msgspec.ValidationError as error:
        expected = "rows of three whole numbers, as [[1, 8, 5]]"
        raise ValueError(f"{argument} must hold {expected}: {error}") from error
    except msgspec.DecodeError as error:
        raise ValueError(f"{argument} is not JSON: {error}") from error
    except ValueError as error:
        raise ValueError(f"{argument}: {error}") from error


def _fixed_budget(argument: str) -> BatchingPolicy:
    return FixedBudget(_whole_number("fixed:TOKENS", argument, "fixed:512"))


def _slack(argument: str) -> BatchingPolicy:
    try:
        return Slack(float(argument)) if argument else Slack()
    except ValueError as error:
        raise ValueError(f"slack:TARGETS needs a positive number, not {argument!r}") from error


def _least_cost(argument: str) -> RoutingPolicy:
    if argument not in {"", "undrafted"}:
        raise ValueError(f"least_cost takes no argument but `undrafted`, not {argument!r}")
    return LeastCost("least_cost:undrafted", drafts=False) if argument else LeastCost()


def _llumnix(argument: str) -> ReschedulingPolicy:
    if not argument:
        return Llumnix()
    try:
        low, high = map(float, argument.split(","))
    except ValueError:
        raise ValueError(
            f"llumnix:LOW,HIGH needs two numbers of steps, as in llumnix:10,60, not {argument!r}"
        ) from None
    return Llumnix(f"llumnix:{argument}", low, high)


def without_argument(factory: Callable[[], Policy]) -> Callable[[str], Policy]:
    """Return a factory for the registry that refuses an argument."""

    def build(argument: str) -> Policy:
        if argument:
            raise ValueError(f"this policy takes no argument, but got {argument!r}")
        return factory()

    return build


class _Family(Generic[Policy]):
    """Policies of one kind, which entry points of `draftgate.policies.KIND` extend.

    An entry point is a factory that takes the argument of the name, or "" without one. Policies of
    other packages are guarded (`policies.guarded`).
    """

    def __init__(
        self,
        kind: str,
        plain: Mapping[str, Callable[[], Policy]],
        with_argument: Mapping[str, Callable[[str], Policy]] = MappingProxyType({}),
    ) -> None:
        """Name the built-in policies.

        Args:
            kind: kind of the policies, for example "speculation".
            plain: factories of policies without an argument.
            with_argument: factories by name and notation of the argument, as in `fixed:K`.
        """
        self._kind = kind
        self._built_in = {name: without_argument(factory) for name, factory in plain.items()}
        self._notations = {re.split(r"\W", text)[0]: text for text in with_argument}
        self._built_in |= dict(zip(self._notations, with_argument.values(), strict=True))

    def build(self, spec: str, also: Sequence[str] = ()) -> Policy:
        """Return the policy for `NAME` or `NAME:ARGUMENT`.

        Args:
            also: further names that the caller accepts, for the message about an unknown policy.

        Raises:
            ValueError: the argument is invalid, or the policy is unknown (the message lists the
                names).
        """
        name, _, argument = spec.partition(":")
        if name in self._built_in:
            return self._built_in[name](argument)
        found = extensions(f"draftgate.policies.{self._kind}")
        if name in found:
            try:
                policy: Policy = found[name].load()(argument)
                return policy if is_own(found[name]) else self._guarded(policy, spec)
            except (Exception, SystemExit) as error:  # code of other packages may raise anything
                words = error if isinstance(error, ImportError | ValueError) else repr(error)
                raise ValueError(f"{self._kind} policy {spec!r}: {words}") from error
        names = sorted(self._built_in.keys() | found.keys() | set(also))
        known = ", ".join(self._notations.get(one, one) for one in names)
        raise ValueError(f"unknown {self._kind} policy {spec!r}; known: {known}")

    def _guarded(self, policy: Policy, spec: str) -> Policy:
        what = f"{self._kind} policy {spec}"
        guarded: Policy = GUARDS[self._kind](policy, partial(report_failure, what))
        return guarded


speculation_policy: Final = _Family[SpeculationPolicy](
    "speculation",
    {"off": Off},
    {"auto[:unweighted]": _auto, "fixed:K": _fixed, "threshold_by_batch:FILE": _threshold_by_batch},
).build
"""Returns the policy for a name such as `auto` or `fixed:4`."""

batching_policy: Final = _Family[BatchingPolicy](
    "batching", {}, {"slack[:TARGETS]": _slack, "fixed:TOKENS": _fixed_budget}
).build
"""Returns the batching policy for a name such as `slack` or `fixed:512`."""

ordering_policy: Final = _Family[OrderingPolicy](
    "ordering", {"fair": Fair, "fcfs": fcfs, "edf": edf}
).build
"""Returns a new, empty queue for a policy name such as `fair`."""

admission_policy: Final = _Family[AdmissionPolicy](
    "admission", {"deadline": Deadline, "bounded": Bounded, "none": Unbounded}
).build
"""Returns the admission policy for a name such as `deadline`."""

_ROUTING: Final = _Family[RoutingPolicy](
    "routing",
    {
        "freeness": freest,
        "least_loaded": least_loaded,
        "prefix_affinity": prefix_affinity,
        "power_of_two": power_of_two,
        "round_robin": round_robin,
    },
    {"least_cost[:undrafted]": _least_cost, "weighted:SCORER=WEIGHT,...": weighted},
)

rescheduling_policy: Final = _Family[ReschedulingPolicy](
    "rescheduling", {"off": NoMoves, "least_time": LeastTime}, {"llumnix[:LOW,HIGH]": _llumnix}
).build
"""Returns the rescheduling policy for a name such as `llumnix` or `least_time`."""

phases_policy: Final = _Family[PhasesPolicy](
    "phases", {"together": OneWorker, "apart": Separate, "splitwise": Splitwise, "auto": Cheaper}
).build
"""Returns the phases policy for a name such as `apart` or `auto`."""


def routing_policy(spec: str) -> RoutingPolicy:
    """Return a new routing policy for a name such as `least_cost` or `weighted:prefix=2,load=1`.

    Each gateway needs its own policy, because policies remember their placements.
    """
    name, colon, argument = spec.partition(":")
    if name == "price":  # the name of `least_cost` in 0.1.0
        name = "least_cost"
    return _ROUTING.build(f"{name}{colon}{argument}")
