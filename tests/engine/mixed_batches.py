"""Batches of requests in several modes, which must have the texts of each request alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many

from bench.harness.prompts import held_out_prompts
from draftgate.backends.types import GenerationRequest
from draftgate.policies.protocols import SpeculationPolicy
from draftgate.policies.registry import speculation_policy
from draftgate.policies.speculation.baselines import Off
from draftgate.policies.types import SpeculationMode
from tests.engine.harness import Engine, Model, RandomSlots, Setup, request, run

HEAD_MODES = (
    SpeculationMode.EAGLE,
    SpeculationMode.NGRAM,
    SpeculationMode.EAGLE,
    SpeculationMode.OFF,
)
"""Modes of requests to a worker with an EAGLE-3 head."""

Batching = dict[str, int]
"""Limits of a batch, by the fields of `Setup`."""


def policy_named(name: str) -> SpeculationPolicy:
    return RandomSlots(random.Random(5)) if name == "random" else speculation_policy(name)


def at_random(batchings: Iterable[Batching]) -> list[tuple[SpeculationPolicy, Batching]]:
    """Return each batching with a policy that drafts at random."""
    return [(policy_named("random"), batching) for batching in batchings]


def mixed_requests(
    model: Model, policy: SpeculationPolicy, modes: Many[SpeculationMode], num_prompts: int = 4
) -> list[GenerationRequest]:
    """Return greedy and sampled requests in turn in all modes, of which some share a prefix."""
    prompts = held_out_prompts(model.tokenizer, num_prompts, least=60, most=120)
    shared = [(*prompts[0], *prompt[:20]) for prompt in prompts]
    return [
        request(
            str(index),
            prompt,
            policy,
            mode=modes[index % len(modes)],
            temperature=(0.0, 0.9)[index // 2 % 2],
            seed=index,
            max_tokens=40,
        )
        for index, prompt in enumerate([*prompts, *shared])
    ]


def check_lossless(
    model: Model,
    modes: Many[SpeculationMode],
    batches: Iterable[tuple[SpeculationPolicy, Batching]],
    make: Callable[[SpeculationPolicy, Batching], Engine],
    num_prompts: int = 4,
) -> None:
    """Compare batches of all modes with each request alone and without drafts.

    Args:
        make: returns a worker for a policy and a batching.
    """
    alone = mixed_requests(model, Off(), modes, num_prompts)
    expected = run(model, alone, Setup(max_num_seqs=1)).tokens
    accepted = rejected = preemptions = cached = 0
    for policy, batching in batches:
        outcome = make(policy, batching).run(mixed_requests(model, policy, modes, num_prompts))
        assert outcome.tokens == expected, policy.name
        assert outcome.leaked_blocks == 0
        accepted += outcome.accepted
        rejected += outcome.rejected
        preemptions += outcome.preemptions
        cached += outcome.cached_tokens
    assert accepted > 50
    assert rejected > 50
    assert preemptions > 0
    assert cached > 0
