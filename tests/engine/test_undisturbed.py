"""Whatever a request asks for, caches, batches, preemptions and moves change none of its tokens.

The suite of `test_lossless` varies speculation on plain requests, `test_sampling` what is sampled;
here several choices, shared and cached prefixes, moves and dtypes come together.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from bench.harness.prompts import held_out_prompts
from draftgate.backends.checkpoints import SHIPPED_MODEL
from draftgate.backends.types import GenerationRequest, ResumedChoice
from draftgate.policies.protocols import SpeculationPolicy
from draftgate.policies.registry import speculation_policy
from draftgate.policies.speculation.baselines import Off
from tests.engine.harness import Engine, Model, RandomSlots, Setup, request, run
from tests.engine.shipped_proposers import every_proposer_and_a_hostile_one, mixed

NEW_TOKENS = 24

WISHES = {
    "plain": {},
    "sampled": {"temperature": 0.8},
    "penalties": {
        "temperature": 0.9,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.4,
        "presence_penalty": 0.3,
    },
    "filters": {"temperature": 1.2, "top_k": 40, "top_p": 0.9, "min_p": 0.02},
    "late stop": {
        "temperature": 0.8,
        "min_tokens": 12,
        "stop": ("\n", "self"),
        "ignore_eos": False,
    },
}
"""What requests may ask for. Logprobs are always asked for: they are compared bit by bit."""


@pytest.fixture(scope="module")
def prompts(shipped: Model) -> list[list[int]]:
    """Prompts that share beginnings: a long one, parts of it, and others."""
    first, *others = held_out_prompts(shipped.tokenizer, 4, seed=11)
    return [first, first[:90], first[:90], *others]


@pytest.fixture(scope="module")
def shipped_bfloat16() -> Model:
    """The shipped model in bfloat16, exact."""
    return Model(SHIPPED_MODEL, torch.bfloat16)


def requests(
    prompts: list[list[int]], wishes: dict, policy: SpeculationPolicy, n: int = 1
) -> list[GenerationRequest]:
    wanted = {"max_tokens": NEW_TOKENS, "logprobs": 2, **wishes}
    return [
        request(str(index), prompt, policy, n=n, seed=500 + index, mode=mixed(index), **wanted)
        for index, prompt in enumerate(prompts)
    ]


def undisturbed(model: Model, prompts: list[list[int]], wishes: dict, n: int = 1):
    """Each request by itself on a fresh worker, without speculation."""
    setup = Setup(Off(), max_num_seqs=1)
    outcomes = [run(model, [one], setup) for one in requests(prompts, wishes, Off(), n)]
    tokens = {key: ids for outcome in outcomes for key, ids in outcome.tokens.items()}
    logprobs = {key: all_ for outcome in outcomes for key, all_ in outcome.logprobs.items()}
    return tokens, logprobs


def crowded(model: Model) -> Setup:
    """Random drafts, chunked prompts, and memory for a few sequences only."""
    policy = RandomSlots(random.Random(5))
    proposers = every_proposer_and_a_hostile_one
    return Setup(policy, proposers, max_num_seqs=6, max_step_tokens=50, num_blocks=32)


@pytest.mark.parametrize("wish", WISHES)
def test_a_crowd_with_hostile_drafts_changes_nothing(
    wish: str, shipped: Model, prompts: list[list[int]]
) -> None:
    """Tokens and log probabilities equal those alone: shared, preempted, drafted at random."""
    expected = undisturbed(shipped, prompts, WISHES[wish], n=2)
    setup = crowded(shipped)
    outcome = run(shipped, requests(prompts, WISHES[wish], setup.policy, n=2), setup)
    assert (outcome.tokens, outcome.logprobs) == expected
    assert outcome.accepted > 0
    assert outcome.rejected > 0
    assert outcome.preemptions > 0
    assert outcome.cached_tokens > 0
    assert outcome.leaked_blocks == 0


@pytest.mark.parametrize("wish", ["plain", "penalties"])
def test_bfloat16_is_exact_when_asked(
    wish: str, shipped_bfloat16: Model, prompts: list[list[int]]
) -> None:
    """With `--exact`, neither a crowd, nor a cache, nor a move changes a bit in bfloat16."""
    model, wishes = shipped_bfloat16, WISHES[wish]
    expected = undisturbed(model, prompts, wishes)
    setup = crowded(model)
    engine = Engine(model, setup)
    for _ in range(2):
        outcome = engine.run(requests(prompts, wishes, setup.policy))
        assert (outcome.tokens, outcome.logprobs) == expected
    assert outcome.cached_tokens > 0
    one = requests(prompts, wishes, setup.policy)[0]
    whole = expected[0]["0", 0]
    for cut in (1, 9, 23):
        again = replace(one, resumed=(ResumedChoice(0, tuple(whole[:cut])),))
        assert run(model, [again], setup).tokens["0", 0] == whole[cut:]


@pytest.mark.parametrize("wish", ["plain", "penalties", "late stop"])
def test_a_cached_prompt_gives_what_an_uncached_one_gives(
    wish: str, shipped: Model, prompts: list[list[int]]
) -> None:
    """The second run of the same requests computes little of the prompts and says the same."""
    policy = speculation_policy("fixed:4")
    engine = Engine(shipped, Setup(policy))
    wanted = requests(prompts, WISHES[wish], policy)
    cold, warm = engine.run(wanted), engine.run(wanted)
    assert (cold.tokens, cold.logprobs) == undisturbed(shipped, prompts, WISHES[wish])
    assert (warm.tokens, warm.logprobs) == (cold.tokens, cold.logprobs)
    # All full blocks but the one that holds a prompt's last token.
    assert warm.cached_tokens == sum((len(prompt) - 1) // 16 * 16 for prompt in prompts)
    assert cold.cached_tokens < warm.cached_tokens


@pytest.mark.parametrize("wish", ["sampled", "penalties", "late stop"])
def test_a_choice_resumed_at_any_position_goes_on_identically(
    wish: str, shipped: Model, prompts: list[list[int]]
) -> None:
    """Cut after every token and continued on another worker, the tokens are those of one run."""
    prompt = prompts[1]
    tokens, logprobs = undisturbed(shipped, [prompt], WISHES[wish])
    whole, of_whole = tokens["0", 0], logprobs["0", 0]
    policy = speculation_policy("auto")
    (one,) = requests([prompt], WISHES[wish], policy)
    wanted = [
        replace(one, request_id=str(cut), resumed=(ResumedChoice(0, tuple(whole[:cut])),))
        for cut in range(len(whole))
    ]
    outcome = run(shipped, wanted, Setup(policy, num_blocks=200))
    for cut in range(len(whole)):
        assert outcome.tokens[str(cut), 0] == whole[cut:]
        assert outcome.logprobs[str(cut), 0] == of_whole[cut:]


def test_a_sequence_may_move_again_and_again(shipped: Model, prompts: list[list[int]]) -> None:
    """Handed between two workers after every few tokens, a request gives what one worker gives."""
    wishes = WISHES["penalties"]
    tokens, _ = undisturbed(shipped, [prompts[0]], wishes)
    policy = speculation_policy("fixed:3")
    engines = [Engine(shipped, Setup(policy)), Engine(shipped, crowded(shipped))]
    done: list[int] = []
    for hop in range(NEW_TOKENS):
        if len(done) >= NEW_TOKENS:
            break
        (one,) = requests([prompts[0]], wishes, policy)
        begun = (ResumedChoice(0, tuple(done)),) if done else ()
        short = replace(
            one,
            resumed=begun,
            sampling=replace(one.sampling, max_tokens=min(NEW_TOKENS, len(done) + 1 + hop % 4)),
        )
        done += engines[hop % 2].run([short]).tokens["0", 0]
    assert done == tokens["0", 0]
