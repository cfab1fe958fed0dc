"""Where a checkpoint lies: a directory of this machine, or a model hub's cache of it.

Hub names go through `huggingface_hub`, which reads its own environment: `HF_TOKEN` for models
behind a login, `HF_HOME` for where the cache lies, `HF_HUB_OFFLINE`, `HF_ENDPOINT`. What is in the
cache is found without a network.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Final

from draftgate.backends.errors import CheckpointError
from draftgate.backends.shipped import SHIPPED_MODEL, SHIPPED_MODEL_ID

_HUB_NAME: Final = re.compile(r"(?P<repo>\w[\w.-]*/\w[\w.-]*)(@(?P<revision>\w[\w./-]*))?")

_SETTINGS: Final = ("*.json", "*.jinja")
_WEIGHTS: Final = "*.safetensors"
_LEFT_ALONE: Final = ("[!1]*/*.json", "*/*.safetensors", "consolidated*.safetensors")
"""Copies of the weights for other programs, and what else lies in folders, but for how an embedding
model pools (`1_Pooling`)."""


def find_checkpoint(name: str | None, *, weights: bool = True) -> Path:
    """Return the directory of a checkpoint, downloaded if need be. May block for long.

    May be called in any thread. Progress bars show where stderr is a terminal.

    Args:
        name: a directory, which comes first, or a hub's `organisation/model`, which may end in
            `@revision` (branch, tag or commit); None is the shipped model.
        weights: False if only tokenizer and configuration are wanted.

    Raises:
        CheckpointError: there is none of that name, or the hub does not give it; the message says
            what to do.
    """
    if name is None:
        return SHIPPED_MODEL
    directory = Path(name).expanduser()
    if directory.is_dir():
        return directory
    hub = _HUB_NAME.fullmatch(name)
    if hub is None:
        raise CheckpointError(
            f"no checkpoint: {directory} is not a directory, nor a hub's organisation/model"
        )
    patterns = (*_SETTINGS, _WEIGHTS) if weights else _SETTINGS
    directory = _download(name, hub["repo"], hub["revision"], patterns)
    if weights and not any(directory.glob(_WEIGHTS)):
        raise CheckpointError(f"no checkpoint: {name} has no {_WEIGHTS} files, only other formats")
    return directory


def checkpoint_id(name: str | None) -> str:
    """Return what clients call the checkpoint that `find_checkpoint` finds by this name."""
    if name is None:
        return SHIPPED_MODEL_ID
    directory, hub = Path(name).expanduser(), _HUB_NAME.fullmatch(name)
    return hub["repo"] if hub and not directory.is_dir() else directory.resolve().name


def _download(name: str, repo: str, revision: str | None, patterns: tuple[str, ...]) -> Path:
    """Return the hub's snapshot of a model, which has at least the files of these patterns."""
    # Only here, for most checkpoints are directories, and this is half a second.
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()  # they would fill a server's log
    try:
        return Path(
            snapshot_download(
                repo,
                revision=revision,
                allow_patterns=list(patterns),
                ignore_patterns=list(_LEFT_ALONE),
            )
        )
    except Exception as error:  # the library passes on what its HTTP clients and disks raise
        raise CheckpointError(f"no checkpoint: {name}: {_advice(error)}") from error


def _advice(error: Exception) -> str:
    """Return what went wrong and what to do about it."""
    from huggingface_hub import errors

    # The first that fits: a gated repository is a kind of one not found.
    advice: dict[type[Exception], str] = {
        errors.GatedRepoError: "its owner gives it only to those who accepted the licence; "
        "accept it on the model's page and set HF_TOKEN to a token of that account",
        errors.RepositoryNotFoundError: "is not a directory here, and the hub knows no such model; "
        "if it is private, set HF_TOKEN to a token that may read it",
        errors.RevisionNotFoundError: "the hub has the model, but not this revision",
        errors.LocalEntryNotFoundError: "is not a directory here, is not (or not all) in the "
        "hub's cache, and the hub is out of reach; unset HF_HUB_OFFLINE, look at the network, or "
        "pass a directory",
    }
    for kind, text in advice.items():
        if isinstance(error, kind):
            return text
    return f"the download failed: {error}"
