"""The credentials and the tokenizer of an upstream, from its settings."""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path

from aiohttp import BasicAuth

from draftgate.backends.errors import CheckpointError
from draftgate.backends.tokenizer import Tokenizer
from draftgate.backends.worker_config import UpstreamSettings


def tokenizer_of(settings: UpstreamSettings) -> Tokenizer | None:
    """Return the tokenizer of the upstream's models, if it is configured.

    Raises:
        ValueError: it is missing although the events of the cache need it, or cannot be loaded.
    """
    if settings.tokenizer is None:
        if settings.kv_events is not None:
            raise ValueError(
                f"--upstream {settings.shown}: kv_events requires tokenizer, a directory with "
                "tokenizer.json"
            )
        return None
    try:
        return _loaded(settings.tokenizer)
    except CheckpointError as error:
        raise ValueError(f"--upstream {settings.shown}: tokenizer: {error}") from None


def authorization(
    settings: UpstreamSettings, credentials: tuple[str, str] | None
) -> dict[str, str]:
    """Return the header with the credentials of an address, or the key in a variable or a file.

    Raises:
        ValueError: several are given, the variable is not set, or the file cannot be read.
    """
    variable, file = settings.api_key_env, settings.api_key_file
    if credentials is not None:
        if variable is not None or file is not None:
            raise ValueError(
                f"--upstream {settings.shown}: a key cannot be combined with credentials in the URL"
            )
        return {"Authorization": BasicAuth(*credentials, "utf-8").encode()}
    if file is not None:
        try:
            key, missing = Path(file).read_text("utf-8").strip(), f"the key file {file} is empty"
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"--upstream {settings.shown}: the key file: {error}") from None
    elif variable is not None:
        key, missing = os.environ.get(variable, "").strip(), f"the variable {variable} is not set"
    else:
        return {}
    if not key:
        raise ValueError(f"--upstream {settings.shown}: {missing}")
    return {"Authorization": f"Bearer {key}"}


@lru_cache(maxsize=8)
def _loaded(directory: str) -> Tokenizer:
    """Return a tokenizer, which upstreams with the same models share."""
    return Tokenizer(Path(directory))
