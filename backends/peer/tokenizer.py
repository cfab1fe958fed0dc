"""Peers' tokenizers, made from the files that they sent."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from draftgate.backends.errors import CheckpointError
from draftgate.backends.tokenizer import Tokenizer, is_tokenizer_file


class Tokenizers:
    """The tokenizers of peers, each loaded and kept once: those of a pool have the same.

    Use on the event loop's thread.
    """

    def __init__(self) -> None:
        """Have none yet."""
        self._known: dict[str, Tokenizer] = {}
        self._loading = asyncio.Lock()

    async def get(
        self, digest: str, fetch: Callable[[], Awaitable[Mapping[str, bytes]]]
    ) -> Tokenizer:
        """Return the tokenizer with this digest; its files are fetched if it is not known.

        Raises:
            BackendFailed: they cannot be fetched.
            CheckpointError: they are not those that were announced, not a tokenizer's, or damaged.
        """
        if digest not in self._known:
            files = await fetch()  # from several at once: one of them may hang
            async with self._loading:
                if digest not in self._known:
                    self._known[digest] = await asyncio.to_thread(received_tokenizer, files, digest)
        return self._known[digest]


def files_digest(files: Mapping[str, bytes]) -> str:
    """Return what tells a tokenizer's files from any others; 10 MB take 10 ms."""
    digest = hashlib.sha256()
    for name, data in sorted(files.items()):
        for part in (name.encode(), data):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
    return digest.hexdigest()


def received_tokenizer(files: Mapping[str, bytes], digest: str) -> Tokenizer:
    """Return the tokenizer of these files. Blocks: large ones take seconds to load.

    Raises:
        CheckpointError: they are not those that were announced, not a tokenizer's, or damaged.
    """
    strangers = [name for name in files if not is_tokenizer_file(name)]
    if strangers:
        raise CheckpointError(f"the peer sent what is no file of a tokenizer: {strangers[0]!r}")
    if files_digest(files) != digest:
        raise CheckpointError("the peer's tokenizer is not the one that it announced")
    with TemporaryDirectory(prefix="draftgate-tokenizer-") as folder:
        for name, data in files.items():
            path = Path(folder, name)
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(data)
        return Tokenizer(Path(folder))
