"""What a checkpoint in the layout of sentence-transformers asks of whoever embeds with it.

`modules.json` lists what comes behind the decoder, `1_Pooling/config.json` says how to pool. What
`pooling.py` and the gateway make is the last token's state, normalised. A mean would need every
row's state, of what is cached as well; it is refused by name and never quietly made otherwise.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any, Final

from draftgate.backends.errors import CheckpointError
from draftgate.backends.tokenizer import read_json

LAST_TOKEN: Final = "lasttoken"
SILENT_MODE: Final = "mean_tokens"
"""What sentence-transformers does where a pooling's configuration says nothing."""

_FLAG: Final = "pooling_mode_"
_POOLING: Final = "Pooling"
_DONE_ANYHOW: Final = frozenset({"Transformer", _POOLING, "Normalize"})


logger = logging.getLogger(__name__)


def pools_last_token(directory: Path) -> bool:
    """Return whether a checkpoint's embeddings are those that are made here; the log says why not.

    Raises:
        CheckpointError: a file is damaged.
    """
    reason = why_not_embedded(directory)
    if reason is not None:
        logger.warning("no embeddings: %s; made here is the last token's alone", reason)
    return reason is None


def why_not_embedded(directory: Path) -> str | None:
    """Return why a checkpoint's embeddings cannot be given as it asks; None if they can.

    Raises:
        CheckpointError: a file is damaged.
    """
    pooling = "1_Pooling"
    for module in _modules(directory / "modules.json"):
        kind = str(module.get("type", "")).rpartition(".")[2]
        if kind not in _DONE_ANYHOW:
            return f"modules.json asks for a module {kind!r} behind the pooling"
        if kind == _POOLING:
            pooling = str(module.get("path", pooling))
    settings = read_json(directory / pooling / "config.json", missing={_FLAG + LAST_TOKEN: True})
    asked = _modes(settings)
    if asked != [LAST_TOKEN]:
        return f"{pooling}/config.json asks for pooling by {' and '.join(asked)}"
    return None


def _modes(settings: dict[str, Any]) -> list[str]:
    """Return the modes that a pooling's configuration asks for."""
    named = settings.get("pooling_mode")
    if isinstance(named, str):
        return [named]
    asked = [name.removeprefix(_FLAG) for name, on in settings.items() if on is True]
    return [name for name in asked if _FLAG + name in settings] or [SILENT_MODE]


def _modules(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    try:
        modules = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"damaged {path}: {error}") from error
    if not isinstance(modules, list) or not all(isinstance(each, dict) for each in modules):
        raise CheckpointError(f"damaged {path}: a list of JSON objects was expected")
    return modules
