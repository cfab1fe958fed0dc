"""Describes the matrix products of a layer as a checkpoint stores them, and reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftgate.backends.engine.checkpoint import TensorReader
from draftgate.backends.engine.linear import Linear


@dataclass(frozen=True, slots=True)
class FusedModules:
    """Modules of a checkpoint with the same input, which one product computes together.

    Attributes:
        names: names of the modules, in the order of their outputs.
        outputs: number of outputs of each module.
        inputs: number of inputs of every module.
        bias: whether every module has a bias.
    """

    names: tuple[str, ...]
    outputs: tuple[int, ...]
    inputs: int
    bias: bool

    def below(self, prefix: str) -> FusedModules:
        """Return the modules with `prefix` before their names."""
        names = tuple(f"{prefix}{name}" for name in self.names)
        return FusedModules(names, self.outputs, self.inputs, self.bias)

    def each(self) -> list[FusedModules]:
        """Return every module by itself."""
        return [
            FusedModules((name,), (outputs,), self.inputs, self.bias)
            for name, outputs in zip(self.names, self.outputs, strict=True)
        ]

    @staticmethod
    def joined(parts: Sequence[FusedModules]) -> FusedModules:
        """Return the modules of all parts, the inverse of `each`."""
        names = tuple(name for part in parts for name in part.names)
        outputs = tuple(count for part in parts for count in part.outputs)
        return FusedModules(names, outputs, parts[0].inputs, parts[0].bias)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the name and shape of every tensor of the modules."""
        shapes: dict[str, tuple[int, ...]] = {}
        for name, outputs in zip(self.names, self.outputs, strict=True):
            shapes[f"{name}.weight"] = (outputs, self.inputs)
            if self.bias:
                shapes[f"{name}.bias"] = (outputs,)
        return shapes


def read_linear(
    reader: TensorReader, modules: FusedModules, device: torch.device, *, exact: bool
) -> Linear:
    """Read the modules and return their product, with all outputs side by side.

    Args:
        reader: an open reader of the checkpoint.
        modules: the modules, with their full names.
        device: device of the product.
        exact: as in `Linear`.

    Raises:
        CheckpointError: a file was removed or damaged after its header was read.
    """

    def stacked(kind: str) -> Tensor:
        return reader.read([f"{name}.{kind}" for name in modules.names]).to(device)

    return Linear(stacked("weight"), stacked("bias") if modules.bias else None, exact=exact)
