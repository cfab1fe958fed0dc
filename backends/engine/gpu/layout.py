"""The memory layout of a step: the host writes the fields, one copy moves them to the device.

The offset of a field depends only on the shape of the step. A captured graph therefore finds the
fields of every step of its shape at the same addresses.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from functools import cached_property
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from draftgate.backends.engine.inputs import AttentionSpans, RaggedSpans, StepInputs
from draftgate.backends.engine.kernels.paged_attention_ref import BlockTables
from draftgate.backends.engine.kernels.sample_verify_ref import RowSampling

_ALIGNED: Final = 64
"""Alignment of fields in bytes. Triton compiles kernels for aligned pointers."""


class StepShape(NamedTuple):
    """The sizes of a step, including padding.

    Attributes:
        rows: number of tokens.
        sequences: number of sequences. Padding sequences have no rows.
        pages: number of pages of the longest page table.
    """

    rows: int
    sequences: int
    pages: int


class _Field(NamedTuple):
    """An array with an element per `unit`, a field of `StepShape`, and `more` further elements."""

    dtype: torch.dtype
    unit: str
    more: int = 0


_FIELDS: Final = {
    # The forward pass reads these fields (`StepInputs`, `RaggedSpans`).
    "token_ids": _Field(torch.int64, "rows"),
    "positions": _Field(torch.int64, "rows"),
    "slots": _Field(torch.int64, "rows"),
    "sample_rows": _Field(torch.int64, "rows"),
    "ancestors": _Field(torch.int64, "rows"),
    "attention_positions": _Field(torch.int32, "rows"),
    "query_starts": _Field(torch.int32, "sequences", 1),
    "context_lens": _Field(torch.int32, "sequences"),
    "draft_starts": _Field(torch.int32, "sequences"),
    "table_starts": _Field(torch.int32, "sequences"),
    # Rows whose tokens the previous step samples, and the rows of that step that sample them.
    "pending_rows": _Field(torch.int64, "rows"),
    "pending_sources": _Field(torch.int64, "rows"),
    # Sampling reads these fields (`RowSampling`), with an entry per sampled row.
    "temperature": _Field(torch.float32, "rows"),
    "top_k": _Field(torch.int32, "rows"),
    "top_p": _Field(torch.float32, "rows"),
    "min_p": _Field(torch.float32, "rows"),
    "seed": _Field(torch.int64, "rows"),
    "choice": _Field(torch.int32, "rows"),
    "position": _Field(torch.int32, "rows"),
    # `accept_walk` reads these fields.
    "draft_tokens": _Field(torch.int64, "rows"),
    "draft_parents": _Field(torch.int32, "rows"),
    "sample_starts": _Field(torch.int32, "sequences", 1),
    "remaining": _Field(torch.int32, "sequences"),
    "ignore_eos": _Field(torch.int8, "sequences"),
}

_TABLES: Final = torch.int32

_NUMPY: Final[dict[torch.dtype, Any]] = {
    torch.int64: np.int64,
    torch.int32: np.int32,
    torch.int8: np.int8,
    torch.float32: np.float32,
}


class StepLayout:
    """The offsets of the fields of a step.

    The page tables are the last field, one after the other, so that a step copies only the pages
    that it uses.
    """

    def __init__(self, shape: StepShape) -> None:
        self.shape = shape
        sizes = shape._asdict()
        self._spans: dict[str, tuple[int, int]] = {}
        end = 0
        for name, field in _FIELDS.items():
            begin = -(-end // _ALIGNED) * _ALIGNED
            end = begin + (sizes[field.unit] + field.more) * field.dtype.itemsize
            self._spans[name] = (begin, end)
        self._tables_begin = -(-end // _ALIGNED) * _ALIGNED

    @cached_property
    def num_bytes(self) -> int:
        """Size of a step in bytes."""
        return self._tables_begin + self.shape.sequences * self.shape.pages * _TABLES.itemsize

    def used_bytes(self, pages: int) -> int:
        """Return the leading bytes that a step needs, given the pages of all its contexts."""
        return self._tables_begin + pages * _TABLES.itemsize

    def fields(self, memory: Tensor) -> dict[str, Tensor]:
        """Return the fields as views of `memory`, uint8 [at least num_bytes]."""
        found = {
            name: memory[begin:end].view(_FIELDS[name].dtype)
            for name, (begin, end) in self._spans.items()
        }
        return found | {"tables": memory[self._tables_begin : self.num_bytes].view(_TABLES)}

    def array(self, name: str, memory: npt.NDArray[np.uint8]) -> npt.NDArray[Any]:
        """Return a field other than the tables as a view of main memory."""
        begin, end = self._spans[name]
        return memory[begin:end].view(_NUMPY[_FIELDS[name].dtype])

    def tables_array(self, memory: npt.NDArray[np.uint8]) -> npt.NDArray[np.int32]:
        """Return the tables as a view of main memory, [sequences * pages]."""
        return memory[self._tables_begin : self.num_bytes].view(np.int32)


class StepFields:
    """The fields of a step on the device.

    `memory` is uint8 [at least num_bytes].
    """

    def __init__(self, layout: StepLayout, memory: Tensor, page_tokens: int) -> None:
        self._fields = layout.fields(memory)
        self._longest_table = layout.shape.pages
        self._page_tokens = page_tokens

    def __getitem__(self, name: str) -> Tensor:
        return self._fields[name]

    @property
    def tables(self) -> BlockTables:
        """The page tables."""
        return BlockTables(
            self._fields["tables"], self._fields["table_starts"], self._longest_table
        )

    def inputs(self, num_samples: int, num_hidden: int = 0) -> StepInputs:
        """Return the decoder's inputs, given the numbers of sampled rows and of hidden rows."""
        fields = self._fields
        return StepInputs(
            fields["token_ids"],
            fields["positions"],
            fields["slots"],
            AttentionSpans(self._page_tokens),
            fields["sample_rows"][: num_samples + num_hidden],
            num_samples,
            RaggedSpans(
                fields["query_starts"],
                fields["context_lens"],
                self.tables,
                fields["ancestors"],
                fields["draft_starts"],
                fields["attention_positions"],
                self._page_tokens,
            ),
            num_hidden,
        )

    def sampling(self, num_samples: int) -> RowSampling:
        """Return the sampling parameters of the first `num_samples` sampled rows."""
        return RowSampling(*(self._fields[name][:num_samples] for name in RowSampling._fields))


class HostFields:
    """The fields of a step in main memory, for writing.

    `memory` is uint8 [num_bytes]. The content of unwritten fields is undefined.
    """

    def __init__(self, layout: StepLayout, memory: Tensor) -> None:
        self._layout = layout
        self._memory: npt.NDArray[np.uint8] = memory.numpy()

    def write(self, name: str, values: Many[int] | npt.NDArray[Any], padding: int = 0) -> None:
        """Write values to the beginning of a field and padding to the rest."""
        array = self._layout.array(name, self._memory)
        array[: len(values)] = values
        array[len(values) :] = padding

    @property
    def tables(self) -> npt.NDArray[np.int32]:
        """The page tables, one after the other: [sequences * pages]."""
        return self._layout.tables_array(self._memory)
