"""What a simulated worker believes of its device before it has measured anything."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from draftgate.backends.sim.profile import DraftCost, Profile
from draftgate.policies.costs.step_cost import StepCost


def misjudged(profile: Profile, error: float, seed: int) -> Profile:
    """Return what a worker believes at first: each figure too large or too small by that share.

    The first bucket of a table and what comes on top of it are off independently, each with a sign
    of its own, and so are reading, pairs, sequences and each proposer's drafting.

    Args:
        error: the share, at least 0 and less than 1.
        seed: of the signs.

    Raises:
        ValueError: the share is out of range.
    """
    if not 0.0 <= error < 1.0:
        raise ValueError(f"the error of what is believed must be in [0, 1), not {error}")
    random = Random(seed)

    def off() -> float:
        return 1.0 + error * (1 if random.random() < 0.5 else -1)

    def table(steps: tuple[float, ...]) -> tuple[float, ...]:
        first, rest = off(), off()
        return tuple(steps[0] * first + (step_s - steps[0]) * rest for step_s in steps)

    def cost(true: StepCost) -> StepCost:
        return StepCost(
            true.token_buckets,
            table(true.step_s),
            true.kv_token_s * off(),
            true.sequence_s * off(),
            true.pair_s * off(),
        )

    believed = cost(profile.cost)
    draft = {
        name: DraftCost(cost(told.depths), told.call_s * off())
        for name, told in sorted(profile.draft.items())
    }
    return replace(profile, cost=believed, draft=draft)
