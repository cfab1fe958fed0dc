"""The layers of a decoder whose products are all packed, in one call of C (`operators/decoder.c`).

From Python, a layer takes about ten calls of 3 to 5 us. With one row of SmolLM2-135M, the calls of
30 layers took a fifth of the time of a step.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from draftgate.backends.engine.config import ModelConfig
from draftgate.backends.engine.kv_pool import Layers
from draftgate.backends.engine.linear import Product
from draftgate.backends.engine.mlp import DenseMlp
from draftgate.backends.engine.operators.base import Operators
from draftgate.backends.engine.operators.native import NativeOperators, NativeStep
from draftgate.backends.engine.operators.packed import row_memory
from draftgate.backends.engine.quantisation.fp8_kv import FP8
from draftgate.backends.engine.quantisation.packed import PackedLinear
from draftgate.backends.engine.weights import LayerWeights

_Pointer = ctypes.c_void_p
_Int = ctypes.c_int64


class _Part(ctypes.Structure):
    """The struct `Part` of `decoder.c`."""

    _fields_ = (("multiply", _Pointer), ("matrix", _Pointer), ("outputs", _Int))


class _Linear(ctypes.Structure):
    """The struct `Linear` of `decoder.c`."""

    _fields_ = (("parts", _Pointer), ("count", _Int), ("outputs", _Int))


class _Layer(ctypes.Structure):
    """The struct `Layer` of `decoder.c`."""

    _fields_ = (
        ("qkv", _Linear), ("output", _Linear), ("gate_up", _Linear), ("down", _Linear),
        ("input_norm", _Pointer), ("qk_norm", _Pointer), ("output_norm", _Pointer),
        ("mlp_norm", _Pointer), ("down_norm", _Pointer),
        ("cosines", _Pointer), ("sines", _Pointer), ("half", _Int), ("window", _Int),
    )  # fmt: skip


class _Decoder(ctypes.Structure):
    """The struct `Decoder` of `decoder.c`."""

    _fields_ = (
        ("layers", _Pointer),
        ("count", _Int), ("hidden_size", _Int), ("inner", _Int), ("gelu", _Int),
    )  # fmt: skip


class _Buffers(ctypes.Structure):
    """The struct `Buffers` of `decoder.c`."""

    _fields_ = tuple(
        (name, _Pointer)
        for name in (
            "hidden", "normed", "fused", "queries", "attended", "delta", "gate_up", "gated",
            "blocks",
        )
    )  # fmt: skip


class PackedLayers:
    """Runs the layers of a step. Its results have the same bits as those of single operators."""

    def __init__(
        self, config: ModelConfig, operators: NativeOperators, layers: Sequence[LayerWeights]
    ) -> None:
        """Collect the addresses of the weights.

        Args:
            layers: layers that `packed_layers` has accepted.
        """
        self._call = operators.library.run_layers
        self._call.argtypes = (*[_Pointer] * 5, _Int)
        self._owned: list[Any] = [operators]  # which own the memory of the pointers
        ropes = config.layer_ropes or (config.rope,) * len(layers)
        columns = zip(layers, ropes, config.windows, strict=True)
        structs = [
            self._layer(layer, operators.rotations[rope], window) for layer, rope, window in columns
        ]
        array = (_Layer * len(structs))(*structs)
        self._owned.append(array)
        qkv, output, gate_up, down = layers[0].linears
        self._decoder = _Decoder(
            ctypes.addressof(array),
            len(structs),
            config.hidden_size,
            down.in_features,
            config.activation == "gelu",
        )
        hidden, queries = config.hidden_size, output.in_features
        self._widths = (
            hidden, qkv.out_features, queries, hidden, gate_up.out_features, down.in_features,
        )  # fmt: skip
        self._widest = max(hidden, queries, down.in_features)
        self._kv: Layers = ()
        self._kv_pointers = (_Pointer * 0)()

    def run(self, step: NativeStep, hidden: Tensor, kv: Layers) -> Tensor:
        """Run the layers over a step, and write its keys and values to `kv`.

        Args:
            step: the result of `NativeOperators.begin`.
            hidden: the embeddings, [rows, hidden_size]. The method replaces them by the sum of all
                results but the last one.

        Returns:
            The result of the last layer's MLP, [rows, hidden_size].

        Raises:
            MemoryError: the memory for unpacked weights is not available.
        """
        if kv is not self._kv:
            self._kv = kv
            self._kv_pointers = (_Pointer * len(kv))(*(layer.data_ptr() for layer in kv))
        rows = len(hidden)
        normed, fused, queries, delta, gate_up, gated = (
            hidden.new_empty(rows, width) for width in self._widths
        )
        # Rows of padding do not attend, but their products read them.
        attended = hidden.new_zeros(rows, queries.shape[1])
        tensors = (hidden, normed, fused, queries, attended, delta, gate_up, gated)
        buffers = _Buffers(*[one.data_ptr() for one in tensors], row_memory(rows, self._widest))
        attention, rotation = step.attention, step.rotation
        attention.strip = rotation.strip = kv[0].stride(0)
        attention.e4m3 = rotation.e4m3 = kv[0].dtype is FP8
        structs = (self._decoder, buffers, attention, rotation, self._kv_pointers)
        if self._call(*map(ctypes.addressof, structs), step.threads):
            raise MemoryError(f"not enough memory for {step.threads} unpacked parts of a matrix")
        return delta

    def _layer(
        self, layer: LayerWeights, rotation: tuple[int, int, int], window: int | None
    ) -> _Layer:
        norms = (
            layer.input_norm, layer.qk_norm, layer.output_norm, layer.mlp_norm, layer.down_norm,
        )  # fmt: skip
        wide = [None if norm is None else norm.float().contiguous() for norm in norms]
        self._owned.append(wide)
        pointers = [None if norm is None else norm.data_ptr() for norm in wide]
        return _Layer(*map(self._linear, layer.linears), *pointers, *rotation, window or 0)

    def _linear(self, linear: Product) -> _Linear:
        assert isinstance(linear, PackedLinear)
        parts = [
            _Part(ctypes.cast(function, _Pointer), matrix, outputs)
            for function, matrix, outputs in linear.products
        ]
        array = (_Part * len(parts))(*parts)
        self._owned += [linear, array]
        return _Linear(ctypes.addressof(array), len(parts), linear.out_features)


def packed_layers(
    config: ModelConfig, operators: Operators, layers: Sequence[LayerWeights]
) -> PackedLayers | None:
    """Return an object that runs these layers in one call, or None if C lacks one of them.

    C lacks mixtures of experts, adapters, and matrices that are not packed.
    """
    if not layers or not isinstance(operators, NativeOperators):
        return None
    for layer in layers:
        packed = all(isinstance(linear, PackedLinear) for linear in layer.linears)
        if not packed or not isinstance(layer.mlp, DenseMlp):
            return None
    return PackedLayers(config, operators, layers)
