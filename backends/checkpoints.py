"""Locations of checkpoints: the shipped models, directories, and the cache of the Hugging Face hub.

`huggingface_hub` resolves hub names and reads its own environment variables: `HF_TOKEN` for gated
models, `HF_HOME` for the cache, `HF_HUB_OFFLINE` and `HF_ENDPOINT`. Cached models need no network.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from draftgate.backends.errors import CheckpointError

SHIPPED_MODEL: Final = Path(__file__).parent / "engine" / "demo" / "target"
"""Directory of the shipped target model, in Hugging Face layout."""

SHIPPED_DRAFT: Final = SHIPPED_MODEL.parent / "draft"
"""Directory of the shipped draft model."""

SHIPPED_DRAFT_WINDOW: Final = 256
"""Attention window of each layer of the shipped draft model, in tokens. The model's loss rises
beyond 1,024.

Accepted share of drafts of 4 tokens after 4,000 tokens, by window (`bench/results/proposers.json`,
2026-11-21):

    window              128    256    512    1,024    none
    greedy              56%    59%    60%    26%      13%
    temperature 0.8     35%    36%    37%    22%      12%

After 100 to 240 tokens, the shares are 77% and 49% with any window.
"""

SHIPPED_MODEL_ID: Final = "draftgate-demo"
"""Name by which clients request the shipped model."""

SHIPPED_DOCUMENTS_ID: Final = "draftgate-documents"
SHIPPED_QUERIES_ID: Final = "draftgate-queries"
"""Names of the shipped towers, which embed documents and queries in one space."""

SHIPPED_TOWERS: Final = {
    SHIPPED_DOCUMENTS_ID: SHIPPED_MODEL.parent / "documents",
    SHIPPED_QUERIES_ID: SHIPPED_MODEL.parent / "queries",
}
"""Directories of the shipped towers, in the layout of sentence-transformers."""

_HUB_NAME: Final = re.compile(r"(?P<repo>\w[\w.-]*/\w[\w.-]*)(@(?P<revision>\w[\w./-]*))?")

_SETTINGS: Final = ("*.json", "*.jinja")
_WEIGHTS: Final = "*.safetensors"
_IGNORED: Final = ("[!1-9]*/*.json", "[!1-9]*/*.safetensors", "consolidated*.safetensors")
"""Weights in other layouts, and subfolders except the modules of embedding models (`1_Pooling`)."""


def find_checkpoint(name: str | None, *, weights: bool = True) -> Path:
    """Return the directory of a checkpoint, and download it if necessary.

    A download may take long. The function may be called in any thread. Progress bars appear if
    stderr is a terminal.

    Args:
        name: a directory, one of `SHIPPED_TOWERS`, or `organisation/model` on the hub with an
            optional `@revision` (branch, tag or commit). None is the shipped language model.
        weights: whether to download weights, not only tokenizer and configuration.

    Raises:
        CheckpointError: the checkpoint does not exist, or the hub denies access. The message
            contains the remedy.
    """
    if name is None:
        return SHIPPED_MODEL
    directory = Path(name).expanduser()
    if directory.is_dir():
        return directory
    if name in SHIPPED_TOWERS:
        return SHIPPED_TOWERS[name]
    hub = _HUB_NAME.fullmatch(name)
    if hub is None:
        raise CheckpointError(
            f"no checkpoint: {directory} is neither a directory nor organisation/model on the hub; "
            f"shipped: {', '.join(SHIPPED_TOWERS)}"
        )
    patterns = (*_SETTINGS, _WEIGHTS) if weights else _SETTINGS
    directory = _download(name, hub["repo"], hub["revision"], patterns)
    if weights and not any(directory.glob(_WEIGHTS)):
        raise CheckpointError(f"no checkpoint: {name} has no {_WEIGHTS} files, only other formats")
    return directory


def checkpoint_id(name: str | None) -> str:
    """Return the name by which clients request the checkpoint `find_checkpoint(name)`."""
    if name is None:
        return SHIPPED_MODEL_ID
    directory, hub = Path(name).expanduser(), _HUB_NAME.fullmatch(name)
    if directory.is_dir():
        return directory.resolve().name
    if name in SHIPPED_TOWERS:
        return name
    return hub["repo"] if hub else directory.resolve().name


def named_checkpoints(entries: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield the name and the checkpoint of each entry, `NAME=CHECKPOINT` or a checkpoint alone."""
    for entry in entries:
        name, equals, path = entry.partition("=")
        yield (name, path) if equals else (checkpoint_id(entry), entry)


def _download(name: str, repo: str, revision: str | None, patterns: tuple[str, ...]) -> Path:
    """Return a snapshot of a model on the hub with the files that match these patterns."""
    # Imported here because the import takes half a second, and most checkpoints are directories.
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()  # progress bars would fill a server's log
    try:
        return Path(
            snapshot_download(
                repo,
                revision=revision,
                allow_patterns=list(patterns),
                ignore_patterns=list(_IGNORED),
            )
        )
    except Exception as error:  # any error of the library's HTTP client or of the disk
        raise CheckpointError(f"no checkpoint: {name}: {_advice(error)}") from error


def _advice(error: Exception) -> str:
    """Return the cause of a failed download and its remedy."""
    from huggingface_hub import errors

    # The first match counts, because a gated repository is also a repository that was not found.
    advice: dict[type[Exception], str] = {
        errors.GatedRepoError: "the owner requires a licence: accept it on the model's page and "
        "set HF_TOKEN to a token of that account",
        errors.RepositoryNotFoundError: "the name is neither a local directory nor a model on "
        "the hub; if the model is private, set HF_TOKEN to a token that may read it",
        errors.RevisionNotFoundError: "the hub has the model, but not this revision",
        errors.LocalEntryNotFoundError: "the name is not a local directory, is not complete in "
        "the hub's cache, and the hub cannot be reached; unset HF_HUB_OFFLINE, check "
        "the network, or pass a directory",
    }
    for kind, text in advice.items():
        if isinstance(error, kind):
            return text
    return f"the download failed: {error}"
