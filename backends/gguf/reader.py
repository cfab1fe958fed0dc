"""Reads the headers of GGUF files: metadata, and where each tensor is.

A file is a magic number, a version, counts, pairs of key and value, descriptions of tensors, and
the tensors, all in little-endian byte order. The specification is `docs/gguf.md` of `ggml`. A
header may be hostile, so every count and length is compared with the bytes that are left before
anything of that size is made.
"""

from __future__ import annotations

import math
import mmap
import reprlib
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar

from draftgate.backends.errors import CheckpointError
from draftgate.backends.gguf.block_types import BLOCK_TYPES, UNSUPPORTED_TYPES, BlockType
from draftgate.backends.gguf.choice import PART

Value: TypeAlias = int | float | str | tuple[int | float | str, ...]
"""A value of the metadata. All elements of a list have one type. True and false are integers."""

_MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)

_MAX_PAIRS: Final = 1 << 16
_MAX_TENSORS: Final = 1 << 16
_MAX_PARTS: Final = 1 << 12
_MAX_ELEMENTS: Final = 1 << 22
_MAX_NAME_BYTES: Final = 64
_MAX_KEY_BYTES: Final = (1 << 16) - 1
"""Upper bounds, the last two of the specification. A larger number means that a file is damaged."""

_DIMENSIONS: Final = range(1, 5)

_STRING, _ARRAY, _BOOL = 8, 9, 7
_NUMBERS: Final = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    _BOOL: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
"""Formats of numbers, as in `struct`, by the number of their type."""

_LENGTH: Final = struct.Struct("<Q")

_PAIR_BYTES: Final = 8 + 4 + 1
_TENSOR_BYTES: Final = 8 + 4 + 8 + 4 + 8
"""Bytes of the smallest pair, and of the smallest description of a tensor."""

_REMEDY: Final = "download the file again, or convert the model with a current version of llama.cpp"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where a tensor is.

    Attributes:
        path: the file.
        kind: the type of its blocks.
        shape: the dimensions, outermost first. Blocks run along the last one.
        offset: position of the first byte in the file.
    """

    path: Path
    kind: BlockType
    shape: tuple[int, ...]
    offset: int

    @property
    def row_bytes(self) -> int:
        """The bytes of a row."""
        return self.kind.row_bytes(self.shape[-1])

    @property
    def num_bytes(self) -> int:
        """The bytes of the tensor."""
        return math.prod(self.shape[:-1]) * self.row_bytes


class Metadata:
    """The metadata of a file, with checks of types. An error names the file and the key."""

    def __init__(self, values: Mapping[str, Value], path: Path) -> None:
        self._values = values
        self._path = path

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def error(self, key: str, problem: str) -> CheckpointError:
        """Return an error that names the file and the key."""
        return CheckpointError(f"{self._path}: {key} {problem}")

    def is_list(self, key: str) -> bool:
        """Return whether the value of a key is a list."""
        return isinstance(self._values.get(key), tuple)

    def count(self, key: str, default: int | None = None) -> int:
        """Return a whole number. A list with one number for each layer must repeat one number."""
        value = self._values.get(key)
        if isinstance(value, tuple) and value:
            if len(set(value)) > 1:
                raise self.error(key, f"differs between layers, which is not supported: {value}")
            value = value[0]
        found: int = self._checked(key, value, default, int, "a whole number")
        return found

    def number(self, key: str, default: float | None = None) -> float:
        """Return a number."""
        return float(self._checked(key, self._values.get(key), default, (int, float), "a number"))

    def text(self, key: str, default: str | None = None) -> str:
        """Return a text."""
        found: str = self._checked(key, self._values.get(key), default, str, "a text")
        return found

    def texts(self, key: str) -> tuple[str, ...]:
        """Return a list of texts, which is empty if the key is missing."""
        return self._list(key, str, "a list of texts")

    def integers(self, key: str) -> tuple[int, ...]:
        """Return a list of whole numbers, which is empty if the key is missing."""
        return self._list(key, int, "a list of whole numbers")

    def numbers(self, key: str) -> tuple[float, ...]:
        """Return a list of numbers, which is empty if the key is missing."""
        return self._list(key, float, "a list of numbers")

    def _list(self, key: str, kind: type[T], words: str) -> tuple[T, ...]:
        values: tuple[T, ...] = self._checked(key, self._values.get(key), (), tuple, words)
        self._checked(key, values[0] if values else None, kind(), kind, words)
        return values

    def _checked(self, key: str, value: Any, default: Any, kind: Any, words: str) -> Any:
        value = default if value is None else value
        if value is None:
            raise self.error(key, f"is missing; {_REMEDY}")
        if not isinstance(value, kind):
            raise self.error(key, f"must be {words}, not {reprlib.repr(value)}")
        return value


@dataclass(frozen=True, slots=True)
class GgufModel:
    """The headers of a model in one or several files.

    Attributes:
        path: the first file.
        metadata: the metadata of the first file.
        tensors: the tensors of all files by name.
    """

    path: Path
    metadata: Metadata
    tensors: Mapping[str, GgufTensor]


def read_gguf(path: Path) -> GgufModel:
    """Read the headers of a model.

    Args:
        path: the file, or any of the files `NAME-00001-of-0000N.gguf` of a model in parts.

    Raises:
        CheckpointError: a file is missing, damaged, or has a feature that is not supported. The
            message names the file and the feature.
    """
    paths = part_paths(path)
    parts = [_read_file(part) for part in paths]
    (metadata, first), others = parts[0], parts[1:]
    count = metadata.count("split.count", 1) or 1
    if count != len(paths):
        raise metadata.error(
            "split.count",
            f"is {count}, but the name of the file is not that of the first of {count} parts, "
            f"such as model-00001-of-{count:05}.gguf; give the parts their original names",
        )
    tensors = dict(first)
    for number, (own, more) in enumerate(others, start=1):
        if own.count("split.no", number) != number or own.count("split.count", count) != count:
            raise own.error("split.no", f"is not {number}, so the part has the wrong name")
        repeated = tensors.keys() & more.keys()
        if repeated:
            raise CheckpointError(f"damaged {paths[number]}: tensor {min(repeated)} is repeated")
        tensors |= more
    total = metadata.count("split.tensors.count", len(tensors))
    if total != len(tensors):
        raise metadata.error("split.tensors.count", f"is {total}, not {len(tensors)}; {_REMEDY}")
    return GgufModel(paths[0], metadata, tensors)


def part_paths(path: Path) -> list[Path]:
    """Return the files of the model that a file belongs to, the first one first.

    Raises:
        CheckpointError: a part is missing.
    """
    part = PART.fullmatch(path.name)
    if part is None:
        return [path]
    count = int(part["count"])
    if not 1 <= int(part["number"]) <= count <= _MAX_PARTS:
        raise CheckpointError(f"{path}: the name has an impossible number of parts")
    names = [f"{part['name']}-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1)]
    missing = [name for name in names if not path.with_name(name).is_file()]
    if missing:
        raise CheckpointError(
            f"{path}: {len(missing)} of the {count} parts of the model are missing: "
            f"{reprlib.repr(missing)[1:-1]}; download them to the same folder"
        )
    return [path.with_name(name) for name in names]


def _read_file(path: Path) -> tuple[Metadata, dict[str, GgufTensor]]:
    try:
        with path.open("rb") as file:
            if file.read(len(_MAGIC)) != _MAGIC:
                raise CheckpointError(f"{path} is not a GGUF file; {_REMEDY}")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Header(path, data).read()
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error


class _Header:
    """Reads the header of a file from its start to its end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._at = len(_MAGIC)

    def read(self) -> tuple[Metadata, dict[str, GgufTensor]]:
        version: int = self._number("<I")
        if version not in _VERSIONS:
            words = "in big-endian byte order" if version >> 16 else f"of version {version}"
            raise CheckpointError(
                f"{self._path}: GGUF {words} is not supported; supported: version "
                f"{' and '.join(map(str, _VERSIONS))} in little-endian order; {_REMEDY}"
            )
        tensors = self._count("<Q", _MAX_TENSORS, _TENSOR_BYTES, "tensors")
        pairs = self._count("<Q", _MAX_PAIRS, _PAIR_BYTES, "metadata pairs")
        values: dict[str, Value] = {}
        for _ in range(pairs):
            key = self._text(_MAX_KEY_BYTES)
            if key in values:
                raise self._damage(f"key {key} is repeated")
            values[key] = self._value(self._number("<I"), key)
        metadata = Metadata(values, self._path)
        alignment = metadata.count("general.alignment", 32)
        if not 8 <= alignment <= 1 << 16 or alignment % 8:
            raise metadata.error("general.alignment", f"must be a multiple of 8, not {alignment}")
        found = [self._tensor(alignment) for _ in range(tensors)]
        return metadata, self._placed(found, alignment)

    def _placed(self, found: list[tuple[str, GgufTensor]], alignment: int) -> dict[str, GgufTensor]:
        """Return the tensors with their places in the file, without overlaps."""
        start = -(-self._at // alignment) * alignment
        placed = {name: replace(one, offset=start + one.offset) for name, one in found}
        if len(placed) < len(found):
            raise self._damage("a tensor is repeated")
        ordered = sorted(placed.items(), key=lambda pair: pair[1].offset)
        for (before, one), (after, other) in pairwise(ordered):
            if one.offset + one.num_bytes > other.offset:
                raise self._damage(f"tensors {before} and {after} overlap")
        for name, one in ordered[-1:]:
            if one.offset + one.num_bytes > len(self._data):
                raise self._damage(f"it ends before tensor {name} does")
        return placed

    def _tensor(self, alignment: int) -> tuple[str, GgufTensor]:
        name = self._text(_MAX_NAME_BYTES)
        dimensions: int = self._number("<I")
        if dimensions not in _DIMENSIONS:
            raise self._damage(f"tensor {name} has {dimensions} dimensions")
        shape = [self._number("<Q") for _ in range(dimensions)][::-1]
        number: int = self._number("<I")
        offset: int = self._number("<Q")
        kind = BLOCK_TYPES.get(number)
        if kind is None:
            words = UNSUPPORTED_TYPES.get(number, f"number {number}")
            raise CheckpointError(
                f"{self._path}: tensor {name} has type {words}, which is not supported; supported: "
                f"{', '.join(one.name for one in BLOCK_TYPES.values())}; "
                "choose another quantisation of the model, such as Q4_K_M"
            )
        if shape[-1] % kind.values or not all(0 < size <= len(self._data) for size in shape):
            raise self._damage(f"tensor {name} cannot have the shape {shape} in {kind.name}")
        if offset % alignment or offset > len(self._data):
            raise self._damage(f"tensor {name} cannot be at {offset}")
        return name, GgufTensor(self._path, kind, tuple(shape), offset)

    def _value(self, kind: int, key: str) -> Value:
        if kind == _STRING:
            return self._text(len(self._data))
        if kind != _ARRAY:
            number: Value = self._number(self._format(kind, key))
            return number
        element: int = self._number("<I")
        if element == _ARRAY:
            raise self._damage(f"{key} is a list of lists")
        if element == _STRING:
            count = self._count("<Q", _MAX_ELEMENTS, 8, f"elements of {key}")
            return tuple(self._texts(count))
        layout = self._format(element, key)
        size = struct.calcsize(layout)
        count = self._count("<Q", _MAX_ELEMENTS, size, f"elements of {key}")
        values = struct.unpack_from(f"<{count}{layout[1]}", self._data, self._at)
        self._at += count * size
        return values

    def _format(self, kind: int, key: str) -> str:
        layout = _NUMBERS.get(kind)
        if layout is None:
            raise self._damage(f"{key} has the unknown type {kind}")
        return layout

    def _count(self, layout: str, most: int, each_bytes: int, what: str) -> int:
        """Read a count of things that have at least `each_bytes` each."""
        count: int = self._number(layout)
        if count > most or count * each_bytes > len(self._data) - self._at:
            raise self._damage(f"it cannot have {count} {what}")
        return count

    def _text(self, most: int) -> str:
        length: int = self._number("<Q")
        if length > min(most, len(self._data) - self._at):
            raise self._damage(f"a text of {length} bytes at {self._at} is too long")
        self._at += length
        try:
            return self._data[self._at - length : self._at].decode()
        except UnicodeDecodeError as error:
            raise self._damage(f"a text at {self._at - length} is not UTF-8") from error

    def _texts(self, count: int) -> Iterator[str]:
        """Yield texts of any length, in half the time of `_text`.

        The tokens and merges of a vocabulary take most of the time of a header.
        """
        data, size, length_at = self._data, len(self._data), _LENGTH.unpack_from
        for _ in range(count):
            start = self._at + _LENGTH.size
            if start > size:
                raise self._damage(f"it ends at {size} bytes")
            (length,) = length_at(data, self._at)
            end = start + length
            if end > size:
                raise self._damage(f"a text of {length} bytes at {start} is too long")
            self._at = end
            try:
                yield data[start:end].decode()
            except UnicodeDecodeError as error:
                raise self._damage(f"a text at {start} is not UTF-8") from error

    def _number(self, layout: str) -> Any:
        try:
            (value,) = struct.unpack_from(layout, self._data, self._at)
        except struct.error as error:
            raise self._damage(f"it ends at {len(self._data)} bytes") from error
        self._at += struct.calcsize(layout)
        return value

    def _damage(self, problem: str) -> CheckpointError:
        return CheckpointError(f"damaged {self._path}: {problem}; {_REMEDY}")
