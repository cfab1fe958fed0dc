"""A mixture of experts with a KV cache in FP8, LoRA adapters and several proposers in one batch."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from bench.harness.prompts import held_out_prompts
from draftgate.backends.checkpoints import SHIPPED_MODEL
from draftgate.backends.core.proposer import Proposer
from draftgate.backends.engine.config import read_model_config
from draftgate.backends.engine.lora.weights import adapted_products
from draftgate.backends.engine.proposers.ngram import NgramProposer
from draftgate.backends.engine.proposers.sparse_self import SparseSelfProposer
from draftgate.backends.engine.quantisation.fp8_kv import FP8
from draftgate.backends.types import GenerationRequest, ResumedChoice
from draftgate.policies.protocols import SpeculationPolicy
from draftgate.policies.speculation.baselines import Off
from draftgate.policies.types import SpeculationMode
from draftgate.policies.values import replace
from tests.engine.eagle_engine import TappedEngine, eagle_proposer, load_head
from tests.engine.eagle_heads import repeating, write_head
from tests.engine.harness import COST, HostileProposer, Model, RandomSlots, Setup, request, run
from tests.engine.random_adapters import write_adapter

EXPERTS = 4
NEW_TOKENS = 32
MODES = (
    SpeculationMode.EAGLE,
    SpeculationMode.NGRAM,
    SpeculationMode.SPARSE_SELF,
    SpeculationMode.OFF,
)


def write_mixture(directory: Path) -> Path:
    """Write a mixture whose experts are disturbed copies of the shipped model's MLPs."""
    generator = torch.Generator().manual_seed(0)
    tensors = load_file(SHIPPED_MODEL / "model.safetensors")
    for name in [name for name in tensors if ".mlp." in name]:
        weight = tensors.pop(name).float()
        layer, product = name.split(".mlp.")
        part = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}[product.split(".")[0]]
        for expert in range(EXPERTS):
            noise = torch.randn(weight.shape, generator=generator) * weight.std()
            path = f"{layer}.block_sparse_moe.experts.{expert}.{part}.weight"
            tensors[path] = (weight + 0.2 * noise).bfloat16()
        if part == "w1":
            router = torch.randn(EXPERTS, weight.shape[1], generator=generator)
            tensors[f"{layer}.block_sparse_moe.gate.weight"] = router.bfloat16()
    config = json.loads((SHIPPED_MODEL / "config.json").read_text())
    config |= {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
    config |= {"num_local_experts": EXPERTS, "num_experts_per_tok": 2, "sliding_window": None}
    directory.mkdir()
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (directory / file).write_bytes((SHIPPED_MODEL / file).read_bytes())
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors")
    return directory


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """The mixture with a cache in FP8 and two adapters of its attention."""
    directory = tmp_path_factory.mktemp("mixture")
    checkpoint = write_mixture(directory / "model")
    config = read_model_config(checkpoint)
    shapes = {
        module.names[0]: (module.outputs[0], module.inputs)
        for layer in range(config.num_layers)
        for product in adapted_products(config, layer)
        for module in product.each()
        if "self_attn" in module.names[0]
    }
    adapters = tuple(directory / name for name in ("first", "second"))
    for seed, adapter in enumerate(adapters):
        write_adapter(adapter, shapes, seed=seed, lora_alpha=2)
    return Model(checkpoint, kv_dtype=FP8, adapters=adapters)


def requests(model: Model, policy: SpeculationPolicy) -> list[GenerationRequest]:
    """Return a greedy or sampled request for each prompt and adapter, in turn in all modes.

    The last prompt begins with the first, so that requests of one adapter share blocks.
    """
    prompts = held_out_prompts(model.tokenizer, 4, least=40, most=80)
    prompts.append((*prompts[0], *prompts[1][:20]))
    return [
        replace(
            request(
                f"{place}-{number}",
                prompt,
                policy,
                mode=MODES[(place + number) % len(MODES)],
                temperature=0.8 * (place % 2),
                seed=place,
                max_tokens=NEW_TOKENS,
            ),
            adapter=adapter,
        )
        for number, adapter in enumerate(("", *model.slots))
        for place, prompt in enumerate(prompts)
    ]


def resumed(wanted: GenerationRequest, text: list[int]) -> GenerationRequest:
    """Return every third request as another worker takes it over after some tokens."""
    done = 10 if (int(wanted.request_id[0]) + int(wanted.request_id[2])) % 3 == 0 else 0
    return replace(wanted, resumed=(ResumedChoice(0, tuple(text[:done])),))


@pytest.mark.parametrize("hostile", [False, True])
def test_a_batch_of_everything_has_the_text_of_each_request_alone(
    hostile: bool, mixture: Model, tmp_path: Path
) -> None:
    """Texts equal those of requests that run alone without drafts. The batch has drafts of an
    EAGLE-3 head, n-grams (or random trees) and sparse self-speculation, adapters, chunked prompts,
    cache hits, preemptions and requests that another worker has begun."""
    head = load_head(write_head(tmp_path, repeating), mixture)

    def proposers(engine: TappedEngine) -> dict[str, Proposer]:
        vocab_size = mixture.config.vocab_size
        sparse = SparseSelfProposer(
            engine.runner.forward,
            budget_tokens=48,
            sink_tokens=16,
            eos_ids=mixture.config.eos_ids,
            keep_distributions=False,
            cost=COST,
        )
        return {
            "ngram": HostileProposer(vocab_size, random.Random(6)) if hostile else NgramProposer(),
            "sparse_self": sparse,
            "eagle": eagle_proposer(engine),
        }

    expected = run(mixture, requests(mixture, Off()), Setup(max_num_seqs=1)).tokens
    policy = RandomSlots(random.Random(5))
    setup = Setup(policy, proposers, max_num_seqs=8, max_step_tokens=48, num_blocks=42)
    wanted = [resumed(one, expected[one.request_id, 0]) for one in requests(mixture, policy)]
    try:
        outcome = TappedEngine(mixture, setup, head).run(wanted)
    finally:
        mixture.decoder.taps = None
    for one in wanted:
        done = len(one.resumed[0].output_ids)
        assert outcome.tokens[one.request_id, 0] == expected[one.request_id, 0][done:]
    assert len({tuple(tokens) for tokens in expected.values()}) > 0.8 * len(expected)
    assert outcome.accepted > 50
    assert outcome.rejected > 50
    assert outcome.preemptions > 0
    assert outcome.cached_tokens > 0
    assert outcome.leaked_blocks == 0
