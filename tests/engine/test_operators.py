"""The operators in C, compared with the operators in torch."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from draftgate.backends.checkpoints import SHIPPED_MODEL
from draftgate.backends.engine.config import ModelConfig, read_model_config
from draftgate.backends.engine.inputs import AttentionSpans, StepInputs
from draftgate.backends.engine.kv_pool import KvPool
from draftgate.backends.engine.linear import Linear
from draftgate.backends.engine.model import Decoder
from draftgate.backends.engine.operators import compiler
from draftgate.backends.engine.operators.base import Operators, rotary_tables
from draftgate.backends.engine.operators.choose import operators_for
from draftgate.backends.engine.operators.native import native_operators
from draftgate.backends.engine.operators.reference import TorchOperators
from draftgate.backends.engine.rope import Rope
from draftgate.backends.engine.runner import Runner
from draftgate.backends.engine.weights import load_weights
from tests.engine.step_logits import blocks_of, logits_in_steps

DTYPES = (torch.float32, torch.bfloat16)
POSITIONS, SLOTS, ROWS = 40, 64, 12

SHAPES = (
    # hidden, intermediate, heads, KV heads, head_dim
    (64, 96, 4, 2, 16),
    (256, 704, 8, 4, 32),
    (160, 208, 3, 1, 48),
    (256, 512, 2, 2, 80),
    (512, 1408, 4, 1, 256),
)

needs_gcc = pytest.mark.skipif(compiler.compiler_version() is None, reason="needs gcc")


def shaped(shape: tuple[int, ...]) -> ModelConfig:
    """Return the shipped model's configuration with other widths."""
    hidden, intermediate, heads, kv_heads, head_dim = shape
    return replace(
        read_model_config(SHIPPED_MODEL),
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
    )


def torch_and_native(config: ModelConfig, dtype: torch.dtype) -> tuple[Operators, Operators]:
    """Return the operators in torch and the operators in C."""
    tables = rotary_tables(config, POSITIONS, dtype)
    native = native_operators(config, tables, dtype)
    assert native is not None
    return TorchOperators(config, tables), native


def random(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    """Return random numbers that depend only on the shape."""
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(shape, generator=generator) * scale).to(dtype)


def assert_close(found: Tensor, expected: Tensor) -> None:
    """Check that tensors differ by at most a few units in the last place of the dtype."""
    tolerance = 2e-6 if found.dtype is torch.float32 else 2e-2
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@needs_gcc
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("added", [False, True])
def test_norms_equal_those_of_torch(
    added: bool, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """The residual sum has equal bits, and the norm is equal up to rounding."""
    config = shaped(shape)
    width = config.hidden_size
    sums, normed = [], []
    for operators in torch_and_native(config, dtype):
        hidden = random(ROWS, width, dtype=dtype, scale=30.0)
        delta = random(ROWS + 1, width, dtype=dtype)[:ROWS] if added else None
        normed.append(operators.add_norm(hidden, delta, random(width, dtype=dtype)))
        sums.append(hidden)
    assert torch.equal(*sums)
    assert_close(normed[1], normed[0])


@needs_gcc
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("normed", "partial"), [(False, False), (True, False), (False, True)])
def test_queries_keys_and_values_equal_those_of_torch(
    normed: bool, partial: bool, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Heads are normalised, rotated, scaled and written as in torch, and no other slot changes."""
    config = shaped(shape)
    if partial:
        config = replace(config, rope=Rope(1e4, share=16 / config.head_dim))
    zeros = torch.zeros(ROWS, dtype=torch.int64)
    order = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(1))[:ROWS]
    positions = torch.randperm(POSITIONS, generator=torch.Generator().manual_seed(2))[:ROWS]
    inputs = StepInputs(zeros, positions, order, AttentionSpans(), zeros[:0], 0)
    heads = config.num_heads + config.num_kv_heads
    weight = random(heads, config.head_dim, dtype=dtype) if normed else None
    width = (heads + config.num_kv_heads) * config.head_dim
    found = []
    for operators in torch_and_native(config, dtype):
        layer_kv = torch.full((2 * config.num_kv_heads, SLOTS, config.head_dim), 7.0, dtype=dtype)
        fused = random(ROWS, width, dtype=dtype)
        step = operators.begin(inputs)
        queries = operators.rotate_and_store(step, fused, layer_kv, weight)
        found.append((queries, layer_kv))
    for native, expected in zip(found[1], found[0], strict=True):
        assert native.shape == expected.shape
        assert_close(native, expected)
    untouched = [slot for slot in range(SLOTS) if slot not in order.tolist()]
    assert (found[1][1][:, untouched] == 7.0).all()


@needs_gcc
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_gates_equal_those_of_torch(
    activation: str, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """The product activation(gate) * up is correct even for gates whose exponential overflows."""
    config = replace(shaped(shape), activation=activation)
    gate_up = random(ROWS, 2 * config.intermediate_size, dtype=dtype, scale=5.0)
    gate_up[0, :4] = torch.tensor([300.0, -300.0, 0.0, -88.0])
    expected, found = (operators.gate(gate_up) for operators in torch_and_native(config, dtype))
    assert_close(found, expected)


@needs_gcc
@pytest.mark.parametrize("vocab", [3, 64, 131])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_logits_of_bfloat16_weights_have_float32_precision(
    shape: tuple[int, ...], vocab: int
) -> None:
    """Logits of bfloat16 weights are float32 sums, and a row has the same bits in any batch."""
    width = shape[0]
    hidden, weight = (random(n, width, dtype=torch.bfloat16) for n in (ROWS, vocab))
    head = Linear(weight, pack=False)
    found = head.float32(hidden)
    expected = hidden.double() @ weight.double().T
    assert found.dtype is torch.float32
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()
    alone = [head.float32(hidden[row : row + 1]) for row in range(ROWS)]
    assert torch.equal(found, torch.cat(alone))


@needs_gcc
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_have_the_same_bits_alone_and_together(dtype: torch.dtype, threads: int) -> None:
    """A row has the same bits for any number of rows or threads."""
    config = shaped((512, 1408, 4, 1, 256))
    _, native = torch_and_native(config, dtype)
    hidden, weight = random(300, 512, dtype=dtype), random(512, dtype=dtype)
    gate_up = random(300, 2816, dtype=dtype)
    alone = [native.add_norm(hidden[i : i + 1].clone(), None, weight) for i in range(300)]
    gated = [native.gate(gate_up[i : i + 1]) for i in range(300)]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert torch.equal(native.add_norm(hidden.clone(), None, weight), torch.cat(alone))
        assert torch.equal(native.gate(gate_up), torch.cat(gated))
    finally:
        torch.set_num_threads(before)


@needs_gcc
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_logits_of_the_shipped_model_equal_those_of_torch(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt and its decodes have the logits of the torch operators."""
    config = read_model_config(SHIPPED_MODEL)
    weights = load_weights(SHIPPED_MODEL, config, dtype)
    tokens = torch.randint(0, 4096, (300,), generator=torch.Generator().manual_seed(1)).tolist()
    edges = [0, 200, 280, *range(281, 301)]
    fast = Decoder(config, weights, 512)
    monkeypatch.setattr(
        "draftgate.backends.engine.operators.choose.native_operators", lambda *_: None
    )
    slow = Decoder(config, weights, 512)
    assert fast.operators.name != slow.operators.name
    found, expected = (
        logits_in_steps(runner_of(decoder, dtype), blocks_of(0, 300), tokens, edges)
        for decoder in (fast, slow)
    )
    error = (found - expected).abs().max() / expected.std()
    assert error < (1e-5 if dtype is torch.float32 else 0.1)


def runner_of(decoder: Decoder, dtype: torch.dtype) -> Runner:
    """Return a runner over a small pool."""
    return Runner(decoder, KvPool(decoder.config, 32, dtype))


@pytest.mark.parametrize(
    "shape",
    [(250, 704, 8, 4, 32), (256, 700, 8, 4, 32), (256, 704, 8, 4, 24), (256, 96, 65, 1, 16)],
)
def test_unsupported_shapes_use_torch(shape: tuple[int, ...]) -> None:
    """The model uses torch if a width is not a multiple of 16, or if a KV head has too many query
    heads."""
    operators = operators_for(shaped(shape), torch.float32, 8)
    assert operators.name == f"torch-{torch.__version__}"


def test_torch_is_used_without_a_compiler(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The model runs on torch without gcc, and the log reports the cost."""
    compiler.compiled.cache_clear()
    monkeypatch.setattr(compiler, "compiler_version", lambda: None)
    with caplog.at_level(logging.INFO):
        operators = operators_for(read_model_config(SHIPPED_MODEL), torch.float32, 8)
    compiler.compiled.cache_clear()
    assert operators.name == f"torch-{torch.__version__}"
    assert "several times as long" in caplog.text


@needs_gcc
def test_torch_is_used_if_compilation_fails(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """The model runs on torch if compilation fails, and the log has the reason."""
    compiler.compiled.cache_clear()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(compiler, "FLAGS", (*compiler.FLAGS, "-no-such-flag"))
    operators = operators_for(read_model_config(SHIPPED_MODEL), torch.float32, 8)
    compiler.compiled.cache_clear()
    assert operators.name == f"torch-{torch.__version__}"
    assert "do not compile" in caplog.text


@needs_gcc
def test_compiled_libraries_are_cached(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The second start on a machine compiles no library."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    defines = {"HEAD_DIM": 32, "BFLOAT16": 0, "TILE": 256}
    compiler.compiled.cache_clear()
    assert compiler.compiled("attention.c", **defines) is not None
    (library,) = (tmp_path / "draftgate").iterdir()
    made = library.stat().st_mtime_ns
    compiler.compiled.cache_clear()
    assert compiler.compiled("attention.c", **defines) is not None
    compiler.compiled.cache_clear()
    assert [path.stat().st_mtime_ns for path in (tmp_path / "draftgate").iterdir()] == [made]


@needs_gcc
@pytest.mark.parametrize("damage", ["cut", "empty", "text", "bit"])
def test_a_damaged_library_is_compiled_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, damage: str
) -> None:
    """A cached library with other contents is not loaded, which could end the process."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    defines = {"HEAD_DIM": 32, "BFLOAT16": 0, "TILE": 256}
    compiler.compiled.cache_clear()
    assert compiler.compiled("attention.c", **defines) is not None
    (library,) = (tmp_path / "draftgate").iterdir()
    whole = library.read_bytes()
    library.unlink()  # the mapping of this process keeps its file
    changed = {
        "cut": whole[:5000],
        "empty": b"",
        "text": b"no library",
        "bit": whole[:-1] + bytes([whole[-1] ^ 1]),
    }
    library.write_bytes(changed[damage])
    compiler.compiled.cache_clear()
    assert compiler.compiled("attention.c", **defines) is not None
    compiler.compiled.cache_clear()
    assert library.read_bytes() == whole


@needs_gcc
def test_a_cache_that_cannot_be_written_costs_only_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without a place for the cache, the library is compiled elsewhere and loaded."""
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    compiler.compiled.cache_clear()
    library = compiler.compiled("attention.c", HEAD_DIM=32, BFLOAT16=0, TILE=256)
    compiler.compiled.cache_clear()
    assert library is not None
