"""Every sampling parameter on the shipped model, with and without drafts."""

from __future__ import annotations

import random
from functools import cache

import pytest
import torch

from bench.harness.prompts import held_out_prompts
from draftgate.backends.core.drafts import Draft
from draftgate.backends.core.sequence import Sequence
from draftgate.backends.core.steps import SequenceWork, StepPlan
from draftgate.backends.token_ids import compact
from draftgate.backends.types import GenerationRequest
from draftgate.policies.protocols import SpeculationPolicy
from draftgate.policies.registry import speculation_policy
from draftgate.policies.speculation.baselines import Off
from tests.engine import reference_logits
from tests.engine.harness import (
    Model,
    Outcome,
    RandomSlots,
    Setup,
    request,
    run,
)
from tests.engine.shipped_proposers import every_proposer, every_proposer_and_a_hostile_one, mode_of
from tests.examples import grid

PROMPTS = 6
NEW_TOKENS = 40

SAMPLINGS: dict[str, dict[str, object]] = {
    "repetition, greedy": {"temperature": 0.0, "repetition_penalty": 1.3},
    "frequency and presence": {
        "temperature": 0.8,
        "frequency_penalty": 0.7,
        "presence_penalty": 0.5,
    },
    # Negative penalties make text repeat, so that long drafts are accepted.
    "repetition wanted": {"temperature": 0.6, "frequency_penalty": -0.5, "logprobs": 2},
    "bias and min_tokens": {
        "temperature": 0.7,
        "min_tokens": 17,
        "ignore_eos": False,
        "logit_bias": ((0, 6.0), (11, 2.5), (300, -100.0)),
    },
    "everything": {
        "temperature": 1.1,
        "top_k": 60,
        "top_p": 0.9,
        "min_p": 0.02,
        "repetition_penalty": 1.1,
        "frequency_penalty": 0.2,
        "presence_penalty": -0.3,
        "logit_bias": ((5, 1.5),),
        "min_tokens": 20,
        "logprobs": 4,
    },
}

# The memory is small enough to preempt sequences, which need up to 15 blocks, and to split prompts.
BATCHINGS = {
    "fixed:8": {"max_num_seqs": 4, "max_step_tokens": 40},
    "auto": {"max_num_seqs": 6, "max_step_tokens": 200, "num_blocks": 34},
    "random": {"max_num_seqs": 6, "max_step_tokens": 60, "num_blocks": 30},
}


def requests(
    model: Model, policy: SpeculationPolicy, sampling: dict[str, object]
) -> list[GenerationRequest]:
    prompts = held_out_prompts(model.tokenizer, PROMPTS, seed=8)
    settings = {"max_tokens": NEW_TOKENS, **sampling}
    return [
        request(str(i), p, policy, seed=50 + i, mode=mode_of(i), **settings)
        for i, p in enumerate(prompts)
    ]


def speculating(model: Model, name: str, sampling: dict[str, object]) -> Outcome:
    if name != "random":
        policy, proposers = speculation_policy(name), every_proposer
    else:
        policy, proposers = RandomSlots(random.Random(1)), every_proposer_and_a_hostile_one
    setup = Setup(policy, proposers, **BATCHINGS[name])
    return run(model, requests(model, policy, sampling), setup)


@cache
def undisturbed(model: Model, name: str) -> Outcome:
    """Run each request alone without drafts and return the expected result."""
    return run(model, requests(model, Off(), SAMPLINGS[name]), Setup(max_num_seqs=1))


@pytest.mark.parametrize(
    "sampling", grid(SAMPLINGS, quick={"repetition, greedy", "everything"}.__contains__)
)
def test_drafts_do_not_change_results(shipped: Model, sampling: str) -> None:
    """Drafts and preemptions do not change tokens, text or log probabilities."""
    alone = undisturbed(shipped, sampling)
    accepted = rejected = preemptions = 0
    for name in BATCHINGS:
        outcome = speculating(shipped, name, SAMPLINGS[sampling])
        assert outcome.tokens == alone.tokens, name
        assert outcome.text == alone.text, name
        assert outcome.logprobs == alone.logprobs, name
        assert outcome.leaked_blocks == 0
        accepted += outcome.accepted
        rejected += outcome.rejected
        preemptions += outcome.preemptions
    assert min(accepted, rejected) >= 10
    assert preemptions > 0


@pytest.mark.parametrize("sampling", ["repetition, greedy", "frequency and presence"])
def test_penalties_make_texts_repeat_less(shipped: Model, sampling: str) -> None:
    """A text with a penalty contains more distinct tokens than a text without a penalty."""
    plain = {"temperature": SAMPLINGS[sampling]["temperature"]}
    without = run(shipped, requests(shipped, Off(), plain), Setup())
    penalised = undisturbed(shipped, sampling)

    def different(outcome: Outcome) -> int:
        return sum(len(set(tokens)) for tokens in outcome.tokens.values())

    assert different(penalised) > different(without)


def test_bias_of_100_forces_or_bans_a_token(shipped: Model) -> None:
    """A bias of +100 forces a token, and a bias of -100 replaces the greedy token."""

    def tokens_with(**sampling: object) -> list[list[int]]:
        outcome = run(shipped, requests(shipped, Off(), sampling), Setup())
        return list(outcome.tokens.values())

    assert tokens_with(logit_bias=((77, 100.0),)) == [[77] * NEW_TOKENS] * PROMPTS
    likeliest = {tokens[0] for tokens in tokens_with(temperature=0.0, max_tokens=1)}
    banned = tuple((token, -100.0) for token in sorted(likeliest))
    others = tokens_with(temperature=0.0, max_tokens=1, logit_bias=banned)
    assert not likeliest & {tokens[0] for tokens in others}


@pytest.mark.parametrize("policy", ["off", "fixed:8"])
def test_text_does_not_end_before_min_tokens(shipped: Model, policy: str) -> None:
    """A text has exactly `min_tokens` tokens if the end token is by far the likeliest token."""
    ends = tuple((token, 100.0) for token in sorted(shipped.config.eos_ids))
    for wanted in (0, 1, 13):
        chosen = speculation_policy(policy)
        sampling = {"ignore_eos": False, "logit_bias": ends, "min_tokens": wanted}
        outcome = run(shipped, requests(shipped, chosen, sampling), Setup(chosen))
        for tokens in outcome.tokens.values():
            assert len(tokens) == wanted + 1
            assert tokens[-1] in shipped.config.eos_ids
            assert not set(tokens[:-1]) & shipped.config.eos_ids


def test_logprobs_are_those_of_the_raw_logits(shipped: Model) -> None:
    """Bias and penalties change the sampled tokens but not log probabilities and ranks."""
    sampled_requests = requests(shipped, Off(), {**SAMPLINGS["everything"], "max_tokens": 12})
    outcome = run(shipped, sampled_requests, Setup())
    runner = shipped.runner(64)
    for each in sampled_requests:
        tokens = outcome.tokens[each.request_id, 0]
        context = (*each.prompt_ids, *tokens[:-1])
        table = Sequence(
            0, each, 0, compact(context), block_table=list(range(-(-len(context) // 16)))
        )
        prompt, drafts = tuple(each.prompt_ids), Draft(tuple(tokens[:-1]))
        work = SequenceWork(table, 0, prompt, True, drafts)
        rows = runner.logits(StepPlan((work,))).tolist()
        for token, row, entry in zip(
            tokens, rows, outcome.logprobs[each.request_id, 0], strict=True
        ):
            exact = reference_logits.logprobs(row)
            assert entry.token_id == token
            assert entry.logprob == pytest.approx(exact[token], abs=1e-5)
            likeliest = sorted(range(len(exact)), key=lambda t: -exact[t])[:4]
            assert [t for t, _ in entry.top] == likeliest
            assert [value for _, value in entry.top] == pytest.approx(
                [exact[t] for t in likeliest], abs=1e-5
            )


def test_step_can_be_fetched_after_the_next_launch(shipped: Model) -> None:
    """A fetch after the next launch returns the result of the fetched step."""
    runner = shipped.runner(8)

    def plan(key: int, token: int) -> StepPlan:
        each = request(str(key), (1, token), Off(), temperature=0.0, logprobs=2)
        sequence = Sequence(key, each, 0, [1, token], block_table=[key])
        return StepPlan((SequenceWork(sequence, 0, (1, token), samples=True),))

    plans = [plan(0, 40), plan(1, 90)]
    at_once = [runner.execute(p) for p in plans]
    launched = [runner.launch(p) for p in plans]
    late = [runner.fetch(step) for step in launched]
    assert [r.emitted for r in late] == [r.emitted for r in at_once]
    assert [r.logprobs for r in late] == [r.logprobs for r in at_once]
    first, second = (step.logprobs.found[2].top for step in launched)
    assert not torch.equal(first, second)


def test_log_probabilities_of_a_step_need_one_copy_for_each_number_of_alternatives(
    shipped: Model,
) -> None:
    """The copies do not grow with the sequences, and each sequence has the values it has alone."""
    runner = shipped.runner(16)
    wanted = [2, None, 0, 2, 3, 2, None, 0]

    def work(key: int) -> SequenceWork:
        each = request(str(key), (1, 40 + key), Off(), temperature=0.0, logprobs=wanted[key])
        sequence = Sequence(key, each, 0, [1, 40 + key], block_table=[key])
        return SequenceWork(sequence, 0, (1, 40 + key), samples=True)

    together = runner.launch(StepPlan(tuple(map(work, range(len(wanted))))))
    assert sorted(together.logprobs.found) == [0, 2, 3]
    result = runner.fetch(together)
    for key in range(len(wanted)):
        alone = runner.execute(StepPlan((work(key),)))
        assert result.logprobs[key] == alone.logprobs[0]
