"""The memory of KV caches of models that share a device."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draftgate.backends.checkpoints import SHIPPED_MODEL
from draftgate.backends.core.kv_blocks import KvBlocks
from draftgate.backends.engine import memory
from draftgate.backends.engine.checkpoint import Checkpoint
from draftgate.backends.engine.config import read_model_config
from draftgate.backends.engine.kv_pool import BLOCK_TOKENS
from draftgate.backends.engine.load import load_engine
from draftgate.backends.engine.loaded import LoadedEngine
from draftgate.backends.engine.memory import (
    CPU_MOST_BYTES,
    CPU_SHARE,
    KEEP_PREFIXES_S,
    RELEASE_EVERY_S,
    UnusedMemory,
    gpu_kv_bytes,
    kv_cache_bytes,
)
from draftgate.backends.worker_config import WorkerConfig

CPU, GPU = torch.device("cpu"), torch.device("cuda")
GIB = 1 << 30


def gpu_of(monkeypatch: pytest.MonkeyPatch, free: int, total: int) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, total))


def test_kv_bytes_are_divided_by_the_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker takes its share of --kv-bytes on any device, however much memory is free."""
    gpu_of(monkeypatch, 0, 80 * GIB)
    monkeypatch.setattr(memory, "available_bytes", lambda: 0)
    for device in (CPU, GPU):
        for share, expected in ((1.0, 1000), (0.25, 250)):
            config = WorkerConfig(kv_bytes=1000, memory_share=share, num_workers=2)
            assert kv_cache_bytes(device, config, 5, 5) == expected


def test_cpu_memory_is_divided_by_workers_and_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers of a CPU take equal parts of the available memory, and models their shares."""
    monkeypatch.setattr(memory, "available_bytes", lambda: 4 * GIB)
    config = WorkerConfig(memory_share=0.75, num_workers=2)
    assert kv_cache_bytes(CPU, config, 0, 0) == CPU_SHARE * 4 * GIB * 0.75 / 2
    assert kv_cache_bytes(CPU, WorkerConfig(), 0, 0) == CPU_SHARE * 4 * GIB
    monkeypatch.setattr(memory, "available_bytes", lambda: 64 * GIB)
    assert kv_cache_bytes(CPU, config, 0, 0) == CPU_MOST_BYTES * 0.75 / 2
    assert kv_cache_bytes(CPU, WorkerConfig(), 0, 0) == CPU_MOST_BYTES == 2 * GIB


@pytest.mark.parametrize(
    ("available", "sequences", "context", "expected"),
    [
        (64 * GIB, 4, 64, 4 * 64),  # all contexts fit
        (64 * GIB, 4, 60, 4 * 64),  # a context has whole blocks
        (1 << 20, 64, 512, 0.25),  # less than a quarter of a megabyte is free
        (64 * GIB, 4096, 512, 2048),
    ],
)
def test_default_pool_of_a_cpu_is_bounded(
    available: int,
    sequences: int,
    context: int,
    expected: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The pool holds the contexts of all sequences, at most a quarter of free memory and 2 GiB.

    `expected` is in tokens if all contexts fit, and else in MiB.
    """
    monkeypatch.setattr(memory, "available_bytes", lambda: available)
    token_bytes = read_model_config(SHIPPED_MODEL).kv_bytes_per_token(4)
    config = WorkerConfig(
        device="cpu",
        dtype="float32",
        proposer="ngram",
        max_num_seqs=sequences,
        max_model_len=context,
    )
    monkeypatch.setattr("draftgate.backends.engine.load.rehearse", lambda *_: None)
    card = load_engine(config).served.card
    tokens = expected
    if sequences * context > 4 * 64:
        tokens = int(expected * (1 << 20)) // (token_bytes * BLOCK_TOKENS) * BLOCK_TOKENS
    assert card.pool_tokens == tokens


def test_cpu_memory_is_measured() -> None:
    """The KV cache of a CPU worker takes a part of the memory that is available now."""
    kv_bytes = kv_cache_bytes(CPU, WorkerConfig(num_workers=4), 0, 0)
    assert 0 < kv_bytes < memory.available_bytes() / 4


@pytest.mark.parametrize(
    ("share", "free", "expected"),
    [
        # A single model: 0.9 x 80 = 72, less 20 in use and 2 for graphs.
        (1.0, 60, 50),
        # Half of 72 is 36, less 16 of its own weights and 2 x 2 for steps. Other models do not
        # count, whether they are loaded (60 free) or not (62 free).
        (0.5, 60, 16),
        (0.5, 62, 16),
        (0.25, 60, 0),  # 18 do not hold its weights and steps
        (0.5, 10, 8),  # another program uses the memory, and a step needs 2
    ],
)
def test_gpu_memory_is_divided_by_models(
    share: float, free: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model takes its share of a GPU, less its own weights and steps."""
    gpu_of(monkeypatch, free * GIB, 80 * GIB)
    config = WorkerConfig(gpu_memory_utilization=0.9, memory_share=share)
    assert kv_cache_bytes(GPU, config, 16 * GIB, 2 * GIB) == pytest.approx(expected * GIB, abs=1)


BYTES = st.integers(0, 1000)


@given(
    st.lists(st.tuples(st.integers(1, 10), BYTES, BYTES), min_size=2, max_size=4),
    st.floats(0.1, 1.0),
)
def test_models_of_a_gpu_stay_within_its_utilization(
    models: list[tuple[int, int, int]], utilization: float
) -> None:
    """Weights, steps and KV caches of models that fit their shares take at most the utilization, in
    whatever order the models load."""
    total, parts = 10_000, sum(part for part, _, _ in models)
    used = 0
    for part, weights, step in models:
        used += weights + step
        kv = gpu_kv_bytes(total - used, total, utilization, part / parts, weights, step)
        own = weights + 2 * step
        assert kv == 0 or own + kv <= part / parts * utilization * total + 1
        used += kv + step


def loaded(**settings: object) -> LoadedEngine:
    return load_engine(WorkerConfig(device="cpu", threads=1, max_model_len=512, **settings))


def test_shipped_model_takes_its_share() -> None:
    """A loaded worker has the blocks of its share, and a share below a block is an error."""
    block_bytes = read_model_config(SHIPPED_MODEL).kv_bytes_per_token(4) * BLOCK_TOKENS
    settings = {"dtype": "float32", "kv_bytes": 40 * block_bytes}
    card = loaded(memory_share=0.25, **settings).served.card
    assert card.pool_tokens == 10 * BLOCK_TOKENS
    with pytest.raises(ValueError, match=f"at least {block_bytes}, one block"):
        loaded(memory_share=0.02, **settings)


@pytest.mark.parametrize(("quantization", "bits"), [("none", 32), ("q8_0", 8.5), ("q4_0", 4.5)])
def test_card_has_the_size_of_weights_and_cache(quantization: str, bits: float) -> None:
    """The card states the bytes of packed and of unpacked weights, and of the KV cache."""
    card = loaded(
        dtype="float32", kv_bytes=1 << 24, proposer="ngram", quantization=quantization
    ).served.card
    parameters = Checkpoint(SHIPPED_MODEL).num_parameters
    config = read_model_config(SHIPPED_MODEL)
    norms = (2 * config.num_layers + 1) * config.hidden_size
    output = config.vocab_size * config.hidden_size
    outputs = sum(
        name.endswith(("embed_tokens.weight", "lm_head.weight"))
        for name in Checkpoint(SHIPPED_MODEL).tensors
    )
    matrices = (parameters - norms - outputs * output) * bits / 8
    output_bits = 32 if quantization == "none" else 8.5
    expected = matrices + outputs * output * output_bits / 8 + 4 * norms
    assert card.weight_bytes == expected
    assert 0.9 * (1 << 24) < card.kv_bytes < 1.2 * (1 << 24)


def test_weights_of_the_draft_model_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights of a model include those of its draft model."""
    seen = []

    def noted(*arguments: object) -> int:
        seen.append(arguments[2])
        return 1 << 24

    monkeypatch.setattr("draftgate.backends.engine.load.kv_cache_bytes", noted)
    loaded(dtype="float32")
    loaded(dtype="float32", proposer="ngram")
    both, alone = seen
    assert alone == 4 * Checkpoint(SHIPPED_MODEL).num_parameters
    assert both > alone


def unused_memory(blocks: KvBlocks, *, expires: bool = True) -> tuple[UnusedMemory, list[set[int]]]:
    """Return the unused memory of a worker at time 0, and the blocks of each of its releases."""
    released: list[set[int]] = []

    class Pool:
        def release(self, runs: Iterable[range]) -> None:
            released.append({block for run in runs for block in run})

    memory_ = UnusedMemory(blocks, Pool(), expires=expires, now_s=0.0)  # type: ignore[arg-type]
    return memory_, released


def used_and_cached(blocks: KvBlocks) -> tuple[array[int], list[bytes]]:
    """Return the table and the hashes of a sequence of four cached blocks."""
    table, hashes = array("q"), [bytes([index]) for index in range(4)]
    blocks.extend(table, 4 * BLOCK_TOKENS)
    blocks.confirm(table, hashes, range(4))
    return table, hashes


def test_free_blocks_are_released_after_steps() -> None:
    """A worker releases exactly its free blocks, no more often than the interval allows, and not
    again without steps."""
    blocks = KvBlocks(16, BLOCK_TOKENS)
    unused, released = unused_memory(blocks)
    assert released == [set(range(16))]
    assert unused.due_in_s(1.0) is None
    table, _ = used_and_cached(blocks)
    unused.note_step()
    assert unused.due_in_s(10.0) == RELEASE_EVERY_S - 10.0
    unused.release(10.0)
    assert len(released) == 1
    unused.release(RELEASE_EVERY_S)
    assert released[1:] == [set(range(16)) - set(table)]
    assert unused.due_in_s(RELEASE_EVERY_S) is None


def test_unused_prefixes_expire() -> None:
    """A prefix stays cached for the promised time, and its memory is released within twice that
    time, without steps."""
    blocks = KvBlocks(16, BLOCK_TOKENS)
    unused, released = unused_memory(blocks)
    table, hashes = used_and_cached(blocks)
    unused.note_step()
    unused.release(RELEASE_EVERY_S)
    blocks.release(table)
    freed_s, now_s = RELEASE_EVERY_S, RELEASE_EVERY_S
    while (wait_s := unused.due_in_s(now_s)) is not None:
        now_s += wait_s
        if now_s <= freed_s + KEEP_PREFIXES_S:
            assert blocks.num_cached(hashes) == 4
        unused.release(now_s)
    assert blocks.num_cached(hashes) == 0
    assert released[-1] == set(range(16))
    assert freed_s + KEEP_PREFIXES_S <= now_s <= freed_s + 2 * KEEP_PREFIXES_S


def test_prefixes_in_use_do_not_expire() -> None:
    """Neither a prefix in use nor one that was used again in time expires."""
    blocks = KvBlocks(16, BLOCK_TOKENS)
    unused, _ = unused_memory(blocks)
    table, hashes = used_and_cached(blocks)
    for turn in range(1, 5):
        unused.note_step()
        unused.release(turn * KEEP_PREFIXES_S)
        assert blocks.num_cached(hashes) == 4
        blocks.release(table)
        again = array("q")
        assert blocks.admit(again, hashes, 5 * BLOCK_TOKENS) == 4
        table = again


def test_prefixes_of_a_recorded_run_do_not_expire() -> None:
    """A worker that records its run keeps unused prefixes, because a replay would."""
    blocks = KvBlocks(16, BLOCK_TOKENS)
    unused, _ = unused_memory(blocks, expires=False)
    table, hashes = used_and_cached(blocks)
    blocks.release(table)
    for turn in range(1, 5):
        unused.note_step()
        unused.release(turn * KEEP_PREFIXES_S)
    assert unused.due_in_s(5 * KEEP_PREFIXES_S) is None
    assert blocks.num_cached(hashes) == 4
