"""Quantised checkpoints, compared with transformers in the arithmetic of their formats."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftgate.backends.engine.checkpoint import STORED_DTYPES, Checkpoint
from draftgate.backends.engine.config import read_model_config
from draftgate.backends.engine.model import Decoder
from draftgate.backends.engine.quantisation.e4m3 import widened
from draftgate.backends.engine.quantisation.linear import QuantisedLinear, StackedLinear
from draftgate.backends.engine.quantisation.reading import loaded_bytes
from draftgate.backends.engine.weights import (
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    layer_shapes,
    load_weights,
)
from draftgate.backends.errors import CheckpointError
from tests.engine.harness import RandomSlots, Setup, request
from tests.engine.quantised_checkpoints import FORMATS, write_quantised
from tests.engine.step_logits import blocks_of, logits_in_steps, runner_of
from tests.engine.test_model_families import random_model, random_model_of
from tests.engine.tiny_model import VOCAB, cpu_engine

PLAIN = (EMBEDDING, HEAD, FINAL_NORM)
TOKENS = 90
STEPS = [0, 1, 2, 40, 45, TOKENS]

SAME = 1e-4
"""Largest error of a logit with equal activations, as with unquantised weights."""

FP8_ROWS, FP8_ERROR = 0.8, 0.5
"""Least share of the rows within `SAME` in FP8, and largest error of a logit of the others.

Another order of sums changes the last bit of an activation, which may move it to the next number of
FP8, up to 1/8 away. Of 90 rows, this affects none to 8 in these formats, with errors of up to 0.21.
Logits have a standard deviation of 1.7 (AMD EPYC with AVX-512, 2026-11-27).
"""


def assert_equal(form: str, found: Tensor, expected: Tensor) -> None:
    """Check that logits agree up to the rounding of the format."""
    of_rows = (found - expected).abs().amax(dim=1)
    if "fp8" in form:
        assert (of_rows < SAME).float().mean() >= FP8_ROWS
        assert of_rows.max() < FP8_ERROR
    else:
        assert of_rows.max() < SAME


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Tensor]]:
    """Return a function that writes a random Qwen2 in a format, once, with its reference logits."""
    found: dict[str, tuple[Path, Tensor]] = {}

    def write(form: str) -> tuple[Path, Tensor]:
        if form not in found:
            directory = tmp_path_factory.mktemp(form)
            model = write_quantised(random_model("qwen2"), directory, FORMATS[form])
            with torch.no_grad():
                found[form] = directory, model(tokens()[None]).logits[0]
        return found[form]

    return write


def tokens() -> Tensor:
    return torch.randint(0, 300, (TOKENS,), generator=torch.Generator().manual_seed(1))


def logits_of(directory: Path, steps: list[int] = STEPS) -> Tensor:
    table = blocks_of(0, TOKENS)
    return logits_in_steps(runner_of(directory), table, tokens().tolist(), steps)


@pytest.mark.parametrize("form", FORMATS)
def test_logits_equal_the_arithmetic_of_the_format(
    form: str, written: Callable[[str], tuple[Path, Tensor]]
) -> None:
    """Logits agree with a float32 model that has the dequantised weights and rounds its activations
    as the format does."""
    directory, expected = written(form)
    assert_equal(form, logits_of(directory), expected)


@pytest.mark.parametrize("form", FORMATS)
def test_steps_change_no_bit_of_a_quantised_model(
    form: str, written: Callable[[str], tuple[Path, Tensor]]
) -> None:
    """Logits have the same bits in a prefill, in chunks with drafts, and token by token."""
    directory, _ = written(form)
    expected = logits_of(directory)
    assert torch.equal(logits_of(directory, [0, TOKENS]), expected)
    assert torch.equal(logits_of(directory, [*range(20), TOKENS]), expected)


@pytest.mark.parametrize("form", ["fp8-block", "compressed-fp8-channel", "gptq-ordered", "awq"])
def test_greedy_tokens_equal_the_arithmetic_of_the_format(form: str, tmp_path: Path) -> None:
    """Greedy decoding gives the ids of the reference, whose best logits differ enough."""
    model = write_quantised(random_model("llama"), tmp_path, FORMATS[form])
    prompt = torch.randint(0, 300, (1, 20), generator=torch.Generator().manual_seed(5))
    generated = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        max_new_tokens=24,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = torch.cat(generated.logits).topk(2).values
    assert (best[:, 0] - best[:, 1]).min() > SAME
    runner, table, ids = runner_of(tmp_path), blocks_of(0, 44), prompt[0].tolist()
    edges = [0, 20]
    while len(ids) < 44:
        ids.append(int(logits_in_steps(runner, table, ids, edges[-2:])[-1].argmax()))
        edges.append(len(ids))
    assert ids == generated.sequences[0].tolist()


@pytest.mark.parametrize("form", ["fp8-block", "gptq-ordered"])
def test_drafts_change_no_token_of_a_quantised_model(form: str, tmp_path: Path) -> None:
    """Texts are equal with and without drafts, greedy and sampled."""
    directory, model = tmp_path, random_model_of("qwen2", {"vocab_size": VOCAB})
    write_quantised(model, directory, FORMATS[form])
    config = read_model_config(directory)
    weights = load_weights(directory, config, torch.float32)
    prompt = [*range(30, 42)] * 3
    outcomes = []
    for setup in (Setup(), Setup(RandomSlots(random.Random(2)), max_step_tokens=37)):
        requests = [
            request(
                str(index), prompt[index:], setup.policy, temperature=0.7 * index, max_tokens=30
            )
            for index in range(3)
        ]
        outcomes.append(cpu_engine(config, weights, setup).run(requests))
    off, drafted = outcomes
    assert drafted.accepted + drafted.rejected > 10
    assert drafted.tokens == off.tokens


@pytest.mark.parametrize("form", ["fp8-static", "compressed-int4"])
@pytest.mark.parametrize("layer", ["model.layers.0.self_attn.k_proj", "model.layers.1.mlp.up_proj"])
def test_skipped_modules_keep_their_weights(form: str, layer: str, tmp_path: Path) -> None:
    """A module in the list of skipped modules is multiplied unquantised beside quantised ones."""
    model = write_quantised(random_model("qwen3-bias"), tmp_path, FORMATS[form], (layer,))
    with torch.no_grad():
        expected = model(tokens()[None]).logits[0]
    assert_equal(form, logits_of(tmp_path), expected)
    config = read_model_config(tmp_path)
    layers = load_weights(tmp_path, config, torch.float32).layers
    kinds = {type(product) for layer in layers for product in layer.linears}
    assert kinds == {QuantisedLinear, StackedLinear}


@pytest.mark.parametrize(
    ("of_tensors", "of_modules"),
    [
        ("model.language_model.", "model.language_model."),
        ("language_model.model.", "model.language_model."),
        ("language_model.model.", "language_model.model."),
    ],
)
@pytest.mark.parametrize("form", ["awq", "compressed-int4"])
def test_skipped_modules_may_have_another_prefix(
    form: str, of_tensors: str, of_modules: str, tmp_path: Path
) -> None:
    """The list of skipped modules applies under every prefix of tensors and modules."""
    layer = "layers.0.mlp.down_proj"
    write_quantised(random_model("llama"), tmp_path, FORMATS[form], (f"model.{layer}",))
    expected = logits_of(tmp_path)
    path = tmp_path / "model.safetensors"
    renamed = {
        of_tensors + name.removeprefix("model.") if name.startswith("model.") else name: tensor
        for name, tensor in load_file(path).items()
    }
    save_file(renamed, path, {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"][FORMATS[form].skips] = [f"{of_modules}{layer}", "lm_head"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert torch.equal(logits_of(tmp_path), expected)


def test_modules_with_different_scales_are_not_fused(tmp_path: Path) -> None:
    """Each module of a fused product rounds its activations with its own scale."""
    write_quantised(random_model("llama"), tmp_path, FORMATS["fp8-static"])
    before = logits_of(tmp_path)
    path = tmp_path / "model.safetensors"
    stored = load_file(path)
    stored["model.layers.0.self_attn.v_proj.input_scale"] *= 3
    save_file(stored, path, {"format": "pt"})
    config = read_model_config(tmp_path)
    layers = load_weights(tmp_path, config, torch.float32).layers
    assert isinstance(layers[0].qkv, StackedLinear)
    assert isinstance(layers[1].qkv, QuantisedLinear)
    assert not torch.equal(logits_of(tmp_path), before)


def test_every_number_of_fp8_is_widened_exactly() -> None:
    """All codes but the two NaN have the value that torch gives them, the sign of 0 included."""
    octets = torch.arange(256, dtype=torch.uint8)
    codes = octets[(octets & 0x7F) != 0x7F].view(torch.float8_e4m3fn)
    assert torch.equal(widened(codes).view(torch.int32), codes.float().view(torch.int32))


def test_bfloat16_keeps_the_weights_packed(written: Callable[[str], tuple[Path, Tensor]]) -> None:
    """In bfloat16 a quantised model differs from float32 by the rounding of its activations."""
    directory, _ = written("gptq")
    config = read_model_config(directory)
    decoder = Decoder(config, load_weights(directory, config, torch.bfloat16), 256)
    hidden = torch.randn(16, config.hidden_size).bfloat16()
    product = decoder._weights.layers[0].qkv
    assert product(hidden).dtype is torch.bfloat16
    assert torch.equal(product(hidden), product.float32(hidden).bfloat16())


@pytest.mark.parametrize("form", FORMATS)
def test_bytes_of_loaded_weights_are_counted(
    form: str, written: Callable[[str], tuple[Path, Tensor]]
) -> None:
    """The memory of a model includes the scales of every output, and zeros of a byte.

    Other tensors count in the dtype of the model. Fused modules share an order of inputs.
    """
    directory, _ = written(form)
    config, checkpoint = read_model_config(directory), Checkpoint(directory)
    weights = load_weights(directory, config, torch.float32)
    products = [*(one for layer in weights.layers for one in layer.linears), weights.lm_head]
    packed = [one._weight for one in products if isinstance(one, QuantisedLinear)]
    parts = (getattr(one, name) for one in packed for name in one.__slots__)
    num_bytes = sum(part.nbytes for part in parts if isinstance(part, Tensor))
    kept = [name for name in PLAIN if name in checkpoint.tensors] + list(layer_shapes(config))
    rest = sum(
        math.prod(checkpoint.tensors[name].shape)
        for name in kept
        if name in checkpoint.tensors and checkpoint.tensors[name].dtype in STORED_DTYPES
    )
    counted = loaded_bytes(directory, torch.bfloat16) - 2 * rest
    if form == "gptq-ordered":
        assert num_bytes < counted < 1.2 * num_bytes
    else:
        assert counted == num_bytes


def test_checkpoints_of_both_widths_have_the_same_weights(
    written: Callable[[str], tuple[Path, Tensor]],
) -> None:
    """Words of 4-bit weights count as eight weights each."""
    int4, fp8 = (
        Checkpoint(written(form)[0]).num_parameters
        for form in ("compressed-int4-channel", "compressed-fp8-channel")
    )
    assert abs(int4 / fp8 - 1) < 0.02


def change_tensors(directory: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    path = directory / "model.safetensors"
    stored = load_file(path)
    change(stored)
    save_file(stored, path, {"format": "pt"})


def nan_in(weight: Tensor) -> None:
    weight.view(torch.uint8)[3, 5] = 0xFF


NAME = "model.layers.1.mlp.down_proj"

DAMAGES = {
    "scale": (
        "fp8-block",
        lambda s: s.pop(f"{NAME}.weight_scale_inv"),
        "weight_scale_inv is missing",
    ),
    "input scale": ("fp8-static", lambda s: s.pop(f"{NAME}.input_scale"), "input_scale is missing"),
    "block": (
        "fp8-block",
        lambda s: s.update({f"{NAME}.weight_scale_inv": torch.ones(1, 1)}),
        r"weight_scale_inv has shape \(1, 1\), config.json requires \(2, 4\)",
    ),
    "dtype": (
        "compressed-fp8-channel",
        lambda s: s.update({f"{NAME}.weight": torch.ones(64, 144)}),
        r"weight has dtype F32; supported: F8_E4M3",
    ),
    "nan": ("fp8-block", lambda s: nan_in(s[f"{NAME}.weight"]), "weight has NaN"),
    "zeros": ("awq", lambda s: s.pop(f"{NAME}.qzeros"), "qzeros is missing"),
    "group": (
        "gptq",
        lambda s: s.update({f"{NAME}.scales": torch.ones(3, 64)}),
        r"scales has shape \(3, 64\), config.json requires \(9, 64\)",
    ),
    "order": (
        "gptq-ordered",
        lambda s: s[f"{NAME}.g_idx"].zero_(),
        "g_idx does not assign 16 inputs to each group",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_tensor_of_a_quantised_module_is_named(name: str, tmp_path: Path) -> None:
    """A missing or unfitting tensor raises an error with its name."""
    form, damage, message = DAMAGES[name]
    write_quantised(random_model("llama"), tmp_path, FORMATS[form])
    change_tensors(tmp_path, damage)
    with pytest.raises(CheckpointError, match=f"tensor {NAME}.{message}"):
        load_weights(tmp_path, read_model_config(tmp_path), torch.float32)


def test_quantised_experts_on_a_gpu_are_refused(tmp_path: Path) -> None:
    """No kernel multiplies the packed weights of experts, which a CPU serves."""
    random_model("mixtral").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    raw = json.loads(path.read_text()) | {"quantization_config": FORMATS["awq"].config}
    path.write_text(json.dumps(raw))
    config = read_model_config(tmp_path)
    with pytest.raises(CheckpointError, match="experts in int4-awq-16 are not supported on a GPU"):
        load_weights(tmp_path, config, torch.float32, for_gpu=True)


def test_gpu_without_fp8_is_named(
    written: Callable[[str], tuple[Path, Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """FP8 on an A100 raises an error with the required compute capability."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    directory, _ = written("fp8-block")
    with pytest.raises(CheckpointError, match=r"need a GPU of compute capability 8\.9 or higher"):
        load_weights(
            directory,
            read_model_config(directory),
            torch.bfloat16,
            device=torch.device("cuda"),
        )


def test_sizes_that_cannot_be_packed_are_named(tmp_path: Path) -> None:
    """An odd number of inputs raises an error with the name of the module."""
    write_quantised(random_model("llama"), tmp_path, FORMATS["gptq"])
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"intermediate_size": 143}))
    with pytest.raises(CheckpointError, match=r"mlp.gate_proj: its 143 outputs and 64 inputs must"):
        load_weights(tmp_path, read_model_config(tmp_path), torch.float32)


def changed(form: str, **changes: object) -> dict[str, object]:
    return {**FORMATS[form].config, **changes}


def regrouped(form: str, **changes: object) -> dict[str, object]:
    config = json.loads(json.dumps(FORMATS[form].config))
    for place, value in changes.items():
        holder, _, name = place.rpartition("__")
        group = config["config_groups"]["group_0"]
        (group[holder] if holder else group)[name] = value
    return config


UNSUPPORTED = {
    "method": ({"quant_method": "bitsandbytes"}, r"quant_method 'bitsandbytes' is not supported"),
    "no method": ({"bits": 4}, "quant_method is missing"),
    "bits": (changed("gptq", bits=3), "bits 3 is not supported; supported: 4"),
    "awq bits": (changed("awq", bits=8), "bits 8 is not supported; supported: 4"),
    "awq layout": (changed("awq", version="gemv"), "version 'gemv' is not supported; supported: g"),
    "no zeros": (changed("awq", zero_point=False), "zero_point False is not supported"),
    "marlin": (changed("gptq", checkpoint_format="marlin"), "checkpoint_format 'marlin' is not"),
    "group": (changed("gptq", group_size=12), "group_size must be -1 or a multiple of 8, not 12"),
    "no group": (changed("gptq", group_size=None), "group_size is missing"),
    "rules": (changed("gptq", dynamic={"x": {}}), r"dynamic \(.*\) is not supported"),
    "blocks": (changed("fp8-block", weight_block_size=[128]), "weight_block_size must be two posi"),
    "e5m2": (changed("fp8-block", fmt="e5m2"), "fmt 'e5m2' is not supported"),
    "static blocks": (
        changed("fp8-block", activation_scheme="static"),
        "activation_scheme 'static' is not supported; supported: dynamic",
    ),
    "expression": (
        changed("fp8-block", modules_to_not_convert=["("]),
        "modules_to_not_convert holds an invalid expression",
    ),
    "no list": (changed("awq", modules_to_not_convert="x"), "must be a list of modules, not 'x'"),
    "format": (
        changed("compressed-fp8-channel", format="marlin-24"),
        "format 'marlin-24' is not supported; supported: float-quantized",
    ),
    "groups": (
        changed("compressed-fp8-channel", config_groups={"a": {}, "b": {}}),
        "config_groups must be one group, not 2",
    ),
    "targets": (
        regrouped("compressed-fp8-channel", targets=["re:.*q_proj"]),
        r"config_groups.group_0.targets \['re:.*q_proj'\] is not supported",
    ),
    "int8": (
        regrouped("compressed-fp8-channel", weights__type="int"),
        r"config_groups.group_0.weights.type 'int' is not supported; supported: float",
    ),
    "dynamic tensor": (
        regrouped("compressed-fp8-channel", input_activations__strategy="tensor"),
        r"input_activations.strategy 'tensor' is not supported; supported: token",
    ),
    "w4a8": (
        regrouped("compressed-int4", input_activations={"num_bits": 8}),
        r"input_activations.num_bits \(8\) is not supported",
    ),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_format_is_named(name: str, checkpoint_copy: Path) -> None:
    """An unsupported or invalid format raises an error that names file and field."""
    config, message = UNSUPPORTED[name]
    path = checkpoint_copy / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": config}))
    with pytest.raises(CheckpointError, match=rf"config\.json: quantization_config\..*{message}"):
        read_model_config(checkpoint_copy)
