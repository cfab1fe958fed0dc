"""A step as one run of bytes: written on the host, copied once, read on the device field by field.

Where a field lies follows from the shape of the step alone, so a captured graph finds the fields
of every step of its shape at the same addresses.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from draftgate.backends.engine.inputs import AttentionSpans, RaggedSpans, StepInputs
from draftgate.backends.engine.kernels.sample_verify_ref import RowSampling

_ALIGNED: Final = 64
"""Fields begin at multiples of so many bytes: Triton compiles kernels for aligned pointers."""


class StepShape(NamedTuple):
    """The sizes of a step, padding included.

    Attributes:
        rows: tokens.
        sequences: parts; those that are padding have no rows.
        pages: of the longest page table.
    """

    rows: int
    sequences: int
    pages: int


class _Field(NamedTuple):
    """`size` counts `unit`s, one of the names of `StepShape`, and `more` elements."""

    dtype: torch.dtype
    unit: str
    more: int = 0


_FIELDS: Final = {
    # What the forward pass reads (`StepInputs`, `RaggedSpans`).
    "token_ids": _Field(torch.int64, "rows"),
    "positions": _Field(torch.int64, "rows"),
    "slots": _Field(torch.int64, "rows"),
    "sample_rows": _Field(torch.int64, "rows"),
    "ancestors": _Field(torch.int64, "rows"),
    "attention_positions": _Field(torch.int32, "rows"),
    "query_starts": _Field(torch.int32, "sequences", 1),
    "context_lens": _Field(torch.int32, "sequences"),
    "draft_starts": _Field(torch.int32, "sequences"),
    # Rows whose tokens the step before draws, and in which of its sampled rows.
    "pending_rows": _Field(torch.int64, "rows"),
    "pending_sources": _Field(torch.int64, "rows"),
    # What draws tokens (`RowSampling`), one entry for each row that is sampled.
    "temperature": _Field(torch.float32, "rows"),
    "top_k": _Field(torch.int32, "rows"),
    "top_p": _Field(torch.float32, "rows"),
    "min_p": _Field(torch.float32, "rows"),
    "seed": _Field(torch.int64, "rows"),
    "choice": _Field(torch.int32, "rows"),
    "position": _Field(torch.int32, "rows"),
    # What walks drafts (`accept_walk`).
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
    """Where the fields of steps of one shape lie. The page tables come last."""

    def __init__(self, shape: StepShape) -> None:
        """Lay the fields out one behind the other."""
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
        """Bytes of a step."""
        return self._tables_begin + self.shape.sequences * self.shape.pages * _TABLES.itemsize

    def used_bytes(self, sequences: int) -> int:
        """Return the leading bytes that matter where only so many sequences are no padding."""
        return self._tables_begin + sequences * self.shape.pages * _TABLES.itemsize

    def fields(self, memory: Tensor) -> dict[str, Tensor]:
        """Return the fields as views of memory, uint8 [num_bytes or more]."""
        found = {
            name: memory[begin:end].view(_FIELDS[name].dtype)
            for name, (begin, end) in self._spans.items()
        }
        tables = memory[self._tables_begin : self.num_bytes].view(_TABLES)
        return found | {"tables": tables.view(self.shape.sequences, self.shape.pages)}

    def array(self, name: str, memory: npt.NDArray[np.uint8]) -> npt.NDArray[Any]:
        """Return a field as a view of main memory, but for the tables."""
        begin, end = self._spans[name]
        return memory[begin:end].view(_NUMPY[_FIELDS[name].dtype])

    def tables_array(self, memory: npt.NDArray[np.uint8]) -> npt.NDArray[np.int32]:
        """Return the tables as a view of main memory, [sequences, pages]."""
        tables = memory[self._tables_begin : self.num_bytes].view(np.int32)
        return tables.reshape(self.shape.sequences, self.shape.pages)


class StepFields:
    """The fields of a step on the device, grouped as those want them who read them."""

    def __init__(self, fields: dict[str, Tensor], page_tokens: int) -> None:
        """Keep the views."""
        self._fields = fields
        self._page_tokens = page_tokens

    def __getitem__(self, name: str) -> Tensor:
        """Return a field by its name in the layout."""
        return self._fields[name]

    def inputs(self, num_samples: int, num_pooled: int = 0) -> StepInputs:
        """Return what the decoder reads: so many rows sampled, and so many behind them pooled."""
        fields = self._fields
        return StepInputs(
            fields["token_ids"],
            fields["positions"],
            fields["slots"],
            AttentionSpans(self._page_tokens),
            fields["sample_rows"][: num_samples + num_pooled],
            num_samples,
            RaggedSpans(
                fields["query_starts"],
                fields["context_lens"],
                fields["tables"],
                fields["ancestors"],
                fields["draft_starts"],
                fields["attention_positions"],
                self._page_tokens,
            ),
            num_pooled,
        )

    def sampling(self, num_samples: int) -> RowSampling:
        """Return how the first so many sampled rows are drawn."""
        return RowSampling(*(self._fields[name][:num_samples] for name in RowSampling._fields))


class HostFields:
    """The fields of a step on the host, to be written."""

    def __init__(self, layout: StepLayout, memory: Tensor) -> None:
        """Look at memory, uint8 [num_bytes]; what is not written is undefined."""
        self._layout = layout
        self._memory: npt.NDArray[np.uint8] = memory.numpy()

    def write(
        self,
        name: str,
        values: list[int] | list[float] | npt.NDArray[np.int64],
        padding: int = 0,
    ) -> None:
        """Write a field from its beginning, and padding behind."""
        array = self._layout.array(name, self._memory)
        array[: len(values)] = values
        array[len(values) :] = padding

    @property
    def tables(self) -> npt.NDArray[np.int32]:
        """The page tables, [sequences, pages]."""
        return self._layout.tables_array(self._memory)
