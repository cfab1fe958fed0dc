"""Chooses a model among the GGUF files of a directory or of a repository on the hub."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import PurePosixPath
from typing import Final

from draftgate.backends.errors import CheckpointError

SUFFIX: Final = ".gguf"

PART: Final = re.compile(r"(?P<name>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
"""The name of a part of a model."""

_ASIDE: Final = ("mmproj-", "mtp-")
"""Beginnings of the names of files that belong to a model: vision, and a head that drafts."""

_MAX_SHOWN: Final = 20
"""Maximum number of files in an error message."""

_PREFERRED: Final = ("Q4_K_M", "Q4_0", "Q5_K_M", "Q8_0", "BF16", "F16")
"""Quantisations in the order in which one is chosen if the user names none."""


def gguf_models(files: Iterable[str]) -> list[str]:
    """Return the files that are a model or the first part of one, in alphabetical order.

    Args:
        files: names or relative paths of files.
    """
    return sorted(file for file in files if _is_model(PurePosixPath(file).name))


def model_name(file: str) -> str:
    """Return the name of a model without its suffix and its number of parts."""
    part = PART.fullmatch(file)
    return part["name"] if part else file.removesuffix(SUFFIX)


def choose_model(where: str, files: Iterable[str], quantisation: str | None = None) -> str:
    """Return the file of a model, or the first part of one.

    Args:
        where: the directory or repository, for error messages.
        files: names or relative paths of files.
        quantisation: a part of the name such as `Q4_K_M`, in any case. None means a model of 4 bits
            per weight if there are several.

    Raises:
        CheckpointError: no model or several models have the quantisation. The message lists what
            exists.
    """
    models = gguf_models(files)
    found: list[str] = []
    for wanted in _PREFERRED if quantisation is None and len(models) > 1 else [quantisation]:
        found = [model for model in models if wanted is None or _has(model, wanted)]
        if len(found) == 1:
            return found[0]
        if found:
            break
    if not models:
        raise CheckpointError(f"no checkpoint: {where} has neither safetensors nor GGUF files")
    shown = ", ".join((found or models)[:_MAX_SHOWN])
    words = "several" if found else "no"
    quality = "of that name" if quantisation else "of a common quantisation"
    raise CheckpointError(
        f"no checkpoint: {where} has {words} GGUF models {quality}; name one of: {shown}"
    )


def _is_model(name: str) -> bool:
    part = PART.fullmatch(name)
    first = part is None or int(part["number"]) == 1
    return name.endswith(SUFFIX) and first and not name.lower().startswith(_ASIDE)


def _has(model: str, quantisation: str) -> bool:
    """Return whether a path contains a quantisation between separators."""
    pattern = rf"(^|[-._/]){re.escape(quantisation)}($|[-._/])"
    return re.search(pattern, model_name(model), re.IGNORECASE) is not None
