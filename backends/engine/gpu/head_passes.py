"""Passes of an EAGLE-3 head on a GPU, with CUDA graphs for recurring shapes.

A pass of a head is a single layer, so its launches take longer than its kernels. Its input is one
copy from the host, and the features or hidden states that the head reads, which are on the GPU. A
graph computes the logits of as many rows as it reads. That is nearly free, because the rows are few
and the product reads the weight of the LM head in any case.
"""

from __future__ import annotations

from collections.abc import Sequence as Many

import torch
from torch import Tensor

from draftgate.backends.engine.eagle.head import EagleHead, HeadOutput
from draftgate.backends.engine.gpu.forward import DevicePasses
from draftgate.backends.engine.gpu.layout import StepFields
from draftgate.backends.engine.gpu.packing import pack_feeds
from draftgate.backends.engine.gpu.shapes import Shapes
from draftgate.backends.engine.inputs import Feed
from draftgate.backends.engine.kv_pool import DraftLayers


class HeadPasses(DevicePasses[HeadOutput]):
    """Passes of a head over its pages."""

    def __init__(self, head: EagleHead, kv: DraftLayers, shapes: Shapes) -> None:
        """Bind a head to its layer of the pool.

        Args:
            shapes: the shapes of the passes. Longer passes run without a graph.
        """
        super().__init__(head.device, kv.dump_slot, shapes)
        self._head = head
        self._layers = kv.layers
        rows = max(shapes.row_buckets, default=0)
        self._features = torch.zeros(
            (rows, head.features.size), dtype=head.dtype, device=head.device
        )

    def run(self, feeds: Many[Feed], features: Tensor) -> HeadOutput:
        """Run the rows of feeds after these features or hidden states, [rows, hidden_size].

        Returns:
            The sampled rows. The next pass may overwrite the logits.
        """
        packed = pack_feeds(feeds, self.shapes.page_tokens)
        shape, fields = self.place(packed)
        samples = len(packed.rows.sample_rows)
        if shape.rows <= len(self._features):
            self._features[: len(features)] = features
            hidden, logits = self.launch(shape, fields, samples)
        else:  # longer than any graph, and without padding
            hidden, logits = self._head.forward(fields.inputs(samples), features, self._layers)
        return HeadOutput(hidden[:samples].clone(), logits[:samples])

    def _pass(self, fields: StepFields, num_samples: int, num_hidden: int = 0) -> HeadOutput:
        inputs = fields.inputs(num_samples, num_hidden)
        features = self._features[: len(inputs.token_ids)]
        return self._head.forward(inputs, features, self._layers)
