"""Judges what readers of GGUF files do with a case. The `gguf` package is the second reader."""

from __future__ import annotations

import os
import tracemalloc
from collections import Counter
from pathlib import Path

import gguf
import torch

from draftgate.backends.engine.config import ModelConfig
from draftgate.backends.engine.weights import load_weights
from draftgate.backends.errors import CheckpointError
from draftgate.backends.gguf.folder import settings_folder
from draftgate.backends.gguf.reader import GgufModel, read_gguf
from tests.fuzz.gguf_cases import Case
from tests.fuzz.gguf_files import read_folder

BASE_BYTES = 4 << 20
BYTES_PER_BYTE = 64
"""The memory of the reader: a part for any file, and a multiple of the size of its files. A text of
two characters takes 10 bytes in a file, and 59 as a Python object in a tuple."""

MOST_JUDGED = 1 << 18
"""Size of the largest file for the second reader, which takes 20 us for each number."""

MOST_PARAMETERS = 1 << 20
"""Weights of the largest model that is loaded."""


class Finding(Exception):
    """What a reader must not do."""


class Judge:
    """Reads cases, and counts what became of them."""

    def __init__(self, place: Path) -> None:
        """Use a folder for the files."""
        self._place = place
        self.counts: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()

    def check(self, case: Case) -> None:
        """Read a case as serving does.

        Raises:
            Finding: an error is undocumented, the memory unbounded, or a result wrong.
        """
        self.counts["cases"] += 1
        folder, cache = self._place / "model", self._place / "cache"
        folder.mkdir()
        try:
            self._check(case, folder, cache)
        except CheckpointError as error:
            self.counts["refused"] += 1
            self.refusals[_reason(str(error))] += 1
            if str(folder) not in str(error) and str(cache) not in str(error):
                raise Finding(f"the error names no file: {error}") from error
        except Finding:
            raise
        except BaseException as error:  # also a panic of a library
            if isinstance(error, KeyboardInterrupt):
                raise
            raise Finding(f"{type(error).__name__}: {error!s:.500}") from error
        finally:
            _delete(self._place)

    def _check(self, case: Case, folder: Path, cache: Path) -> None:
        for name, data in case.files.items():
            (folder / name).write_bytes(data)
        entry = folder / case.entry
        os.truncate(entry, entry.stat().st_size + case.zeros)
        size = sum(path.stat().st_size for path in folder.iterdir())
        model = _traced(entry, size)
        self.counts["headers read"] += 1
        for path in {one.path for one in model.tensors.values()}:
            self._compare(model, path)
        settings = settings_folder(entry, cache)
        again = settings_folder(entry, cache)
        if settings != again:
            raise Finding("the second start makes another folder")
        config = read_folder(settings)
        self.counts["models read"] += 1
        self._load(settings, config)

    def _load(self, settings: Path, config: ModelConfig) -> None:
        """Load a small model with packed weights, as a worker does."""
        width = config.hidden_size * (config.vocab_size + config.num_layers)
        if width <= MOST_PARAMETERS:
            load_weights(settings, config, torch.float32, packing="stored")
            self.counts["models loaded"] += 1

    def _compare(self, model: GgufModel, path: Path) -> None:
        """Compare the tensors of a file with what the second reader finds."""
        if path.stat().st_size > MOST_JUDGED:
            return
        try:
            other = gguf.GGUFReader(path)
        except Exception:  # noqa: BLE001 - the second reader documents no errors
            self.counts["headers that only the second reader refuses"] += 1
            return
        theirs = {
            one.name: (
                tuple(int(size) for size in one.shape)[::-1],
                one.tensor_type.value,
                one.data_offset,
                int(one.n_bytes),
            )
            for one in other.tensors
        }
        own = {
            name: (one.shape, one.kind.number, one.offset, one.num_bytes)
            for name, one in model.tensors.items()
            if one.path == path
        }
        if own != theirs:
            raise Finding(f"the second reader finds other tensors: {own} and {theirs}")
        self.counts["headers compared"] += 1


def _traced(entry: Path, size: int) -> GgufModel:
    """Read headers, and check the memory that they take."""
    tracemalloc.start()
    try:
        return read_gguf(entry)
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        if peak > BASE_BYTES + BYTES_PER_BYTE * size:
            raise Finding(f"the reader took {peak} bytes for {size}")


def _reason(message: str) -> str:
    """Return the words of an error without paths, names and numbers."""
    words = [word for word in message.split(";", maxsplit=1)[0].split() if word.isalpha()]
    return " ".join(words)[:80]


def _delete(place: Path) -> None:
    """Delete the files of a case. `shutil.rmtree` would take a tenth of the time."""
    for path in sorted(place.rglob("*"), reverse=True):
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        else:
            path.unlink()
