"""Products of a model with the adapters of its rows, on a CPU.

The product with the weights of the model computes all rows together, as without adapters. Each
adapter then adds to its own rows. `Linear` computes the low-rank products, so the bits of a row do
not depend on the other rows of the step.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from draftgate.backends.engine.inputs import StepInputs
from draftgate.backends.engine.linear import MAX_ROWS, MIN_ROWS, Linear, Product
from draftgate.backends.engine.lora.weights import LayerPairs, LowRank
from draftgate.backends.engine.mlp import DenseMlp
from draftgate.backends.engine.weights import LayerWeights, Weights
from draftgate.backends.errors import CheckpointError

_NO_ADAPTER: Final = 0
"""The slot of rows without an adapter."""

ADAPTED_ROWS: Final = tuple(sorted({max(MIN_ROWS, rows) for rows in (4, 16, 64, MAX_ROWS)}))
"""Numbers of rows to which the rows of an adapter are padded.

Each one needs kernels for every shape of low-rank matrices (`linear.ROW_MULTIPLES`), whose products
are small, so few numbers suffice. (Chosen, not tuned.)
"""


class LowRankProduct:
    """`up(down(x))` for a pair of matrices."""

    def __init__(self, pair: LowRank, *, exact: bool) -> None:
        self._down = Linear(pair.down, exact=exact)
        self._up = Linear(pair.up, exact=exact)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Inputs, rank and outputs."""
        return self._down.in_features, self._down.out_features, self._up.out_features

    def __call__(self, x: Tensor) -> Tensor:
        """Return [rows, outputs] for x of [rows, inputs]."""
        return self._up(self._down(x))


@torch.inference_mode()
def multiplies_exactly(product: LowRankProduct, dtype: torch.dtype) -> bool:
    """Return whether rows have the same bits in products of all numbers of rows.

    The test compiles the kernels of these products.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(MAX_ROWS, product.shape[0], generator=generator).to(dtype)
    alone = torch.cat([product(tile) for tile in x.split(MIN_ROWS)])
    equal = [torch.equal(product(x[:rows]), alone[:rows]) for rows in ADAPTED_ROWS]
    return all(equal)


class AdapterRows:
    """The rows of an adapter in a step.

    Attributes:
        slot: the adapter.
        rows: int64 [number of rows].
    """

    def __init__(self, slot: int, rows: Tensor, step_rows: int) -> None:
        self.slot = slot
        self.rows = rows
        padding = adapted_rows(len(rows)) - len(rows)
        # A step with a single adapter needs no copy of its rows.
        whole = len(rows) + padding == step_rows and int(rows[-1]) == len(rows) - 1
        self._gathered = None if whole else torch.cat([rows, rows[:1].expand(padding)])

    def add(self, product: LowRankProduct, x: Tensor, out: Tensor) -> None:
        """Add the product of the adapter's rows of x to those of `out`."""
        part = x if self._gathered is None else x.index_select(0, self._gathered)
        out.index_add_(0, self.rows, product(part)[: len(self.rows)])


def adapted_rows(rows: int) -> int:
    """Return the number of rows of a low-rank product, including padding."""
    whole, rest = divmod(rows, MAX_ROWS)
    return whole * MAX_ROWS + (next(most for most in ADAPTED_ROWS if rest <= most) if rest else 0)


@dataclass(slots=True)
class _Step:
    """The rows of the present step, which the adapted products of a model share."""

    groups: tuple[AdapterRows, ...] = ()


class AdaptedProduct:
    """A `Product` that adds the low-rank products of the adapters in memory.

    Attributes:
        slots: the low-rank products by slot.
    """

    def __init__(self, base: Product, step: _Step) -> None:
        self.in_features, self.out_features = base.in_features, base.out_features
        self.slots: dict[int, LowRankProduct] = {}
        self._base = base
        self._step = step

    @property
    def padded(self) -> bool:
        """Whether the product of the model needs the rows of `padded_rows`."""
        return self._base.padded

    @property
    def library(self) -> str | None:
        """The library of float32 products, or None for torch."""
        return self._base.library

    def __call__(self, x: Tensor) -> Tensor:
        """Return [rows, out_features] for x of [rows, in_features], the rows of the step."""
        return self._adapted(x, self._base(x))

    def float32(self, x: Tensor) -> Tensor:
        """Return the product in float32, with the adapters' part in the dtype of x."""
        return self._adapted(x, self._base.float32(x))

    def _adapted(self, x: Tensor, out: Tensor) -> Tensor:
        for group in self._step.groups:
            product = self.slots.get(group.slot)
            if product is not None:
                group.add(product, x, out)
        return out


PreparedLayers = tuple[tuple[LowRankProduct | None, ...], ...]
"""The products of an adapter, by layer."""


class CpuAdapters:
    """The adapters in the memory of a CPU, in slots from 1 on.

    Attributes:
        weights: the weights of the model, whose products add those of the adapters.
    """

    def __init__(self, weights: Weights, *, exact: bool) -> None:
        """Wrap the products of a model. Until the first `begin`, they work without adapters.

        Args:
            weights: the weights of the model.
            exact: as in `Linear`.
        """
        self._exact = exact
        self._step = _Step()
        self._tested: set[tuple[int, int, int]] = set()
        self._dtype = weights.embedding.dtype
        adapted = [_adapt(layer, self._step) for layer in weights.layers]
        self._products = [products for _, products in adapted]
        self.weights = replace(weights, layers=tuple(layer for layer, _ in adapted))

    def begin(self, inputs: StepInputs) -> None:
        """Set the rows of a step, before its first product."""
        self._step.groups = () if inputs.adapter_slots is None else _groups(inputs.adapter_slots)

    def prepare(self, layers: Iterable[LayerPairs], *, exact: bool = False) -> PreparedLayers:
        """Pack the pairs of an adapter, and compile and test the kernels of new shapes.

        Any thread may call the method.

        Args:
            exact: whether the bits of a row must not depend on the number of rows.

        Raises:
            CheckpointError: `exact` is set, but the bits depend on it on this machine.
        """
        return tuple(
            tuple(None if pair is None else self._prepared(pair, exact=exact) for pair in layer)
            for layer in layers
        )

    def install(self, slot: int, prepared: PreparedLayers) -> None:
        """Put an adapter into a slot, in place of the former one."""
        for products, of_layer in zip(self._products, prepared, strict=True):
            for product, low_rank in zip(products, of_layer, strict=True):
                product.slots.pop(slot, None)
                if low_rank is not None:
                    product.slots[slot] = low_rank

    def _prepared(self, pair: LowRank, *, exact: bool) -> LowRankProduct:
        product = LowRankProduct(pair, exact=self._exact)
        if product.shape not in self._tested:
            if not multiplies_exactly(product, self._dtype) and exact:
                raise CheckpointError(
                    "on this machine, the bits of the adapter's products with (inputs, rank, "
                    f"outputs) = {product.shape} depend on the rest of a step, so texts would "
                    "depend on the batch; use another --dtype, or an adapter of another rank"
                )
            self._tested.add(product.shape)
        return product


def _adapt(layer: LayerWeights, step: _Step) -> tuple[LayerWeights, tuple[AdaptedProduct, ...]]:
    """Return a layer with adapted products, and these products as `adapted_products` lists them."""
    qkv, output = AdaptedProduct(layer.qkv, step), AdaptedProduct(layer.output, step)
    if not isinstance(layer.mlp, DenseMlp):
        return replace(layer, qkv=qkv, output=output), (qkv, output)
    gate_up = AdaptedProduct(layer.mlp.gate_up, step)
    down = AdaptedProduct(layer.mlp.down, step)
    mlp = DenseMlp(gate_up, down)
    return replace(layer, qkv=qkv, output=output, mlp=mlp), (qkv, output, gate_up, down)


def _groups(slots: Tensor) -> tuple[AdapterRows, ...]:
    return tuple(
        AdapterRows(slot, (slots == slot).nonzero()[:, 0], len(slots))
        for slot in slots.unique().tolist()
        if slot != _NO_ADAPTER
    )
