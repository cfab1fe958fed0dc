"""Models so small that Triton's interpreter runs them, with random weights."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from backends.core.drive import drive
from backends.core.kv_blocks import KvBlocks
from backends.core.scheduler import Scheduler, SchedulerConfig
from backends.core.worker import Worker
from backends.engine.config import ModelConfig, read_model_config
from backends.engine.kv_pool import BLOCK_TOKENS, KvPool
from backends.engine.linear import Linear
from backends.engine.model import Decoder
from backends.engine.operators.base import RotaryTables
from backends.engine.operators.reference import TorchOperators
from backends.engine.runner import Runner
from backends.engine.weights import LayerWeights, Weights
from backends.shipped import SHIPPED_MODEL
from backends.types import GenerationRequest
from tests.engine.harness import COST, Outcome, Setup, note

if TYPE_CHECKING:
    from backends.engine.gpu.runner import GpuRunner

VOCAB = 61
POSITIONS = 256


def tiny_config(**changes: object) -> ModelConfig:
    """Two layers, two query heads for each KV head, every width odd in some way."""
    shape: dict[str, object] = {
        "vocab_size": VOCAB,
        "hidden_size": 40,
        "intermediate_size": 56,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "windows": (None, None),
        "max_position_embeddings": POSITIONS,
        "eos_ids": frozenset({0}),
    }
    return replace(read_model_config(SHIPPED_MODEL), **{**shape, **changes})


def tiny_weights(
    config: ModelConfig,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
    *,
    exact: bool = False,
) -> Weights:
    """Random weights, large enough for logits that differ."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator) * scale).to(device, dtype)

    def linear(outputs: int, inputs: int, *, bias: bool) -> Linear:
        weight = random(outputs, inputs, scale=inputs**-0.5)
        return Linear(weight, random(outputs) if bias else None, exact=exact)

    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    heads = config.num_heads + config.num_kv_heads
    layers = tuple(
        LayerWeights(
            input_norm=random(hidden),
            qkv=linear(queries + 2 * keys, hidden, bias=config.qkv_bias),
            qk_norm=random(heads, config.head_dim) if config.qk_norm else None,
            output=linear(hidden, queries, bias=config.output_bias),
            mlp_norm=random(hidden),
            gate_up=linear(2 * inner, hidden, bias=config.mlp_bias),
            down=linear(hidden, inner, bias=config.mlp_bias),
        )
        for _ in range(config.num_layers)
    )
    embedding = random(config.vocab_size, hidden)
    # A wide head makes laws peaked, so that drafts of a similar model are accepted now and then.
    head = embedding if config.tied_embeddings else random(config.vocab_size, hidden)
    return Weights(embedding, layers, random(hidden), Linear(head, exact=exact, pack=False), "tiny")


def torch_decoder(config: ModelConfig, weights: Weights) -> Decoder:
    """The model on the operators that define all others."""
    decoder = Decoder(config, weights, POSITIONS)
    decoder.operators = TorchOperators(config, _tables(config, weights.embedding.dtype))
    return decoder


def triton_decoder(config: ModelConfig, weights: Weights) -> Decoder:
    """The model on the Triton kernels, wherever its weights lie."""
    from backends.engine.operators.triton import triton_operators

    decoder = Decoder(config, weights, POSITIONS)
    decoder.operators = triton_operators(config, POSITIONS, decoder.device)
    return decoder


def _tables(config: ModelConfig, dtype: torch.dtype) -> RotaryTables:
    return RotaryTables(*config.rope.tables(config.head_dim, POSITIONS, dtype))


class LetterTokenizer:
    """Token i is the i-th letter from `A` on: as much of a tokenizer as a worker needs."""

    vocab_size = VOCAB

    def decode(self, token_ids: Iterable[int]) -> str:
        return "".join(chr(ord("A") + token) for token in token_ids)


class TinyEngine:
    """A tiny model behind a worker, driven in the caller's thread."""

    def __init__(self, config: ModelConfig, runner: Runner | GpuRunner, setup: Setup) -> None:
        self.blocks = KvBlocks(setup.num_blocks, BLOCK_TOKENS)
        self.runner = runner
        self.scheduler = Scheduler(
            SchedulerConfig(setup.max_num_seqs, setup.max_step_tokens, config.eos_ids),
            self.blocks,
            setup.policy,
            setup.proposers(self),
            COST,
        )
        self.worker = Worker(self.scheduler, LetterTokenizer(), POSITIONS)

    def run(self, requests: Iterable[GenerationRequest]) -> Outcome:
        """Run the requests to their end."""
        outcome = Outcome()
        for request in requests:
            self.worker.check(request)
            self.worker.submit(request)
        sequences = self.scheduler.waiting
        for step in drive(self.worker, self.runner):
            for request_id, delta in step.deltas:
                note(outcome, request_id, delta)
        outcome.preemptions = sum(sequence.preemptions for sequence in sequences)
        outcome.leaked_blocks = self.blocks.num_blocks - self.blocks.num_free
        return outcome


def cpu_engine(config: ModelConfig, weights: Weights, setup: Setup, **of_runner: Any) -> TinyEngine:
    """The model on the CPU's runner and torch's operators."""
    pool = KvPool(config, setup.num_blocks, weights.embedding.dtype)
    runner = Runner(torch_decoder(config, weights), pool, **of_runner)
    return TinyEngine(config, runner, setup)


def gpu_engine(config: ModelConfig, weights: Weights, setup: Setup, **of_runner: Any) -> TinyEngine:
    """The model on the GPU's runner and kernels, wherever its weights lie."""
    from backends.engine.gpu.runner import gpu_runner

    decoder = triton_decoder(config, weights)
    pool = KvPool(config, setup.num_blocks, weights.embedding.dtype, decoder.device)
    bounds = {"max_num_seqs": setup.max_num_seqs, "max_model_len": POSITIONS}
    return TinyEngine(config, gpu_runner(decoder, pool, **bounds, **of_runner), setup)
