"""Writes small quantised checkpoints, and models of transformers with the same arithmetic.

The packing follows the definition of each format, number by number, and shares no code with the
engine.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FP8 = torch.float8_e4m3fn
SEQUENTIAL = (0, 1, 2, 3, 4, 5, 6, 7)
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The output at each place of a word, from the lowest bits."""

Quantised = tuple[dict[str, Tensor], Tensor]
"""Stored tensors of a module, and the float32 weight that they mean."""


@dataclass(frozen=True)
class Format:
    """A format of quantised weights.

    Attributes:
        config: the `quantization_config`.
        quantise: quantises a weight of a module.
        activations: rounds the inputs of a module.
        skips: name of the field with the modules that are not quantised.
    """

    config: dict[str, Any]
    quantise: Callable[[Tensor], Quantised]
    activations: Callable[[Tensor], Tensor] = lambda x: x
    skips: str = "modules_to_not_convert"
    head: bool = field(default=False)


def fp8_scale(values: Tensor) -> Tensor:
    return values.abs().max().clamp(min=1e-10) / 448.0


def to_fp8(values: Tensor, scale: Tensor) -> Tensor:
    return (values / scale).clamp(-448, 448).to(FP8)


def rounded_groups(group: int) -> Callable[[Tensor], Tensor]:
    """Return a function that rounds each group of inputs of each token to FP8."""

    def rounded(x: Tensor) -> Tensor:
        parts = []
        for part in x.split(group, -1):
            scale = part.abs().amax(-1, keepdim=True).clamp(min=1e-10) / 448.0
            parts.append(to_fp8(part, scale).float() * scale)
        return torch.cat(parts, -1)

    return rounded


def rounded_to(scale: float) -> Callable[[Tensor], Tensor]:
    return lambda x: to_fp8(x, torch.tensor(scale)).float() * scale


def fp8_channels(weight: Tensor) -> Quantised:
    scales = torch.stack([fp8_scale(row) for row in weight])[:, None]
    codes = to_fp8(weight, scales)
    return {"weight": codes, "weight_scale": scales}, codes.float() * scales


def fp8_tensor(input_scale: float | None) -> Callable[[Tensor], Quantised]:
    def quantise(weight: Tensor) -> Quantised:
        scale = fp8_scale(weight)
        codes = to_fp8(weight, scale)
        tensors = {"weight": codes, "weight_scale": scale}
        if input_scale is not None:
            tensors["input_scale"] = torch.tensor([input_scale])
        return tensors, codes.float() * scale

    return quantise


def fp8_blocks(rows: int, columns: int, name: str) -> Callable[[Tensor], Quantised]:
    def quantise(weight: Tensor) -> Quantised:
        codes, dense = torch.empty_like(weight, dtype=FP8), torch.empty_like(weight)
        scales = torch.empty(-(-weight.shape[0] // rows), -(-weight.shape[1] // columns))
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                block = (
                    slice(i * rows, (i + 1) * rows),
                    slice(j * columns, (j + 1) * columns),
                )
                scales[i, j] = fp8_scale(weight[block])
                codes[block] = to_fp8(weight[block], scales[i, j])
                dense[block] = codes[block].float() * scales[i, j]
        return {"weight": codes, name: scales}, dense

    return quantise


def words(numbers: Tensor, order: tuple[int, ...] = SEQUENTIAL) -> Tensor:
    """Pack each 8 numbers of 4 bits along the last dimension into an int32."""
    packed = torch.zeros(*numbers.shape[:-1], numbers.shape[-1] // 8, dtype=torch.int64)
    for place, offset in enumerate(order):
        packed |= numbers.long()[..., offset::8] << 4 * place
    return torch.where(packed < 1 << 31, packed, packed - (1 << 32)).int()


@dataclass(frozen=True)
class Groups:
    """Numbers of 4 bits of a weight [outputs, inputs], with scales and zeros of its groups."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    of_input: Tensor

    def dense(self) -> Tensor:
        scales, zeros = self.scales.float()[:, self.of_input], self.zeros[:, self.of_input]
        return (self.codes - zeros).float() * scales


def grouped(
    weight: Tensor, group: int, *, symmetric: bool = False, shuffled: bool = False
) -> Groups:
    """Quantise each group of inputs of each output to 4 bits, with scales in float16."""
    outputs, inputs = weight.shape
    group = inputs if group == -1 else group
    of_input = torch.arange(inputs) // group
    if shuffled:
        generator = torch.Generator().manual_seed(inputs)
        of_input = of_input[torch.randperm(inputs, generator=generator)]
    count = -(-inputs // group)
    scales, zeros = torch.empty(outputs, count).half(), torch.empty(outputs, count).long()
    for index in range(count):
        part = weight[:, of_input == index]
        low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
        if symmetric:
            scales[:, index] = torch.maximum(-low, high) / 7
            zeros[:, index] = 8
        else:
            scales[:, index] = (high - low) / 15
            zeros[:, index] = (-low / scales[:, index].float()).round().clamp(0, 15).long()
    wide = scales.float()[:, of_input]
    codes = ((weight / wide).round() + zeros[:, of_input]).clamp(0, 15).long()
    return Groups(codes, scales, zeros, of_input)


def awq(group: int) -> Callable[[Tensor], Quantised]:
    def quantise(weight: Tensor) -> Quantised:
        found = grouped(weight, group)
        tensors = {
            "qweight": words(found.codes.T, AWQ_ORDER),
            "qzeros": words(found.zeros.T, AWQ_ORDER),
            "scales": found.scales.T.contiguous(),
        }
        return tensors, found.dense()

    return quantise


def gptq(
    group: int, *, symmetric: bool = False, shuffled: bool = False, subtracted: int = 1
) -> Callable[[Tensor], Quantised]:
    def quantise(weight: Tensor) -> Quantised:
        found = grouped(weight, group, symmetric=symmetric, shuffled=shuffled)
        tensors = {
            "qweight": words(found.codes).T.contiguous(),
            "qzeros": words((found.zeros - subtracted & 15).T),
            "scales": found.scales.T.contiguous(),
            "g_idx": found.of_input.int(),
        }
        return tensors, found.dense()

    return quantise


def packed(group: int, *, symmetric: bool) -> Callable[[Tensor], Quantised]:
    def quantise(weight: Tensor) -> Quantised:
        found = grouped(weight, group, symmetric=symmetric)
        tensors = {
            "weight_packed": words(found.codes),
            "weight_scale": found.scales.bfloat16(),
            "weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            tensors["weight_zero_point"] = words(found.zeros.T).T.contiguous()
        exact = Groups(found.codes, tensors["weight_scale"], found.zeros, found.of_input)
        return tensors, exact.dense()

    return quantise


def compressed(form: str, weights: dict[str, Any], inputs: dict[str, Any] | None) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": weights,
                "input_activations": inputs,
                "output_activations": None,
            }
        },
    }


FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True}
INT4 = {"num_bits": 4, "type": "int"}
FP8_TOKEN = {**FLOAT8, "strategy": "token", "dynamic": True}
WHOLE = 1 << 20
"""A group that holds all inputs."""

FORMATS = {
    "fp8-block": Format(
        {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [48, 40]},
        fp8_blocks(48, 40, "weight_scale_inv"),
        rounded_groups(40),
    ),
    "fp8-static": Format(
        {"quant_method": "fp8", "activation_scheme": "static"},
        fp8_tensor(0.02),
        rounded_to(0.02),
        "ignored_layers",
    ),
    "fp8-tensor": Format(
        {"quant_method": "fp8", "activation_scheme": "dynamic"},
        fp8_tensor(None),
        rounded_groups(WHOLE),
        "ignored_layers",
    ),
    "compressed-fp8-channel": Format(
        compressed("float-quantized", {**FLOAT8, "strategy": "channel"}, FP8_TOKEN),
        fp8_channels,
        rounded_groups(WHOLE),
        "ignore",
    ),
    "compressed-fp8-block": Format(
        compressed(
            "float-quantized",
            {**FLOAT8, "strategy": "block", "block_structure": [32, 16]},
            {**FLOAT8, "strategy": "group", "group_size": 16, "dynamic": True},
        ),
        fp8_blocks(32, 16, "weight_scale"),
        rounded_groups(16),
        "ignore",
    ),
    "compressed-fp8-head": Format(
        compressed("float-quantized", {**FLOAT8, "strategy": "tensor"}, FP8_TOKEN),
        fp8_tensor(None),
        rounded_groups(WHOLE),
        "ignore",
        head=True,
    ),
    "gptq": Format(
        {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": False, "sym": False},
        gptq(16),
    ),
    "gptq-symmetric": Format(
        {"quant_method": "gptq", "bits": 4, "group_size": 48, "desc_act": False, "sym": True},
        gptq(48, symmetric=True),
    ),
    "gptq-ordered": Format(
        {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": True, "sym": False},
        gptq(16, shuffled=True),
    ),
    "gptq-v2": Format(
        {"quant_method": "gptq", "bits": 4, "group_size": -1, "checkpoint_format": "gptq_v2"},
        gptq(-1, subtracted=0),
    ),
    "awq": Format(
        {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm"},
        awq(16),
    ),
    "compressed-int4": Format(
        compressed(
            "pack-quantized",
            {**INT4, "strategy": "group", "group_size": 16, "symmetric": False},
            None,
        ),
        packed(16, symmetric=False),
        skips="ignore",
    ),
    "compressed-int4-channel": Format(
        compressed("pack-quantized", {**INT4, "strategy": "channel", "symmetric": True}, None),
        packed(-1, symmetric=True),
        skips="ignore",
    ),
}


def write_quantised(
    model: PreTrainedModel, directory: Path, form: Format, skipped: tuple[str, ...] = ()
) -> PreTrainedModel:
    """Write a model in a format, and give the model the arithmetic of the written checkpoint.

    Args:
        model: a model in float32.
        directory: an existing directory.
        form: the format.
        skipped: modules besides the LM head that stay unquantised.

    Returns:
        The model, with weights that are as inexact as the written weights, and with hooks that
        round the inputs of its products.
    """
    skipped = skipped if form.head else (*skipped, "lm_head")
    tensors = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.Linear) or name in skipped:
            continue
        del tensors[f"{name}.weight"]
        stored, dense = form.quantise(module.weight.detach())
        tensors |= {f"{name}.{kind}": tensor for kind, tensor in stored.items()}
        module.weight.data.copy_(dense)
        module.register_forward_pre_hook(lambda _, x: (form.activations(x[0]), *x[1:]))
    if model.config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    config = model.config.to_dict() | {"architectures": [type(model).__name__]}
    config["quantization_config"] = {**form.config, form.skips: list(skipped)}
    (directory / "config.json").write_text(json.dumps(config, default=str))
    return model
