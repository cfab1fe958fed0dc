"""Folders in Hugging Face layout for GGUF files.

Everything after this module reads the same files for all checkpoints. A folder has a `config.json`,
a tokenizer and sampling defaults that are derived from the metadata of a GGUF file, and a link to
the file in place of `model.safetensors`.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from draftgate.backends.errors import CheckpointError
from draftgate.backends.gguf.architectures import config_fields, source_tensors
from draftgate.backends.gguf.choice import SUFFIX, gguf_models
from draftgate.backends.gguf.reader import GgufModel, part_paths, read_gguf
from draftgate.backends.gguf.vocabulary import Vocabulary
from draftgate.backends.tokenizer import read_json
from draftgate.cache import cache_directory

SAFETENSORS: Final = ("model.safetensors", "model.safetensors.index.json")
"""Files with weights, or with their names, which take precedence over GGUF files."""

_SAMPLING: Final = "generation_config.json"
"""A file beside a GGUF file that takes precedence over the metadata."""

_NAME_DIGITS: Final = 24
_FOLDER: Final = re.compile(f"[0-9a-f]{{{_NAME_DIGITS}}}")
"""The names of the folders in the cache."""

_MAX_FOLDERS: Final = 16
"""Maximum number of folders in the cache, of which the oldest are deleted. Gemma's tokenizer has
33 MB."""


def weights_file(directory: Path) -> Path | None:
    """Return the GGUF file with the weights of a directory, or its first part.

    The result is None for a directory with safetensors, or without GGUF files.
    """
    if any((directory / name).is_file() for name in SAFETENSORS):
        return None
    names = gguf_models(path.name for path in directory.glob(f"*{SUFFIX}"))
    return directory / names[0] if names else None


def settings_folder(path: Path, cache: Path | None = None) -> Path:
    """Return the folder in Hugging Face layout of a GGUF file.

    The folder is in the cache, where a later start finds it. Its name is a hash of everything that
    the content depends on. If the cache cannot be written, the folder exists until the process
    ends.

    Args:
        path: the file, or any part of a model in parts.
        cache: the directory of all such folders. None is that of Draftgate's cache.

    Raises:
        CheckpointError: the model is damaged or not supported.
    """
    parts = part_paths(path)
    try:
        name = _name(parts)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    found = (cache or cache_directory() / "gguf") / name
    if (found / "config.json").is_file():
        _touch(found)
        return found
    model = read_gguf(path)
    files = _settings(model, Vocabulary(model))
    source_tensors(model)  # refuse tensors that the engine would ignore
    try:
        found.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=".", dir=found.parent))
    except OSError:
        # Never renamed into the cache, and no neighbours are deleted.
        folder = found = Path(tempfile.mkdtemp(prefix="draftgate-gguf-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    try:
        _write(folder, files, parts)
        if folder != found:
            folder.rename(found)
            _delete_oldest(found)
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        if not (found / "config.json").is_file():  # another process was not faster
            raise CheckpointError(f"cannot write the settings of {path}: {error}") from error
    return found


def _settings(model: GgufModel, vocabulary: Vocabulary) -> dict[str, Any]:
    """Return the content of all files: JSON objects, and texts."""
    beside = read_json(model.path.with_name(_SAMPLING), missing={})
    generation = vocabulary.generation_config()
    ends = beside.get("eos_token_id")
    ends = ends if isinstance(ends, list) else [] if ends is None else [ends]
    merged = {**generation, **beside, "eos_token_id": [*generation["eos_token_id"], *ends]}
    return {"config.json": config_fields(model), _SAMPLING: merged, **vocabulary.files()}


def _write(folder: Path, files: Mapping[str, Any], parts: list[Path]) -> None:
    """Write the files of a folder, and its links to the parts of a model."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
        path.write_text(text, encoding="utf-8")
    for number, part in enumerate(parts, start=1):
        ending = "" if len(parts) == 1 else f"-{number:05}-of-{len(parts):05}"
        (folder / f"model{ending}{SUFFIX}").symlink_to(part.absolute())


def _name(parts: list[Path]) -> str:
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    beside = parts[0].with_name(_SAMPLING)
    for path in [*parts, *([beside] if beside.is_file() else [])]:
        status = path.stat()
        digest.update(f"{path.absolute()}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
    return digest.hexdigest()[:_NAME_DIGITS]


def _touch(folder: Path) -> None:
    try:
        os.utime(folder)
    except OSError:
        return  # the age only matters for deletions, which the same rights forbid


def _delete_oldest(kept: Path) -> None:
    """Delete the oldest folders of the cache beside one. Nothing else in their place is touched."""
    try:
        named = [one for one in kept.parent.iterdir() if _FOLDER.fullmatch(one.name)]
        folders = sorted(named, key=lambda one: one.stat().st_mtime)
    except OSError:
        return  # another process deletes, too
    for folder in folders[:-_MAX_FOLDERS]:
        if folder != kept:
            shutil.rmtree(folder, ignore_errors=True)
