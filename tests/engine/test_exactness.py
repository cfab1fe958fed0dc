"""In float32, and in bfloat16 with `exact`, the bits of a row do not depend on other rows of the
step.

The terms of the test products cancel, so only rounding errors remain. Another order of additions
changes every number. Outputs rounded to bfloat16 would hide most differences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import accumulate
from random import Random

import pytest
import torch
from torch import Tensor

from draftgate.backends.checkpoints import SHIPPED_MODEL
from draftgate.backends.engine import linear as linear_module
from draftgate.backends.engine.config import ModelConfig, read_model_config
from draftgate.backends.engine.inputs import AttentionSpan, attention_inputs
from draftgate.backends.engine.kv_pool import BLOCK_TOKENS, KV_TILE, KvPool
from draftgate.backends.engine.linear import (
    EXACT_ROWS,
    MAX_ROWS,
    MIN_ROWS,
    PRODUCT_ROWS,
    ROW_TILE,
    Linear,
    padded_rows,
)
from draftgate.backends.engine.model import Decoder
from draftgate.backends.engine.numerics import is_exact
from draftgate.backends.engine.operators import attention as attention_module
from draftgate.backends.engine.operators.attention import CallRows, call_rows
from draftgate.backends.engine.operators.base import Operators, RotaryTables, rotary_tables
from draftgate.backends.engine.operators.compiler import compiler_version
from draftgate.backends.engine.operators.native import NativeOperators, native_operators
from draftgate.backends.engine.operators.pieces import KvPiece, kv_pieces
from draftgate.backends.engine.operators.reference import TorchOperators
from draftgate.backends.engine.rope import Rope
from draftgate.backends.engine.runner import Runner
from draftgate.backends.engine.warmup import steps_are_exact, windows_are_exact
from draftgate.backends.engine.weights import load_weights
from tests.engine.step_logits import Table, blocks_of, logits_in_steps, runner_of
from tests.examples import grid

DTYPES = [torch.float32, torch.bfloat16]
WIDTHS = [5, 16, 33, 40, 160, 512]
CONTEXT = 600


def cancelling(rows: int, width: int, outputs: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return x and a weight whose exact product is zero."""
    random = torch.Generator().manual_seed(width)
    half = torch.randperm(width // 2, generator=random)
    x = torch.randn(rows, width // 2, generator=random).to(dtype)
    weight = torch.randn(outputs, width // 2, generator=random).to(dtype)
    return torch.cat([x, x[:, half]], 1), torch.cat([weight, -weight[:, half]], 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("shape", [(64, 192), (256, 4096), (882, 301), (1728, 420), (14336, 64)])
def test_a_row_of_a_product_does_not_depend_on_the_number_of_rows(
    shape: tuple[int, int], dtype: torch.dtype, *, pack: bool
) -> None:
    """A row of a product has the same bits for any number of tiles and at any position."""
    x, weight = cancelling(512, *shape, dtype)
    bias = torch.zeros(shape[1], dtype=dtype)
    linear = Linear(weight, bias, exact=True, pack=pack)
    alone = torch.cat([linear(tile) for tile in x.split(16)])
    assert alone.any()
    for rows in (16, 32, 48, 80, 160, 512):
        assert torch.equal(linear(x[:rows]), alone[:rows])
        assert torch.equal(linear(x[-rows:]), alone[-rows:])
    assert torch.equal(linear(x[3:19]), alone[3:19])


@pytest.mark.parametrize("pack", [True, False])
def test_float32_products_of_bfloat16_are_exact_to_16_bits(*, pack: bool) -> None:
    """`Linear.float32` has a relative error of at most 2^-17, and its rows do not depend on each
    other."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(160, 256, generator=random).bfloat16()
    weight = torch.randn(999, 256, generator=random).bfloat16()
    bias = torch.randn(999, generator=random).bfloat16()
    linear = Linear(weight, bias, exact=True, pack=pack)
    expected = x.double() @ weight.double().T + bias.double()
    error = (linear.float32(x) - expected).abs()
    assert (error <= expected.abs() * 2**-16 + 1e-4).all()
    assert (linear(x) - expected).abs().max() > 0.1
    assert linear.float32(x).dtype is torch.float32
    alone = torch.cat([linear.float32(tile) for tile in x.split(16)])
    assert torch.equal(linear.float32(x), alone)


@pytest.mark.parametrize("in_c", [True, False])
@pytest.mark.parametrize("shape", [(64, 192), (256, 4096), (882, 301), (1728, 420)])
def test_a_bfloat16_row_without_onednn_does_not_depend_on_the_number_of_rows(
    shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch, *, in_c: bool
) -> None:
    """If oneDNN lacks bfloat16, the products in C and in torch are rounded float32 products."""
    monkeypatch.setattr(linear_module, "ONEDNN_BFLOAT16", False)
    if not in_c:
        monkeypatch.setattr(linear_module, "multiplies_in_c", lambda width: False)
    x, weight = cancelling(160, *shape, torch.bfloat16)
    bias = torch.ones(shape[1], dtype=torch.bfloat16)
    linear = Linear(weight, bias, exact=True)
    wide = linear.float32(x)
    assert wide.dtype is torch.float32
    alone = torch.cat([linear.float32(tile) for tile in x.split(padded_rows(1))])
    assert torch.equal(wide, alone)
    assert torch.equal(linear(x), wide.bfloat16())
    assert torch.equal(linear(x[3:19]), linear(x)[3:19])
    assert (wide - 1).abs().max() < 1e-3


class Recording(Linear):
    """A linear layer that records the number of rows of each product."""

    rows: list[int]

    def _multiply(self, x: Tensor) -> Tensor:
        self.rows.append(len(x))
        return super()._multiply(x)


def test_exact_bfloat16_products_have_fewer_rows_than_others() -> None:
    """Exact bfloat16 products have up to `EXACT_ROWS` rows, and all other products have up to
    `MAX_ROWS`."""
    for dtype, exact, most in (
        (torch.bfloat16, True, EXACT_ROWS),
        (torch.bfloat16, False, MAX_ROWS),
        (torch.float32, True, MAX_ROWS),
    ):
        for rows in (padded_rows(33), 80, padded_rows(300)):
            x, weight = cancelling(rows, 256, 64, dtype)
            linear = Recording(weight, exact=exact)
            linear.rows = []
            linear(x)
            assert padded_rows(1) <= min(linear.rows) <= max(linear.rows) <= most
            assert sum(linear.rows) == rows
            assert len(linear.rows) == -(-rows // most)


def tables() -> Iterator[tuple[str, list[int]]]:
    """Block tables of a sequence of `CONTEXT` tokens: 38 blocks of a pool of 128."""
    count = -(-CONTEXT // BLOCK_TOKENS)
    yield "one_run", list(range(5, 5 + count))
    yield "at_the_end", list(range(128 - count, 128))
    yield "border_at_a_tile", [*range(60, 76), *range(10, 10 + count - 16)]
    yield "border_in_a_tile", [*range(60, 81), *range(10, 10 + count - 21)]
    yield "three_runs", [*range(60, 76), *range(100, 116), *range(3, 3 + count - 32)]
    yield "scattered", [(7 * index) % 127 for index in range(count)]


TABLES = dict(tables())


WINDOWS = (None, 1, 100, 256, 300)


def native(config: ModelConfig, dtype: torch.dtype) -> NativeOperators:
    """Return the operators in C, or skip the test if no compiler is available."""
    operators = native_operators(config, no_rotation(config, dtype), dtype)
    if operators is None:
        pytest.skip("needs gcc")
    return operators


def no_rotation(config: ModelConfig, dtype: torch.dtype) -> dict[Rope, RotaryTables]:
    """Return the rotation of position 0, because these tests check only attention."""
    return rotary_tables(config, 1, dtype)


MAKERS: dict[str, Callable[[ModelConfig, torch.dtype], Operators]] = {
    "torch": lambda config, dtype: TorchOperators(config, no_rotation(config, dtype)),
    "native": native,
}


class Attention:
    """Random queries, keys and values of a sequence at any place in a pool."""

    def __init__(
        self,
        make: str,
        group: int,
        dtype: torch.dtype,
        head_dim: int = 32,
        softcap: float | None = None,
    ) -> None:
        random = torch.Generator().manual_seed(group)
        kv_heads = 2
        config = replace(
            read_model_config(SHIPPED_MODEL),
            num_heads=kv_heads * group,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            windows=WINDOWS,
            attention_softcap=softcap,
        )
        self.operators = MAKERS[make](config, dtype)
        self.kv = torch.randn(2 * kv_heads, CONTEXT, head_dim, generator=random).to(dtype)
        shape = (CONTEXT + 16, kv_heads * group, head_dim)
        self.queries = (torch.randn(shape, generator=random) * 0.3).to(dtype)

    def layer_kv(self, table: list[int]) -> Tensor:
        """Return a layer of a pool with this sequence in its blocks and other numbers elsewhere."""
        slots = torch.tensor(table)[:, None] * BLOCK_TOKENS + torch.arange(BLOCK_TOKENS)
        pool = torch.full((4, 128 * BLOCK_TOKENS + KV_TILE, self.kv.shape[2]), 9.0)
        pool = pool.to(self.kv.dtype)
        pool[:, slots.flatten()[:CONTEXT]] = self.kv
        return pool

    def attention_output(
        self, width: int, window: int | None, table: list[int], begin: int = 0
    ) -> Tensor:
        """Return the outputs of all rows from `begin`, computed `width` rows at a time."""
        layer_kv = self.layer_kv(table)
        rows = []
        for start in range(begin, CONTEXT, width):
            tokens = min(width, CONTEXT - start)
            step = self.queries[start : start + padded_rows(tokens)]
            span = AttentionSpan(tokens, start, table)
            begun = self.operators.begin(attention_inputs(span, len(step)))
            rows.append(self.operators.attend(begun, step, layer_kv, window)[:tokens])
        return torch.cat(rows)


@pytest.mark.parametrize(
    ("window", "group"),
    grid(
        *((None, 1, 100, 300), (1, 2, 4, 8)),
        quick=lambda *case: case in {(None, 4), (1, 2), (100, 8), (300, 1)},
    ),
)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("make", MAKERS)
def test_attention_of_a_row_has_the_same_bits_in_steps_of_any_size(
    window: int | None, group: int, dtype: torch.dtype, make: str
) -> None:
    """The attention of a row has the same bits in any step, head group and window."""
    attention = Attention(make, group, dtype)
    table = TABLES["one_run"]
    alone = attention.attention_output(1, window, table, CONTEXT - 176)
    for width in WIDTHS:
        actual = attention.attention_output(width, window, table, CONTEXT - max(width, 176))
        assert torch.equal(actual[-176:], alone)


def test_calls_of_attention_avoid_rows_that_a_kernel_computes_in_another_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If a kernel computes 3 rows at a time, as MKL does for AVX2, no call leaves 2 rows over."""
    flash = attention_module._flash

    def in_groups_of_3(queries: Tensor, *args: Tensor, **options: object) -> tuple[Tensor, Tensor]:
        values, sums = flash(queries, *args, **options)
        for block in values.split(32, 2):
            if block.shape[2] % 3 == 2:
                block[:, :, -2:] *= 1 + 2**-20
        return values, sums

    monkeypatch.setattr(attention_module, "_flash", in_groups_of_3)
    attention_module._float32_rows.cache_clear()
    attention = Attention("torch", 8, torch.float32)
    try:
        assert call_rows(torch.float32) == CallRows(12, 24)
        alone = attention.attention_output(1, 100, TABLES["one_run"], CONTEXT - 40)
        actual = attention.attention_output(40, 100, TABLES["one_run"], CONTEXT - 40)
    finally:
        attention_module._float32_rows.cache_clear()
    assert torch.equal(actual, alone)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("make", MAKERS)
def test_capped_attention_of_a_row_has_the_same_bits_in_steps_of_any_size(
    dtype: torch.dtype, make: str
) -> None:
    """A bound on the scores keeps the attention of a row independent of its step."""
    attention = Attention(make, 3, dtype, softcap=2.0)
    expected = attention.attention_output(1, 100, TABLES["one_run"], CONTEXT - 40)
    for width in (5, 33):
        actual = attention.attention_output(width, 100, TABLES["scattered"], CONTEXT - 40)
        assert torch.equal(actual, expected)


@pytest.mark.parametrize(
    ("window", "dtype"),
    grid(
        *((None, 100, 300), DTYPES),
        quick=lambda *case: case in {(None, torch.bfloat16), (100, torch.float32)},
    ),
)
@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("make", MAKERS)
def test_attention_does_not_depend_on_the_block_table(
    table: str, window: int | None, dtype: torch.dtype, make: str
) -> None:
    """Attention has the same bits if blocks are one run, several runs or scattered."""
    attention = Attention(make, 2, dtype)
    expected = attention.attention_output(33, window, TABLES["one_run"])
    assert torch.equal(attention.attention_output(33, window, TABLES[table]), expected)
    assert torch.equal(attention.attention_output(1, window, TABLES[table], 512), expected[512:])


@pytest.mark.parametrize(
    ("width", "window"),
    grid(
        *((1, 5, 160, 600), (None, 1, 100, 256, 300)),
        quick=lambda width, window: width == 160 or (width, window) in {(1, 300), (5, 100)},
    ),
)
@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_attention_equals_its_formula_in_float64(
    softcap: float | None, make: str, width: int, window: int | None
) -> None:
    """The result equals a float64 softmax over the keys in the window, up to rounding."""
    attention = Attention(make, 4, torch.float32, softcap=softcap)
    keys, values = attention.kv.double().chunk(2)
    queries = attention.queries[:CONTEXT].double().view(CONTEXT, 2, 4, -1)
    scores = torch.einsum("rhgd,hkd->rhgk", queries, keys)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    distance = torch.arange(CONTEXT)[:, None] - torch.arange(CONTEXT)
    hidden = (distance < 0) | (distance >= (window or CONTEXT))
    scores.masked_fill_(hidden[:, None, None], -torch.inf)
    expected = torch.einsum("rhgk,hkd->rhgd", scores.softmax(-1), values).flatten(1)
    actual = attention.attention_output(width, window, TABLES["border_in_a_tile"])
    assert (actual - expected).abs().max() < 1e-5


@pytest.mark.parametrize("page_tokens", [1, 16, 24, 48])
def test_pieces_have_the_slots_of_the_page_table(page_tokens: int) -> None:
    """Each position has the slot that the page table assigns, for any table and page size."""
    random = Random(page_tokens)
    for context in (1, 200, 256, 257, 600, 1100):
        pages = -(-context // page_tokens)
        cut = random.randrange(pages + 1)
        run = [*range(500, 500 + cut), *range(3, 3 + pages - cut)]
        for table in (run, random.sample(range(pages * 3), pages), [*run, 7, 8]):
            pieces = kv_pieces(table, context, page_tokens)
            slots = [int(slot) for piece in pieces for slot in piece.slots]
            expected = [
                table[place // page_tokens] * page_tokens + place % page_tokens
                for place in range(context)
            ]
            assert slots[:context] == expected
            assert all(len(piece.slots) % KV_TILE == 0 for piece in pieces)
            assert sum(len(piece.slots) for piece in pieces) == -(-context // KV_TILE) * KV_TILE
            starts = accumulate((len(piece.slots) for piece in pieces[:-1]), initial=0)
            assert [piece.start for piece in pieces] == list(starts)


def test_tables_are_read_in_the_fewest_pieces() -> None:
    """The reader views a run directly, gathers a tile across two runs, and merges neighbours."""

    def shape(table: str) -> list[tuple[int, int, bool]]:
        pieces: tuple[KvPiece, ...] = kv_pieces(TABLES[table], CONTEXT)
        return [(piece.start, len(piece.slots), isinstance(piece.slots, range)) for piece in pieces]

    assert shape("one_run") == [(0, 768, True)]
    assert shape("border_at_a_tile") == [(0, 256, True), (256, 512, True)]
    assert shape("border_in_a_tile") == [(0, 256, True), (256, 256, False), (512, 256, True)]
    assert shape("three_runs") == [(0, 256, True), (256, 256, True), (512, 256, True)]
    assert shape("scattered") == [(0, 768, False)]


NEEDS_GCC = pytest.mark.skipif(compiler_version() is None, reason="needs gcc")
PACKED = pytest.param((torch.float32, "q8_0"), marks=NEEDS_GCC)


@pytest.fixture(scope="module", params=[*((dtype, None) for dtype in DTYPES), PACKED], ids=str)
def runner(request: pytest.FixtureRequest) -> Runner:
    """The shipped model with exact rows, unpacked or packed."""
    dtype, packing = request.param
    config = read_model_config(SHIPPED_MODEL)
    weights = load_weights(SHIPPED_MODEL, config, dtype, exact=True, packing=packing)
    return Runner(Decoder(config, weights, 1024), KvPool(config, 128, dtype))


TOKENS = torch.randint(0, 4096, (300,), generator=torch.Generator().manual_seed(3)).tolist()


@pytest.fixture(scope="module")
def one_by_one(runner: Runner) -> Tensor:
    """Logits of `TOKENS`, computed as a long prompt and then single tokens."""
    return logits_in_steps(runner, blocks_of(0, 300), TOKENS, [0, *range(230, 301)])


@pytest.mark.parametrize("table", [None, "border_in_a_tile", "scattered"])
@pytest.mark.parametrize("width", [5, 33, 40, 160, 300])
def test_logits_of_the_shipped_model_have_the_same_bits_in_any_step(
    width: int, table: str | None, runner: Runner, one_by_one: Tensor
) -> None:
    """The shipped model's logits have the same bits in steps of any size and with blocks at any
    place."""
    where = blocks_of(1, 300) if table is None else Table(TABLES[table])
    logits = logits_in_steps(runner, where, TOKENS, [*range(0, 300, width), 300])
    assert logits.dtype is torch.float32
    assert torch.equal(logits, one_by_one)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_probe_confirms_exactness(dtype: torch.dtype) -> None:
    """The probe confirms exact float32, exact bfloat16, and exact windows."""
    config = read_model_config(SHIPPED_MODEL)
    weights = load_weights(SHIPPED_MODEL, config, dtype, exact=True)
    runner = Runner(Decoder(config, weights, 512), KvPool(config, 32, dtype))
    assert is_exact(
        partial(steps_are_exact, runner, config, dtype, dtype, 512), dtype, required=True
    )
    sliding = replace(config, windows=(None, 4096) * (config.num_layers // 2))
    assert windows_are_exact(sliding, dtype, dtype)


def test_bfloat16_is_inexact_without_the_option() -> None:
    """A bfloat16 worker without `--exact` is inexact and runs no test."""
    assert not is_exact(pytest.fail, torch.bfloat16, required=False)


class InexactRunner(Runner):
    """A runner whose rows depend on the number of rows, as in other engines."""

    def logits(self, plan: object) -> Tensor:
        """Return logits whose last bits depend on the number of rows."""
        logits = super().logits(plan)  # type: ignore[arg-type]
        return logits * (1 + 1e-6 * (len(logits) > 4))


def test_exact_raises_if_the_probe_fails() -> None:
    """`--exact` raises an error if the probe fails."""
    config = read_model_config(SHIPPED_MODEL)
    weights = load_weights(SHIPPED_MODEL, config, torch.float32)
    runner = InexactRunner(Decoder(config, weights, 512), KvPool(config, 32, torch.float32))
    with pytest.raises(ValueError, match="--exact is not possible in float32 on this machine"):
        is_exact(
            partial(steps_are_exact, runner, config, torch.float32, torch.float32, 512),
            torch.float32,
            required=True,
        )


def test_products_have_few_numbers_of_rows() -> None:
    """Steps of any length use few row counts, because oneDNN keeps memory for each row count.

    Padding adds at most a quarter of the rows above the minimum.
    """
    assert len(PRODUCT_ROWS) <= 30
    for dtype in DTYPES:
        linear = Recording(torch.zeros(8, 8, dtype=dtype), exact=True)
        linear.rows = []
        for rows in range(1, 3 * MAX_ROWS):
            more = padded_rows(rows)
            assert rows <= more <= max(MIN_ROWS, 1.25 * rows + ROW_TILE)
            assert linear(torch.zeros(more, 8, dtype=dtype)).shape == (more, 8)
        assert set(linear.rows) <= set(PRODUCT_ROWS)
    assert padded_rows(0) == 0


def test_steps_need_no_kernels_beyond_those_of_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After `compile_products`, no step compiles another kernel, so memory does not grow. A kernel
    belongs to a weight shape and a number of rows."""
    met = set()
    real = linear_module._product

    def product(x: Tensor, weight: Tensor, *others: object) -> Tensor:
        met.add((x.shape, weight.shape))
        result: Tensor = real(x, weight, *others)
        return result

    monkeypatch.setattr(linear_module, "_product", product)
    runner = runner_of(SHIPPED_MODEL)
    runner._decoder.compile_products()
    compiled = frozenset(met)
    assert len(compiled) == 5 * len(PRODUCT_ROWS)
    for tokens in (1, 2, 5, 17, 33, 70, 129, 300, 511):
        logits_in_steps(runner, blocks_of(0, 512), [7] * tokens, [0, tokens])
    assert met == compiled
