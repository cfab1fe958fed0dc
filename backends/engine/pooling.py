"""Embeddings: the hidden state of the last token after the final norm.

Embedding models made from decoders pool the last token, because that token alone attends to all
others (Qwen3-Embedding, arXiv 2506.05176; vLLM's `LAST`). The gateway normalises the embedding.

A checkpoint in the layout of sentence-transformers lists its modules in `modules.json` and its
pooling in `1_Pooling/config.json`. A decoder does not support mean pooling, which needs the hidden
states of all rows, including cached rows. Encoders do (`encoder.sentence`).
"""

from __future__ import annotations

import json
import logging
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from draftgate.backends.core.steps import StepPlan
from draftgate.backends.errors import CheckpointError
from draftgate.backends.tokenizer import read_json

LAST_TOKEN: Final = "lasttoken"
DEFAULT_MODE: Final = "mean_tokens"
"""Pooling mode of sentence-transformers if a configuration names none."""

_FLAG: Final = "pooling_mode_"
_POOLING: Final = "Pooling"
_SUPPORTED: Final = frozenset({"Transformer", _POOLING, "Normalize"})

logger = logging.getLogger(__name__)


def rows_to_pool(plan: StepPlan) -> list[int]:
    """Return the rows of a step whose hidden state a request needs."""
    if not plan.pooled:
        return []
    ends = list(accumulate(work.num_tokens for work in plan.work))
    return [ends[place] - 1 for place in plan.pooled]


def select_pooled(hidden: Tensor, num_samples: int, num_pooled: int) -> Tensor | None:
    """Return the pooled rows, which follow the sampled rows.

    Args:
        hidden: [rows, hidden_size], from `Decoder.last_hidden`.
        num_samples: number of sampled rows.
        num_pooled: number of pooled rows.

    Returns:
        float32 [num_pooled, hidden_size] on the same device, or None without pooled rows.
    """
    return hidden[num_samples : num_samples + num_pooled].float() if num_pooled else None


def pooled_bytes(pooled: Tensor | None) -> list[bytes] | None:
    """Return each row of a tensor in main memory as little-endian float32."""
    return None if pooled is None else [row.tobytes() for row in pooled.numpy().astype("<f4")]


def pools_last_token(directory: Path) -> bool:
    """Return whether the engine supports a checkpoint's embeddings, and log the reason otherwise.

    Raises:
        CheckpointError: a file is damaged.
    """
    reason = unsupported_pooling(directory)
    if reason is not None:
        logger.warning("no embeddings: %s, but decoders support only last-token pooling", reason)
    return reason is None


def unsupported_pooling(directory: Path) -> str | None:
    """Return the reason why the engine does not support a checkpoint's embeddings, or None.

    Raises:
        CheckpointError: a file is damaged.
    """
    pooling = "1_Pooling"
    for module in read_modules(directory / "modules.json"):
        kind = str(module.get("type", "")).rpartition(".")[2]
        if kind not in _SUPPORTED:
            return f"modules.json requires a module {kind!r} after the pooling"
        if kind == _POOLING:
            pooling = str(module.get("path", pooling))
    settings = read_json(directory / pooling / "config.json", missing={_FLAG + LAST_TOKEN: True})
    modes = pooling_modes(settings)
    if modes != [LAST_TOKEN]:
        return f"{pooling}/config.json requires pooling by {' and '.join(modes)}"
    return None


def pooling_modes(settings: dict[str, Any]) -> list[str]:
    """Return the modes that the configuration of a pooling names, in the order of its fields."""
    named = settings.get("pooling_mode")
    if isinstance(named, str):
        return [named]
    flags = [name for name, on in settings.items() if on is True and name.startswith(_FLAG)]
    return [name.removeprefix(_FLAG) for name in flags] or [DEFAULT_MODE]


def read_modules(path: Path) -> list[dict[str, Any]]:
    """Return the entries of a `modules.json`, or none if the file does not exist.

    Raises:
        CheckpointError: the file is damaged.
    """
    if not path.is_file():
        return []
    try:
        modules = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"damaged {path}: {error}") from error
    if not isinstance(modules, list) or not all(isinstance(each, dict) for each in modules):
        raise CheckpointError(f"damaged {path}: a list of JSON objects was expected")
    return modules
