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
    """A cache of tokenizers, because the peers of a pool share a tokenizer.

    Use it on the event loop's thread.
    """

    def __init__(self) -> None:
        self._known: dict[str, Tokenizer] = {}
        self._loading = asyncio.Lock()

    async def get(
        self, digest: str, fetch: Callable[[], Awaitable[Mapping[str, bytes]]]
    ) -> Tokenizer:
        """Return the tokenizer with this digest.

        Args:
            fetch: returns the tokenizer's files, if the cache does not contain the tokenizer.

        Raises:
            BackendFailed: the files cannot be fetched.
            CheckpointError: the files are damaged, as in `received_tokenizer`.
        """
        if digest not in self._known:
            files = await fetch()  # not under the lock, because a peer may hang
            async with self._loading:
                if digest not in self._known:
                    self._known[digest] = await asyncio.to_thread(received_tokenizer, files, digest)
        return self._known[digest]


def files_digest(files: Mapping[str, bytes]) -> str:
    """Return a digest of a tokenizer's files, which takes 10 ms for 10 MB."""
    digest = hashlib.sha256()
    for name, data in sorted(files.items()):
        for part in (name.encode(), data):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
    return digest.hexdigest()


def received_tokenizer(files: Mapping[str, bytes], digest: str) -> Tokenizer:
    """Load a tokenizer from files, which blocks for seconds if the tokenizer is large.

    Raises:
        CheckpointError: the files do not have the digest, are not a tokenizer's, or are damaged.
    """
    unexpected = [name for name in files if not is_tokenizer_file(name)]
    if unexpected:
        raise CheckpointError(
            f"the peer sent a file that is not part of a tokenizer: {unexpected[0]!r}"
        )
    if files_digest(files) != digest:
        raise CheckpointError("the peer sent a different tokenizer than it announced")
    with TemporaryDirectory(prefix="draftgate-tokenizer-") as folder:
        for name, data in files.items():
            path = Path(folder, name)
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(data)
        return Tokenizer(Path(folder))
