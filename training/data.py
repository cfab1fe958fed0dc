"""Packed, shuffled windows of token ids for training, and plain windows for evaluation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer

Ids = NDArray[np.uint16]


def encode_documents(tokenizer: Tokenizer, texts: Sequence[str], separator: int) -> list[Ids]:
    """Return an id array per text. Each array begins with the separator."""
    encoded = tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
    return [np.array([separator, *item.ids], dtype=np.uint16) for item in encoded]


class PackedStream:
    """Endless windows of `length + 1` ids over documents joined in a new order each epoch.

    Every epoch shuffles the documents, drops a random prefix to shift the windows, and visits the
    windows in random order. A run can save and resume the position (epoch, cursor, length).
    """

    def __init__(self, documents: Sequence[Ids], seed: int) -> None:
        self._documents = documents
        self._seed = seed
        self.epoch = 0
        self.cursor = 0
        self.length = 0
        self._tokens: Ids = np.zeros(0, dtype=np.uint16)
        self._starts: NDArray[np.int64] = np.zeros(0, dtype=np.int64)

    def seek(self, epoch: int, cursor: int, length: int) -> None:
        """Continue at a saved position."""
        rng = np.random.default_rng((self._seed, epoch, length))
        order = rng.permutation(len(self._documents))
        joined = np.concatenate([self._documents[index] for index in order])
        self._tokens = joined[rng.integers(length) :]
        windows = (len(self._tokens) - 1) // length
        self._starts = rng.permutation(windows) * length
        self.epoch, self.cursor, self.length = epoch, cursor, length

    def batch(self, rows: int, length: int) -> torch.Tensor:
        """Return int64 ids [rows, length + 1]. A new length starts a new epoch."""
        if length != self.length or self.cursor + rows > len(self._starts):
            self.seek(self.epoch + 1, 0, length)
        starts = self._starts[self.cursor : self.cursor + rows]
        self.cursor += rows
        picked = np.stack([self._tokens[start : start + length + 1] for start in starts])
        return torch.from_numpy(picked.astype(np.int64))


def even_windows(documents: Sequence[Ids], length: int, count: int | None = None) -> torch.Tensor:
    """Return int64 ids [count, length + 1], evenly spread over the documents joined in order.

    Without a count, the function returns all windows that fit.
    """
    joined = np.concatenate(list(documents))
    total = (len(joined) - 1) // length
    chosen = range(total) if count is None else np.linspace(0, total - 1, min(count, total))
    rows = [joined[int(at) * length : int(at) * length + length + 1] for at in chosen]
    return torch.from_numpy(np.stack(rows).astype(np.int64))
