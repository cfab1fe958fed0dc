"""A model's forward pass on a GPU: feeds in, logits out; graphs for the shapes that recur.

Launching the 300 kernels of a step one by one takes a host longer than a GPU needs for a small
step. So for every shape (`shapes.py`) the kernels from the embedding to the last norm are captured
once and replayed; what differs between steps lies in memory at fixed addresses (`layout.py`): the
kernels find the sequences of a row, their lengths and pages there. The LM head stays outside: it
multiplies the sampled rows alone, and what it returns, the largest tensor of a step, need not be
held for every graph.

Padding rows belong to no sequence: they attend to nothing, and write to the dump slot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache

import torch
from torch import Tensor

from draftgate.backends.engine import pooling
from draftgate.backends.engine.gpu.layout import HostFields, StepFields, StepLayout, StepShape
from draftgate.backends.engine.gpu.packing import PackedFeeds, pack_feeds
from draftgate.backends.engine.gpu.shapes import Shapes
from draftgate.backends.engine.inputs import Feed
from draftgate.backends.engine.kv_pool import Layers
from draftgate.backends.engine.model import Decoder
from draftgate.backends.engine.transfer import host_memory

MoreFields = Callable[[HostFields], None]
"""Writes fields of a step that the forward pass does not read, to go over in the same copy."""


class DeviceForward:
    """Runs one decoder over one set of layers, on one device, in one thread."""

    def __init__(self, decoder: Decoder, layers: Layers, dump_slot: int, shapes: Shapes) -> None:
        """Allocate the memory that captured steps read.

        Args:
            layers: keys and values of a pool.
            dump_slot: where padding rows write.
        """
        self.shapes = shapes
        self._decoder = decoder
        self._layers = layers
        self._dump_slot = dump_slot
        self._layout = cache(StepLayout)
        largest = max((self._layout(s).num_bytes for s in shapes.captured()), default=0)
        self._fixed = torch.zeros(largest, dtype=torch.uint8, device=decoder.device)
        self._fixed_fields = cache(self._fields_of_fixed)
        self._graphs: dict[StepShape, tuple[torch.cuda.CUDAGraph, Tensor]] = {}

    def place(
        self, packed: PackedFeeds, more: MoreFields | None = None
    ) -> tuple[StepShape, StepFields]:
        """Bring a step to the device in one copy; enqueued, not waited for."""
        rows, sequences = len(packed.rows.token_ids), len(packed.spans.context_lens)
        shape, captured = self.shapes.shape(rows, sequences, packed.longest_context)
        layout = self._layout(shape) if captured else StepLayout(shape)
        device = self._decoder.device
        host = host_memory((layout.num_bytes,), torch.uint8, device)
        fields = HostFields(layout, host)
        packed.write(fields, self._dump_slot)
        if more is not None:
            more(fields)
        used = layout.used_bytes(sequences)
        if captured:
            self._fixed[:used].copy_(host[:used], non_blocking=True)
            return shape, self._fixed_fields(shape)
        memory = torch.empty(layout.num_bytes, dtype=torch.uint8, device=device)
        memory[:used].copy_(host[:used], non_blocking=True)
        return shape, StepFields(layout.fields(memory), self.shapes.page_tokens)

    def run(
        self, shape: StepShape, fields: StepFields, num_samples: int, num_pooled: int = 0
    ) -> tuple[Tensor, Tensor | None]:
        """Run a step that was placed.

        Returns:
            The logits of its sampled rows, float32 [num_samples, vocab_size], and the hidden states
            of those behind them (`pooling.select_pooled`), which the next step may write over.
        """
        if shape in self._graphs:
            graph, hidden = self._graphs[shape]
            graph.replay()
        else:
            inputs = fields.inputs(num_samples, num_pooled)
            hidden = self._decoder.last_hidden(inputs, self._layers)
        pooled = pooling.select_pooled(hidden, num_samples, num_pooled)
        return self._decoder.logits(hidden[:num_samples]), pooled

    @torch.inference_mode()
    def __call__(self, feeds: Iterable[Feed]) -> Tensor:
        """Return the logits of the sampled rows of feeds: float32 [rows, vocab_size]."""
        packed = pack_feeds(feeds, self.shapes.page_tokens)
        return self.run(*self.place(packed), len(packed.rows.sample_rows))[0]

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture every shape, the largest first, in one pool of memory."""
        pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream(self._decoder.device)
        for shape in self.shapes.captured():
            inputs = self._idle(shape).inputs(shape.rows)
            # What is launched for the first time is compiled and loaded, which no graph can hold.
            self._decoder.last_hidden(inputs, self._layers)
            graph = torch.cuda.CUDAGraph()
            # Other threads may have workers of their own, on other GPUs.
            with torch.cuda.graph(graph, pool, stream, capture_error_mode="thread_local"):
                hidden = self._decoder.last_hidden(inputs, self._layers)
            self._graphs[shape] = graph, hidden

    def _idle(self, shape: StepShape) -> StepFields:
        """Return the fields of a step that is all padding."""
        layout = self._layout(shape)
        host = host_memory((layout.num_bytes,), torch.uint8, self._decoder.device)
        pack_feeds(()).write(HostFields(layout, host), self._dump_slot)
        self._fixed[: layout.num_bytes].copy_(host)
        return self._fixed_fields(shape)

    def _fields_of_fixed(self, shape: StepShape) -> StepFields:
        return StepFields(self._layout(shape).fields(self._fixed), self.shapes.page_tokens)
