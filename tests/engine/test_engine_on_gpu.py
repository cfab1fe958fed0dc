"""The engine on a GPU, compared with the reference on a CPU."""

from __future__ import annotations

import asyncio
import os
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from draftgate.backends.checkpoints import SHIPPED_MODEL
from draftgate.backends.core.proposer import Proposer
from draftgate.backends.core.steps import StepPlan
from draftgate.backends.delta_reader import generate
from draftgate.backends.engine.backend import EngineBackend
from draftgate.backends.engine.config import read_model_config
from draftgate.backends.engine.gpu.head_passes import HeadPasses
from draftgate.backends.engine.gpu.shapes import Shapes
from draftgate.backends.engine.inputs import Feed
from draftgate.backends.engine.kv_pool import BLOCK_TOKENS, KvPool
from draftgate.backends.engine.load import load_engine
from draftgate.backends.engine.model import Decoder
from draftgate.backends.engine.quantisation.fp8_kv import FP8
from draftgate.backends.engine.rope import Rope
from draftgate.backends.engine.runner import Runner
from draftgate.backends.engine.weights import load_weights
from draftgate.backends.tokenizer import Tokenizer
from draftgate.backends.types import Delta, FinishReason
from draftgate.backends.worker_config import WorkerConfig
from draftgate.policies.protocols import SpeculationPolicy
from draftgate.policies.speculation.baselines import Fixed, Off
from tests.engine.harness import (
    MAX_MODEL_LEN,
    HostileProposer,
    Outcome,
    RandomSlots,
    Setup,
    embedding_request,
    request,
)
from tests.engine.tiny_drafter import MakeChains, TinyDrafter, in_graphs, on_the_device
from tests.engine.tiny_head import tiny_head
from tests.engine.tiny_model import (
    MIXED_BLOCKS,
    TINY_EXPERTS,
    VOCAB,
    TinyEngine,
    cpu_engine,
    gpu_engine,
    mixed_plans,
    tiny_config,
    tiny_weights,
    tokens_of,
    torch_decoder,
    triton_decoder,
)
from tests.kernels.synchronisation import forbid_synchronisation

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET", "0") == "1",
        reason="needs a CUDA device and compiled kernels",
    ),
]

GPU = "cuda:0"

TEXT = Path(__file__).parents[2] / "training" / "train.py"
"""A long text."""

CONFIGS = {
    "plain": {},
    "windows": {"windows": (20, None)},
    "norms and biases": {"qk_norm": True, "qkv_bias": True, "output_bias": True, "mlp_bias": True},
    "one head for all": {"num_heads": 3, "num_kv_heads": 1, "tied_embeddings": True},
    "Gemma 3": {
        "activation": "gelu",
        "qk_norm": True,
        "sandwich_norms": True,
        "embedding_scale": 6.25,
        "query_scalar": 24.0,
        "windows": (20, None),
        "layer_ropes": (Rope(500.0), Rope(1e4)),
        "rope": Rope(1e4),
    },
    "bounded scores": {"attention_softcap": 2.0, "logit_softcap": 3.0},
    "part of a head rotates": {"rope": Rope(1e4, share=0.75)},
    # Rows have all experts, because rounding may change the choice of some.
    "experts": {"experts": replace(TINY_EXPERTS, per_row=TINY_EXPERTS.count)},
}

# Errors are relative to the spread of the logits. Two layers in half precision lose two bits.
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 6e-2, torch.float16: 1e-2}

SAMPLINGS = (
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.95},
    {"temperature": 1.0, "top_k": 50, "presence_penalty": 0.3, "logprobs": 2},
)


def tiny_engine(
    changes: dict[str, object],
    dtype: torch.dtype,
    *,
    exact: bool = False,
    chosen: SpeculationPolicy | None = None,
) -> TinyEngine:
    """Create a tiny model on the GPU, without captured graphs."""
    config = tiny_config(**changes)
    weights = tiny_weights(config, dtype, GPU, exact=exact)
    return gpu_engine(config, weights, Setup(chosen or Off(), num_blocks=MIXED_BLOCKS))


@pytest.mark.parametrize("captured", [False, True])
def test_hidden_states_equal_the_cpu(captured: bool) -> None:
    """Embeddings in a batch with decodes equal the CPU's embeddings, even if the next step reuses
    graph memory."""
    requests = [
        request("generating", range(3, 20), Off(), max_tokens=12),
        *(embedding_request(f"e{length}", range(length)) for length in (1, 16, 40, 61)),
    ]
    engine = tiny_engine({}, torch.float32)
    if captured:
        engine.runner.capture()
    config = tiny_config()
    setup = Setup(num_blocks=MIXED_BLOCKS)
    expected = cpu_engine(config, tiny_weights(config), setup).run(requests).embeddings
    actual = engine.run(requests).embeddings
    assert actual.keys() == expected.keys() == {"e1", "e16", "e40", "e61"}
    for name, embedding in expected.items():
        state = np.frombuffer(actual[name], "<f4")
        np.testing.assert_allclose(state, np.frombuffer(embedding, "<f4"), atol=1e-3)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("changes", CONFIGS.values(), ids=CONFIGS.keys())
@pytest.mark.parametrize("captured", [False, True])
def test_logits_equal_the_cpu(
    captured: bool, changes: dict[str, object], dtype: torch.dtype
) -> None:
    """Chunks, decodes, chains and trees have the same float32 logits as with the reference
    operators."""
    engine = tiny_engine(changes, dtype)
    if captured:
        engine.runner.capture()
    config = tiny_config(**changes)
    weights = tiny_weights(config, rounded_to=dtype)
    pool = KvPool(config, MIXED_BLOCKS, torch.float32)
    reference = Runner(torch_decoder(config, weights), pool)
    for plan in mixed_plans():
        actual, expected = engine.runner.logits(plan).cpu(), reference.logits(plan)
        assert actual.dtype is torch.float32
        assert actual.shape == expected.shape
        if len(expected):
            error = (actual - expected).abs().max() / expected.std()
            assert error < TOLERANCES[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_graph_has_the_bits_of_eager_execution(dtype: torch.dtype) -> None:
    """A replayed graph has the same bits as separate kernel launches."""
    eager, captured = (tiny_engine({"windows": (20, None)}, dtype) for _ in range(2))
    captured.runner.capture()
    for _ in range(2):
        for plan in mixed_plans():
            assert torch.equal(captured.runner.logits(plan), eager.runner.logits(plan))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_have_the_same_bits_alone_and_in_a_batch(dtype: torch.dtype) -> None:
    """With exact products, a row has the same bits alone and in a batch."""
    together, alone = (tiny_engine({}, dtype, exact=True) for _ in range(2))
    together.runner.capture()
    for plan in mixed_plans():
        parts = [alone.runner.logits(StepPlan((work,))) for work in plan.work]
        assert torch.equal(together.runner.logits(plan), torch.cat(parts))


class Shipped:
    """The shipped model on the GPU, with exact products and captured graphs."""

    def __init__(self, dtype: torch.dtype, kv_dtype: torch.dtype | None = None) -> None:
        config = read_model_config(SHIPPED_MODEL)
        weights = load_weights(SHIPPED_MODEL, config, dtype, device=torch.device(GPU), exact=True)
        self.decoder = Decoder(config, weights, MAX_MODEL_LEN)
        self.kv_dtype = kv_dtype or dtype
        self.tokenizer = Tokenizer(SHIPPED_MODEL)

    def engine(self, setup: Setup) -> TinyEngine:
        from draftgate.backends.engine.gpu.runner import gpu_runner

        config = self.decoder.config
        pool = KvPool(config, setup.num_blocks, self.kv_dtype, self.decoder.device)
        runner = gpu_runner(
            self.decoder, pool, max_num_seqs=setup.max_num_seqs, max_model_len=MAX_MODEL_LEN
        )
        runner.capture()
        return TinyEngine(config, runner, setup, self.tokenizer, MAX_MODEL_LEN)

    def run(self, chosen: SpeculationPolicy, **bounds: int) -> Outcome:
        """Run 24 greedy and sampled requests whose prompts begin like a file of this repository."""
        text = TEXT.read_text()
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        requests = [
            request(
                f"{place}", ids[40 * place : 40 * place + 60 + 9 * place], chosen,
                max_tokens=48, seed=place, **SAMPLINGS[place % len(SAMPLINGS)],
            )
            for place in range(24)
        ]  # fmt: skip
        return self.engine(Setup(chosen, self._proposers, **bounds)).run(requests)

    def _proposers(self, _engine: object) -> dict[str, Proposer]:
        return {"ngram": HostileProposer(self.decoder.config.vocab_size, random.Random(4))}


@pytest.mark.parametrize("kv_dtype", [None, FP8], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_drafts_and_batches_do_not_change_texts(
    dtype: torch.dtype, kv_dtype: torch.dtype | None
) -> None:
    """Trees, wrong drafts, small budgets and preemption do not change the tokens."""
    shipped = Shipped(dtype, kv_dtype)
    plain = shipped.run(Off(), max_num_seqs=1)
    drafted = shipped.run(RandomSlots(random.Random(5)), max_num_seqs=16, num_blocks=80)
    assert drafted.accepted > 0
    assert drafted.rejected > 0
    assert drafted.preemptions > 0
    assert plain.leaked_blocks == drafted.leaked_blocks == 0
    assert drafted.tokens == plain.tokens
    assert drafted.text == plain.text


@pytest.mark.parametrize("captured", [False, True])
def test_launches_do_not_wait_for_the_gpu(captured: bool) -> None:
    """Consecutive launches with trees and all sampling methods are asynchronous."""
    config = tiny_config()
    chosen = Fixed(8)
    hostile = HostileProposer(VOCAB, random.Random(4))
    setup = Setup(chosen, lambda _: {"ngram": hostile}, num_blocks=64)
    engine = gpu_engine(config, tiny_weights(config, torch.bfloat16, GPU), setup)
    if captured:
        engine.runner.capture()
    for place, sampling in enumerate(SAMPLINGS):
        generation = request(f"{place}", [3, 1, 4, 1, 5] * 9, chosen, max_tokens=24, **sampling)
        engine.worker.submit(generation)
    trees = False
    while (plan := engine.worker.plan()) is not None:
        trees = trees or any(not work.draft.is_chain for work in plan.work)
        engine.runner.execute(plan)  # the first launch of a kernel compiles it
        with forbid_synchronisation():
            launched = engine.runner.launch(plan)
        engine.worker.complete(plan, engine.runner.fetch(launched))
    assert trees


@pytest.mark.parametrize("make_chains", [on_the_device, in_graphs])
def test_device_draws_the_chains_of_the_host_without_waiting(make_chains: MakeChains) -> None:
    """Chains have the tokens and evidence of chains that the host extends. The host waits only for
    their results."""
    config = tiny_config(windows=(24, None))
    decoder = triton_decoder(config, tiny_weights(config, device=GPU, exact=True))
    drafter, again = (TinyDrafter(decoder, make_chains) for _ in range(2))
    expected = TinyDrafter(decoder).run()
    assert drafter.run() == expected  # the first launch of a kernel compiles it
    with forbid_synchronisation():
        assert again.run() == expected


def test_graph_of_a_head_has_the_bits_of_separate_launches() -> None:
    """A captured pass of an EAGLE-3 head has the same bits, and its launch does not wait."""
    config = tiny_config(num_layers=1, windows=(None,))
    head = tiny_head(config, tiny_weights(config, device=GPU, exact=True))
    kv = KvPool(config, 16, torch.float32, GPU).draft_layers(config)
    eager, captured = (HeadPasses(head, kv, Shapes(8, 4, 64, kv.page_tokens)) for _ in range(2))
    captured.capture()
    feeds = [Feed(tokens_of(rows), 20, range(4 * rows, 4 * rows + 4), rows) for rows in (1, 2, 3)]
    features = torch.randn(6, head.features.size, device=GPU)
    with torch.inference_mode():
        expected = eager.run(feeds, features)  # the first launch of a kernel compiles it
        with forbid_synchronisation():
            found = captured.run(feeds, features)
    assert torch.equal(found.hidden, expected.hidden)
    assert torch.equal(found.logits, expected.logits)


def test_run_waits_only_for_results() -> None:
    """The engine launches decodes before the previous step ends, and waits only to read results."""
    config, chosen = tiny_config(), Off()
    engine = gpu_engine(
        config, tiny_weights(config, torch.bfloat16, GPU), Setup(chosen, num_blocks=64)
    )
    engine.runner.capture()
    launch, previous_steps = engine.runner.launch, []
    engine.runner.launch = lambda plan, step=None: (
        previous_steps.append(step),
        launch(plan, step),
    )[1]
    requests = [
        request(f"{place}", [7, place, 9], chosen, max_tokens=30, logprobs=place % 2 or None)
        for place in range(6)
    ]
    expected = engine.run(requests)  # the first launch of a kernel compiles it
    previous_steps.clear()
    with forbid_synchronisation():
        actual = engine.run(requests)
    assert actual.tokens == expected.tokens
    assert sum(step is not None for step in previous_steps) >= 25


def test_worker_starts_on_a_gpu() -> None:
    """The start measures memory and steps, captures graphs, and names device and driver."""
    config = WorkerConfig(device="cuda", max_model_len=512, gpu_memory_utilization=0.3)
    engine = load_engine(config)
    numerics = engine.served.card.numerics_class
    assert "/cuda-" in numerics
    assert "triton-" in numerics
    assert numerics.endswith("/threads-any/inexact")
    assert engine.worker.load().kv_blocks_total >= 64 * 512 // BLOCK_TOKENS
    assert set(engine.proposers) == {"ngram", "draft_model", "sparse_self", "prediction"}


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("proposer", ["ngram", "draft_model", "sparse_self"])
def test_request_is_served_with_every_proposer(proposer: str, kv_cache_dtype: str) -> None:
    """The engine serves a request to its end with drafts of every proposer."""
    deltas = asyncio.run(_serve_one(proposer, kv_cache_dtype))
    assert sum(len(delta.token_ids) for delta in deltas) == 40
    assert deltas[-1].finish_reason is FinishReason.LENGTH
    assert deltas[-1].outcome.num_drafted_tokens > 0


async def _serve_one(proposer: str, kv_cache_dtype: str) -> list[Delta]:
    config = WorkerConfig(
        device="cuda", max_model_len=512, kv_bytes=64 << 20, speculation="fixed:4",
        proposer=proposer, kv_cache_dtype=kv_cache_dtype,
    )  # fmt: skip
    backend = EngineBackend(config)
    await backend.start()
    try:
        ids = backend.tokenizer.encode("def read(path):\n    with open(path) as file:\n")
        generation = request("one", ids, Fixed(4), max_tokens=40, temperature=0.0)
        plan = replace(generation.speculation, proposer=proposer)
        return [d async for d in generate(backend, replace(generation, speculation=plan))]
    finally:
        await backend.stop()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_exact_mode_is_probed_on_the_gpu(dtype: str) -> None:
    """`--exact` starts if the probe passes, and the numerics class reports exactness."""
    config = WorkerConfig(
        device="cuda", dtype=dtype, exact=True, max_model_len=512, kv_bytes=64 << 20
    )
    assert load_engine(config).served.card.numerics_class.endswith("/exact")


def test_transferred_blocks_are_equal_on_every_device() -> None:
    """Blocks that are read from a GPU's pool make blocks of a CPU's pool equal, and back."""
    config = read_model_config(SHIPPED_MODEL)
    for dtype in (torch.float32, torch.bfloat16, FP8):
        gpu, cpu = KvPool(config, 12, dtype, "cuda"), KvPool(config, 12, dtype)
        gpu.memory.copy_(torch.randn(gpu.memory.shape))
        assert gpu.block_bytes == cpu.block_bytes
        cpu.write([4, 0], gpu.read([7, 2]))
        gpu.write([9, 1], cpu.read([4, 0]))
        for old, here, new in ((7, 4, 9), (2, 0, 1)):
            first, second, third = (
                pool.cells[:, block * BLOCK_TOKENS : (block + 1) * BLOCK_TOKENS].cpu()
                for pool, block in ((gpu, old), (cpu, here), (gpu, new))
            )
            assert torch.equal(first, second)
            assert torch.equal(first, third)
