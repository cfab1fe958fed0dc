"""Loads the weights of a Hugging Face checkpoint, fused and packed for the decoder."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, NamedTuple

import torch
from torch import Tensor

from draftgate.backends.engine.checkpoint import Checkpoint, TensorReader, checkpoint_hash
from draftgate.backends.engine.config import ExpertsConfig, ModelConfig
from draftgate.backends.engine.fields import UPSTREAM_HINT
from draftgate.backends.engine.linear import Linear, Product
from draftgate.backends.engine.mlp import DenseMlp, LoopedExperts, Mlp, SparseMlp
from draftgate.backends.engine.numerics import CPU
from draftgate.backends.engine.operators.packed import PackedMatrix
from draftgate.backends.engine.operators.products import multiplies_in_c
from draftgate.backends.engine.quantisation.packed import (
    PackedLinear,
    Packing,
    packed_formats,
    read_packed_output,
)
from draftgate.backends.engine.quantisation.reading import read_product, require_weights
from draftgate.backends.engine.quantisation.scheme import LM_HEAD, Fp8Scheme, quantises
from draftgate.backends.engine.stored_linear import FusedModules
from draftgate.backends.errors import CheckpointError

QKV: Final = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
OUTPUT: Final = ("self_attn.o_proj",)
GATE_UP: Final = ("mlp.gate_proj", "mlp.up_proj")
DOWN: Final = ("mlp.down_proj",)
FUSED_QKV: Final = ("self_attn.qkv_proj",)
FUSED_GATE_UP: Final = ("mlp.gate_up_proj",)

QK_NORMS: Final = ("self_attn.q_norm", "self_attn.k_norm")


class _NormNames(NamedTuple):
    """Names of the norms before and after the attention and the MLP."""

    input: str
    output: str
    mlp: str
    down: str


NORMS: Final = _NormNames("input_layernorm", "", "post_attention_layernorm", "")
SANDWICH_NORMS: Final = _NormNames(
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)

EMBEDDING: Final = "model.embed_tokens.weight"
FINAL_NORM: Final = "model.norm.weight"
HEAD: Final = "lm_head.weight"

TIED_COPY_BYTES: Final = 1 << 27
"""Maximum size of a tied embedding that is copied into the LM head's fastest layout.

The copy makes the LM head 1.2 to 2.5 times as fast (`linear.py`). A larger embedding is stored
once. The bits are the same.
"""


_FP8_CAPABILITY: Final = (8, 9)
"""Least compute capability whose matrix instructions read FP8."""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """The weights of one layer.

    Queries, keys and values share one matrix. Weights of norms are float32.

    Attributes:
        qk_norm: [num_heads + num_kv_heads, head_dim], one weight per head of queries and keys. None
            for models without head norms.
        output_norm, down_norm: norms of the results of the attention and of the MLP. None for
            models without such norms.
    """

    input_norm: Tensor
    qkv: Product
    qk_norm: Tensor | None
    output: Product
    mlp_norm: Tensor
    mlp: Mlp
    output_norm: Tensor | None = None
    down_norm: Tensor | None = None

    @property
    def linears(self) -> tuple[Product, ...]:
        """The matrices in the order of their application."""
        return self.qkv, self.output, *self.mlp.linears


@dataclass(frozen=True, slots=True)
class Weights:
    """All weights of a decoder.

    Attributes:
        embedding: [vocab_size, hidden_size].
        formats: names of the block types of packed weights, ascending.
    """

    embedding: Tensor | PackedMatrix
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    lm_head: Product
    checkpoint_hash: str
    formats: tuple[str, ...] = ()

    @property
    def padded(self) -> bool:
        """Whether a product needs the rows of `padded_rows`."""
        products = [self.lm_head, *(linear for layer in self.layers for linear in layer.linears)]
        routed = any(isinstance(layer.mlp, SparseMlp) for layer in self.layers)
        return routed or any(product.padded for product in products)


def load_weights(
    directory: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    *,
    device: torch.device = CPU,
    exact: bool = False,
    for_gpu: bool | None = None,
    packing: Packing | None = None,
    progress: Callable[[float], None] = lambda _share: None,
) -> Weights:
    """Load, convert, fuse and prepack the weights, layer by layer.

    The function needs memory for the weights, the largest matrix and the pages of one layer. A
    second thread hashes the files.

    Args:
        directory: directory of the checkpoint.
        config: shape of the model.
        dtype: dtype of the loaded weights.
        device: device of the loaded weights.
        exact: whether the rows of bfloat16 products must be independent (`linear.py`).
        for_gpu: whether experts and quantised weights multiply in the kernels of a GPU. The default
            depends on the device.
        packing: which weights stay packed, on a CPU.
        progress: called after each tensor with the share of bytes loaded, 0 to 1.

    Raises:
        CheckpointError: a file or tensor is missing, damaged, or of the wrong shape or dtype, or a
            GPU does not support the format of its weights.
    """
    for_gpu = device.type != "cpu" if for_gpu is None else for_gpu
    if for_gpu:
        _check_format(directory, config, device)
    checkpoint = Checkpoint(directory)
    embedding_name, head_name = _matrix_names(checkpoint, config)
    matrix = (config.vocab_size, config.hidden_size)
    shapes = {
        embedding_name: matrix,
        head_name: matrix,
        FINAL_NORM: (config.hidden_size,),
        **layer_shapes(config),
    }
    total_bytes = require_weights(checkpoint, shapes, {embedding_name}, config.quantisation)
    loader = _Loader(
        checkpoint,
        config,
        dtype,
        device,
        exact,
        for_gpu,
        packing,
        lambda done: progress(done / total_bytes),
    )
    with ThreadPoolExecutor(1) as executor:
        hashed = executor.submit(checkpoint_hash, directory)
        # Load the largest matrices first, because later matrices reuse the memory of their packing.
        lm_head, embedding = loader.head_and_embedding(head_name, embedding_name)
        layers = tuple(loader.layer(index) for index in range(config.num_layers))
        final_norm = loader.norm(FINAL_NORM)
        formats = packed_formats(checkpoint, shapes, {head_name, embedding_name}, packing)
        return Weights(embedding, layers, final_norm, lm_head, hashed.result(), formats)


def _check_format(directory: Path, config: ModelConfig, device: torch.device) -> None:
    """Check that a GPU supports the format of the weights.

    Raises:
        CheckpointError: the GPU lacks FP8, or experts are quantised.
    """
    scheme = config.quantisation
    if isinstance(scheme, Fp8Scheme) and device.type == "cuda":
        found = torch.cuda.get_device_capability(device)
        if found < _FP8_CAPABILITY:
            raise CheckpointError(
                f"{directory}: weights in {scheme.name} need a GPU of compute capability "
                f"{'.'.join(map(str, _FP8_CAPABILITY))} or higher, not "
                f"{'.'.join(map(str, found))}; use --device cpu"
            )
    experts = config.experts
    if scheme is None or experts is None:
        return
    for layer in experts.layers:
        for modules in expert_products(config, experts, 0):
            if quantises(scheme, modules.below(layer_prefix(layer)).names[0]):
                raise CheckpointError(
                    f"{directory}: experts in {scheme.name} are not supported on a GPU; "
                    f"use --device cpu; {UPSTREAM_HINT}"
                )


def _matrix_names(checkpoint: Checkpoint, config: ModelConfig) -> tuple[str, str]:
    """Return the names of the embedding and of the LM head.

    As in transformers, a tied checkpoint that stores a single matrix uses it for both. A checkpoint
    that stores both matrices is not tied.
    """
    if not config.tied_embeddings:
        return EMBEDDING, HEAD
    stored = [name for name in (EMBEDDING, HEAD) if name in checkpoint.tensors] or [EMBEDDING]
    return stored[0], stored[-1]


class _Loader:
    """Reads the parts of a model in any order.

    `on_bytes` receives the total number of bytes after each tensor.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        exact: bool,
        for_gpu: bool,
        packing: Packing | None,
        on_bytes: Callable[[int], None],
    ) -> None:
        self._checkpoint = checkpoint
        self._config = config
        self._dtype = dtype
        self._device = device
        self._exact = exact
        self._for_gpu = for_gpu
        self._packing: Packing | None = packing
        self._on_bytes = on_bytes
        self._done_bytes = 0

    def tensor(self, name: str) -> Tensor:
        with self._reader() as reader:
            return reader.read([name]).to(self._device)

    def head_and_embedding(
        self, head: str, embedding: str
    ) -> tuple[Product, Tensor | PackedMatrix]:
        """Return the LM head and the embedding.

        A tied pair shares memory unless a copy is cheap.
        """
        tied = head == embedding
        with self._reader() as reader:
            packed = read_packed_output(reader, head, self._packing)
            if packed is not None:
                other = packed if tied else read_packed_output(reader, embedding, self._packing)
                return PackedLinear([packed]), self.tensor(embedding) if other is None else other
        if not tied and quantises(self._config.quantisation, LM_HEAD):
            config = self._config
            modules = FusedModules((LM_HEAD,), (config.vocab_size,), config.hidden_size, bias=False)
            with self._reader() as reader:
                return self._product(reader, modules, None), self.tensor(embedding)
        weight = self.tensor(head)
        # C reads the weight in its stored layout.
        on_cpu, rounds = self._device.type == "cpu", self._dtype is torch.bfloat16
        in_c = on_cpu and rounds and multiplies_in_c(weight.shape[1])
        pack = not in_c and (not tied or weight.nbytes <= TIED_COPY_BYTES)
        linear = Linear(weight, exact=self._exact, pack=pack)
        if tied:
            return linear, weight
        del weight
        return linear, self.tensor(embedding)

    def layer(self, index: int) -> LayerWeights:
        config, products = self._config, layer_products(self._config)
        prefix = layer_prefix(index)
        with self._reader() as reader:

            def product(modules: FusedModules) -> Product:
                return self._product(reader, modules.below(prefix), self._packing)

            norms = {name: self._norm(reader, f"{prefix}{name}.weight") for name in _norms(config)}
            qk_norm = None
            if config.qk_norm:
                heads = (config.num_heads, config.num_kv_heads)
                parts = (norms[name] for name in QK_NORMS)
                qk_norm = torch.cat([p.expand(n, -1) for n, p in zip(heads, parts, strict=True)])
            names = SANDWICH_NORMS if config.sandwich_norms else NORMS
            return LayerWeights(
                input_norm=norms[names.input],
                qkv=product(products.qkv),
                qk_norm=qk_norm,
                output=product(products.output),
                mlp_norm=norms[names.mlp],
                mlp=self._mlp(reader, index),
                output_norm=norms.get(names.output),
                down_norm=norms.get(names.down),
            )

    def _mlp(self, reader: TensorReader, index: int) -> Mlp:
        config, experts = self._config, self._config.experts

        def product(modules: FusedModules) -> Product:
            return self._product(reader, modules.below(layer_prefix(index)), self._packing)

        if experts is None or index not in experts.layers:
            products = layer_products(config)
            return DenseMlp(product(products.gate_up), product(products.down))
        modules = [expert_products(config, experts, expert) for expert in range(experts.count)]
        router = self._product(
            reader, router_product(config, experts).below(layer_prefix(index)), None
        )
        if not self._for_gpu:
            mlps = tuple(DenseMlp(product(gate_up), product(down)) for gate_up, down in modules)
            return SparseMlp(router, LoopedExperts(mlps, experts.per_row, experts.normalised))
        # Some machines lack Triton.
        from draftgate.backends.engine.grouped_experts import GroupedExperts

        def stacked(parts: Iterable[FusedModules]) -> Tensor:
            names = (f"{layer_prefix(index)}{name}.weight" for part in parts for name in part.names)
            matrix = reader.read(names).to(self._device)
            return matrix.view(experts.count, -1, matrix.shape[1])

        gate_up, down = (stacked(parts) for parts in zip(*modules, strict=True))
        return SparseMlp(router, GroupedExperts(gate_up, down, experts.per_row, experts.normalised))

    def norm(self, name: str) -> Tensor:
        with self._reader() as reader:
            return self._norm(reader, name)

    def _norm(self, reader: TensorReader, name: str) -> Tensor:
        # The sum with 1 in a shorter dtype would lose most bits of a weight near 0.
        weight = reader.read([name], torch.float32).to(self._device)
        return weight.add_(1.0) if self._config.unit_norms else weight

    def _product(
        self, reader: TensorReader, modules: FusedModules, packing: Packing | None
    ) -> Product:
        return read_product(
            reader,
            modules,
            self._device,
            self._config.quantisation,
            packing,
            exact=self._exact,
            for_gpu=self._for_gpu,
        )

    def _reader(self) -> TensorReader:
        return TensorReader(self._checkpoint, self._dtype, self._count)

    def _count(self, num_bytes: int) -> None:
        self._done_bytes += num_bytes
        self._on_bytes(self._done_bytes)


class LayerProducts(NamedTuple):
    """The matrix products of a layer without experts, in the order of their application."""

    qkv: FusedModules
    output: FusedModules
    gate_up: FusedModules
    down: FusedModules


def layer_products(config: ModelConfig) -> LayerProducts:
    """Return the products of a layer, with names relative to the layer."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    products = LayerProducts(
        qkv=FusedModules(QKV, (queries, keys, keys), hidden, config.qkv_bias),
        output=FusedModules(OUTPUT, (hidden,), queries, config.output_bias),
        gate_up=FusedModules(GATE_UP, (inner, inner), hidden, config.mlp_bias),
        down=FusedModules(DOWN, (hidden,), inner, config.mlp_bias),
    )
    if not config.fused_products:
        return products
    return products._replace(
        qkv=replace(products.qkv, names=FUSED_QKV, outputs=(queries + 2 * keys,)),
        gate_up=replace(products.gate_up, names=FUSED_GATE_UP, outputs=(2 * inner,)),
    )


def router_product(config: ModelConfig, experts: ExpertsConfig) -> FusedModules:
    """Return the product that gives the logits of the experts."""
    names = (f"{experts.names.block}.gate",)
    return FusedModules(names, (experts.count,), config.hidden_size, bias=False)


def expert_products(
    config: ModelConfig, experts: ExpertsConfig, expert: int
) -> tuple[FusedModules, FusedModules]:
    """Return the products of an expert, with names relative to the layer."""
    prefix, names = f"{experts.names.block}.experts.{expert}.", experts.names
    hidden, width = config.hidden_size, experts.width
    gate_up = FusedModules((names.gate, names.up), (width, width), hidden, bias=False)
    down = FusedModules((names.down,), (hidden,), width, bias=False)
    return gate_up.below(prefix), down.below(prefix)


def layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the name and shape of every tensor of the layers in a checkpoint."""
    norms = {f"{module}.weight": (width,) for module, width in _norms(config).items()}
    shapes: dict[str, tuple[int, ...]] = {}
    for index in range(config.num_layers):
        for modules in _layer_modules(config, index):
            shapes |= modules.below(layer_prefix(index)).shapes()
        shapes |= {f"{layer_prefix(index)}{name}": shape for name, shape in norms.items()}
    return shapes


def _layer_modules(config: ModelConfig, index: int) -> Iterator[FusedModules]:
    products, experts = layer_products(config), config.experts
    yield from (products.qkv, products.output)
    if experts is None or index not in experts.layers:
        yield from (products.gate_up, products.down)
        return
    yield router_product(config, experts)
    for expert in range(experts.count):
        yield from expert_products(config, experts, expert)


def layer_prefix(index: int) -> str:
    """Return the text before the names of a layer's modules."""
    return f"model.layers.{index}."


def _norms(config: ModelConfig) -> dict[str, int]:
    """Return the names and widths of the norms of a layer."""
    names = SANDWICH_NORMS if config.sandwich_norms else NORMS
    heads = dict.fromkeys(QK_NORMS, config.head_dim) if config.qk_norm else {}
    return dict.fromkeys(filter(None, names), config.hidden_size) | heads
