"""Hidden states of the target that an EAGLE-3 head reads.

The head reads the hidden states of three layers for each token, fused to one vector: the *feature*
of the token. Every step stores the features of all its rows in the KV pool, each in the slot of the
token's keys and values. A worker that has a token's keys and values therefore has its feature, also
after a prefix-cache hit, a preemption or a transfer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from draftgate.backends.engine.kv_pool import KvPool


@dataclass(frozen=True, slots=True)
class Taps:
    """The layers whose inputs are tapped, and the features that are made of them.

    Attributes:
        layers: numbers of layers. The number of layers stands for the output of the last layer.
        fuse: returns features, [rows, feature_size], of the states of all `layers`, concatenated in
            order: [rows, len(layers) x hidden_size].
        pool: the KV pool that stores the features.
    """

    layers: tuple[int, ...]
    fuse: Callable[[Tensor], Tensor]
    pool: KvPool

    def begin(self) -> Tapping:
        """Begin a step."""
        return Tapping(self)


@dataclass(slots=True)
class Tapping:
    """The tapped states of a step in progress.

    Attributes:
        states: copies of the tapped states, [rows, hidden_size] each, by layer.
    """

    taps: Taps
    states: dict[int, Tensor] = field(default_factory=dict)
    layer: int = 0

    def add(self, hidden: Tensor) -> None:
        """Keep the input of the next layer if it is tapped. Later layers overwrite `hidden`."""
        if self.layer in self.taps.layers:
            self.states[self.layer] = hidden.clone()
        self.layer += 1

    def end(self, hidden: Tensor, delta: Tensor | None, slots: Tensor) -> None:
        """Store the features of all rows.

        Args:
            hidden, delta: [rows, hidden_size], whose sum is the output of the last layer.
            slots: int64 [rows], the slot of each row.
        """
        if self.layer in self.taps.layers:
            self.states[self.layer] = hidden if delta is None else hidden + delta
        tapped = torch.cat([self.states[layer] for layer in self.taps.layers], 1)
        self.taps.pool.write_features(slots, self.taps.fuse(tapped))
