"""Tokenizers of peers, loaded from the files that they send."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from draftgate.backends.errors import CheckpointError
from draftgate.backends.tokenizer import Tokenizer, is_tokenizer_file


class Tokenizers:
    """A cache of tokenizers, since the peers of a pool share one. For the event loop's thread."""

    def __init__(self) -> None:
        """Start empty."""
        self._known: dict[str, Tokenizer] = {}
        self._loading = asyncio.Lock()

    async def get(
        self, digest: str, fetch: Callable[[], Awaitable[Mapping[str, bytes]]]
    ) -> Tokenizer:
        """Return the tokenizer with this digest; `fetch` is called if it is not in the cache.

        Raises:
            BackendFailed: the files cannot be fetched.
            CheckpointError: as `received_tokenizer`.
        """
        if digest not in self._known:
            files = await fetch()  # not under the lock, since a peer may hang
            async with self._loading:
                if digest not in self._known:
                    self._known[digest] = await asyncio.to_thread(received_tokenizer, files, digest)
        return self._known[digest]


def files_digest(files: Mapping[str, bytes]) -> str:
    """Return a digest of a tokenizer's files; 10 MB take 10 ms."""
    digest = hashlib.sha256()
    for name, data in sorted(files.items()):
        for part in (name.encode(), data):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
    return digest.hexdigest()


def received_tokenizer(files: Mapping[str, bytes], digest: str) -> Tokenizer:
    """Load a tokenizer from files. This blocks; large tokenizers take seconds.

    Raises:
        CheckpointError: the files do not have the digest, are not a tokenizer's, or are damaged.
    """
    strangers = [name for name in files if not is_tokenizer_file(name)]
    if strangers:
        raise CheckpointError(f"the peer sent a file that no tokenizer has: {strangers[0]!r}")
    if files_digest(files) != digest:
        raise CheckpointError("the peer sent another tokenizer than it announced")
    with TemporaryDirectory(prefix="draftgate-tokenizer-") as folder:
        for name, data in files.items():
            path = Path(folder, name)
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(data)
        return Tokenizer(Path(folder))
