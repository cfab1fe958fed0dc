"""Weights in FP8 (E4M3) with float scales, as vLLM, DeepSeek and compressed-tensors store them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from draftgate.backends.engine.checkpoint import Checkpoint, TensorReader
from draftgate.backends.engine.quantisation.e4m3 import fp8_rows, has_nan, scaled
from draftgate.backends.engine.quantisation.scheme import Fp8Scheme
from draftgate.backends.engine.stored_linear import FusedModules
from draftgate.backends.errors import CheckpointError

FP8_DTYPE: Final = "F8_E4M3"
"""Name of the dtype in safetensors."""

INPUT_SCALE: Final = "input_scale"


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """A weight in FP8, and how a product rounds its activations.

    Attributes:
        codes: E4M3 [outputs, inputs].
        scales: float32 [outputs, groups].
        group: inputs that share a scale, of the weight and of the activations.
        input_scale: the scale of all activations, or None for a scale per row and group.
    """

    codes: Tensor
    scales: Tensor
    group: int
    input_scale: float | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of outputs and inputs."""
        outputs, inputs = self.codes.shape
        return outputs, inputs

    def activations(self, x: Tensor) -> Tensor:
        """Return the float32 activations that the format multiplies."""
        return scaled(*fp8_rows(x, self.group, self.input_scale), self.group)

    def dense(self, first: int, last: int) -> Tensor:
        """Return the float32 weights of the outputs from `first` to before `last`."""
        return scaled(self.codes[first:last], self.scales[first:last], self.group)


def require_fp8(
    checkpoint: Checkpoint, module: str, outputs: int, inputs: int, scheme: Fp8Scheme
) -> int:
    """Check the tensors of a module, and return their bytes.

    Raises:
        CheckpointError: a tensor is missing, or has another shape or dtype. The message names it.
    """
    one = ((), (1,))
    scales: tuple[tuple[int, ...], ...] = ((outputs, 1), (outputs,), (1, 1), *one)
    if scheme.block is not None:
        rows, columns = scheme.block
        scales = ((-(-outputs // rows), -(-inputs // columns)),)
    num_bytes = checkpoint.require_tensor(f"{module}.weight", ((outputs, inputs),), (FP8_DTYPE,))
    num_bytes += checkpoint.require_tensor(f"{module}.{scheme.scale}", scales)
    if scheme.static:
        num_bytes += checkpoint.require_tensor(f"{module}.{INPUT_SCALE}", one)
    return num_bytes


def input_scale(reader: TensorReader, module: str, scheme: Fp8Scheme) -> float | None:
    """Return the stored scale of a module's activations, if the scheme has one."""
    return float(reader.read_stored(f"{module}.{INPUT_SCALE}")) if scheme.static else None


def read_fp8(
    reader: TensorReader,
    modules: FusedModules,
    scheme: Fp8Scheme,
    scale: float | None,
    device: torch.device,
) -> Fp8Weight:
    """Return the weight of modules whose activations have the same scale.

    Raises:
        CheckpointError: a file was removed or damaged after its header was read, or has NaN.
    """
    names = [f"{name}.weight" for name in modules.names]
    codes = reader.read(names, torch.float8_e4m3fn).to(device)
    for name, part in zip(names, codes.split(modules.outputs), strict=True):
        if has_nan(part):
            raise CheckpointError(f"tensor {name} has NaN")
    parts = zip(modules.names, modules.outputs, strict=True)
    scales = torch.cat(
        [
            _scales_of_outputs(reader.read_stored(f"{name}.{scheme.scale}"), outputs, scheme)
            for name, outputs in parts
        ]
    )
    group = modules.inputs if scheme.block is None else scheme.block[1]
    return Fp8Weight(codes, scales.to(device), group, scale)


def _scales_of_outputs(stored: Tensor, outputs: int, scheme: Fp8Scheme) -> Tensor:
    """Return the scales of each output, so that fused modules need not end with a whole block."""
    stored = stored.float()
    if scheme.block is None:
        return stored.reshape(-1, 1).expand(outputs, 1)
    return stored.repeat_interleave(scheme.block[0], 0)[:outputs]
