"""Costs of a run as a `profile/1`, from which the simulator predicts step times."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

from bench.engine.models import Model
from draftgate.backends.checkpoints import SHIPPED_MODEL, SHIPPED_MODEL_ID
from draftgate.backends.core.proposer import Proposer
from draftgate.backends.engine.warmup import DEPTH_BUCKETS
from draftgate.policies.costs.step_cost import StepCost


def profile_of(
    facts: dict[str, Any], model: Model, cost: StepCost, drafts: dict[str, Any]
) -> dict[str, Any]:
    """Return the profile of a model.

    Args:
        facts: provenance of the run.
        cost: step costs of the worker.
        drafts: result of `draft_costs`.
    """
    source = (
        f"measured: {facts['command']}, commit {facts['commit']}, {facts['date']}, "
        f"torch {facts['torch']}, {facts['threads']} threads"
    )
    return {
        "device": facts["device"],
        "model": SHIPPED_MODEL_ID if model.directory == SHIPPED_MODEL else model.name,
        "dtype": str(model.dtype).removeprefix("torch."),
        "source": source + (", machine disturbed" if facts["disturbed"] else ""),
        "token_buckets": cost.token_buckets,
        "step_s": [round(seconds, 7) for seconds in without_pairs(cost)],
        "kv_token_s": round(cost.kv_token_s, 12),
        "sequence_s": round(cost.sequence_s, 9),
        "prefill_attention_s": round(cost.pair_s, 13),
        "sample_s": round(cost.sample_s, 9),
        "draft": drafts,
        "kv_token_bytes": model.config.kv_bytes_per_token(model.dtype.itemsize),
    }


def without_pairs(cost: StepCost) -> list[float]:
    """Return the step table without attention between the tokens of a step.

    The timed tokens belonged to a single sequence, so each token attended to all earlier tokens.
    The simulator charges the pairs of a prefill separately, and decode steps have no such pairs.
    """
    bare = (
        max(step_s - cost.pair_s * tokens * (tokens + 1) / 2, 0.0)
        for tokens, step_s in zip(cost.token_buckets, cost.step_s, strict=True)
    )
    return list(accumulate(bare, max))


def draft_costs(proposers: dict[str, Proposer]) -> dict[str, Any]:
    """Return the seconds per depth by number of sequences, for proposers that run a model."""
    return {
        name: {
            "sequences": list(DEPTH_BUCKETS),
            "depth_s": [round(proposer.depth_s(count), 7) for count in DEPTH_BUCKETS],
        }
        for name, proposer in proposers.items()
        if proposer.depth_s(1) > 0.0
    }
