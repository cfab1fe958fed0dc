"""Policies by name, including policies of other packages (entry points).

Only this module of `policies` reads files or package metadata.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Generic, TypeVar

import msgspec

from draftgate.extensions import extensions
from draftgate.policies.admission.bounded import Bounded, Unbounded
from draftgate.policies.admission.deadline import Deadline
from draftgate.policies.batching import FixedBudget, Slack
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


@dataclass(frozen=True, slots=True)
class _Family(Generic[Policy]):
    """Policies of one kind, which entry points of `draftgate.policies.KIND` extend.

    Attributes:
        kind: kind of the policies, for example "speculation".
        built_in: factories by name, each called with the argument of the name, or "" without one.
        arguments: notation of each policy's argument in messages, by name.
    """

    kind: str
    built_in: Mapping[str, Callable[[str], Policy]]
    arguments: Mapping[str, str]

    def build(self, spec: str) -> Policy:
        name, _, argument = spec.partition(":")
        if name in self.built_in:
            return self.built_in[name](argument)
        found = extensions(f"draftgate.policies.{self.kind}")
        if name in found:
            policy: Policy = found[name].load()(argument)
            return policy
        names = sorted(self.built_in.keys() | found.keys())
        known = ", ".join(one + self.arguments.get(one, "") for one in names)
        raise ValueError(f"unknown {self.kind} policy {spec!r}; known: {known}")


_SPECULATION: Final[_Family[SpeculationPolicy]] = _Family(
    "speculation",
    {
        "off": without_argument(Off),
        "fixed": _fixed,
        "auto": _auto,
        "threshold_by_batch": _threshold_by_batch,
    },
    {"auto": "[:unweighted]", "fixed": ":K", "threshold_by_batch": ":FILE"},
)

_BATCHING: Final[_Family[BatchingPolicy]] = _Family(
    "batching",
    {
        "slack": without_argument(Slack),
        "fixed": _fixed_budget,
    },
    {"fixed": ":TOKENS"},
)

_ORDERING: Final[_Family[OrderingPolicy]] = _Family(
    "ordering",
    {
        "fair": without_argument(Fair),
        "fcfs": without_argument(fcfs),
        "edf": without_argument(edf),
    },
    {},
)

_ADMISSION: Final[_Family[AdmissionPolicy]] = _Family(
    "admission",
    {
        "deadline": without_argument(Deadline),
        "bounded": without_argument(Bounded),
        "none": without_argument(Unbounded),
    },
    {},
)

_ROUTING: Final[_Family[RoutingPolicy]] = _Family(
    "routing",
    {
        "least_cost": _least_cost,
        "least_loaded": without_argument(least_loaded),
        "prefix_affinity": without_argument(prefix_affinity),
        "power_of_two": without_argument(power_of_two),
        "round_robin": without_argument(round_robin),
        "weighted": weighted,
    },
    {"least_cost": "[:undrafted]", "weighted": ":SCORER=WEIGHT,..."},
)


_RESCHEDULING: Final[_Family[ReschedulingPolicy]] = _Family(
    "rescheduling",
    {
        "off": without_argument(NoMoves),
        "llumnix": _llumnix,
        "least_time": without_argument(LeastTime),
    },
    {"llumnix": "[:LOW,HIGH]"},
)

_PHASES: Final[_Family[PhasesPolicy]] = _Family(
    "phases",
    {
        "together": without_argument(OneWorker),
        "apart": without_argument(Separate),
        "splitwise": without_argument(Splitwise),
        "auto": without_argument(Cheaper),
    },
    {},
)


def speculation_policy(spec: str) -> SpeculationPolicy:
    """Return the policy for `NAME` or `NAME:ARGUMENT`, such as `auto` or `fixed:4`.

    Other packages add policies with entry points in the group `draftgate.policies.speculation`. An
    entry point is a factory that takes the argument ("" without one).

    Raises:
        ValueError: the argument is invalid, or the policy is unknown (the message lists the names).
    """
    return _SPECULATION.build(spec)


def batching_policy(spec: str) -> BatchingPolicy:
    """Return the batching policy for a name such as `slack` or `fixed:512`."""
    return _BATCHING.build(spec)


def ordering_policy(spec: str) -> OrderingPolicy:
    """Return a new, empty queue for a policy name such as `fair`."""
    return _ORDERING.build(spec)


def admission_policy(spec: str) -> AdmissionPolicy:
    """Return the admission policy for a name such as `deadline`."""
    return _ADMISSION.build(spec)


def routing_policy(spec: str) -> RoutingPolicy:
    """Return a new routing policy for a name such as `least_cost` or `weighted:prefix=2,load=1`.

    Each gateway needs its own policy, because policies remember their placements.
    """
    name, colon, argument = spec.partition(":")
    if name == "price":  # the name of `least_cost` in 0.1.0
        name = "least_cost"
    return _ROUTING.build(f"{name}{colon}{argument}")


def rescheduling_policy(spec: str) -> ReschedulingPolicy:
    """Return the rescheduling policy for a name such as `llumnix` or `least_time`."""
    return _RESCHEDULING.build(spec)


def phases_policy(spec: str) -> PhasesPolicy:
    """Return the phases policy for a name such as `apart` or `auto`."""
    return _PHASES.build(spec)
