"""Batches of requests with and without LoRA adapters do not change a token."""

from __future__ import annotations

from collections.abc import Sequence as Many
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from bench.harness.prompts import held_out_prompts
from draftgate.backends.checkpoints import SHIPPED_MODEL
from draftgate.backends.types import GenerationRequest
from draftgate.policies.speculation.baselines import Off
from draftgate.policies.types import SpeculationMode
from draftgate.policies.values import replace
from tests.engine.eagle_engine import TappedEngine, both, load_head
from tests.engine.eagle_heads import repeating, write_head
from tests.engine.harness import Model, Setup, request, run
from tests.engine.mixed_batches import policy_named
from tests.engine.random_adapters import merge, read_tensors, write_demo_adapters
from tests.engine.shipped_proposers import MODES, every_proposer, every_proposer_and_a_hostile_one

NEW_TOKENS = 24
BATCHINGS: dict[str, dict[str, int]] = {
    "fixed:4": {"max_num_seqs": 16, "max_step_tokens": 64, "num_blocks": 96},
    "random": {"max_num_seqs": 8, "max_step_tokens": 48, "num_blocks": 42},
}


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """The shipped model with three adapters."""
    directory = tmp_path_factory.mktemp("adapters")
    return Model(SHIPPED_MODEL, adapters=tuple(write_demo_adapters(directory)))


def requests(
    model: Model, policy: Any, modes: Many[SpeculationMode] = (SpeculationMode.OFF,)
) -> list[GenerationRequest]:
    """Return a greedy or sampled request for each prompt and adapter, in turn in all modes."""
    prompts = held_out_prompts(model.tokenizer, 3, least=40, most=80)
    return [
        replace(
            request(
                f"{place}-{adapter}",
                prompt,
                policy,
                mode=modes[(place + number) % len(modes)],
                temperature=0.8 if number % 2 else 0.0,
                seed=place,
                max_tokens=NEW_TOKENS,
            ),
            adapter=adapter,
        )
        for place, prompt in enumerate(prompts)
        for number, adapter in enumerate(("", *model.slots))
    ]


def test_drafts_and_batches_do_not_change_a_token(adapted: Model) -> None:
    """Texts equal those of requests that run alone without drafts, in batches of several adapters
    with drafts of all proposers, trees, chunked prompts and preemptions."""
    expected = run(adapted, requests(adapted, Off()), Setup(max_num_seqs=1)).tokens
    assert len({tuple(tokens) for tokens in expected.values()}) == len(expected)
    accepted = rejected = preemptions = 0
    for name, batching in BATCHINGS.items():
        proposers = every_proposer_and_a_hostile_one if name == "random" else every_proposer
        policy = policy_named(name)
        setup = Setup(policy, proposers, **batching)
        outcome = run(adapted, requests(adapted, policy, MODES), setup)
        assert outcome.tokens == expected, name
        assert outcome.leaked_blocks == 0
        accepted += outcome.accepted
        rejected += outcome.rejected
        preemptions += outcome.preemptions
    assert accepted > 50
    assert rejected > 50
    assert preemptions > 0


def test_drafts_of_a_head_do_not_change_a_token(adapted: Model, tmp_path: Path) -> None:
    """An EAGLE-3 head drafts from the hidden states that the adapters change."""
    head = load_head(write_head(tmp_path, repeating), adapted)
    expected = run(adapted, requests(adapted, Off()), Setup(max_num_seqs=1)).tokens
    policy = policy_named("fixed:4")
    engine = TappedEngine(adapted, Setup(policy, both, **BATCHINGS["fixed:4"]), head)
    try:
        outcome = engine.run(requests(adapted, policy, (SpeculationMode.EAGLE,)))
    finally:
        adapted.decoder.taps = None
    assert outcome.tokens == expected
    assert outcome.accepted > 0


def test_greedy_texts_equal_those_of_merged_weights(adapted: Model) -> None:
    """A batch of the model and its adapters has the greedy texts of `transformers`, which has the
    adapters merged into its weights."""
    prompt = held_out_prompts(adapted.tokenizer, 1)[0]
    batch = [
        replace(request(name, prompt, Off(), max_tokens=NEW_TOKENS, temperature=0.0), adapter=name)
        for name in ("", *adapted.slots)
    ]
    found = run(adapted, batch, Setup()).tokens
    for adapter in ("", *adapted.slots):
        model = AutoModelForCausalLM.from_pretrained(SHIPPED_MODEL, dtype=torch.float32)
        if adapter:
            directory = adapted.adapters[adapted.slots[adapter] - 1]
            merge(model, read_tensors(directory), lambda _module: 2 / 4)
        tokens = model.generate(
            torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None
        )
        assert found[adapter, 0] == tokens[0, len(prompt) :].tolist()
