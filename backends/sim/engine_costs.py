"""Host costs of engines, which belong to the engine of a profile and not to its device.

A fast GPU loses more by a slow host than a cheap one, so an engine can change which GPU is the
cheapest.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

_Seconds = Annotated[float, msgspec.Meta(ge=0)]


class HostCost(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Time of the host to plan, launch and account for a step, without drafting.

    Attributes:
        step_s: seconds per step.
        sequence_s: seconds per sequence of a step.
        launches_ahead: whether a step may be launched while the previous step runs, which hides
            this time. Otherwise the device always waits for the host.
    """

    step_s: _Seconds = 0.0
    sequence_s: _Seconds = 0.0
    launches_ahead: bool = False


class EngineCost(msgspec.Struct, frozen=True):
    """The host cost of an engine and its source."""

    host: HostCost
    source: str


ENGINES: Final = {
    # 64 us with 1 sequence and 1,252 us with 256.
    "draftgate": EngineCost(
        HostCost(59e-6, 4.66e-6, launches_ahead=True),
        "host of draftgate: CPU time of greedy steps of 1 to 256 sequences on a Zen 4"
        " (bench/results/host-zen4.json)",
    ),
    "vllm": EngineCost(
        HostCost(1.21e-3, 12.7e-6, launches_ahead=True),
        "host of vllm: 1.21 ms a step (SpecDecode-Bench's fit) and 12.7 us a sequence (a profile of"
        " the scheduler of vLLM 0.27 on a CPU, openfabric-systems/simllm), hidden by asynchronous"
        " scheduling",
    ),
    # 5 ms without many sequences, and (20 ms - 5 ms) / 200 for each.
    "vllm-2024": EngineCost(
        HostCost(5e-3, 75e-6),
        "host of vllm-2024: between two steps, the GPU of vLLM 0.5 waits for 5 to 13 ms (its"
        " proposal of multi-step scheduling, July 2024), and for 20 ms with 200 sequences (a"
        " comment on its performance roadmap, August 2024)",
    ),
}
"""Engines by name, which `PROFILE@ENGINE` selects."""
