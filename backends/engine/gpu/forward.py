"""The forward pass on a GPU, with CUDA graphs for recurring shapes.

The host takes longer to launch the 300 kernels of a step than a GPU takes to run a small step. The
runner therefore captures the kernels from the embedding to the last norm once per shape
(`shapes.py`), and replays the graph. The kernels read all data of a step from memory at fixed
addresses (`layout.py`).

The LM head stays outside the graphs, because it multiplies only the sampled rows. Its result is the
largest tensor of a step, and graphs would keep that tensor for every shape.

Padding rows belong to no sequence. They attend to nothing and write to the dump slot.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from functools import cache
from typing import Generic, TypeVar

import torch
from torch import Tensor

from draftgate.backends.engine.gpu.layout import HostFields, StepFields, StepLayout, StepShape
from draftgate.backends.engine.gpu.packing import PackedFeeds, pack_feeds
from draftgate.backends.engine.gpu.shapes import Shapes
from draftgate.backends.engine.inputs import Feed
from draftgate.backends.engine.kv_pool import Layers
from draftgate.backends.engine.model import Decoder
from draftgate.backends.engine.transfer import host_memory

MoreFields = Callable[[HostFields], None]
"""Writes fields that the forward pass does not read, for the same copy to the device."""


Result = TypeVar("Result")


class DevicePasses(ABC, Generic[Result]):
    """Places and runs the passes of a model on one device and in one thread.

    A subclass says what a pass computes.
    """

    def __init__(self, device: torch.device, dump_slot: int, shapes: Shapes) -> None:
        """Allocate the memory that captured passes read.

        Args:
            device: the device of the model.
            dump_slot: the slot for keys and values of padding rows.
            shapes: the shapes of the passes.
        """
        self.shapes = shapes
        self._device = device
        self._dump_slot = dump_slot
        self._layout = cache(StepLayout)
        largest = max((self._layout(s).num_bytes for s in shapes.captured()), default=0)
        self._fixed = torch.zeros(largest, dtype=torch.uint8, device=device)
        self._fixed_fields = cache(self._fields_of_fixed)
        self._graphs: dict[StepShape, tuple[torch.cuda.CUDAGraph, Result]] = {}

    def place(
        self, packed: PackedFeeds, more: MoreFields | None = None
    ) -> tuple[StepShape, StepFields]:
        """Copy a step to the device in a single copy, without waiting."""
        rows, sequences = len(packed.rows.token_ids), len(packed.spans.context_lens)
        shape, captured = self.shapes.shape(rows, sequences, packed.longest_context)
        layout = self._layout(shape) if captured else StepLayout(shape)
        device = self._device
        host = host_memory((layout.num_bytes,), torch.uint8, device)
        fields = HostFields(layout, host)
        packed.write(fields, self._dump_slot)
        if more is not None:
            more(fields)
        used = layout.used_bytes(packed.num_pages)
        if captured:
            self._fixed[:used].copy_(host[:used], non_blocking=True)
            return shape, self._fixed_fields(shape)
        memory = torch.empty(layout.num_bytes, dtype=torch.uint8, device=device)
        memory[:used].copy_(host[:used], non_blocking=True)
        return shape, StepFields(layout, memory, self.shapes.page_tokens)

    def launch(
        self, shape: StepShape, fields: StepFields, num_samples: int, num_hidden: int = 0
    ) -> Result:
        """Run a placed pass, and return its result, which the next pass may overwrite."""
        if shape in self._graphs:
            graph, result = self._graphs[shape]
            graph.replay()
            return result
        return self._pass(fields, num_samples, num_hidden)

    @abstractmethod
    def _pass(self, fields: StepFields, num_samples: int, num_hidden: int = 0) -> Result:
        """Run a pass with separate launches, which a graph captures for all rows."""

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture every shape in one memory pool, the largest shape first."""
        pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream(self._device)
        for shape in self.shapes.captured():
            fields = self._place_padding(shape)
            # The first launch compiles and loads a kernel, which a graph cannot capture.
            self._pass(fields, shape.rows)
            graph = torch.cuda.CUDAGraph()
            # Use the thread-local mode, because other threads may run workers on other GPUs.
            with torch.cuda.graph(graph, pool, stream, capture_error_mode="thread_local"):
                result = self._pass(fields, shape.rows)
            self._graphs[shape] = graph, result

    def _place_padding(self, shape: StepShape) -> StepFields:
        """Place a step of padding rows, and return its fields."""
        layout = self._layout(shape)
        host = host_memory((layout.num_bytes,), torch.uint8, self._device).zero_()
        pack_feeds(()).write(HostFields(layout, host), self._dump_slot)
        self._fixed[: layout.num_bytes].copy_(host)
        return self._fixed_fields(shape)

    def _fields_of_fixed(self, shape: StepShape) -> StepFields:
        return StepFields(self._layout(shape), self._fixed, self.shapes.page_tokens)


class DeviceForward(DevicePasses[Tensor]):
    """Forward passes of a decoder, whose results are the final hidden states.

    `layers` are the keys and values of a pool (`DevicePasses`).
    """

    def __init__(self, decoder: Decoder, layers: Layers, dump_slot: int, shapes: Shapes) -> None:
        super().__init__(decoder.device, dump_slot, shapes)
        self._decoder = decoder
        self._layers = layers

    def run(
        self, shape: StepShape, fields: StepFields, num_samples: int, num_hidden: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Run a placed step.

        Returns:
            The logits of the sampled rows, float32 [num_samples, vocab_size], and the result of
            `Decoder.last_hidden`, which the next step may overwrite.
        """
        hidden = self.launch(shape, fields, num_samples, num_hidden)
        return self._decoder.logits(hidden[:num_samples]), hidden

    @torch.inference_mode()
    def __call__(self, feeds: Iterable[Feed]) -> Tensor:
        """Return the logits of the sampled rows of feeds: float32 [rows, vocab_size]."""
        packed = pack_feeds(feeds, self.shapes.page_tokens)
        return self.run(*self.place(packed), len(packed.rows.sample_rows))[0]

    def _pass(self, fields: StepFields, num_samples: int, num_hidden: int = 0) -> Tensor:
        return self._decoder.last_hidden(fields.inputs(num_samples, num_hidden), self._layers)
