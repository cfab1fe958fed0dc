"""A tower: a BERT encoder, mean pooling, and an optional dense layer.

Shapes: B is the number of texts, L their longest length, H the hidden size, D the embedding size.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional
from transformers import BertConfig, BertModel

from training.towers import tokenization
from training.towers.recipes import Shape

MAX_TOKENS: Final = 512
"""Maximum length of a text. Training texts have at most 256 tokens, so later positions stay
zero."""

MICRO_TOKENS: Final = 8192
"""Tokens per forward pass, including padding."""

MODULES: Final = ("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Dense", "Dense")
NORMALIZE: Final = ("3_Normalize", "Normalize")

Texts: TypeAlias = Sequence[NDArray[np.uint16]]


class Tower(nn.Module):
    """Embeds texts, given as token ids, as unit vectors.

    At first, every layer is the identity and positions are zero. A text is then the mean of the
    normalised embeddings of its words, which `lexical` trains at a fraction of the time.
    """

    def __init__(self, shape: Shape, vocab_size: int) -> None:
        super().__init__()
        self.shape = shape
        self.bert = BertModel(_config(shape, vocab_size), add_pooling_layer=False)
        self.dense = nn.Linear(shape.hidden, shape.dense, bias=False) if shape.dense else None
        embeddings = self.bert.embeddings
        nn.init.normal_(embeddings.word_embeddings.weight, std=0.05)
        nn.init.zeros_(embeddings.position_embeddings.weight)
        nn.init.zeros_(embeddings.token_type_embeddings.weight)
        embeddings.token_type_embeddings.weight.requires_grad_(False)
        for layer in self.bert.encoder.layer:
            nn.init.zeros_(layer.attention.output.dense.weight)
            nn.init.zeros_(layer.output.dense.weight)

    @property
    def words(self) -> Tensor:
        """The word embeddings, [vocabulary, H]."""
        weight: Tensor = self.bert.embeddings.word_embeddings.weight
        return weight

    @property
    def is_lexical(self) -> bool:
        """Whether all layers are the identity, so that `lexical` returns the same vectors."""
        layers = self.bert.encoder.layer
        outputs = [dense for layer in layers for dense in (layer.attention.output, layer.output)]
        return not any(weight.any() for each in outputs for weight in each.dense.parameters())

    def forward(self, texts: Texts) -> Tensor:
        """Return unit vectors, [B, D]. Texts of similar length share a forward pass."""
        order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
        pooled = [self._pooled([texts[i] for i in part]) for part in _parts(order, texts)]
        back = torch.empty(len(order), dtype=torch.long)
        back[torch.tensor(order)] = torch.arange(len(order))
        return self._finish(torch.cat(pooled)[back])

    def lexical(self, texts: Texts) -> Tensor:
        """Return what `forward` returns while layers are the identity, at a fraction of the time.

        Layer normalisation is idempotent without its weights, which only the last layer trains in
        this phase.
        """
        flat = torch.from_numpy(np.concatenate(texts).astype(np.int64))
        starts = torch.tensor([0, *(len(text) for text in texts)]).cumsum(0)[:-1]
        tokens, places = flat.unique(return_inverse=True)
        states = self.bert.embeddings.LayerNorm(self.words[tokens])
        states = self.bert.encoder.layer[-1].output.LayerNorm(states)
        return self._finish(functional.embedding_bag(places, states, starts, mode="mean"))

    def lexical_parameters(self) -> list[nn.Parameter]:
        """Return the parameters of `lexical`, the word embeddings first."""
        last = self.bert.encoder.layer[-1].output.LayerNorm
        dense = [self.dense.weight] if self.dense is not None else []
        return [self.bert.embeddings.word_embeddings.weight, *last.parameters(), *dense]

    def _pooled(self, texts: Texts) -> Tensor:
        longest = max(map(len, texts))
        ids, mask = torch.zeros(2, len(texts), longest, dtype=torch.long)
        for row, text in enumerate(texts):
            ids[row, : len(text)] = torch.from_numpy(text.astype(np.int64))
            mask[row, : len(text)] = 1
        with torch.autocast("cpu", torch.bfloat16, enabled=self.training):
            states = self.bert(input_ids=ids, attention_mask=mask).last_hidden_state
        weights = mask[..., None].float()
        pooled: Tensor = (states.float() * weights).sum(1) / weights.sum(1)
        return pooled

    def _finish(self, pooled: Tensor) -> Tensor:
        projected: Tensor = pooled if self.dense is None else self.dense(pooled)
        return functional.normalize(projected, dim=-1)

    def save(self, folder: Path, tokenizer: Tokenizer) -> None:
        """Write a checkpoint with float16 weights in the layout of sentence-transformers."""
        folder.mkdir(parents=True, exist_ok=True)
        weights = {k: v.half().contiguous() for k, v in self.bert.state_dict().items()}
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        config = {
            **self.bert.config.to_diff_dict(),
            "architectures": ["BertModel"],
            "model_type": "bert",
            "dtype": "float16",
        }
        _write(folder / "config.json", config)
        tokenization.write(tokenizer, folder, MAX_TOKENS)
        _write(folder / "sentence_bert_config.json", {"max_seq_length": MAX_TOKENS})
        pooling = {"word_embedding_dimension": self.shape.hidden, "pooling_mode_mean_tokens": True}
        _write(folder / "1_Pooling" / "config.json", pooling)
        if self.dense is not None:
            self._save_dense(folder / "2_Dense")
        modules = (*MODULES[: 2 + (self.dense is not None)], NORMALIZE)
        listed = [
            {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for i, (path, kind) in enumerate(modules)
        ]
        _write(folder / "modules.json", listed)

    def _save_dense(self, folder: Path) -> None:
        assert self.dense is not None
        settings = {
            "in_features": self.shape.hidden,
            "out_features": self.shape.dense,
            "bias": False,
            "activation_function": "torch.nn.modules.linear.Identity",
        }
        _write(folder / "config.json", settings)
        save_file(
            {"linear.weight": self.dense.weight.detach().half()}, folder / "model.safetensors"
        )


def load(folder: Path, shape: Shape) -> Tower:
    """Return a saved tower in float32, in evaluation mode."""
    weights = load_file(folder / "model.safetensors")
    tower = Tower(shape, len(weights["embeddings.word_embeddings.weight"]))
    tower.bert.load_state_dict(weights)
    if tower.dense is not None:
        stored = load_file(folder / "2_Dense" / "model.safetensors")
        tower.dense.load_state_dict({"weight": stored["linear.weight"]})
    return tower.eval()


@torch.no_grad()
def embed(tower: Tower, texts: Texts, *, batch: int = 512) -> Tensor:
    """Return the unit vectors of many texts, [B, D]."""
    encode = tower.lexical if tower.is_lexical else tower
    return torch.cat([encode(texts[at : at + batch]) for at in range(0, len(texts), batch)])


def _config(shape: Shape, vocab_size: int) -> BertConfig:
    return BertConfig(
        vocab_size=vocab_size,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        intermediate_size=shape.inner,
        max_position_embeddings=MAX_TOKENS,
        type_vocab_size=1,
        # Word dropout regularises instead, because dropout of states is slow on a CPU.
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        pad_token_id=0,
        attn_implementation="eager",
    )


def _parts(order: Sequence[int], texts: Texts) -> list[list[int]]:
    """Divide texts in order of length into forward passes of `MICRO_TOKENS` with padding."""
    parts, part = list[list[int]](), list[int]()
    for index in order:
        if part and (len(part) + 1) * len(texts[index]) > MICRO_TOKENS:
            parts.append(part)
            part = []
        part.append(index)
    return [*parts, part]


def _write(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n")
