"""Quantised models on the GPU runner in the interpreter, compared with the CPU's products."""

from __future__ import annotations

from collections.abc import Sequence as Many
from pathlib import Path

import pytest
import torch

from draftgate.backends.core.drafts import Draft
from draftgate.backends.core.proposer import DraftRequest
from draftgate.backends.core.sequence import Sequence
from draftgate.backends.engine.config import ModelConfig, read_model_config
from draftgate.backends.engine.kv_pool import KvPool
from draftgate.backends.engine.quantisation.kernels import KernelLinear
from draftgate.backends.engine.runner import Runner
from draftgate.backends.engine.weights import Weights, load_weights
from draftgate.policies.registry import speculation_policy
from tests.engine.harness import Outcome, Setup, request
from tests.engine.quantised_checkpoints import FORMATS, write_quantised
from tests.engine.test_model_families import random_model_of
from tests.engine.tiny_model import (
    MIXED_BLOCKS,
    VOCAB,
    gpu_engine,
    mixed_plans,
    torch_decoder,
    triton_decoder,
)

SAME = 1e-4
FP8_ROWS, FP8_ERROR = 0.7, 0.6
"""Least share of rows within `SAME` in FP8, and largest error of a logit of the others: another
order of sums moves some activations to the next number of FP8, up to 1/8 away."""


def quantised(form: str, directory: Path) -> tuple[ModelConfig, Weights, Weights]:
    """Write a random Qwen2 of one layer, and return its weights for a CPU and for a GPU."""
    model = random_model_of("qwen2", {"vocab_size": VOCAB, "num_hidden_layers": 1})
    write_quantised(model, directory, FORMATS[form])
    config = read_model_config(directory)
    on_cpu, on_gpu = (
        load_weights(directory, config, torch.float32, exact=True, for_gpu=for_gpu)
        for for_gpu in (False, True)
    )
    assert all(isinstance(one, KernelLinear) for one in on_gpu.layers[0].linears)
    return config, on_cpu, on_gpu


QUICK = {"fp8-block", "compressed-fp8-channel", "awq", "gptq-ordered", "compressed-int4"}
"""Formats that together use each kernel. The others differ in how their weights are read, which
tests on a CPU cover."""


@pytest.mark.parametrize(
    "form",
    [form if form in QUICK else pytest.param(form, marks=pytest.mark.long) for form in FORMATS],
)
def test_logits_equal_those_of_a_cpu(form: str, tmp_path: Path) -> None:
    """Prompts, chunks, decodes, chains and trees have the logits of the CPU's products."""
    config, *weights = quantised(form, tmp_path)
    runners = [
        Runner(make(config, of_make), KvPool(config, MIXED_BLOCKS, torch.float32))
        for make, of_make in zip((torch_decoder, triton_decoder), weights, strict=True)
    ]
    with torch.inference_mode():
        expected, found = (
            torch.cat([runner.logits(plan) for plan in mixed_plans()]) for runner in runners
        )
    errors = (found - expected).abs().amax(1)
    if "fp8" in form:
        assert (errors < SAME).float().mean() >= FP8_ROWS
        assert errors.max() < FP8_ERROR
    else:
        assert errors.max() < SAME


class Knowing:
    """A proposer of a known text in which every fourth draft token is wrong."""

    def __init__(self, texts: dict[str, list[int]]) -> None:
        self._texts = texts

    def depth_s(self, sequences: int) -> float:
        return 0.0

    def catch_up_s(self, sequence: Sequence) -> float:
        return 0.0

    def forget(self, sequence: Sequence) -> None:
        pass

    def propose(self, requests: Many[DraftRequest]) -> list[Draft]:
        return [self._draft(one.sequence, one.max_tokens) for one in requests]

    def _draft(self, sequence: Sequence, most: int) -> Draft:
        asked = sequence.request
        first = len(sequence.token_ids) - len(asked.prompt_ids)
        text = self._texts.get(asked.request_id, [])[first : first + most]
        places = enumerate(text, first)
        return Draft(tuple((token + (place % 4 == 3)) % VOCAB for place, token in places))


@pytest.mark.parametrize("form", ["fp8-block", "gptq-ordered"])
def test_drafts_and_batches_change_no_token(form: str, tmp_path: Path) -> None:
    """Greedy and sampled texts of the GPU runner are equal alone without drafts, and in a batch
    with right and wrong drafts."""
    config, _, weights = quantised(form, tmp_path)
    texts: dict[str, list[int]] = {}

    def outcome(policy: str, max_num_seqs: int) -> Outcome:
        chosen = speculation_policy(policy)
        setup = Setup(
            chosen, lambda _: {"ngram": Knowing(texts)}, max_num_seqs=max_num_seqs, num_blocks=64
        )
        requests = [
            request(str(index), range(index, 20), chosen, temperature=0.7 * index, max_tokens=7)
            for index in range(3)
        ]
        return gpu_engine(config, weights, setup).run(requests)

    plain = outcome("off", 1)
    texts |= {name: tokens for (name, _), tokens in plain.tokens.items()}
    drafted = outcome("fixed:3", 3)
    assert min(drafted.accepted, drafted.rejected) > 0
    assert drafted.tokens == plain.tokens
