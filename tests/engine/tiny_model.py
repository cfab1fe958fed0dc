"""Random models that are small enough for Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from draftgate.backends.checkpoints import SHIPPED_MODEL
from draftgate.backends.core.drafts import ROOT, Draft
from draftgate.backends.core.kv_blocks import KvBlocks
from draftgate.backends.core.pipeline import Pipeline
from draftgate.backends.core.scheduler import Scheduler, SchedulerConfig
from draftgate.backends.core.steps import SequenceWork, StepPlan
from draftgate.backends.core.worker import WorkerCore
from draftgate.backends.engine.config import ExpertsConfig, ModelConfig, read_model_config
from draftgate.backends.engine.families import FAMILIES
from draftgate.backends.engine.kv_pool import BLOCK_TOKENS, KvPool
from draftgate.backends.engine.linear import Linear
from draftgate.backends.engine.mlp import DenseMlp, LoopedExperts, SparseMlp
from draftgate.backends.engine.model import Decoder
from draftgate.backends.engine.operators.base import rotary_tables
from draftgate.backends.engine.operators.reference import TorchOperators
from draftgate.backends.engine.runner import Runner
from draftgate.backends.engine.weights import LayerWeights, Weights
from draftgate.backends.types import Delta, GenerationRequest, Task
from tests.engine.harness import COST, Outcome, Setup, add_delta
from tests.engine.step_logits import Table

if TYPE_CHECKING:
    from draftgate.backends.engine.gpu.runner import GpuRunner

VOCAB = 61
POSITIONS = 256
MIXED_BLOCKS = 24


TINY_EXPERTS = ExpertsConfig(
    count=6,
    per_row=2,
    width=32,
    normalised=True,
    layers=frozenset({1}),
    names=FAMILIES["MixtralForCausalLM"].experts,
)


def tiny_config(**changes: object) -> ModelConfig:
    """Return a config with two layers, two query heads per KV head, and unusual widths."""
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
    rounded_to: torch.dtype = torch.float32,
    grouped: bool | None = None,
) -> Weights:
    """Return random weights that are large enough for distinct logits.

    `grouped` selects the experts of a GPU. The default depends on the device.
    """
    grouped = device != "cpu" if grouped is None else grouped
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator) * scale).to(rounded_to).to(device, dtype)

    def linear(outputs: int, inputs: int, *, bias: bool) -> Linear:
        weight = random(outputs, inputs, scale=inputs**-0.5)
        return Linear(weight, random(outputs) if bias else None, exact=exact)

    def dense(width: int) -> DenseMlp:
        return DenseMlp(
            linear(2 * width, hidden, bias=config.mlp_bias),
            linear(hidden, width, bias=config.mlp_bias),
        )

    def sparse(experts: ExpertsConfig) -> SparseMlp:
        router = linear(experts.count, hidden, bias=False)
        shares = (experts.per_row, experts.normalised)
        if not grouped:
            mlps = tuple(dense(experts.width) for _ in range(experts.count))
            return SparseMlp(router, LoopedExperts(mlps, *shares))
        from draftgate.backends.engine.grouped_experts import GroupedExperts

        # The same random numbers in the same order.
        matrices = [
            (
                random(2 * experts.width, hidden, scale=hidden**-0.5),
                random(hidden, experts.width, scale=experts.width**-0.5),
            )
            for _ in range(experts.count)
        ]
        gate_up, down = (torch.stack(parts) for parts in zip(*matrices, strict=True))
        return SparseMlp(router, GroupedExperts(gate_up, down, *shares))

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
            mlp=sparse(config.experts)
            if config.experts and index in config.experts.layers
            else dense(inner),
            output_norm=random(hidden) if config.sandwich_norms else None,
            down_norm=random(hidden) if config.sandwich_norms else None,
        )
        for index in range(config.num_layers)
    )
    embedding = random(config.vocab_size, hidden)
    # A wide head makes distributions peaked, so that some drafts of a similar model are accepted.
    head = embedding if config.tied_embeddings else random(config.vocab_size, hidden)
    return Weights(embedding, layers, random(hidden), Linear(head, exact=exact, pack=False), "tiny")


def torch_decoder(config: ModelConfig, weights: Weights) -> Decoder:
    """Return the model on the reference operators."""
    decoder = Decoder(config, weights, POSITIONS)
    tables = rotary_tables(config, POSITIONS, weights.embedding.dtype)
    decoder.operators = TorchOperators(config, tables)
    return decoder


def triton_decoder(config: ModelConfig, weights: Weights) -> Decoder:
    """Return the model on the Triton kernels, on the device of its weights."""
    from draftgate.backends.engine.operators.triton import triton_operators

    decoder = Decoder(config, weights, POSITIONS)
    decoder.operators = triton_operators(config, POSITIONS, decoder.device)
    return decoder


class LetterTokenizer:
    """A minimal tokenizer that maps token i to the i-th character from `A`."""

    vocab_size = VOCAB
    texts = tuple(chr(ord("A") + token) for token in range(VOCAB))

    def decode(self, token_ids: Iterable[int]) -> str:
        return "".join(chr(ord("A") + token) for token in token_ids)


class TinyEngine:
    """A worker with a tiny model, driven in the caller's thread."""

    def __init__(
        self,
        config: ModelConfig,
        runner: Runner | GpuRunner,
        setup: Setup,
        tokenizer: object = None,
        max_model_len: int = POSITIONS,
    ) -> None:
        self.blocks = KvBlocks(setup.num_blocks, BLOCK_TOKENS)
        self.runner = runner
        self.scheduler = Scheduler(
            SchedulerConfig(setup.max_num_seqs, setup.max_step_tokens, config.eos_ids),
            self.blocks,
            setup.policy,
            setup.proposers(self),
            COST,
        )
        self.worker = WorkerCore(
            self.scheduler,
            tokenizer or LetterTokenizer(),
            max_model_len,
            tasks=(Task.GENERATE, Task.EMBED),
        )

    def run(self, requests: Iterable[GenerationRequest]) -> Outcome:
        """Run all requests to completion."""
        outcome = Outcome()

        def deliver(batch: list[tuple[str, Delta]]) -> None:
            for request_id, delta in batch:
                add_delta(outcome, request_id, delta)

        for request in requests:
            self.worker.admission.check(request)
            self.worker.submit(request)
        sequences = self.scheduler.waiting
        pipeline = Pipeline(self.worker, self.runner, deliver, self.runner.launcher)
        while pipeline.step():
            pass
        outcome.preemptions = sum(sequence.preemptions for sequence in sequences)
        outcome.leaked_blocks = self.blocks.num_blocks - self.blocks.num_free
        return outcome


def cpu_engine(
    config: ModelConfig,
    weights: Weights,
    setup: Setup,
    kv_dtype: torch.dtype | None = None,
    **of_runner: Any,
) -> TinyEngine:
    """Return an engine with the CPU runner and the reference operators."""
    pool = KvPool(config, setup.num_blocks, kv_dtype or weights.embedding.dtype)
    runner = Runner(torch_decoder(config, weights), pool, **of_runner)
    return TinyEngine(config, runner, setup)


def gpu_engine(
    config: ModelConfig,
    weights: Weights,
    setup: Setup,
    kv_dtype: torch.dtype | None = None,
    **of_runner: Any,
) -> TinyEngine:
    """Return an engine with the GPU runner and kernels, on the device of the weights."""
    from draftgate.backends.engine.gpu.runner import gpu_runner

    decoder = triton_decoder(config, weights)
    pool = KvPool(config, setup.num_blocks, kv_dtype or weights.embedding.dtype, decoder.device)
    bounds = {"max_num_seqs": setup.max_num_seqs, "max_model_len": POSITIONS}
    return TinyEngine(config, gpu_runner(decoder, pool, **bounds, **of_runner), setup)


def mixed_plans() -> list[StepPlan]:
    """Return steps that mix prompts, chunks, decodes, and drafts as chains and trees.

    Their blocks belong to a pool of `MIXED_BLOCKS`.
    """
    tree = Draft((11, 12, 13, 14, 15, 16, 17, 18), (ROOT, 0, ROOT, 1, 2, 0, 5, 2)).depth_first()
    table = [
        Table(blocks) for blocks in ([9, 8, 7, 6, 5, 4], [0, 1, 2], [20, 3, 10], [11, 12, 13, 14])
    ]
    text = [tokens_of(60, seed) for seed in range(4)]
    prompts = (
        SequenceWork(table[0], 0, text[0][:40], True),
        SequenceWork(table[1], 0, text[1][:17], True),
        SequenceWork(table[2], 0, text[2][:13], False),
    )
    everything = (
        SequenceWork(table[0], 40, text[0][40:41], True, tree),
        SequenceWork(table[1], 17, text[1][17:18], True),
        SequenceWork(table[2], 13, text[2][13:30], True, tree.first(3).depth_first()),
        SequenceWork(table[3], 0, text[3][:50], False),
    )
    chains = (
        SequenceWork(table[0], 41, text[0][41:42], True, Draft((1, 2, 3))),
        SequenceWork(table[1], 18, text[1][18:19], True, Draft(tokens_of(5))),
        SequenceWork(table[3], 50, text[3][50:51], True),
    )
    chunk = (SequenceWork(table[2], 30, text[2][30:35], False),)
    return [StepPlan(parts) for parts in (prompts, everything, chains, chunk)]


def tokens_of(count: int, seed: int = 1) -> tuple[int, ...]:
    """Return tokens that depend only on the seed."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(VOCAB, (count,), generator=generator).tolist())
