"""Weights of 4 bits, as AutoAWQ, GPTQ and compressed-tensors store them.

All layouts become one: two inputs of an output share a byte, the first in its lower bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from draftgate.backends.engine.checkpoint import Checkpoint, TensorReader
from draftgate.backends.engine.quantisation.nibbles import dequantised, pack, unpack
from draftgate.backends.engine.quantisation.scheme import Int4Scheme
from draftgate.backends.engine.stored_linear import FusedModules
from draftgate.backends.errors import CheckpointError

_WORD: Final = 8
"""Weights in an int32."""

PACKED_WEIGHTS: Final = ("qweight", "weight_packed")
"""Kinds of tensors that hold weights."""

AWQ_PLACES: Final = (0, 4, 1, 5, 2, 6, 3, 7)
"""Place in a word of AWQ, from its lowest bits, of each of eight consecutive outputs."""

MIDDLE: Final = 8
"""The zero of symmetric weights."""


@dataclass(frozen=True, slots=True)
class Int4Weight:
    """A weight of 4 bits.

    Attributes:
        packed: uint8 [outputs, inputs / 2].
        scales: [outputs, groups] in the stored dtype.
        zeros: uint8 [outputs, groups].
        group: inputs that share a scale and a zero.
        order: the input at each place of the packed weight, or None for their own order.
    """

    packed: Tensor
    scales: Tensor
    zeros: Tensor
    group: int
    order: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of outputs and inputs."""
        return self.packed.shape[0], 2 * self.packed.shape[1]

    def ordered(self, x: Tensor) -> Tensor:
        """Return the activations in the order of the packed weight."""
        return x if self.order is None else x[:, self.order]

    def activations(self, x: Tensor) -> Tensor:
        """Return the float32 activations that the format multiplies."""
        return self.ordered(x).float()

    def dense(self, first: int, last: int) -> Tensor:
        """Return the float32 weights of the outputs from `first` to before `last`."""
        packed, scales, zeros = (
            tensor[first:last] for tensor in (self.packed, self.scales, self.zeros)
        )
        return dequantised(packed, scales, zeros, self.group)


def unpacked_shape(packed: tuple[int, ...], scheme: Int4Scheme) -> tuple[int, int]:
    """Return the numbers of outputs and inputs of a weight from the shape of its words."""
    first, second = packed
    if scheme.layout == "packed":
        return first, _WORD * second
    return (_WORD * second, first) if scheme.layout == "awq" else (second, _WORD * first)


def require_int4(
    checkpoint: Checkpoint, module: str, outputs: int, inputs: int, scheme: Int4Scheme
) -> int:
    """Check the tensors of a module, and return their bytes.

    Raises:
        CheckpointError: a tensor is missing, or has another shape or dtype. The message names it.
    """
    if outputs % _WORD or inputs % _WORD:
        raise CheckpointError(
            f"{module}: its {outputs} outputs and {inputs} inputs must be multiples of {_WORD} "
            "for weights of 4 bits"
        )
    groups, words = _groups(inputs, scheme), ("I32",)
    shapes = {
        "awq": (("qweight", (inputs, outputs // _WORD)), ("qzeros", (groups, outputs // _WORD))),
        "gptq": (("qweight", (inputs // _WORD, outputs)), ("qzeros", (groups, outputs // _WORD))),
        "packed": (
            ("weight_packed", (outputs, inputs // _WORD)),
            ("weight_zero_point", (outputs // _WORD, groups)),
        ),
    }[scheme.layout]
    num_bytes = sum(
        checkpoint.require_tensor(f"{module}.{name}", (shape,), words)
        for name, shape in (shapes if scheme.zeros else shapes[:1])
    )
    name, shape = _scales(scheme), (groups, outputs)
    if scheme.layout == "packed":
        shape = shape[::-1]
    num_bytes += checkpoint.require_tensor(f"{module}.{name}", (shape,))
    if scheme.ordered:
        num_bytes += checkpoint.require_tensor(f"{module}.g_idx", ((inputs,),), ("I32", "I64"))
    return num_bytes


def input_order(
    reader: TensorReader, module: str, inputs: int, scheme: Int4Scheme
) -> tuple[int, ...] | None:
    """Return the inputs of a GPTQ module in the order of their groups, or None for their own order.

    Raises:
        CheckpointError: the groups are not of the size in config.json.
    """
    if not scheme.ordered:
        return None
    groups = reader.read_stored(f"{module}.g_idx").long()
    places = torch.arange(inputs)
    order = torch.argsort(groups, stable=True)
    if not torch.equal(groups[order], places // (scheme.group or inputs)):
        raise CheckpointError(
            f"tensor {module}.g_idx does not assign {scheme.group or inputs} inputs to each group"
        )
    return None if torch.equal(order, places) else tuple(order.tolist())


def read_int4(
    reader: TensorReader,
    modules: FusedModules,
    scheme: Int4Scheme,
    order: tuple[int, ...] | None,
    device: torch.device,
) -> Int4Weight:
    """Return the weight of modules whose inputs have the same order.

    Raises:
        CheckpointError: a file was removed or damaged after its header was read.
    """
    parts = [_stored(reader, name, scheme, device) for name in modules.names]
    packed, scales, zeros = (torch.cat(part).contiguous() for part in zip(*parts, strict=True))
    inputs = None if order is None else torch.tensor(order, device=device)
    if inputs is not None:
        packed = pack(unpack(packed)[:, inputs])
    return Int4Weight(packed, scales, zeros, scheme.group or modules.inputs, inputs)


def _groups(inputs: int, scheme: Int4Scheme) -> int:
    return -(-inputs // (scheme.group or inputs))


def _scales(scheme: Int4Scheme) -> str:
    return "weight_scale" if scheme.layout == "packed" else "scales"


def _stored(
    reader: TensorReader, module: str, scheme: Int4Scheme, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the packed weight, its scales and its zeros, each with one row per output.

    A GPU converts them itself, because a CPU takes many times as long.
    """

    def read(name: str) -> Tensor:
        return reader.read_stored(f"{module}.{name}").to(device)

    scales = read(_scales(scheme))
    if scheme.layout == "awq":
        return pack(_awq_numbers(read("qweight"))), scales.T, _awq_numbers(read("qzeros"))
    if scheme.layout == "gptq":
        zeros = unpack(_bytes(read("qzeros"))) + scheme.added_to_zeros
        # The sum of 15 and 1 is 0, as in AutoGPTQ.
        return _bytes(read("qweight").T), scales.T, (zeros & 15).T
    packed = _bytes(read("weight_packed"))
    if not scheme.zeros:
        return packed, scales, torch.full_like(scales, MIDDLE, dtype=torch.uint8)
    return packed, scales, unpack(_bytes(read("weight_zero_point").T)).T


def _awq_numbers(words: Tensor) -> Tensor:
    """Return the numbers of AWQ's words [rows, outputs / 8] for each output, [outputs, rows]."""
    places: Tensor = unpack(_bytes(words)).view(len(words), -1, _WORD)
    return places[..., AWQ_PLACES].flatten(1).T.contiguous()


def _bytes(words: Tensor) -> Tensor:
    """Return the bytes of int32 words, lowest first: uint8 [..., 4 * width]."""
    return words.contiguous().view(torch.uint8)
