"""Proposers, draft decisions, batches and memory do not change a token."""

from __future__ import annotations

import random
from collections.abc import Iterable
from functools import cache

import pytest

from bench.harness.prompts import held_out_prompts
from draftgate.policies.protocols import SpeculationPolicy
from draftgate.policies.registry import speculation_policy
from draftgate.policies.speculation.baselines import Off
from draftgate.policies.types import SpeculationMode
from tests.engine.harness import (
    Model,
    Outcome,
    Setup,
    request,
    run,
)
from tests.engine.mixed_batches import policy_named
from tests.engine.shipped_proposers import every_proposer, every_proposer_and_a_hostile_one, mode_of

PROMPTS = 200
NEW_TOKENS = 128
TEMPERATURES = (0.0, 0.8)

# The setups vary the batch size and the step budget, which splits prompts. Small pools preempt
# sequences, which need up to 24 blocks each.
BATCHINGS = {
    "fixed:1": {"max_num_seqs": 64, "max_step_tokens": 512, "num_blocks": 150},
    "fixed:2": {"max_num_seqs": 32, "max_step_tokens": 512},
    "fixed:3": {"max_num_seqs": 32, "max_step_tokens": 48},
    "fixed:4": {"max_num_seqs": 8, "max_step_tokens": 37},
    "fixed:5": {"max_num_seqs": 24, "max_step_tokens": 256, "num_blocks": 100},
    "fixed:6": {"max_num_seqs": 5, "max_step_tokens": 16, "num_blocks": 40},
    "fixed:7": {"max_num_seqs": 32, "max_step_tokens": 20, "num_blocks": 200},
    "fixed:8": {"max_num_seqs": 1, "max_step_tokens": 512},
    "auto": {"max_num_seqs": 16, "max_step_tokens": 300, "num_blocks": 120},
    "random": {"max_num_seqs": 32, "max_step_tokens": 128, "num_blocks": 90},
    "off": {"max_num_seqs": 48, "max_step_tokens": 200, "num_blocks": 110},
}

QUICK = ("fixed:1", "fixed:4", "fixed:5", "auto", "random")
"""Policies of the quick run, with each proposer, a split of prompts and preemptions."""

# The proposer of each run. Runs without an entry mix all proposers in a batch.
PROPOSERS = {
    "fixed:1": SpeculationMode.NGRAM,
    "fixed:2": SpeculationMode.DRAFT_MODEL,
    "fixed:4": SpeculationMode.SPARSE_SELF,
    "fixed:5": SpeculationMode.DRAFT_MODEL,
    "fixed:7": SpeculationMode.NGRAM,
}


def requests(
    model: Model,
    prompts: list[int],
    policy: SpeculationPolicy,
    shift: int,
    proposer: SpeculationMode | None = None,
    new_tokens: int = NEW_TOKENS,
):
    """Return requests that are greedy and sampled in turn, the first by `shift`."""
    everything = held_out_prompts(model.tokenizer, PROMPTS)
    return [
        request(
            str(index),
            everything[index],
            policy,
            mode=mode_of(place) if proposer is None else proposer,
            temperature=TEMPERATURES[(place + shift) % 2],
            seed=1000 + index,
            max_tokens=new_tokens,
        )
        for place, index in enumerate(prompts)
    ]


def setup_named(name: str) -> Setup:
    proposers = every_proposer_and_a_hostile_one if name == "random" else every_proposer
    return Setup(policy_named(name), proposers, **BATCHINGS[name])


def check_all(
    model: Model,
    prompts: list[int],
    least_slots: int,
    record,
    new_tokens: int = NEW_TOKENS,
    shifts: tuple[int, ...] = (0, 1),
    policies: Iterable[str] = BATCHINGS,
) -> None:
    accepted = rejected = preemptions = 0
    for shift in shifts:
        undisturbed = alone(model, tuple(prompts), shift, new_tokens).tokens
        for name in policies:
            policy = policy_named(name)
            batch_requests = requests(
                model, prompts, policy, shift, PROPOSERS.get(name), new_tokens
            )
            outcome = run(model, batch_requests, setup_named(name))
            different = [key for key in undisturbed if undisturbed[key] != outcome.tokens[key]]
            assert not different, f"{name} with shift {shift} changed prompts {different}"
            assert all(len(tokens) == new_tokens for tokens in outcome.tokens.values())
            assert outcome.leaked_blocks == 0
            accepted += outcome.accepted
            rejected += outcome.rejected
            preemptions += outcome.preemptions
    record("slots accepted", accepted)
    record("slots rejected", rejected)
    record("preemptions", preemptions)
    assert accepted >= least_slots
    assert rejected >= least_slots
    assert preemptions > 0


@cache
def alone(model: Model, prompts: tuple[int, ...], shift: int, new_tokens: int) -> Outcome:
    """Run each prompt alone without speculation and return the expected tokens."""
    setup = Setup(Off(), max_num_seqs=1)
    batch_requests = requests(model, list(prompts), Off(), shift, new_tokens=new_tokens)
    return run(model, batch_requests, setup)


def test_some_prompts_are_lossless_with_every_proposer(
    shipped: Model, record_testsuite_property
) -> None:
    """5 greedy and 5 sampled prompts generate the same 64 tokens with every proposer, batches and
    preemptions as with `off`."""
    prompts = random.Random(0).sample(range(PROMPTS), 10)
    run_all = {"new_tokens": 64, "shifts": (0,), "policies": QUICK}
    check_all(shipped, prompts, 500, record_testsuite_property, **run_all)


@pytest.mark.long
def test_all_prompts_are_lossless_under_every_policy(
    shipped: Model, record_testsuite_property
) -> None:
    """200 prompts generate the same 128 tokens under every policy and batching as with `off`."""
    check_all(shipped, list(range(PROMPTS)), 2000, record_testsuite_property)


def test_choices_of_one_seed_have_different_noise(shipped: Model) -> None:
    """At temperature 1, the choices of a request differ, and a second run repeats each choice."""
    prompt = held_out_prompts(shipped.tokenizer, 1)[0]
    policy = speculation_policy("auto")
    settings = {"temperature": 1.0, "seed": 9, "max_tokens": 64}
    together = run(shipped, [request("a", prompt, policy, n=4, **settings)], Setup(policy))
    again = run(shipped, [request("a", prompt, Off(), n=4, **settings)], Setup(max_num_seqs=1))
    assert len({tuple(tokens) for tokens in together.tokens.values()}) == 4
    assert together.tokens == again.tokens


def test_stop_string_ends_at_the_same_token_with_and_without_drafts(shipped: Model) -> None:
    """The output ends at a stop string, even if the step accepted later tokens."""
    prompts = held_out_prompts(shipped.tokenizer, 8, seed=3)
    for stop in ("\n", "):", "self."):
        outcomes = []
        for name in ("off", "fixed:8"):
            policy = speculation_policy(name)
            sampling = {"stop": (stop,), "max_tokens": 64}
            batch = [request(str(i), p, policy, **sampling) for i, p in enumerate(prompts)]
            outcomes.append(run(shipped, batch, Setup(policy)))
        assert outcomes[0].tokens == outcomes[1].tokens
        assert outcomes[0].text == outcomes[1].text
        assert not any(stop in text for text in outcomes[0].text.values())


def test_filters_are_lossless(shipped: Model) -> None:
    """Requests with top-k, top-p and min-p generate the same tokens with and without drafts."""
    prompts = held_out_prompts(shipped.tokenizer, 8, seed=4)
    filters = {"temperature": 1.2, "top_k": 50, "top_p": 0.9, "min_p": 0.02, "max_tokens": 64}
    outcomes = []
    for name in ("off", "fixed:6"):
        policy = speculation_policy(name)
        batch = [request(str(i), p, policy, seed=i, **filters) for i, p in enumerate(prompts)]
        outcomes.append(run(shipped, batch, Setup(policy)))
    assert outcomes[0].tokens == outcomes[1].tokens


def test_log_probabilities_do_not_depend_on_drafts(shipped: Model) -> None:
    """Log probabilities of the output have the same bits with and without drafts."""
    prompts = held_out_prompts(shipped.tokenizer, 4, seed=5)
    found = []
    for name in ("off", "fixed:6"):
        policy = speculation_policy(name)
        batch = [request(str(i), p, policy, logprobs=3) for i, p in enumerate(prompts)]
        found.append(run(shipped, batch, Setup(policy)).logprobs)
    assert found[0] == found[1]


def test_included_ends_are_lossless(shipped: Model) -> None:
    """Text with the stop string or the stop token that ended it does not depend on drafts."""
    prompts = held_out_prompts(shipped.tokenizer, 6, seed=6)
    line = shipped.tokenizer.encode("\n", add_special_tokens=False)
    for sampling in ({"stop": ("):", "\n    ")}, {"stop_token_ids": tuple(line)}):
        outcomes = []
        for name in ("off", "fixed:8"):
            policy = speculation_policy(name)
            fields = {**sampling, "include_stop_str_in_output": True, "max_tokens": 64}
            batch = [request(str(i), p, policy, **fields) for i, p in enumerate(prompts)]
            outcomes.append(run(shipped, batch, Setup(policy)))
        assert outcomes[0].text == outcomes[1].text
        assert outcomes[0].tokens == outcomes[1].tokens
        ends = sampling.get("stop", ("\n",))
        assert any(text.endswith(ends) for text in outcomes[0].text.values())
        assert not any(
            end in text[: -len(end)] and not text.endswith(ends)
            for text in outcomes[0].text.values()
            for end in ends
        )


def test_allowed_tokens_are_lossless(shipped: Model) -> None:
    """Only allowed tokens are sampled, and drafts of every proposer leave the output unchanged."""
    prompts = held_out_prompts(shipped.tokenizer, 6, seed=7)
    texts = [
        "",
        "self",
        ".",
        "(",
        ")",
        ":",
        ",",
        "=",
        "_",
        "\n",
        "",
        "",
        "",
        "x",
        "y",
        "i",
        "in",
        "def",
        "return",
    ]
    allowed = tuple(sorted({i for text in texts for i in shipped.tokenizer.encode(text) if i >= 4}))
    for temperature in (0.0, 1.0):
        outcomes = []
        for name in ("off", "auto", "fixed:6"):
            policy = speculation_policy(name)
            sampling = {"allowed_token_ids": allowed, "temperature": temperature, "max_tokens": 48}
            batch = [
                request(str(i), p, policy, seed=i, n=2, **sampling) for i, p in enumerate(prompts)
            ]
            proposers = every_proposer if name == "fixed:6" else Setup().proposers
            outcomes.append(run(shipped, batch, Setup(policy, proposers)))
        assert outcomes[0].tokens == outcomes[1].tokens == outcomes[2].tokens
        assert outcomes[2].accepted > 0
        for tokens in outcomes[0].tokens.values():
            assert set(tokens) <= set(allowed)
            assert len(tokens) == 48
