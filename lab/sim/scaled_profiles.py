"""Profiles of slower devices, and profiles in which a worker believes wrongly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

from draftgate.backends.sim.profile import DraftCost, HostCost, Profile
from draftgate.policies.costs.step_cost import StepCost


def slowed(profile: Profile, times: float) -> Profile:
    """Return the profile of a device whose times are all `times` as long."""
    if times == 1.0:
        return profile
    return replace(_scaled(profile, lambda: times), name=f"{profile.name} x {times:g}")


def misjudged(profile: Profile, error: float, seed: int) -> Profile:
    """Return the initial belief of a worker, in which every value is wrong by a share.

    Each value has its own sign. In a table, the first bucket and the increase over it are wrong
    independently.

    Args:
        error: share, at least 0 and less than 1.
        seed: seed of the signs.

    Raises:
        ValueError: the share is out of range.
    """
    if not 0.0 <= error < 1.0:
        raise ValueError(f"the belief error must be at least 0 and less than 1, not {error}")
    random = Random(seed)
    return _scaled(profile, lambda: 1.0 + error * (1 if random.random() < 0.5 else -1))


def _scaled(profile: Profile, factor: Callable[[], float]) -> Profile:
    """Return the profile with each value multiplied by a factor of its own."""

    def table(steps: tuple[float, ...]) -> tuple[float, ...]:
        first, rest = factor(), factor()
        return tuple(steps[0] * first + (step_s - steps[0]) * rest for step_s in steps)

    def cost(true: StepCost) -> StepCost:
        return StepCost(
            true.token_buckets,
            table(true.step_s),
            true.kv_token_s * factor(),
            true.sequence_s * factor(),
            true.pair_s * factor(),
            # Most profiles lack this value, and their signs must not depend on it.
            true.sample_s * factor() if true.sample_s else 0.0,
        )

    scaled = cost(profile.cost)
    draft = {
        name: DraftCost(cost(true.depths), true.call_s * factor(), true.sequence_s * factor())
        for name, true in sorted(profile.draft.items())
    }
    true_host = profile.host
    host = HostCost(
        true_host.step_s * factor(), true_host.sequence_s * factor(), true_host.launches_ahead
    )
    return replace(profile, cost=scaled, draft=draft, host=host)
