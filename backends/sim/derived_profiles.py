"""Profiles derived from the data sheets of GPUs and the shapes of models.

A name such as `a100-8b`, `a100x4-70b` or `h100-8b-fp8` is a GPU, the number of GPUs of a
tensor-parallel group, a model, and the format of the weights of its layers. The times of a step
have the additive form of the published fit in `h100-8b`:

    step       = host + layers x LAYER_S + weights / reads + tokens x token_s + all-reduces
    weights    = bytes of those outside the experts, and of the experts that n tokens read
    token_s    = 2 FLOP per weight of a token / arithmetic + bytes of the all-reduces / link
    KV token   = bytes / reads
    reads      = GPUs x READ_SHARE x bandwidth
    arithmetic = GPUs x share x peak

If a token reads k of E experts, n tokens with independent experts read E (1 - (1 - k / E)^n).
A further token therefore lengthens a small step of a mixture, and hardly lengthens a large one.

`docs/guide/simulation.md` compares the results with published measurements.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final

HOST_S: Final = 1.21e-3
"""Seconds of the host in each step, from SpecDecode-Bench's fit for vLLM on an H100. An engine
(`engine_costs`) replaces them."""

READ_SHARE: Final = 0.85
"""Share of the data sheet's bandwidth at which a step reads weights and KV. Public measurements are
on both sides: 1.0 for KV on an H100 (SpecDecode-Bench), 0.64 for KV on an A100 (DistServe). With
0.85, Llama-3.1-8B on an A100 with 40 GB would take 13.3 ms a token, as measured with vLLM 0.23
(johnmusgrave.com, 75 tokens/s)."""

LAYER_S: Final = 19e-6
"""Seconds of a layer that are neither reading nor arithmetic. With `READ_SHARE`, it makes up the
5.886 ms of SpecDecode-Bench's fit for 32 layers on an H100."""

ARITHMETIC_SHARE: Final = 0.72
"""Share of the peak FLOP/s in matrix products: 21.0 us per token of Llama-3.1-8B on an H100
(SpecDecode-Bench). DistServe's OPT-13B reaches 0.79 on an A100."""

ATTENTION_SHARE: Final = 0.4
"""Share of the peak FLOP/s in attention, as in `h100-8b`."""

ALL_REDUCE_S: Final = 30e-6
"""Seconds of an all-reduce without its bytes. Assumed: engines of 2023 need 50 to 65 us with their
launches (DistServe, Splitwise), and kernels for small messages less than 20 us."""

LINK_SHARE: Final = 1 / 3
"""Share of a link's bandwidth in an all-reduce, which brings prompts of Llama-2-70B within 20% of
Splitwise's measurements on 2, 4 and 8 GPUs."""

DRAFT_DEPTH_S: Final = 0.8e-3
"""Seconds of a depth of an EAGLE head besides its reads: 1.32 ms in `h100-8b` less the reads."""

SPARSE_TOKENS: Final = 512
"""KV tokens that a depth of sparse self-speculation reads, as in `h100-8b`."""

LOOKUP_S: Final = 4.5e-6
"""Seconds of an n-gram lookup, which the host computes. The value is measured (`h100-8b`)."""

MEMORY_SHARE: Final = 0.9
ACTIVATION_BYTES: Final = 2e9
"""Share of the memory that may be used, and the bytes of activations, as in `h100-8b`."""

_TOKEN_BUCKETS: Final = (1, 2, 4, *range(8, 257, 8), *range(272, 513, 16))
"""Token counts of CUDA graphs. Beyond the last one, the time of a step has the same slope."""

DRAFT_SEQUENCES: Final = (1, 4, 16, 64, 256)

VALUE_BYTES: Final = 2
"""Bytes of a weight, an activation or a KV value in bfloat16."""

GROUPS: Final = (1, 2, 4, 8)

RECORDING: Final = "llama-3.1-8b"
"""The only recording of a large model. Drafts for the other models are assumed to be as good."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """The data sheet of a GPU.

    Attributes:
        read_bytes_s: memory bandwidth.
        flop_s: peak of dense bfloat16 matrix products.
        link_bytes_s: bandwidth to the other GPUs in one direction.
        power_w: thermal design power.
        price_per_hour_usd: price on demand.
        price_source: origin and date of the price.
        arithmetic_share: share of the peak that matrix products sustain.
        fp8_speed: ratio of the peak in FP8 to that in bfloat16, 0 for a GPU without FP8.
    """

    device: str
    memory_bytes: float
    read_bytes_s: float
    flop_s: float
    link_bytes_s: float
    power_w: float
    price_per_hour_usd: float
    price_source: str
    arithmetic_share: float = ARITHMETIC_SHARE
    fp8_speed: float = 2.0


@dataclass(frozen=True, slots=True)
class Format:
    """How a checkpoint stores the matrices of the layers. Its LM head stays in bfloat16.

    Attributes:
        weight_bytes: bytes of a weight, with the scales and zeros that the engine reads.
        in_fp8: whether products are in FP8 instead of bfloat16.
    """

    name: str
    weight_bytes: float
    in_fp8: bool = False


@dataclass(frozen=True, slots=True)
class Model:
    """The shape of a decoder whose embedding and LM head are separate matrices.

    Attributes:
        experts: number of experts of every layer, 0 for one MLP.
        experts_per_token: number of experts that a token reads in a layer.
        expert_width: inner width of an expert.
    """

    name: str
    parameters: float
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    experts: int = 0
    experts_per_token: int = 0
    expert_width: int = 0

    @property
    def embedding(self) -> int:
        """Weights of the embedding, of which a step reads only rows."""
        return self.vocabulary * self.hidden

    @property
    def expert_weights(self) -> int:
        """Weights of one expert in all layers."""
        return self.layers * 3 * self.hidden * self.expert_width

    @property
    def common_weights(self) -> float:
        """Weights that every step reads."""
        return self.parameters - self.embedding - self.experts * self.expert_weights

    @property
    def token_weights(self) -> float:
        """Weights that multiply each token."""
        return self.common_weights + self.experts_per_token * self.expert_weights

    def read_weights(self, tokens: int) -> float:
        """Return the expected number of weights that a step of this number of tokens reads."""
        if not self.experts:
            return self.common_weights
        unread = (1 - self.experts_per_token / self.experts) ** tokens
        return self.common_weights + self.experts * (1 - unread) * self.expert_weights

    @property
    def kv_token_bytes(self) -> int:
        """Bytes of the keys and values of a token."""
        return 2 * VALUE_BYTES * self.layers * self.kv_heads * self.head_size


_MELANGE: Final = "Mélange, arXiv 2404.14527, April 2024"
_BLOCKS: Final = "1.10 x H100, the ratio of AWS EC2 Capacity Blocks, December 2024"

GPUS: Final = {
    # The L4 is limited to 72 W. A T4, with 70 W, sustains 0.37 of its peak in products of 4,096 x
    # 4,096 matrices (forums.developer.nvidia.com/t/264462). One half is assumed for the newer chip.
    "l4": Gpu("NVIDIA L4 24GB", 24e9, 300e9, 121e12, 32e9, 72.0, 0.70, _MELANGE, 0.5),
    "a10g": Gpu("NVIDIA A10G 24GB", 24e9, 600e9, 70e12, 32e9, 150.0, 1.01, _MELANGE, fp8_speed=0.0),
    "a100": Gpu(
        "NVIDIA A100 80GB SXM", 80e9, 2039e9, 312e12, 300e9, 400.0, 3.67, _MELANGE, fp8_speed=0.0
    ),
    "h100": Gpu("NVIDIA H100 80GB SXM", 80e9, 3350e9, 989e12, 450e9, 700.0, 7.516, _MELANGE),
    "h200": Gpu("NVIDIA H200 141GB SXM", 141e9, 4800e9, 989e12, 450e9, 700.0, 8.27, _BLOCKS),
}

MODELS: Final = {
    "7b": Model("Llama-2-7B", 6.74e9, 32, 4096, 32, 32, 128, 32_000),
    "8b": Model("Llama-3.1-8B", 8.03e9, 32, 4096, 32, 8, 128, 128_256),
    "13b": Model("Llama-2-13B", 13.02e9, 40, 5120, 40, 40, 128, 32_000),
    "70b": Model("Llama-3.1-70B", 70.55e9, 80, 8192, 64, 8, 128, 128_256),
    "30b-a3b": Model("Qwen3-30B-A3B", 30.53e9, 48, 2048, 32, 4, 128, 151_936, 128, 8, 768),
    "8x7b": Model("Mixtral-8x7B", 46.70e9, 32, 4096, 32, 8, 128, 32_000, 8, 2, 14_336),
}

BFLOAT16: Final = Format("bfloat16", VALUE_BYTES)
FORMATS: Final = {
    "fp8": Format("FP8 with a float32 scale for 128 inputs", 1 + 4 / 128, in_fp8=True),
    "int4": Format("4 bits with a scale and a zero for 128 inputs", 0.5 + 3 / 128),
}
"""Formats of quantised checkpoints, by the last part of a name."""

_NAME: Final = re.compile(
    rf"(?P<gpu>{'|'.join(GPUS)})(?:x(?P<group>[248]))?-(?P<model>{'|'.join(MODELS)})"
    rf"(?:-(?P<form>{'|'.join(FORMATS)}))?"
)


def derived_profile(name: str) -> dict[str, Any] | None:
    """Return the content of a `profile/2` file for a name, or None if it is not of this form.

    Raises:
        ValueError: the GPUs cannot hold the weights of the model, or lack FP8.
    """
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    gpu, model, group = GPUS[found["gpu"]], MODELS[found["model"]], int(found["group"] or 1)
    form = FORMATS[found["form"]] if found["form"] else BFLOAT16
    if form.in_fp8 and not gpu.fp8_speed:
        raise ValueError(f"{name}: {gpu.device} does not multiply in FP8")
    kv_bytes = _kv_bytes(gpu, model, form, group)
    if kv_bytes <= 0:
        least = min((n for n in GROUPS if _kv_bytes(gpu, model, form, n) > 0), default=None)
        rest = name.partition("-")[2]
        hint = "" if least is None else f": use {found['gpu']}x{least}-{rest}"
        raise ValueError(f"{name}: {group} x {gpu.device} cannot hold {model.name}{hint}")
    fixed_s, token_s = _step(gpu, model, form, group)
    reads = group * READ_SHARE * gpu.read_bytes_s
    read_s = {n: _num_bytes(model, form, model.read_weights(n)) / reads for n in _TOKEN_BUCKETS}
    draft_s = _draft_depth_s(gpu, model, group)
    kv_token_s = model.kv_token_bytes / reads
    # The host launches all depths at once, so its time is left out, as in `h100-8b`.
    sparse_s = token_s + SPARSE_TOKENS * kv_token_s
    pair_flop = 4 * model.layers * model.heads * model.head_size
    return {
        "format": "profile/2",
        "device": gpu.device if group == 1 else f"{group} x {gpu.device}",
        "model": model.name,
        "dtype": "bfloat16",
        "source": _source(gpu, model, form, group),
        "token_buckets": _TOKEN_BUCKETS,
        "step_s": [fixed_s + read_s[tokens] + token_s * tokens for tokens in _TOKEN_BUCKETS],
        "kv_token_s": kv_token_s,
        "sequence_s": 0.0,
        "step_host_s": HOST_S,
        "prefill_attention_s": pair_flop / (group * ATTENTION_SHARE * gpu.flop_s),
        "draft": {
            "ngram": {"sequence_s": LOOKUP_S},
            # A further sequence takes an eighth of the target's time for a token, as in `h100-8b`.
            "draft_model": {
                "sequences": DRAFT_SEQUENCES,
                "depth_s": [draft_s + token_s / 8 * (n - 1) for n in DRAFT_SEQUENCES],
            },
            "sparse_self": {
                "sequences": _TOKEN_BUCKETS,
                "depth_s": [fixed_s - HOST_S + read_s[n] + sparse_s * n for n in _TOKEN_BUCKETS],
            },
        },
        "kv_token_bytes": model.kv_token_bytes,
        "kv_bytes": int(kv_bytes),
        "recording": RECORDING,
        "price_per_hour_usd": group * gpu.price_per_hour_usd,
        "power_w": group * gpu.power_w,
    }


def _num_bytes(model: Model, form: Format, weights: float) -> float:
    """Return the bytes of a number of weights, which include the LM head."""
    return VALUE_BYTES * model.embedding + form.weight_bytes * (weights - model.embedding)


def _kv_bytes(gpu: Gpu, model: Model, form: Format, group: int) -> float:
    usable = group * (MEMORY_SHARE * gpu.memory_bytes - ACTIVATION_BYTES)
    embedding = model.embedding
    return usable - VALUE_BYTES * embedding - _num_bytes(model, form, model.parameters - embedding)


def _step(gpu: Gpu, model: Model, form: Format, group: int) -> tuple[float, float]:
    """Return the seconds of a step besides its reads, without tokens and for each token."""
    fixed_s = HOST_S + model.layers * LAYER_S
    of_layers = (model.token_weights - model.embedding) / (gpu.fp8_speed if form.in_fp8 else 1.0)
    token_s = 2 * (model.embedding + of_layers) / (group * gpu.arithmetic_share * gpu.flop_s)
    all_reduces = _all_reduces(model.layers, group)
    # A ring sends each byte 2 (n - 1) / n times.
    sent_bytes = VALUE_BYTES * model.hidden * 2 * (group - 1) / group
    token_s += all_reduces * sent_bytes / (LINK_SHARE * gpu.link_bytes_s)
    return fixed_s + all_reduces * ALL_REDUCE_S, token_s


def _draft_depth_s(gpu: Gpu, model: Model, group: int) -> float:
    """Return the seconds of a depth of an EAGLE head, which has one layer and the LM head.

    The layer has no experts, and as many weights as a token reads in a layer of the model.
    """
    layer = (model.token_weights - model.embedding) / model.layers
    read_bytes = VALUE_BYTES * (layer + model.embedding)
    read_s = read_bytes / (group * READ_SHARE * gpu.read_bytes_s)
    return DRAFT_DEPTH_S + read_s + _all_reduces(1, group) * ALL_REDUCE_S


def _all_reduces(layers: int, group: int) -> int:
    return 0 if group == 1 else 2 * layers


def _source(gpu: Gpu, model: Model, form: Format, group: int) -> str:
    group_words = "" if group == 1 else f" by a tensor-parallel group of {group}"
    return (
        f"derived from the data sheet of {gpu.device} and the shape of {model.name}{group_words},"
        " not measured (backends/sim/derived_profiles.py): reads at"
        f" {READ_SHARE:g} of {gpu.read_bytes_s / 1e9:g} GB/s, arithmetic at"
        f" {gpu.arithmetic_share:g} of {gpu.flop_s / 1e12:g} TFLOP/s, weights in"
        f" {form.name}. Drafts are those of {RECORDING}. Price of a GPU:"
        f" {gpu.price_per_hour_usd:g} USD an hour ({gpu.price_source})."
    )
