"""A peer's tokenizer, made from the files that it sent."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from backends.errors import CheckpointError
from backends.tokenizer import Tokenizer, is_tokenizer_file


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
