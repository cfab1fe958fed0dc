"""Every kernel at its relevant shapes, with its reference and its bytes and operations.

A case holds its tensors and can run any number of times. `FULL` has the shapes of a Llama of 8B
parameters with 64 sequences after 8,192 tokens. Tests use smaller shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple

import torch
from torch import Tensor

from bench.engine.quantised import quantised
from draftgate.backends.engine.kernels import (
    accept_walk_ref,
    kv_move_ref,
    paged_attention_ref,
    rms_norm_ref,
    rope_kv_ref,
    sample_verify_ref,
    swiglu_ref,
)
from draftgate.backends.engine.kernels.accept_walk import accept_walk
from draftgate.backends.engine.kernels.accept_walk_ref import NO_DRAFT, NO_ROW, StopRules
from draftgate.backends.engine.kernels.kv_move import kv_move
from draftgate.backends.engine.kernels.paged_attention import paged_attention
from draftgate.backends.engine.kernels.paged_attention_ref import BlockTables, DraftTrees
from draftgate.backends.engine.kernels.rms_norm import add_rms_norm, rms_norm
from draftgate.backends.engine.kernels.rope_kv import rope_kv
from draftgate.backends.engine.kernels.sample_verify import sample
from draftgate.backends.engine.kernels.sample_verify_ref import RowSampling
from draftgate.backends.engine.kernels.swiglu import swiglu
from draftgate.backends.engine.linear import Product
from draftgate.backends.engine.quantisation.fp8_kv import FP8
from draftgate.backends.engine.quantisation.kernels import KernelLinear
from draftgate.backends.engine.quantisation.linear import QuantisedLinear
from draftgate.backends.engine.quantisation.scheme import Fp8Scheme, Int4Scheme
from draftgate.backends.engine.rope import Rope

EPS: Final = 1e-5
SEED: Final = 1

FP8_BLOCKS: Final = Fp8Scheme((), block=(128, 128))
INT4_GROUPS: Final = Int4Scheme((), "gptq", 128)


class Sizes(NamedTuple):
    """Shapes of all cases."""

    sequences: int = 64
    context: int = 8192
    verified: int = 5
    chunk: int = 2048
    query_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    layers: int = 32
    hidden: int = 4096
    intermediate: int = 14336
    vocab: int = 128256
    block_size: int = 16

    @property
    def rows(self) -> int:
        """Number of rows of a verify step."""
        return self.sequences * self.verified


FULL: Final = Sizes()

Outputs = Sequence[Tensor]


def _nothing() -> None:
    pass


def _fill(tensor: Tensor, value: float) -> None:
    tensor.fill_(value)


def _copy(tensor: Tensor, source: Tensor) -> None:
    tensor.copy_(source)


@dataclass(frozen=True)
class KernelCase:
    """A kernel at a single shape."""

    name: str
    run: Callable[[], Outputs]
    """Function that calls the kernel and returns its results, including changed tensors."""
    reference: Callable[[], Outputs]
    """Function that calls the reference on the same inputs, without changing them."""
    bytes_moved: int
    """Minimum number of bytes read and written, each byte counted once."""
    operations: int = 0
    """Number of operations of matrix products, two for each multiplication."""
    reset: Callable[[], None] = _nothing
    """Function that restores the tensors that a run has changed."""
    tolerance: float = 0.0
    """Relative and absolute tolerance, or 0 for equality."""
    may_differ: float = 0.0
    """Share of elements that may differ, for exact ties that depend on the logarithm's rounding."""

    def check(self) -> None:
        """Compare the kernel with its reference.

        Raises:
            AssertionError: the results differ.
        """
        self.reset()
        results = [tensor.clone() for tensor in self.run()]
        self.reset()
        for tensor, expected in zip(results, self.reference(), strict=True):
            if self.may_differ:
                share = float((tensor != expected).double().mean())
                assert share <= self.may_differ, f"{self.name}: {share:.2%} of tokens differ"
            else:
                torch.testing.assert_close(
                    tensor, expected, rtol=self.tolerance, atol=self.tolerance
                )


class Inputs:
    """A source of random tensors on a device, from a single seed."""

    def __init__(self, sizes: Sizes, device: str, dtype: torch.dtype) -> None:
        self.sizes, self.device, self.dtype = sizes, device, dtype
        self._generator = torch.Generator(device).manual_seed(SEED)

    def normal(self, *shape: int) -> Tensor:
        """Return normally distributed values of the given shape."""
        drawn = torch.empty(shape, dtype=self.dtype, device=self.device)
        return drawn.normal_(generator=self._generator)

    def below(self, limit: int, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        """Return random integers from 0 to limit - 1."""
        drawn = torch.empty(shape, dtype=dtype, device=self.device)
        return drawn.random_(0, limit, generator=self._generator)

    def shuffled(self, count: int) -> Tensor:
        """Return the int64 values from 0 to count - 1 in random order."""
        return torch.randperm(count, generator=self._generator, device=self.device)

    def full(self, value: float, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        """Return a tensor of equal values."""
        return torch.full(shape, value, dtype=dtype, device=self.device)

    def up_to(self, count: int, step: int = 1) -> Tensor:
        """Return the int32 values 0, step, ... count * step."""
        return torch.arange(count + 1, dtype=torch.int32, device=self.device) * step


def cases(inputs: Inputs) -> Iterator[KernelCase]:
    """Yield every case."""
    yield from attention_cases(inputs)
    yield from sampling_cases(inputs)
    yield from layer_cases(inputs)
    yield from product_cases(inputs)
    yield walk_case(inputs)


def attention_cases(inputs: Inputs) -> Iterator[KernelCase]:
    """Yield decodes, verify steps and a prefill chunk on a shared cache with shuffled blocks."""
    sizes = inputs.sizes
    blocks = -(-sizes.context // sizes.block_size)
    slots = sizes.sequences * blocks * sizes.block_size
    layer_kv = inputs.normal(2 * sizes.kv_heads, slots, sizes.head_dim)
    tables = inputs.shuffled(sizes.sequences * blocks).view(sizes.sequences, blocks).int()
    scale = float(sizes.head_dim) ** -0.5

    def case(
        name: str, sequences: int, tokens: int, *, trees: bool = False, fp8: bool = False
    ) -> KernelCase:
        cache = layer_kv.to(FP8) if fp8 else layer_kv
        query = inputs.normal(sequences * tokens, sizes.query_heads, sizes.head_dim)
        arguments = (
            query,
            cache,
            inputs.up_to(sequences, tokens),
            inputs.full(sizes.context, sequences),
            BlockTables.of_rows(tables[:sequences]),
        )
        drafts = forked_drafts(inputs, sequences, tokens) if trees else None
        read = sequences * sizes.context * 2 * sizes.kv_heads * sizes.head_dim
        attended = tokens * sizes.context - tokens * (tokens - 1) // 2
        return KernelCase(
            name,
            lambda: [
                paged_attention(*arguments, block_size=sizes.block_size, scale=scale, trees=drafts)
            ],
            lambda: [
                paged_attention_ref.paged_attention(
                    *arguments, block_size=sizes.block_size, scale=scale, trees=drafts
                )
            ],
            read * cache.dtype.itemsize + 2 * query.numel() * inputs.dtype.itemsize,
            operations=4 * sequences * attended * sizes.query_heads * sizes.head_dim,
            tolerance=2e-2 if inputs.dtype.itemsize == 2 else 1e-5,
        )

    yield case("attention, decode", sizes.sequences, 1)
    yield case("attention, verify", sizes.sequences, sizes.verified)
    yield case("attention, decode, trees compiled in", sizes.sequences, 1, trees=True)
    yield case("attention, verify of trees", sizes.sequences, sizes.verified, trees=True)
    yield case("attention, decode of one", 1, 1)
    yield case("attention, decode of a cache in FP8", sizes.sequences, 1, fp8=True)
    yield case("attention, chunk of a prompt", 1, sizes.chunk)


def forked_drafts(inputs: Inputs, sequences: int, tokens: int) -> DraftTrees:
    """Return drafts after each sequence's first row: a chain whose last token has a sibling."""
    drafts = tokens - 1
    masks = [(1 << draft + 1) - 1 for draft in range(drafts)]
    positions = [inputs.sizes.context - tokens + place for place in range(tokens)]
    if drafts >= 2:
        masks[-1] = masks[-2] ^ 1 << drafts - 2 | 1 << drafts - 1
        positions[-1] -= 1
    return DraftTrees(
        torch.tensor([0, *masks], device=inputs.device).repeat(sequences),
        inputs.full(inputs.sizes.context - drafts, sequences),
        torch.tensor(positions, device=inputs.device).repeat(sequences),
    )


def sampling_cases(inputs: Inputs) -> Iterator[KernelCase]:
    """Yield the sampling of a verify step: greedy, sampled, and sampled with top-p."""
    rows, vocab = inputs.sizes.rows, inputs.sizes.vocab
    logits = inputs.normal(rows, vocab) * 4

    def case(name: str, temperature: float, top_p: float) -> KernelCase:
        parameters = RowSampling(
            temperature=inputs.full(temperature, rows, dtype=torch.float32),
            top_k=inputs.full(0, rows),
            top_p=inputs.full(top_p, rows, dtype=torch.float32),
            min_p=inputs.full(0, rows, dtype=torch.float32),
            seed=inputs.below(1 << 62, rows, dtype=torch.int64),
            choice=inputs.full(0, rows),
            position=inputs.up_to(rows)[1:],
        )
        return KernelCase(
            name,
            lambda: [sample(logits, parameters)],
            lambda: [sample_verify_ref.sample(logits, parameters)],
            logits.numel() * logits.element_size(),
            may_differ=0.01,
        )

    yield case("sample and verify, greedy", 0.0, 1.0)
    yield case("sample and verify", 0.8, 1.0)
    yield case("sample and verify, top-p", 0.8, 0.9)


def layer_cases(inputs: Inputs) -> Iterator[KernelCase]:
    """Yield the kernels between the products of a layer, for the rows of a verify step."""
    sizes, size = inputs.sizes, inputs.dtype.itemsize
    close = 8e-3 if size == 2 else 1e-5
    x, residual = (inputs.normal(sizes.rows, sizes.hidden) for _ in range(2))
    weight = inputs.normal(sizes.hidden)
    yield KernelCase(
        "rms_norm",
        lambda: [rms_norm(x, weight, EPS)],
        lambda: [rms_norm_ref.rms_norm(x, weight, EPS)],
        2 * x.numel() * size,
        tolerance=close,
    )
    before = residual.clone()

    def reference_sum() -> Outputs:
        summed = before.clone()
        return [rms_norm_ref.add_rms_norm(x, summed, weight, EPS), summed]

    yield KernelCase(
        "add_rms_norm",
        lambda: [add_rms_norm(x, residual, weight, EPS), residual],
        reference_sum,
        4 * x.numel() * size,
        reset=lambda: _copy(residual, before),
        tolerance=close,
    )
    gate_up = inputs.normal(sizes.rows, 2 * sizes.intermediate)
    yield KernelCase(
        "swiglu",
        lambda: [swiglu(gate_up)],
        lambda: [swiglu_ref.swiglu(gate_up)],
        gate_up.numel() * size * 3 // 2,
        tolerance=close,
    )
    for normed in (False, True):
        yield rope_case(inputs, normed=normed)
    yield move_case(inputs)


def product_cases(inputs: Inputs) -> Iterator[KernelCase]:
    """Yield products with the gate and up matrix in each format, of a decode and of a prompt."""
    sizes, size = inputs.sizes, inputs.dtype.itemsize
    outputs, hidden = 2 * sizes.intermediate, sizes.hidden
    for scheme in (FP8_BLOCKS, INT4_GROUPS):
        weight = quantised(inputs.normal(outputs, hidden) * hidden**-0.5, scheme)
        kernels = KernelLinear(weight)
        reference = QuantisedLinear(weight)
        for name, rows in (("decode", sizes.sequences), ("chunk of a prompt", sizes.chunk)):
            x = inputs.normal(rows, hidden)
            yield KernelCase(
                f"{scheme.name} product, {name}",
                partial(_list_of, kernels, x),
                partial(_list_of, reference, x),
                scheme.loaded_bytes(outputs, hidden) + rows * (hidden + outputs) * size,
                operations=2 * rows * outputs * hidden,
                tolerance=2e-2 if size == 2 else 2e-4,
            )


def _list_of(product: Product, x: Tensor) -> Outputs:
    return [product(x)]


def rope_case(inputs: Inputs, *, normed: bool) -> KernelCase:
    """Return the rotation of a verify step's rows, written to scattered slots."""
    sizes = inputs.sizes
    heads = sizes.query_heads + 2 * sizes.kv_heads
    slots = sizes.rows * sizes.block_size
    qkv = inputs.normal(sizes.rows, heads * sizes.head_dim)
    positions = inputs.below(sizes.context, sizes.rows, dtype=torch.int64)
    tables = Rope(theta=10_000.0).tables(sizes.head_dim, sizes.context, torch.float32)
    cos, sin = (table.to(inputs.device) for table in tables)
    layer_kv = inputs.full(0, 2 * sizes.kv_heads, slots, sizes.head_dim, dtype=inputs.dtype)
    rotation = (qkv, positions, inputs.shuffled(slots)[: sizes.rows], cos, sin)
    qk_norm = inputs.normal(sizes.query_heads + sizes.kv_heads, sizes.head_dim) if normed else None

    def reference() -> Outputs:
        written = layer_kv.clone()
        return [rope_kv_ref.rope_kv(*rotation, written, qk_norm=qk_norm, eps=EPS), written]

    return KernelCase(
        "rope_kv with head norms" if normed else "rope_kv",
        lambda: [rope_kv(*rotation, layer_kv, qk_norm=qk_norm, eps=EPS), layer_kv],
        reference,
        2 * qkv.numel() * inputs.dtype.itemsize + sizes.rows * sizes.head_dim * 4,
        reset=lambda: _fill(layer_kv, 0),
        tolerance=8e-3 if inputs.dtype.itemsize == 2 else 1e-5,
    )


def move_case(inputs: Inputs) -> KernelCase:
    """Return the compaction of an accepted path per sequence, which moves two tokens over a gap."""
    sizes = inputs.sizes
    strips, slots = sizes.layers * 2 * sizes.kv_heads, sizes.sequences * sizes.block_size
    before = inputs.normal(strips, slots, sizes.head_dim)
    memory = before.clone()
    own = inputs.shuffled(slots).view(sizes.sequences, sizes.block_size)
    sources, targets = own[:, [0, 2, 4]].contiguous(), own[:, [0, 1, 2]].contiguous()

    def run() -> Outputs:
        kv_move(memory, sources, targets)
        return [memory]

    def reference() -> Outputs:
        moved = before.clone()
        kv_move_ref.kv_move(moved, sources, targets)
        return [moved]

    moves = 2 * sizes.sequences
    return KernelCase(
        "kv_move",
        run,
        reference,
        2 * moves * strips * sizes.head_dim * inputs.dtype.itemsize,
        reset=lambda: _copy(memory, before),
    )


def walk_case(inputs: Inputs) -> KernelCase:
    """Return the walk along chains whose tokens agree with probability 0.8."""
    sizes = inputs.sizes
    sequences, length = sizes.sequences, sizes.verified
    sampled = inputs.below(sizes.vocab, sizes.rows, dtype=torch.int64)
    place = torch.arange(sizes.rows, device=inputs.device) % length
    agrees = inputs.below(10, sizes.rows) < 8
    drafts = torch.where(agrees, sampled.roll(1), sizes.vocab).masked_fill(place == 0, NO_DRAFT)
    parents = torch.where(place > 0, place - 1, NO_ROW).int()
    stop = StopRules(
        inputs.full(1000, sequences),
        inputs.below(sizes.vocab, 2, dtype=torch.int64),
        inputs.full(0, sequences, dtype=torch.int8),
    )
    walk = (sampled, drafts, parents, inputs.up_to(sequences, length), stop)
    return KernelCase(
        "accept_walk",
        lambda: accept_walk(*walk, max_rows=length),
        lambda: accept_walk_ref.accept_walk(*walk, max_rows=length),
        32 * sizes.rows + 17 * sequences,
    )
