"""Caches, batches, preemptions and changes of worker do not change the tokens of any request.

`test_lossless` varies speculation on plain requests, and `test_sampling` varies the sampling. These
tests combine several choices, shared and cached prefixes, changes of worker and dtypes.
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
from tests.engine.shipped_proposers import every_proposer_and_a_hostile_one, mode_of
from tests.examples import grid

NEW_TOKENS = 24

SAMPLING = {
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
"""Sampling parameters. Each run also compares the bits of log probabilities."""


@pytest.fixture(scope="module")
def prompts(shipped: Model) -> list[list[int]]:
    """Prompts with shared prefixes: a long prompt, parts of that prompt, and other prompts."""
    first, *others = held_out_prompts(shipped.tokenizer, 4, seed=11)
    return [first, first[:90], first[:90], *others]


@pytest.fixture(scope="module")
def shipped_bfloat16() -> Model:
    """The shipped model in bfloat16, with exact rows."""
    return Model(SHIPPED_MODEL, torch.bfloat16)


def requests(
    prompts: list[list[int]], sampling: dict, policy: SpeculationPolicy, n: int = 1
) -> list[GenerationRequest]:
    requested = {"max_tokens": NEW_TOKENS, "logprobs": 2, **sampling}
    return [
        request(str(index), prompt, policy, n=n, seed=500 + index, mode=mode_of(index), **requested)
        for index, prompt in enumerate(prompts)
    ]


def undisturbed(model: Model, prompts: list[list[int]], sampling: dict, n: int = 1):
    """Return the output of each request alone on a new worker, without speculation."""
    setup = Setup(Off(), max_num_seqs=1)
    outcomes = [run(model, [each], setup) for each in requests(prompts, sampling, Off(), n)]
    tokens = {key: ids for outcome in outcomes for key, ids in outcome.tokens.items()}
    logprobs = {key: all_ for outcome in outcomes for key, all_ in outcome.logprobs.items()}
    return tokens, logprobs


def crowded(model: Model) -> Setup:
    """Return a setup with random drafts, chunked prompts, and memory for few sequences."""
    policy = RandomSlots(random.Random(5))
    proposers = every_proposer_and_a_hostile_one
    return Setup(policy, proposers, max_num_seqs=6, max_step_tokens=50, num_blocks=32)


@pytest.mark.parametrize("kind", grid(SAMPLING, quick={"penalties", "filters"}.__contains__))
def test_a_batch_with_random_drafts_does_not_change_tokens(
    kind: str, shipped: Model, prompts: list[list[int]]
) -> None:
    """Shared prefixes, preemptions and random drafts change no token and no log probability."""
    expected = undisturbed(shipped, prompts, SAMPLING[kind], n=2)
    setup = crowded(shipped)
    outcome = run(shipped, requests(prompts, SAMPLING[kind], setup.policy, n=2), setup)
    assert (outcome.tokens, outcome.logprobs) == expected
    assert outcome.accepted > 0
    assert outcome.rejected > 0
    assert outcome.preemptions > 0
    assert outcome.cached_tokens > 0
    assert outcome.leaked_blocks == 0


@pytest.mark.parametrize("kind", [pytest.param("plain", marks=pytest.mark.long), "penalties"])
def test_exact_bfloat16_does_not_change_tokens(
    kind: str, shipped_bfloat16: Model, prompts: list[list[int]]
) -> None:
    """In bfloat16 with `--exact`, batches, caches and changes of worker do not change the
    output."""
    model, sampling = shipped_bfloat16, SAMPLING[kind]
    expected = undisturbed(model, prompts, sampling)
    setup = crowded(model)
    engine = Engine(model, setup)
    for _ in range(2):
        outcome = engine.run(requests(prompts, sampling, setup.policy))
        assert (outcome.tokens, outcome.logprobs) == expected
    assert outcome.cached_tokens > 0
    each = requests(prompts, sampling, setup.policy)[0]
    whole = expected[0]["0", 0]
    for cut in (1, 9, 23):
        again = replace(each, resumed=(ResumedChoice(0, tuple(whole[:cut])),))
        assert run(model, [again], setup).tokens["0", 0] == whole[cut:]


@pytest.mark.parametrize(
    "kind", grid(("plain", "penalties", "late stop"), quick={"late stop"}.__contains__)
)
def test_a_cached_prompt_gives_the_same_tokens(
    kind: str, shipped: Model, prompts: list[list[int]]
) -> None:
    """A second run of the same requests uses cached prompts and has the same output."""
    policy = speculation_policy("fixed:4")
    engine = Engine(shipped, Setup(policy))
    requested = requests(prompts, SAMPLING[kind], policy)
    cold, warm = engine.run(requested), engine.run(requested)
    assert (cold.tokens, cold.logprobs) == undisturbed(shipped, prompts, SAMPLING[kind])
    assert (warm.tokens, warm.logprobs) == (cold.tokens, cold.logprobs)
    # A run caches all full blocks except a block with the last token of a prompt.
    assert warm.cached_tokens == sum((len(prompt) - 1) // 16 * 16 for prompt in prompts)
    assert cold.cached_tokens < warm.cached_tokens


@pytest.mark.parametrize(
    "kind", grid(("sampled", "penalties", "late stop"), quick={"penalties"}.__contains__)
)
def test_a_choice_resumed_at_any_position_continues_identically(
    kind: str, shipped: Model, prompts: list[list[int]]
) -> None:
    """A choice resumed on another worker after any token has the tokens of an undisturbed run."""
    prompt = prompts[1]
    tokens, logprobs = undisturbed(shipped, [prompt], SAMPLING[kind])
    whole, of_whole = tokens["0", 0], logprobs["0", 0]
    policy = speculation_policy("auto")
    (each,) = requests([prompt], SAMPLING[kind], policy)
    requested = [
        replace(each, request_id=str(cut), resumed=(ResumedChoice(0, tuple(whole[:cut])),))
        for cut in range(len(whole))
    ]
    outcome = run(shipped, requested, Setup(policy, num_blocks=200))
    for cut in range(len(whole)):
        assert outcome.tokens[str(cut), 0] == whole[cut:]
        assert outcome.logprobs[str(cut), 0] == of_whole[cut:]


def test_a_sequence_that_moves_repeatedly_keeps_its_tokens(
    shipped: Model, prompts: list[list[int]]
) -> None:
    """A request that moves between two workers keeps the tokens of a single worker."""
    sampling = SAMPLING["penalties"]
    tokens, _ = undisturbed(shipped, [prompts[0]], sampling)
    policy = speculation_policy("fixed:3")
    engines = [Engine(shipped, Setup(policy)), Engine(shipped, crowded(shipped))]
    done: list[int] = []
    for hop in range(NEW_TOKENS):
        if len(done) >= NEW_TOKENS:
            break
        (each,) = requests([prompts[0]], sampling, policy)
        begun = (ResumedChoice(0, tuple(done)),) if done else ()
        short = replace(
            each,
            resumed=begun,
            sampling=replace(each.sampling, max_tokens=min(NEW_TOKENS, len(done) + 1 + hop % 4)),
        )
        done += engines[hop % 2].run([short]).tokens["0", 0]
    assert done == tokens["0", 0]
