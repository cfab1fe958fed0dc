"""Reads the tensors of a checkpoint: safetensors of a Hugging Face directory, or a GGUF file."""

from __future__ import annotations

import hashlib
import math
import mmap
import os
import reprlib
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from draftgate.backends.engine.gguf.rows import copy_values, map_file, packed_rows
from draftgate.backends.errors import CheckpointError
from draftgate.backends.gguf.architectures import SourceTensor, source_tensors
from draftgate.backends.gguf.block_types import BlockType
from draftgate.backends.gguf.folder import SAFETENSORS, weights_file
from draftgate.backends.gguf.reader import part_paths, read_gguf
from draftgate.backends.tokenizer import read_json

STORED_DTYPES: Final = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
"""The supported dtypes of unquantised tensors by their names in safetensors."""

PACKED_DTYPES: Final = {
    "F8_E4M3": torch.float8_e4m3fn,
    "I32": torch.int32,
    "I64": torch.int64,
    "U8": torch.uint8,
}
"""Dtypes of quantised tensors. The loader keeps their size."""

WORD_WEIGHTS: Final = 8
"""Weights of 4 bits in an int32."""

BASE_PREFIX: Final = "model."
OTHER_PREFIXES: Final = ("", "language_model.model.", "model.language_model.")
"""Prefixes that replace `BASE_PREFIX` in the names of some checkpoints.

Checkpoints with an LM head prefix their tensor names with `BASE_PREFIX`. Many embedding models,
e.g. Qwen3-Embedding, omit the prefix. Models with images, e.g. Gemma 3, have a longer one.
`Checkpoint` restores the prefix.
"""

_EMBEDDING: Final = "embed_tokens.weight"
"""Name of the embedding after the prefix."""

MAPPED_BYTES: Final = 1 << 17
"""Minimum size in bytes of a tensor that gets its own mapping: glibc's initial mmap threshold."""

HASH_PIECE_BYTES: Final = 1 << 26
"""Size in bytes of the pieces of a file that several threads hash in parallel.

SHA-256 on one core (1.5 GB/s on an AMD EPYC Zen 4, 2026-11-21) is slower than a fast disk. The hash
depends on this size.
"""

HASH_THREADS: Final = 4
"""Number of threads that hash. More threads would take cores from the concurrent loading."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """The description of a tensor in the header of its file.

    Attributes:
        dtype: its name in safetensors, or that of the block type in a GGUF file.
        stored_name: the tensor's name in the file.
        source: where the tensor is in a GGUF file, or None in safetensors.
    """

    path: Path
    shape: tuple[int, ...]
    dtype: str
    stored_name: str
    source: SourceTensor | None = None

    @property
    def num_bytes(self) -> int:
        """Size of the tensor in the file, or 0 for an unknown dtype."""
        if self.source is not None:
            return self.source.rows * self.source.row_bytes
        dtype = STORED_DTYPES.get(self.dtype) or PACKED_DTYPES.get(self.dtype)
        return 0 if dtype is None else math.prod(self.shape) * dtype.itemsize


class Checkpoint:
    """The tensors in the weight files of a directory.

    A checkpoint reads each header once, and no weights.
    """

    def __init__(
        self,
        directory: Path,
        rename: Callable[[str], str] = lambda name: name,
        file: str | None = None,
    ) -> None:
        """Read the headers.

        Args:
            directory: directory of the checkpoint.
            rename: returns the engine's name of a stored tensor.
            file: name of the only file with weights. None means the files of a model.

        Raises:
            CheckpointError: a file is missing or damaged, or the index does not match the files.
        """
        self._directory = directory
        self.tensors: Final[Mapping[str, StoredTensor]] = {
            rename(name): one for name, one in _all_tensors(directory, file).items()
        }

    @property
    def num_parameters(self) -> int:
        """Number of weights in all tensors."""
        return sum(
            math.prod(stored.shape) * (WORD_WEIGHTS if stored.dtype == "I32" else 1)
            for stored in self.tensors.values()
        )

    def require(self, shapes: Mapping[str, tuple[int, ...]]) -> int:
        """Check that tensors exist with these shapes and supported dtypes, and return their bytes.

        Raises:
            CheckpointError: a check failed. The message names the file and the tensor.
        """
        return sum(self.require_tensor(name, (shape,)) for name, shape in shapes.items())

    def require_tensor(
        self,
        name: str,
        shapes: Collection[tuple[int, ...]],
        dtypes: Collection[str] = STORED_DTYPES.keys(),
    ) -> int:
        """Check that a tensor exists with one of these shapes and dtypes, and return its bytes.

        Raises:
            CheckpointError: a check failed. The message names the file and the tensor.
        """
        stored = self.tensors.get(name)
        if stored is None:
            raise CheckpointError(f"{self._directory}: tensor {name} is missing")
        if stored.shape not in shapes:
            raise CheckpointError(
                f"{stored.path}: tensor {name} has shape {stored.shape}, "
                f"config.json requires {' or '.join(map(str, shapes))}"
            )
        if stored.source is None and stored.dtype not in dtypes:
            raise CheckpointError(
                f"{stored.path}: tensor {name} has dtype {stored.dtype}; "
                f"supported: {', '.join(dtypes)}"
            )
        return stored.num_bytes


class TensorReader:
    """Copies tensors out of the files and converts them to one dtype.

    Files stay mapped while the reader is open. Until the reader closes, all pages that it has read
    count as memory of the process. Use one reader per layer.

    `on_read` receives the number of bytes of each copied tensor.
    """

    def __init__(
        self, checkpoint: Checkpoint, dtype: torch.dtype, on_read: Callable[[int], None]
    ) -> None:
        self.tensors: Final = checkpoint.tensors
        self.dtype: Final = dtype
        self._on_read = on_read
        self._open = ExitStack()
        self._files: dict[Path, Any] = {}
        self._mapped: dict[Path, Tensor] = {}

    def __enter__(self) -> Self:
        """Return the reader."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the files of this reader."""
        self._files.clear()
        self._mapped.clear()
        self._open.close()

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def read(self, names: Iterable[str], dtype: torch.dtype | None = None) -> Tensor:
        """Return copies of the tensors, stacked along their first dimension.

        Args:
            names: names of the tensors.
            dtype: dtype of the copies. None means that of the reader.

        Raises:
            CheckpointError: a file was removed or damaged after its header was read.
        """
        stored = [self.tensors[name] for name in names]
        lengths = [each.shape[0] for each in stored]
        stacked = _memory((sum(lengths), *stored[0].shape[1:]), dtype or self.dtype)
        for part, each in zip(stacked.split(lengths), stored, strict=True):
            if each.source is None:
                part.copy_(self._stored(each))
            else:
                copy_values(self._packed(each.source), each.source, part)
            self._on_read(each.num_bytes)
        return stacked

    def read_stored(self, name: str) -> Tensor:
        """Return a copy of a tensor in its stored dtype.

        Raises:
            CheckpointError: a file was removed or damaged after its header was read.
        """
        stored = self.tensors[name]
        tensor = self._stored(stored).clone()
        self._on_read(stored.num_bytes)
        return tensor

    def read_packed(self, name: str) -> tuple[BlockType, Tensor]:
        """Return a matrix of a GGUF file without unpacking: its block type, and its rows.

        The rows are uint8 [rows, row_bytes]. They share memory with the file, so use them before
        the reader closes.

        Raises:
            CheckpointError: the file was removed or damaged after its header was read.
        """
        stored = self.tensors[name]
        assert stored.source is not None
        rows = self._packed(stored.source)
        self._on_read(stored.num_bytes)
        return stored.source.stored.kind, rows

    def _packed(self, source: SourceTensor) -> Tensor:
        path = source.stored.path
        if path not in self._mapped:
            self._mapped[path] = map_file(path)
        return packed_rows(self._mapped[path], source)

    def _stored(self, stored: StoredTensor) -> Tensor:
        path, name = stored.path, stored.stored_name
        if path not in self._files:
            self._files[path] = self._open.enter_context(_open(path))
        try:
            tensor: Tensor = self._files[path].get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"damaged {path}: tensor {name}: {error}") from error
        return tensor


def _memory(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return an empty tensor whose memory returns to the system when it is freed.

    The loader packs most tensors and then frees them. On the heap, each packed copy would follow
    its original, and the resulting holes would add up to a sixth of the weights (glibc,
    2026-11-21).
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes < MAPPED_BYTES:
        return torch.empty(shape, dtype=dtype)
    memory = mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # Fewer page faults save a quarter of the load time (AMD EPYC Zen 4, 2026-11-21).
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def checkpoint_hash(directory: Path) -> str:
    """Return 12 hex digits that identify a checkpoint by the contents of its files.

    The value is the SHA-256 over the SHA-256 of each `HASH_PIECE_BYTES` of `config.json` and the
    weights.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    gguf = weights_file(directory)
    weights = part_paths(gguf) if gguf else sorted(set(_weight_map(directory).values()))
    return files_hash([directory / "config.json", *weights])


def files_hash(files: Iterable[Path]) -> str:
    """Return 12 hex digits that identify the contents of files in order, as `checkpoint_hash`."""
    pieces = [
        (path, offset)
        for path in files
        for offset in range(0, path.stat().st_size, HASH_PIECE_BYTES)
    ]
    digest = hashlib.sha256()
    with ThreadPoolExecutor(min(HASH_THREADS, os.cpu_count() or 1)) as pool:
        for piece_digest in pool.map(_piece_digest, pieces):
            digest.update(piece_digest)
    return digest.hexdigest()[:12]


def _piece_digest(piece: tuple[Path, int]) -> bytes:
    path, offset = piece
    digest = hashlib.sha256()
    left = HASH_PIECE_BYTES
    with path.open("rb") as file:
        file.seek(offset)
        while left and (chunk := file.read(min(left, 1 << 20))):
            digest.update(chunk)
            left -= len(chunk)
    return digest.digest()


def _stored_tensors(weight_map: Mapping[str, Path]) -> dict[str, StoredTensor]:
    tensors = {}
    for path in sorted(set(weight_map.values())):
        with _open(path) as file:
            held = set(file.keys())
            for name in (name for name, holder in weight_map.items() if holder == path):
                if name not in held:
                    raise CheckpointError(
                        f"{path}: tensor {name} is missing, but the index lists it"
                    )
                header = file.get_slice(name)
                shape, dtype = tuple(header.get_shape()), header.get_dtype()
                tensors[name] = StoredTensor(path, shape, dtype, name)
    prefixes = (prefix for prefix in OTHER_PREFIXES if prefix + _EMBEDDING in tensors)
    prefix = next(prefixes, BASE_PREFIX)
    return {
        BASE_PREFIX + name.removeprefix(prefix) if name.startswith(prefix) else name: stored
        for name, stored in tensors.items()
    }


def _all_tensors(directory: Path, file: str | None) -> Mapping[str, StoredTensor]:
    gguf = weights_file(directory) if file is None else None
    if gguf is not None:
        return _gguf_tensors(gguf)
    return _stored_tensors(_weight_map(directory) if file is None else _file_map(directory / file))


def _gguf_tensors(path: Path) -> Mapping[str, StoredTensor]:
    try:
        status = [part.stat() for part in part_paths(path)]
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    return _read_gguf_tensors(path, tuple((one.st_size, one.st_mtime_ns) for one in status))


@lru_cache(maxsize=4)
def _read_gguf_tensors(
    path: Path, _state: tuple[tuple[int, int], ...]
) -> Mapping[str, StoredTensor]:
    """Return the tensors of a model, whose header is read once for each state of its files.

    A start looks at them four times. Reading Gemma's header takes 0.23 s, because its tokenizer has
    262,144 tokens (Intel Xeon, 2026-11-29).
    """
    return {
        name: StoredTensor(source.stored.path, source.shape, source.stored.kind.name, name, source)
        for name, source in source_tensors(read_gguf(path)).items()
    }


def _weight_map(directory: Path) -> dict[str, Path]:
    """Return the file of each tensor.

    A single file takes precedence over shards, as in transformers.
    """
    single, index = (directory / name for name in SAFETENSORS)
    if single.is_file():
        return _file_map(single)
    if not index.is_file():
        raise CheckpointError(f"no weights: neither {single} nor {index.name} exists")
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"damaged {index}: no weight_map")
    return {name: _shard(index, name, file) for name, file in weight_map.items()}


def _file_map(path: Path) -> dict[str, Path]:
    with _open(path) as file:
        return dict.fromkeys(file.keys(), path)


def _shard(index: Path, tensor: str, file: object) -> Path:
    """Return the path of a shard. An untrusted index must not name a file outside the directory."""
    if not isinstance(file, str) or file in {"", ".."} or Path(file).name != file:
        shown = reprlib.repr(file)
        raise CheckpointError(f"{index}: tensor {tensor}: {shown} is not a file of the checkpoint")
    path = index.parent / file
    try:
        exists = path.is_file()
    except OSError:  # the name is too long
        exists = False
    if not exists:
        raise CheckpointError(f"{index}: tensor {tensor} is in {file}, which does not exist")
    return path


def _open(path: Path) -> safe_open:
    try:
        return safe_open(str(path), framework="pt")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"damaged or missing weights {path}: {error}") from error
