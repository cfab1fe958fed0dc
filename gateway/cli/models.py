"""The commands `pull`, `list` and `rm`, and the choice of the model that a command runs.

Nothing here imports torch, so that a mistyped name is reported immediately.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from msgspec.structs import replace

from draftgate.addresses import read_server_url
from draftgate.backends.checkpoints import (
    SHIPPED,
    check_checkpoint_name,
    find_checkpoint,
    hub_repository,
    named_checkpoints,
)
from draftgate.backends.errors import CheckpointError
from draftgate.backends.model_store.known_models import CHAT_MODEL, KNOWN_MODELS
from draftgate.backends.model_store.store import models_directory, pull, remove, stored_path
from draftgate.gateway.cli.options import BAD_USAGE, config_from, fail
from draftgate.gateway.config import ServeConfig

if TYPE_CHECKING:
    from huggingface_hub import HFCacheInfo

_MB = 1e6


@dataclass(frozen=True, slots=True)
class Place:
    """Where the model of a command runs.

    Attributes:
        config: the settings of a node in this process, whose `model` also names that of a server.
        url: the address of a server, or None for a node in this process.
        api_key: the key for the server.
    """

    config: ServeConfig
    url: str | None = None
    api_key: str = ""


@dataclass(frozen=True, slots=True)
class _Listed:
    """A model on this machine, or one that can be pulled."""

    name: str
    source: str
    size_bytes: int
    place: str


def prepare_models(config: ServeConfig, default: str | None = None) -> ServeConfig:
    """Return the settings with a model, after a check of all names and a pull of known models.

    The command exits with status 1 and one line on stderr if a model does not exist.

    Args:
        config: the settings. Without a model, the chat model is used if it has been pulled, and
            otherwise the default.
        default: the name of a model, or None for the shipped model.
    """
    if config.backend not in {"engine", "sim"} or config.no_worker:
        return config
    if config.model is None and config.backend == "engine":
        pulled = stored_path(KNOWN_MODELS[CHAT_MODEL]) is not None
        config = replace(config, model=CHAT_MODEL if pulled else default)
    known = KNOWN_MODELS.get(config.model or "")
    if known is not None and config.quantization == "auto":
        config = replace(config, quantization=known.quantization)
    more = (*config.models, *config.embedders, *config.loras)
    first = [name for name in (config.model, config.draft_model) if name is not None]
    names = [*first, *(path for _, path in named_checkpoints(more))]
    try:
        for name in names:
            check_checkpoint_name(name)
        for name in names:
            if name in KNOWN_MODELS and not Path(name).is_dir():
                pull(KNOWN_MODELS[name])  # before the bar of loading appears
    except CheckpointError as error:
        fail(error)
    return config


def chat_place(context: typer.Context, url: str | None, api_key: str) -> Place:
    """Return where a command with the options of a `ModelSettingsCommand` runs its model.

    The command exits with one line on stderr if an option or a name is wrong.
    """
    if url is None:
        return Place(prepare_models(config_from(context).config, CHAT_MODEL))
    own = {name for name, value in context.obj.items() if value not in (None, [], ())} - {"model"}
    if own:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in sorted(own))
        fail(f"--url cannot be combined with {flags}, which a server sets for itself", BAD_USAGE)
    try:
        address = read_server_url(url)
    except ValueError as error:
        fail(f"--url: {error}", BAD_USAGE)
    return Place(ServeConfig(model=context.obj["model"]), address, api_key)


def run_pull(name: str) -> None:
    """Download a model, and print where it is."""
    if name in SHIPPED:
        typer.echo(f"{name} is part of Draftgate: {SHIPPED[name]}")
        return
    known = KNOWN_MODELS.get(name)
    try:
        path = find_checkpoint(name) if known is None else pull(known)
    except CheckpointError as error:
        fail(error)
    except ImportError:
        fail(
            f"{name} is on the Hugging Face hub, which needs huggingface_hub: "
            "pip install 'draftgate[hub]'"
        )
    title = f" ({known.title}, {known.licence})" if known else ""
    typer.echo(f"{name}{title} is in {path}")


def run_list() -> None:
    """Print the models of this machine, and the known models that are not on it."""
    rows = [("NAME", "SOURCE", "SIZE", "PATH")]
    rows += [
        (one.name, one.source, f"{one.size_bytes / _MB:.0f} MB", one.place) for one in _listed()
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, source, size, place in rows:
        typer.echo(f"{name:{widths[0]}}  {source:{widths[1]}}  {size:>{widths[2]}}  {place}")


def run_rm(name: str) -> None:
    """Delete a model from the cache of Draftgate or of the hub."""
    if name in SHIPPED:
        fail(f"{name} is part of Draftgate and cannot be removed")
    try:
        found = remove(name) if name in KNOWN_MODELS else _remove_from_hub(name)
    except OSError as error:
        fail(error)
    if not found:
        present = [one.name for one in _listed() if one.source in {"pulled", "hub"}]
        near = get_close_matches(name, present, n=1)
        hint = f"did you mean {near[0]}?" if near else "draftgate list shows the models"
        fail(f"{name} is not on this machine; {hint}")
    typer.echo(f"removed {name}")


def _listed() -> Iterator[_Listed]:
    for name, directory in SHIPPED.items():
        yield _Listed(name, "shipped", _folder_bytes(directory), str(directory))
    for name, model in KNOWN_MODELS.items():
        path = stored_path(model)
        if path is not None:
            size_bytes = _folder_bytes(models_directory() / name)
            yield _Listed(name, "pulled", size_bytes, str(path))
        else:
            yield _Listed(name, "-", model.file_bytes, f"not here yet: draftgate pull {name}")
    cache = _hub_cache()
    repos = () if cache is None else cache.repos
    for repo in sorted(repos, key=lambda repo: repo.repo_id):
        if repo.repo_type == "model":
            yield _Listed(repo.repo_id, "hub", repo.size_on_disk, str(repo.repo_path))


def _folder_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _hub_cache() -> HFCacheInfo | None:
    """Return the contents of the hub's cache, or None if there is none."""
    try:
        from huggingface_hub import CacheNotFound, constants, scan_cache_dir
    except ImportError:
        return None
    try:
        return scan_cache_dir(constants.HF_HUB_CACHE)
    except CacheNotFound:
        return None


def _remove_from_hub(name: str) -> bool:
    """Delete all revisions of a model from the hub's cache, and return whether it had the model."""
    cache, repository = _hub_cache(), hub_repository(name)
    if cache is None or repository is None:
        return False
    hashes = [
        revision.commit_hash
        for repo in cache.repos
        if repo.repo_type == "model" and repo.repo_id == repository
        for revision in repo.revisions
    ]
    cache.delete_revisions(*hashes).execute()
    return bool(hashes)
