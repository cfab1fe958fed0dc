"""Train an EAGLE-3 head on a target model, and write it in the published layout.

    python -m training.eagle --minutes 40 --out .train/eagle --log .train/eagle.txt

The target is frozen. Each step unrolls the head on its own hidden states, as when it drafts
(training-time test), and fits the target's distribution at every depth.

Source: Li, Wei, Zhang, Zhang, "EAGLE-3: Scaling up Inference Acceleration of Large Language Models
via Training-Time Test" (arXiv 2503.01840).

Shapes: B is the batch, L positions, H heads, D the hidden width, W the width of a head.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import mul
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from training import corpus
from training.data import Ids, PackedStream, even_windows
from training.losses import Teacher, output_loss
from training.recipes import HEAD, HeadRecipe
from training.train import CLIP, MODELS, build_optimizers, documents, load_model, rate_factor

logger = logging.getLogger("train.eagle")

HELD_OUT_WINDOWS = 16
"""Windows of the held-out agreement that the log reports: 8,192 positions."""


@dataclass(frozen=True)
class HeadShape:
    """The shape of a head, whose hidden states are as wide as the target's."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    theta: float


class Norm(nn.Module):
    """The RMS norm of Llama."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Return x of [..., width] with a mean square of 1, times the weight."""
        return functional.rms_norm(x.float(), self.weight.shape, self.weight, self._eps)


class Keys(NamedTuple):
    """Keys and values of a depth, [B, H, L, W] each."""

    keys: Tensor
    values: Tensor


class Attention(nn.Module):
    """Attention of the head's layer, which reads pairs of an embedding and a hidden state."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self._shape = shape
        self.q_proj = nn.Linear(2 * shape.hidden, queries, bias=False)
        self.k_proj = nn.Linear(2 * shape.hidden, keys, bias=False)
        self.v_proj = nn.Linear(2 * shape.hidden, keys, bias=False)
        self.o_proj = nn.Linear(queries, shape.hidden, bias=False)
        nn.init.zeros_(self.o_proj.weight)

    def forward(self, pairs: Tensor, depth: int, earlier: list[Keys]) -> Tensor:
        """Attend to the confirmed tokens, and to the chain's own drafts.

        Chain i of depth s attends to the confirmed rows up to i, then to its drafts of depths 1 to
        s. The keys and values of this depth are appended to `earlier`.

        Args:
            pairs: [B, L, 2 D].
            depth: number of drafts before this row of each chain.
            earlier: keys and values of the lower depths, with those of confirmed rows first.
        """
        batch, length, _ = pairs.shape
        heads, width = self._shape.heads, self._shape.head_dim

        def split(x: Tensor) -> Tensor:
            x = x.view(batch, length, -1, width).transpose(1, 2)
            return x.repeat_interleave(heads // x.shape[1], dim=1)

        cosines, sines = rotation(length, width, self._shape.theta, depth)
        queries = rotate(split(self.q_proj(pairs)), cosines, sines) * width**-0.5
        keys = rotate(split(self.k_proj(pairs)), cosines, sines)
        earlier.append(Keys(keys, split(self.v_proj(pairs))))
        confirmed, *drafts = earlier
        mask = torch.full((length, length), -math.inf).triu_(1)
        scores = [queries @ confirmed.keys.transpose(2, 3) + mask]
        scores += [(queries * draft.keys).sum(-1, keepdim=True) for draft in drafts]
        weights = torch.softmax(torch.cat(scores, -1).float(), -1)
        out = weights[..., :length].to(pairs.dtype) @ confirmed.values
        for place, draft in enumerate(drafts):
            out = out + weights[..., length + place, None] * draft.values
        out = out.transpose(1, 2).reshape(batch, length, -1).to(pairs.dtype)
        return functional.linear(out, self.o_proj.weight)


class Mlp(nn.Module):
    """The gated MLP of Llama."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.inner, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.inner, bias=False)
        self.down_proj = nn.Linear(shape.inner, shape.hidden, bias=False)
        nn.init.zeros_(self.down_proj.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Return [B, L, D]."""
        inner = functional.silu(self.gate_proj(x)) * self.up_proj(x)
        return functional.linear(inner, self.down_proj.weight)


class MidLayer(nn.Module):
    """The head's layer."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = Mlp(shape)
        self.hidden_norm = Norm(shape.hidden, shape.eps)
        self.input_layernorm = Norm(shape.hidden, shape.eps)
        self.post_attention_layernorm = Norm(shape.hidden, shape.eps)

    def forward(self, embedded: Tensor, hidden: Tensor, depth: int, earlier: list[Keys]) -> Tensor:
        """Return the next hidden states of [B, L, D] embeddings and hidden states."""
        pairs = torch.cat([self.input_layernorm(embedded), self.hidden_norm(hidden)], -1)
        attended: Tensor = self.self_attn(pairs, depth, earlier)
        hidden = hidden + attended
        inner: Tensor = self.mlp(self.post_attention_layernorm(hidden))
        return hidden + inner


class Head(nn.Module):
    """An EAGLE-3 head, whose parameters have the names of published checkpoints.

    Attributes:
        token_ids: the target's token of each of the head's tokens, int64 [draft_vocab_size].
    """

    token_ids: Tensor

    def __init__(self, shape: HeadShape, taps: int, token_ids: Tensor) -> None:
        super().__init__()
        self.fc = nn.Linear(taps * shape.hidden, shape.hidden, bias=False)
        self.midlayer = MidLayer(shape)
        self.norm = Norm(shape.hidden, shape.eps)
        self.lm_head = nn.Linear(shape.hidden, len(token_ids), bias=False)
        self.register_buffer("token_ids", token_ids, persistent=False)

    def unroll(self, embedded: Tensor, tapped: Tensor, depths: int) -> Iterator[Tensor]:
        """Yield the normalised hidden states of each depth, [B, L - depth, D].

        Chain i reads the token after position i and the target's hidden states of position i.
        Depth s of the chain then reads the following token and its own hidden state.

        Args:
            embedded: embeddings of the tokens at positions 1 to L, [B, L, D].
            tapped: hidden states of the tapped layers at positions 0 to L - 1, [B, L, taps x D].
        """
        hidden, earlier = self.fc(tapped), list[Keys]()
        for depth in range(depths):
            if depth:  # the last chain has no further token
                hidden, embedded = hidden[:, :-1], embedded[:, 1:]
                earlier = [Keys(k[:, :, :-1], v[:, :, :-1]) for k, v in earlier]
            hidden = self.midlayer(embedded, hidden, depth, earlier)
            yield self.norm(hidden)


def rotation(length: int, width: int, theta: float, shift: int) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of positions from `shift` on, [L, W / 2] each."""
    rates = theta ** (-torch.arange(0, width, 2) / width)
    angles = (torch.arange(length) + shift)[:, None] * rates
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotate the halves of [..., L, W] by the angles of their positions."""
    low, high = x.float().chunk(2, -1)
    rotated = torch.cat([low * cosines - high * sines, high * cosines + low * sines], -1)
    return rotated.to(x.dtype)


class Tapped(NamedTuple):
    """A pass of the target over ids [B, L + 1].

    Attributes:
        embedded: embeddings of the tokens at positions 1 to L, [B, L, D].
        states: hidden states of the tapped layers at positions 0 to L - 1, [B, L, taps x D].
        last: final hidden states after the last norm, [B, L + 1, D].
    """

    embedded: Tensor
    states: Tensor
    last: Tensor


@torch.no_grad()
def tap(target: LlamaForCausalLM, ids: Tensor, layers: Sequence[int]) -> Tapped:
    """Run the target, and keep the residual stream before each of `layers`.

    The number of layers stands for the stream after the last layer.
    """
    kept: dict[int, Tensor] = {}
    modules = [*target.model.layers, target.model.norm]

    def keep(layer: int, arguments: tuple[Tensor, ...]) -> None:
        kept[layer] = arguments[0]

    hooks = [
        modules[layer].register_forward_pre_hook(
            lambda _, arguments, layer=layer: keep(layer, arguments)
        )
        for layer in set(layers)
    ]
    try:
        with torch.autocast("cpu", torch.bfloat16):
            last = target.model(input_ids=ids, use_cache=False).last_hidden_state
    finally:
        for hook in hooks:
            hook.remove()
    embedded = functional.embedding(ids[:, 1:], target.model.embed_tokens.weight)
    return Tapped(embedded, torch.cat([kept[layer][:, :-1] for layer in layers], -1), last)


def frequent_tokens(texts: Sequence[Ids], vocab_size: int, count: int) -> Tensor:
    """Return the `count` most frequent token ids in ascending order."""
    counts = np.bincount(np.concatenate(list(texts)), minlength=vocab_size)
    return torch.from_numpy(np.sort(np.argsort(-counts, kind="stable")[:count]))


def build_head(target: LlamaForCausalLM, recipe: HeadRecipe, token_ids: Tensor) -> Head:
    """Return a head that predicts what the target's highest tap predicts."""
    torch.manual_seed(recipe.seed)
    head = Head(head_shape(target.config, recipe), len(recipe.taps), token_ids)
    width = target.config.hidden_size
    with torch.no_grad():
        head.fc.weight.mul_(0.1)
        head.fc.weight[:, -width:] += torch.eye(width)
        head.lm_head.weight.copy_(target.lm_head.weight[token_ids])
        head.norm.weight.copy_(target.model.norm.weight)
    return head


def head_shape(config: LlamaConfig, recipe: HeadRecipe) -> HeadShape:
    """Return the shape of a head for a target."""
    return HeadShape(
        hidden=config.hidden_size,
        inner=recipe.inner,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        eps=config.rms_norm_eps,
        theta=config.rope_parameters["rope_theta"],
    )


def depth_losses(
    head: Head, target: LlamaForCausalLM, ids: Tensor, recipe: HeadRecipe
) -> list[Tensor]:
    """Return the loss of each depth: the cross-entropy with the corpus, in nats per token.

    The gradient is that of the divergence from the target's distribution over the head's tokens.
    """
    tapped = tap(target, ids[:, :-1], recipe.taps)
    weight = target.lm_head.weight.detach()[head.token_ids].to(torch.bfloat16)
    places = torch.zeros(target.config.vocab_size, dtype=torch.int64)
    places[head.token_ids] = torch.arange(len(head.token_ids))
    losses = []
    with torch.autocast("cpu", torch.bfloat16):
        unrolled = head.unroll(tapped.embedded, tapped.states, recipe.depths)
        for depth, hidden in enumerate(unrolled):
            # Depth s of chain i predicts the token that the target predicts at position i + s + 1.
            taught = tapped.last[:, depth + 1 :].flatten(0, 1)
            labels = places[ids[:, depth + 2 :]].flatten()
            teacher = Teacher(taught, weight, 1.0)
            losses.append(output_loss(hidden.flatten(0, 1), head.lm_head.weight, labels, teacher))
    return losses


@torch.no_grad()
def agreement(
    head: Head, target: LlamaForCausalLM, windows: Tensor, recipe: HeadRecipe
) -> list[float]:
    """Return the share of positions at which the head picks the target's token, by depth."""
    equal = torch.zeros(recipe.depths)
    for ids in windows.split(8):
        tapped = tap(target, ids[:, :-1], recipe.taps)
        chosen = target.lm_head(tapped.last.float()).argmax(-1)
        unrolled = head.unroll(tapped.embedded, tapped.states.float(), recipe.depths)
        for depth, hidden in enumerate(unrolled):
            drafted = head.token_ids[head.lm_head(hidden).argmax(-1)]
            equal[depth] += (drafted == chosen[:, depth + 1 :]).float().mean() * len(ids)
    return [round(share, 4) for share in (equal / len(windows)).tolist()]


def save_head(head: Head, target: LlamaConfig, recipe: HeadRecipe, folder: Path) -> None:
    """Write the head as a bfloat16 checkpoint without the embedding, which is the target's."""
    folder.mkdir(parents=True, exist_ok=True)
    shape = head_shape(target, recipe)
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inner,
        "num_hidden_layers": 1,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": shape.eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.theta},
        "max_position_embeddings": target.max_position_embeddings,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": len(head.token_ids),
        "eagle_aux_hidden_state_layer_ids": list(recipe.taps),
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    tensors = {name: p.detach().to(torch.bfloat16) for name, p in head.named_parameters()}
    tensors["d2t"] = head.token_ids - torch.arange(len(head.token_ids))
    tensors["t2d"] = torch.zeros(target.vocab_size, dtype=torch.bool)
    tensors["t2d"][head.token_ids] = True
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def train(options: argparse.Namespace, recipe: HeadRecipe = HEAD) -> Head:
    """Train until the minutes are used up, and write the head every few minutes."""
    target = load_model(options.target).requires_grad_(requires_grad=False)
    texts = documents(corpus.training_files())
    token_ids = frequent_tokens(texts, target.config.vocab_size, recipe.draft_vocab_size)
    head = build_head(target, recipe, token_ids)
    hidden = (head.fc.weight, *head.midlayer.parameters())
    optimizers = build_optimizers(head, hidden, recipe.matrix_rate, recipe.other_rate)
    stream = PackedStream(texts, recipe.seed)
    held_out = even_windows(documents(corpus.held_out_files()), recipe.length, HELD_OUT_WINDOWS)
    began_s = saved_s = time.monotonic()
    rows, step = recipe.batch_tokens // recipe.length, 0
    while (progress := (time.monotonic() - began_s) / 60 / options.minutes) < 1:
        losses = depth_losses(head, target, stream.batch(rows, recipe.length), recipe)
        shares = [recipe.depth_share**depth for depth in range(len(losses))]
        sum(map(mul, losses, shares), start=torch.zeros(())).backward()
        nn.utils.clip_grad_norm_(head.parameters(), CLIP)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * rate_factor(progress)
            optimizer.step()
            optimizer.zero_grad()
        step += 1
        if step % 25 == 0:
            shown = " ".join(f"{loss.item():.3f}" for loss in losses)
            tokens = step * recipe.batch_tokens
            logger.info("step %d %.1f%% tokens %d loss %s", step, 100 * progress, tokens, shown)
        if time.monotonic() - saved_s > 60 * options.save_minutes:
            saved_s = time.monotonic()
            save_head(head, target.config, recipe, options.out)
            logger.info("agreement %s", agreement(head, target, held_out, recipe))
    save_head(head, target.config, recipe, options.out)
    logger.info("done: agreement %s", agreement(head, target, held_out, recipe))
    return head


def parse(arguments: list[str]) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(prog="python -m training.eagle", description=__doc__)
    parser.add_argument("--target", type=Path, default=MODELS["target"])
    parser.add_argument("--out", type=Path, required=True, help="folder of the written head")
    parser.add_argument("--minutes", type=float, default=HEAD.minutes)
    parser.add_argument("--save-minutes", type=float, default=4)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--log", type=Path, help="log to this file instead of the terminal")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Train a head."""
    options = parse(sys.argv[1:] if arguments is None else arguments)
    logging.basicConfig(
        level=logging.INFO, filename=options.log, format="%(asctime)s %(message)s", force=True
    )
    torch.set_num_threads(options.threads)
    train(options)


if __name__ == "__main__":
    main()
