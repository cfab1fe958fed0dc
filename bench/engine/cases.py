"""The measured steps, with the minimum number of bytes and operations of each step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from draftgate.backends.engine.config import ModelConfig
from draftgate.backends.engine.weights import layer_products


class Case(NamedTuple):
    """A step that computes `tokens` for each of `batch` sequences after `context_tokens`."""

    name: str
    batch: int
    tokens: int
    context_tokens: int

    @property
    def pairs(self) -> int:
        """Number of pairs of a token and a KV token that it attends to."""
        context_pairs = self.tokens * self.context_tokens
        return self.batch * (context_pairs + self.tokens * (self.tokens + 1) // 2)

    @property
    def logit_rows(self) -> int:
        """Number of logit rows: all tokens of a verify step, or the last token of a prefill."""
        return self.batch if self.name == "prefill" else self.batch * self.tokens


class Grid(NamedTuple):
    """Steps over batch size, context and draft slots, and the prefill of a prompt."""

    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    drafts: tuple[int, ...]
    prefill_tokens: int

    def cases(self) -> Iterator[Case]:
        """Yield every step of the grid."""
        for slots in self.drafts:
            for context_tokens in self.contexts:
                for batch in self.batches:
                    name = "verify" if slots else "decode"
                    yield Case(name, batch, 1 + slots, context_tokens)
        yield Case("prefill", 1, self.prefill_tokens, 0)

    @property
    def longest(self) -> int:
        """Maximum number of tokens of a sequence."""
        return max(case.context_tokens + case.tokens for case in self.cases())


GRIDS: Final = {
    "cpu": Grid((1, 8, 32), (512,), (0, 4), 256),
    "cuda": Grid((1, 8, 64), (512, 2048, 8192), (0, 4), 8192),
}
"""The default grid by type of device."""


def layer_parameters(config: ModelConfig, experts: float = 0.0) -> int:
    """Return the number of weights in the matrices of all layers.

    Args:
        experts: number of experts of each layer that count, for a mixture of experts.
    """
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    total: float = config.num_layers * (2 * queries + 2 * keys)
    sparse = 0
    if config.experts is not None:
        sparse = len(config.experts.layers)
        total += sparse * (3 * experts * config.experts.width + config.experts.count)
    total += (config.num_layers - sparse) * 3 * config.intermediate_size
    return round(config.hidden_size * total)


def read_experts(config: ModelConfig, tokens: int) -> float:
    """Return the expected number of experts of a layer that a step reads.

    Each token is assumed to choose its experts independently of the others.
    """
    experts = config.experts
    if experts is None:
        return 0.0
    return float(experts.count * (1 - (1 - experts.per_row / experts.count) ** tokens))


def weight_bytes(config: ModelConfig, itemsize: int, tokens: int = 1) -> int:
    """Return the bytes of weights that every step of this number of tokens reads.

    A step reads only one row per token of an embedding that is not tied to the LM head, so such an
    embedding does not count.

    Args:
        itemsize: bytes per weight that is not quantised.
        tokens: number of tokens of the step, which choose experts.
    """
    layers = layer_parameters(config, read_experts(config, tokens))
    kept = itemsize * config.vocab_size * config.hidden_size
    return round(layers * _weight_bytes(config, itemsize)) + kept


def _weight_bytes(config: ModelConfig, itemsize: int) -> float:
    """Return the mean bytes of a weight of the layers, with the scales and zeros of its format."""
    if config.quantisation is None:
        return itemsize
    shapes = [(sum(each.outputs), each.inputs) for each in layer_products(config)]
    num_bytes = sum(config.quantisation.loaded_bytes(*shape) for shape in shapes)
    return num_bytes / sum(outputs * inputs for outputs, inputs in shapes)


def read_bytes(config: ModelConfig, case: Case, itemsize: int) -> int:
    """Return the bytes that a step must read: the weights, and the keys and values.

    Args:
        itemsize: bytes per number.
    """
    kv_bytes = case.batch * case.context_tokens * config.kv_bytes_per_token(itemsize)
    return weight_bytes(config, itemsize, case.batch * case.tokens) + kv_bytes


def flops(config: ModelConfig, case: Case) -> int:
    """Return the minimum number of operations of a step.

    A step takes two operations for each weight and token. Attention adds two products of `head_dim`
    multiplications and additions for each pair and query head.
    """
    products = case.batch * case.tokens * layer_parameters(config, read_experts(config, 1))
    products += case.logit_rows * config.vocab_size * config.hidden_size
    columns = config.num_layers * config.num_heads * config.head_dim
    return 2 * products + 4 * case.pairs * columns
