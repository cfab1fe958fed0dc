"""Published shapes with random weights that are created on the device."""

from __future__ import annotations

import json
import math
import random
from functools import cached_property
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor

from bench.engine.quantised import product, quantised
from draftgate.backends.checkpoints import SHIPPED_MODEL
from draftgate.backends.engine.config import ModelConfig, read_model_config
from draftgate.backends.engine.linear import Linear, Product
from draftgate.backends.engine.mlp import DenseMlp, LoopedExperts, Mlp, SparseMlp
from draftgate.backends.engine.weights import (
    DOWN,
    EMBEDDING,
    FINAL_NORM,
    GATE_UP,
    HEAD,
    OUTPUT,
    QK_NORMS,
    QKV,
    LayerWeights,
    Weights,
)
from draftgate.backends.tokenizer import Tokenizer

SHAPES: Final[dict[str, dict[str, Any]]] = json.loads(
    Path(__file__).with_name("shapes.json").read_text(encoding="utf-8")
)
"""Shapes of Llama-3.2-1B, Llama-3.1-8B and Qwen3-30B-A3B, as in their `config.json`, and formats of
quantised checkpoints."""

LEAST_PROMPT, MOST_PROMPT = 100, 240
"""Range of prompt lengths for whole generations, in tokens."""

ORDINARY_IDS: Final = range(300, 3000)
"""Range of token ids of arbitrary prompts. These ids have no special meaning in any measured model.
"""

RESIDUAL_SHARE: Final = 0.1
"""Approximate size of all layers' contributions relative to a random embedding. The value is far
below the distance of two embeddings, so rounding never changes the greedy token. With
unconstrained weights, the two largest of 128,256 logits would be very close, and bfloat16 would
change one token in twenty."""


Matrix: TypeAlias = Any
"""A tensor, or its quantised form."""


class _Matrices(NamedTuple):
    """The matrices of a layer.

    The matrices of a mixture of experts are [experts, outputs, inputs], and the router gives the
    logits of the experts.
    """

    qkv: Matrix
    output: Matrix
    gate_up: Matrix
    down: Matrix
    router: Tensor | None


class RandomModel:
    """A published shape whose weights are created on the device, because a file of 8B takes 16 GB.

    Layers add little to the embedding (`RESIDUAL_SHARE`). The LM head is the embedding, optionally
    with its rows shifted by one. The greedy token is therefore the last token or the next id,
    regardless of rounding. The cost of a step does not depend on the values.
    """

    directory: Path | None = None

    def __init__(
        self,
        name: str,
        folder: Path,
        shape: dict[str, Any],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Create the weights.

        Args:
            folder: folder that receives the `config.json`.
            shape: content of `config.json`.
        """
        self.name, self.dtype, self.device = name, dtype, device
        self._folder = folder
        (folder / "config.json").write_text(json.dumps(shape), encoding="utf-8")
        self.config = read_model_config(folder)
        self._random = torch.Generator(device).manual_seed(0)
        config = self.config
        self._embedding = self._matrix(config.vocab_size, config.hidden_size, 1.0)
        tied = config.tied_embeddings
        self._head = self._embedding if tied else self._embedding.roll(1, 0)
        self._ones = torch.ones(config.hidden_size, dtype=dtype, device=device)
        self._layers = [self._layer() for _ in range(config.num_layers)]

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer(SHIPPED_MODEL)

    def weights(self, *, exact: bool) -> Weights:
        config = self.config
        heads, qk_norm = config.num_heads + config.num_kv_heads, None
        if config.qk_norm:
            qk_norm = torch.ones(heads, config.head_dim, device=self.device)
        layers = tuple(
            LayerWeights(
                input_norm=self._ones,
                qkv=self._product(layer.qkv, exact=exact),
                qk_norm=qk_norm,
                output=self._product(layer.output, exact=exact),
                mlp_norm=self._ones,
                mlp=self._mlp(layer, exact=exact),
            )
            for layer in self._layers
        )
        head = Linear(self._head, exact=exact, pack=False)
        return Weights(self._embedding, layers, self._ones, head, self.name)

    def transformers(self) -> Any:
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.from_pretrained(self._folder)
        with self.device:
            model = AutoModelForCausalLM.from_config(config, dtype=self.dtype)
        model.load_state_dict(self.state(), assign=True)
        return model.eval()

    def state(self) -> dict[str, Tensor]:
        """Return the weights by checkpoint name. The tensors share memory with the model.

        The model must not be quantised.
        """
        config = self.config
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        state = {EMBEDDING: self._embedding, HEAD: self._head, FINAL_NORM: self._ones}
        names = ("input_layernorm", "post_attention_layernorm")
        norms = dict.fromkeys(names, self._ones)
        if config.qk_norm:
            norms |= dict.fromkeys(QK_NORMS, self._ones[: config.head_dim])
        for index, layer in enumerate(self._layers):
            parts = layer.qkv.split((queries, keys, keys))
            named = dict(zip((*QKV, *OUTPUT), (*parts, layer.output), strict=True)) | norms
            prefix = f"model.layers.{index}."
            if layer.router is None:
                named |= zip((*GATE_UP, *DOWN), (*layer.gate_up.chunk(2), layer.down), strict=True)
            else:
                named["mlp.gate"] = layer.router
                state[f"{prefix}mlp.experts.gate_up_proj"] = layer.gate_up
                state[f"{prefix}mlp.experts.down_proj"] = layer.down
            state |= {f"{prefix}{name}.weight": weight for name, weight in named.items()}
        return state

    def prompts(self, count: int) -> list[tuple[int, ...]]:
        return arbitrary_prompts(self.config, count)

    def _mlp(self, layer: _Matrices, *, exact: bool) -> Mlp:
        experts = self.config.experts
        if layer.router is None or experts is None:
            gate_up, down = (self._product(m, exact=exact) for m in (layer.gate_up, layer.down))
            return DenseMlp(gate_up, down)
        router, shares = Linear(layer.router, exact=exact), (experts.per_row, experts.normalised)
        if self.device.type != "cpu":
            # Some machines lack Triton.
            from draftgate.backends.engine.grouped_experts import GroupedExperts

            return SparseMlp(router, GroupedExperts(layer.gate_up, layer.down, *shares))
        mlps = tuple(
            DenseMlp(Linear(gate_up, exact=exact), Linear(down, exact=exact))
            for gate_up, down in zip(layer.gate_up, layer.down, strict=True)
        )
        return SparseMlp(router, LoopedExperts(mlps, *shares))

    def _product(self, matrix: Matrix, *, exact: bool) -> Product:
        if isinstance(matrix, Tensor):
            return Linear(matrix, exact=exact)
        return product(matrix, self.device, exact=exact)

    def _layer(self) -> _Matrices:
        config, experts = self.config, self.config.experts
        hidden = config.hidden_size
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        # Two products of each layer contribute to the hidden state independently.
        added = RESIDUAL_SHARE / math.sqrt(2 * config.num_layers)
        qkv = self._matrix(queries + 2 * keys, hidden, 1 / math.sqrt(hidden))
        output = self._matrix(hidden, queries, added / math.sqrt(queries))
        inner = config.intermediate_size if experts is None else experts.width
        count = 1 if experts is None else experts.count
        gate_up = self._matrix(count * 2 * inner, hidden, 1 / math.sqrt(hidden))
        down = self._matrix(count * hidden, inner, added / math.sqrt(inner))
        if experts is None:
            if (scheme := config.quantisation) is not None:
                qkv, output, gate_up, down = (
                    quantised(matrix, scheme) for matrix in (qkv, output, gate_up, down)
                )
            return _Matrices(qkv, output, gate_up, down, None)
        router = self._matrix(count, hidden, 1 / math.sqrt(hidden))
        gate_up, down = gate_up.view(count, -1, hidden), down.view(count, hidden, inner)
        return _Matrices(qkv, output, gate_up, down, router)

    def _matrix(self, rows: int, columns: int, deviation: float) -> Matrix:
        bound = deviation * math.sqrt(3.0)
        empty = torch.empty(rows, columns, dtype=self.dtype, device=self.device)
        return empty.uniform_(-bound, bound, generator=self._random)


def arbitrary_prompts(config: ModelConfig, count: int) -> list[tuple[int, ...]]:
    """Return prompts of arbitrary tokens, for a model without a tokenizer."""
    rng = random.Random(0)
    vocab_size = config.vocab_size
    return [
        tuple(
            rng.choice(ORDINARY_IDS) % vocab_size
            for _ in range(rng.randint(LEAST_PROMPT, MOST_PROMPT))
        )
        for _ in range(count)
    ]
