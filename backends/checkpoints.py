"""Locations of checkpoints: shipped models, directories, GGUF files, and the Hugging Face hub.

`huggingface_hub` resolves hub names and reads its own environment variables: `HF_TOKEN` for gated
models, `HF_HOME` for the cache, `HF_HUB_OFFLINE` and `HF_ENDPOINT`. Cached models need no network.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from glob import escape
from pathlib import Path
from typing import Final

from draftgate.backends.errors import CheckpointError
from draftgate.backends.gguf.choice import SUFFIX, choose_model, gguf_models, model_name
from draftgate.backends.model_store.known_models import KNOWN_MODELS
from draftgate.backends.model_store.store import pull

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

SHIPPED_QUERIES_ID: Final = "draftgate-queries"
"""Name of the shipped query tower, which embeds queries in the space of MiniLM."""

SHIPPED_QUERIES: Final = SHIPPED_MODEL.parent / "queries"
"""Directory of the shipped query tower, in the layout of sentence-transformers."""

SHIPPED: Final[Mapping[str, Path]] = {
    SHIPPED_MODEL_ID: SHIPPED_MODEL,
    SHIPPED_QUERIES_ID: SHIPPED_QUERIES,
}
"""Directories of all shipped models that a user may serve, by name."""

_NAMES: Final = (*SHIPPED, *KNOWN_MODELS)
"""The names of models in place of a path or of a name on the hub."""

_HUB_NAME: Final = re.compile(
    r"(hf:)?(?P<repo>\w[\w.-]*/\w[\w.-]*)(@(?P<revision>\w[\w./-]*))?"
    r"(:(?P<quantisation>\w[\w.-]*))?"
)

_SETTINGS: Final = ("*.json", "*.jinja")
_WEIGHTS: Final = "*.safetensors"
_IGNORED: Final = ("[!1-9]*/*.json", "[!1-9]*/*.safetensors", "consolidated*.safetensors")
"""Weights in other layouts, and subfolders except the modules of embedding models (`1_Pooling`)."""


def find_checkpoint(name: str | None, *, weights: bool = True) -> Path:
    """Return the directory of a checkpoint, and download it if necessary.

    The directory of a GGUF file is in Draftgate's cache, in the layout of other checkpoints.

    A download may take long. The function may be called in any thread. Progress bars appear if
    stderr is a terminal.

    Args:
        name: a directory, a GGUF file, one of `SHIPPED` or `KNOWN_MODELS`, or `organisation/model`
            on the hub, with `hf:` before it or not, and with an optional `@revision` (branch, tag
            or commit) and an optional `:quantisation` of a GGUF file. None is the shipped language
            model.
        weights: whether to download weights, not only tokenizer and configuration.

    Raises:
        CheckpointError: the checkpoint does not exist, or the hub denies access. The message
            contains the remedy.
    """
    if name is None:
        return SHIPPED_MODEL
    path = Path(name).expanduser()
    if path.is_dir():
        return _in_directory(path)
    if path.is_file():
        return _settings_folder(path)
    if name in SHIPPED:
        return SHIPPED[name]
    if name in KNOWN_MODELS:
        path = pull(KNOWN_MODELS[name])
        return path if path.is_dir() else _settings_folder(path)
    hub = _hub_name(name)
    if hub is None:
        raise _unknown(name)
    return _on_hub(name, *hub.group("repo", "revision", "quantisation"), weights=weights)


def check_checkpoint_name(name: str) -> None:
    """Check that `find_checkpoint(name)` can succeed, without a network and without a delay.

    Whether the hub has a model is not checked.

    Raises:
        CheckpointError: the name is neither a directory, a file nor the form of another name. The
            message contains the nearest name that exists.
    """
    if name not in _NAMES and not Path(name).expanduser().exists() and _hub_name(name) is None:
        raise _unknown(name)


def is_shipped_model(name: str | None) -> bool:
    """Return whether `find_checkpoint(name)` is the shipped language model, by its name."""
    return name is None or (name == SHIPPED_MODEL_ID and not Path(name).exists())


def checkpoint_id(name: str | None) -> str:
    """Return the name by which clients request the checkpoint `find_checkpoint(name)`."""
    if name is None:
        return SHIPPED_MODEL_ID
    path, hub = Path(name).expanduser(), _hub_name(name)
    if path.is_dir():
        return path.resolve().name
    if name in _NAMES:
        return name
    if hub is None or path.is_file():
        return model_name(path.absolute().name)
    return ":".join(filter(None, (hub["repo"], hub["quantisation"])))


def hub_repository(name: str) -> str | None:
    """Return the repository of a name on the hub, or None for other names."""
    hub = _hub_name(name)
    return hub["repo"] if hub else None


def named_checkpoints(entries: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield the name and the checkpoint of each entry, `NAME=CHECKPOINT` or a checkpoint alone."""
    for entry in entries:
        name, equals, path = entry.partition("=")
        yield (name, path) if equals else (checkpoint_id(entry), entry)


def _hub_name(name: str) -> re.Match[str] | None:
    """Return the parts of a name on the hub, or None for other names and for files."""
    return None if name.endswith(SUFFIX) else _HUB_NAME.fullmatch(name)


def _unknown(name: str) -> CheckpointError:
    """Return the error about a name, with the nearest name that exists."""
    path = Path(name).expanduser()
    try:
        beside = {
            entry.name: str(entry)
            for entry in path.parent.iterdir()
            if entry.suffix == SUFFIX or entry.is_dir()
        }
    except OSError:
        beside = {}
    known = {key: key for key in _NAMES} if path.name == name else {}
    names = {**beside, **known}
    near = get_close_matches(path.name, names, n=1)
    hint = f"did you mean {names[near[0]]}?" if near else f"known names: {', '.join(_NAMES)}"
    return CheckpointError(
        f"no checkpoint: {name} is neither a directory nor organisation/model on the hub, "
        f"nor a GGUF file; {hint}"
    )


def _in_directory(directory: Path) -> Path:
    """Return a directory, or that of its GGUF model if it has one and no safetensors."""
    files = [path.name for path in directory.glob(f"*{SUFFIX}")]
    if not files or any(directory.glob(_WEIGHTS)):
        return directory
    return _settings_folder(directory / choose_model(str(directory), files))


def _settings_folder(path: Path) -> Path:
    # Imported here because the import takes long, and most checkpoints have no GGUF files.
    from draftgate.backends.gguf.folder import settings_folder

    return settings_folder(path)


def _on_hub(
    name: str, repo: str, revision: str | None, quantisation: str | None, *, weights: bool
) -> Path:
    """Return the directory of a model on the hub, and download it if necessary.

    Safetensors take precedence over GGUF files, of which only one model is downloaded.
    """
    files, cached = _files_on_hub(repo, revision)
    safetensors = any(file.endswith(_WEIGHTS[1:]) for file in files)
    if quantisation is None and (safetensors or not gguf_models(files)):
        patterns = (*_SETTINGS, _WEIGHTS) if weights else _SETTINGS
        directory = _download(name, repo, revision, patterns)
        if weights and not any(directory.glob(_WEIGHTS)):
            raise CheckpointError(f"no checkpoint: {name} has neither safetensors nor GGUF files")
        return directory
    if not files:
        _download(name, repo, revision, _SETTINGS)  # explains why the hub did not list files
    file = choose_model(name, files, quantisation)
    # The pattern matches all parts of a model in parts.
    pattern = re.sub(r"-00001-of-(\d{5})$", r"-?????-of-\1", escape(file.removesuffix(SUFFIX)))
    folder = cached or _download(name, repo, revision, (pattern + SUFFIX,))
    return _settings_folder(folder / file)


def _files_on_hub(repo: str, revision: str | None) -> tuple[list[str], Path | None]:
    """Return the files of a model on the hub.

    If the hub does not list them, they are those in its cache, with their directory.
    """
    from huggingface_hub import HfApi

    try:
        return HfApi().list_repo_files(repo, revision=revision), None
    except Exception:  # noqa: BLE001  # any error of the library's HTTP client
        cached = _cached_snapshot(repo, revision)
        if cached is None:
            return [], None
        files = [path for path in cached.rglob("*") if path.is_file()]
        return [path.relative_to(cached).as_posix() for path in files], cached


def _cached_snapshot(repo: str, revision: str | None) -> Path | None:
    """Return the directory of a model in the cache of the hub, which may be incomplete, or None."""
    from huggingface_hub.constants import HF_HUB_CACHE

    folder = Path(HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}"
    reference = folder / "refs" / (revision or "main")
    commit = reference.read_text().strip() if reference.is_file() else revision
    snapshot = folder / "snapshots" / (commit or "")
    return snapshot if commit and snapshot.is_dir() else None


def _download(
    name: str,
    repo: str,
    revision: str | None,
    patterns: tuple[str, ...],
) -> Path:
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
