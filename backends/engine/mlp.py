"""The feed-forward block of a layer: one MLP, or the best of many for each row.

A mixture of experts (Mixtral, arXiv 2401.04088) sends a row to the experts with the highest router
probabilities, and adds their results by these probabilities. The bits of a row do not depend on
the other rows: the router and every product compute rows independently (`linear.py`), and a row
adds its experts in the order of their probabilities. Equal probabilities are in the order of the
experts.

Rows of padding have no expert, because reading their weights would cost time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from draftgate.backends.engine.linear import Product, padded_rows

Gate = Callable[[Tensor], Tensor]
"""Returns activation(gate) * up, [rows, width], of [rows, 2 * width]."""

LiveRows = int | Tensor
"""Number of rows before the padding: on the host, or int32 [1] on a device."""


class Mlp(Protocol):
    """The feed-forward block of a layer."""

    @property
    def linears(self) -> Iterator[Product]:
        """The matrices in the order of their application."""
        ...

    def __call__(self, x: Tensor, gate: Gate, live_rows: LiveRows, /) -> Tensor:
        """Return the result of every row, [rows, hidden_size]. That of padding is finite."""
        ...


@dataclass(frozen=True, slots=True)
class DenseMlp:
    """An MLP whose gate and up share a matrix."""

    gate_up: Product
    down: Product

    @property
    def linears(self) -> Iterator[Product]:
        """The matrices in the order of their application."""
        yield from (self.gate_up, self.down)

    def __call__(self, x: Tensor, gate: Gate, _live_rows: LiveRows, /) -> Tensor:
        """Return the result of every row, [rows, hidden_size]."""
        return self.down(gate(self.gate_up(x)))


def route(logits: Tensor, per_row: int, *, normalised: bool) -> tuple[Tensor, Tensor]:
    """Return the experts of each row by falling probability, and their shares.

    Args:
        logits: float32 [rows, experts], from the router.
        per_row: number of experts of a row.
        normalised: whether the shares of a row add up to 1.

    Returns:
        int64 and float32 [rows, per_row].
    """
    shares, experts = logits.softmax(-1).sort(dim=-1, descending=True, stable=True)
    shares, experts = shares[:, :per_row], experts[:, :per_row]
    if normalised:
        # One column after the other, because the order of a sum along rows may depend on their
        # number.
        total = shares[:, 0].clone()
        for column in shares.unbind(1)[1:]:
            total += column
        shares = shares / total[:, None]
    return experts, shares


class Experts(Protocol):
    """The matrices of all experts of a layer."""

    @property
    def linears(self) -> Iterator[Product]:
        """The matrices that compute alone."""
        ...

    def __call__(self, x: Tensor, logits: Tensor, gate: Gate, live_rows: LiveRows, /) -> Tensor:
        """Return the sums of the results of each row's experts, as `Mlp`.

        Args:
            x: [rows, hidden_size].
            logits: float32 [rows, experts], from the router.
        """
        ...


@dataclass(frozen=True, slots=True)
class SparseMlp:
    """A mixture of experts."""

    router: Product
    experts: Experts

    @property
    def linears(self) -> Iterator[Product]:
        """The matrices of the experts, without the router."""
        return self.experts.linears

    def __call__(self, x: Tensor, gate: Gate, live_rows: LiveRows, /) -> Tensor:
        """Return the result of every row, [rows, hidden_size]."""
        return self.experts(x, self.router.float32(x), gate, live_rows)


@dataclass(frozen=True, slots=True)
class LoopedExperts:
    """Experts that compute one after the other, each with all of its rows.

    The number of rows of each expert must be known on the host, so these experts suit a CPU.

    Attributes:
        mlps: the experts.
        per_row: number of experts of a row.
        normalised: whether the shares of a row's experts add up to 1.
    """

    mlps: tuple[DenseMlp, ...]
    per_row: int
    normalised: bool

    @property
    def linears(self) -> Iterator[Product]:
        """The matrices in the order of the experts."""
        for mlp in self.mlps:
            yield from mlp.linears

    def __call__(self, x: Tensor, logits: Tensor, gate: Gate, live_rows: LiveRows, /) -> Tensor:
        """Return the sums of the results of each row's experts, [rows, hidden_size]."""
        assert isinstance(live_rows, int)
        out = torch.zeros_like(x)
        if not live_rows:
            return out
        experts, shares = route(logits[:live_rows], self.per_row, normalised=self.normalised)
        results = self._results(x, experts, gate).view(*experts.shape, -1)
        total = results[:, 0] * shares[:, :1]
        for rank in range(1, experts.shape[1]):
            total += results[:, rank] * shares[:, rank, None]
        out[:live_rows] = total
        return out

    def _results(self, x: Tensor, experts: Tensor, gate: Gate) -> Tensor:
        """Return float32 [live rows * experts per row, hidden_size]."""
        chosen = experts.flatten()
        counts = torch.bincount(chosen, minlength=len(self.mlps)).tolist()
        results = x.new_empty(len(chosen), x.shape[1], dtype=torch.float32)
        by_expert = chosen.argsort(stable=True).split(counts)
        for mlp, places in zip(self.mlps, by_expert, strict=True):
            if count := len(places):
                padding = padded_rows(count) - count if mlp.gate_up.padded else 0
                rows = x[places // experts.shape[1]]
                padded = functional.pad(rows, (0, 0, 0, padding))
                results[places] = mlp(padded, gate, count)[:count].float()
        return results
