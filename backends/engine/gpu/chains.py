"""Chains of drafts from a draft model on a GPU, for which the host waits only once.

The first pass reads the tokens of each sequence that the draft model has not read. Each further
pass reads the drafts that the previous pass has sampled, one per sequence. Such a pass ends with a
kernel that writes the input of the next pass (`kernels/advance_drafts.py`), so all passes of one
shape are the same launches. A CUDA graph contains them, and a chain of k drafts replays it k - 1
times. All graphs share the memory of the largest logits.

The host copies the input of the first pass and that of the further passes before it launches the
first one, and reads all drafts after the last one. The number of rows of a pass is fixed. A
sequence with a shorter chain therefore takes part in all passes, as a row that reads one token.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Many
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import torch
from torch import Tensor

from draftgate.backends.core.drafts import PER_MILLE, Draft
from draftgate.backends.core.proposer import DraftRequest
from draftgate.backends.core.steps import StepPlan
from draftgate.backends.engine.gpu.forward import DeviceForward, DevicePasses
from draftgate.backends.engine.gpu.layout import HostFields, StepFields
from draftgate.backends.engine.gpu.packing import pack_feeds
from draftgate.backends.engine.gpu.shapes import Shapes, row_bucket
from draftgate.backends.engine.inputs import Feed
from draftgate.backends.engine.kernels.advance_drafts import advance_drafts
from draftgate.backends.engine.kernels.advance_drafts_ref import DraftRows
from draftgate.backends.engine.kernels.sample_verify import sample
from draftgate.backends.engine.kv_pool import DraftLayers
from draftgate.backends.engine.logits import in_vocabulary
from draftgate.backends.engine.model import Decoder
from draftgate.backends.engine.proposers.chains import Observe, last_token
from draftgate.backends.engine.sampler import SamplingColumns
from draftgate.backends.engine.transfer import new_event, to_host

LONGEST_CHAIN: Final = 64
"""Maximum drafts of a chain, the longest draft that a step verifies."""

_EVIDENCE: Final = 0
"""Row of the results with the evidence of each chain. Row r has the drafts with r - 1 left."""


class _NextDrafts(DevicePasses[Tensor]):
    """Passes that read the drafts of the previous pass, one row per sequence.

    Attributes:
        results: int64 [1 + LONGEST_CHAIN, sequences], the evidence and the drafts of each sequence.
    """

    def __init__(self, decoder: Decoder, kv: DraftLayers, shapes: Shapes, vocab_size: int) -> None:
        super().__init__(decoder.device, kv.dump_slot, shapes)
        self._decoder = decoder
        self._layers = kv.layers
        self._vocab_size = vocab_size
        self.results = torch.zeros(
            (1 + LONGEST_CHAIN, shapes.max_sequences), dtype=torch.int64, device=decoder.device
        )

    def begin(self, logits: Tensor, fields: StepFields) -> None:
        """Sample the first drafts, and store their evidence.

        Args:
            logits: float32 [sequences, vocab_size of the draft model].
            fields: input of the further passes.
        """
        logits = in_vocabulary(logits, self._vocab_size)
        tokens = self._sample(logits, fields)
        chances = torch.softmax(logits, dim=1).gather(1, tokens[:, None])[:, 0]
        # In double precision, so that the rounded number is that of Python.
        self.results[_EVIDENCE, : len(tokens)] = (PER_MILLE * chances.double()).round_()

    def _pass(self, fields: StepFields, num_samples: int, num_hidden: int = 0) -> Tensor:
        hidden = self._decoder.last_hidden(fields.inputs(num_samples, num_hidden), self._layers)
        return self._sample(in_vocabulary(self._decoder.logits(hidden), self._vocab_size), fields)

    def _sample(self, logits: Tensor, fields: StepFields) -> Tensor:
        """Sample the drafts of a pass, and write the input of the next one."""
        tokens = sample(logits, fields.sampling(len(logits)))
        advance_drafts(
            tokens,
            DraftRows(*(fields[name] for name in DraftRows._fields)),
            fields.tables,
            self.results,
            page_tokens=self.shapes.page_tokens,
            dump_slot=self._dump_slot,
        )
        return tokens


@dataclass(frozen=True, slots=True)
class LaunchedChains:
    """Enqueued passes, whose tensor in main memory is undefined until the last event has passed.

    Attributes:
        lengths: number of drafts of each sequence.
        first_rows: rows of the first pass.
        results: int64 [1 + longest chain, at least sequences], see `_NextDrafts`.
        passed: events after each pass.
        started_s: `time.perf_counter` before the host packed the input.
    """

    lengths: list[int]
    first_rows: int
    results: Tensor
    passed: list[torch.cuda.Event]
    started_s: float


class DeviceChains:
    """Draws chains from a draft model on a GPU, or in Triton's interpreter.

    Attributes:
        forward: returns the logits of feeds, float32 [sampled rows, vocab_size of the draft model].
    """

    def __init__(
        self,
        decoder: Decoder,
        kv: DraftLayers,
        vocab_size: int,
        *,
        max_num_seqs: int,
        max_model_len: int,
    ) -> None:
        """Allocate the memory that passes read, without capturing graphs.

        Args:
            decoder: the draft model.
            kv: the draft model's view of the pool.
            vocab_size: vocabulary size of the target.
            max_num_seqs: maximum sequences of a step.
            max_model_len: maximum tokens of a context.
        """

        def shapes(rows: int) -> Shapes:
            return Shapes(row_bucket(rows), max_num_seqs, max_model_len, kv.page_tokens)

        # The target may have accepted all drafts, and then the draft model has not read the last.
        self.forward = DeviceForward(decoder, kv.layers, kv.dump_slot, shapes(2 * max_num_seqs))
        self._next = _NextDrafts(decoder, kv, shapes(max_num_seqs), vocab_size)
        self._sampling = SamplingColumns()
        self._page_tokens = kv.page_tokens
        self._device = decoder.device

    def capture(self) -> None:
        """Capture the graphs of all passes, which takes seconds."""
        self.forward.capture()
        self._next.capture()

    def draw(
        self, requests: Many[DraftRequest], first_feeds: Many[Feed], observe: Observe
    ) -> list[Draft]:
        """Return the chains of `draw_chains`, for sequences whose logits nothing changes.

        Args:
            requests: the requests, each for at least one token. Chains have at most `LONGEST_CHAIN`
                tokens.
            first_feeds: the feed for each request's first draft. Its pages hold all drafts but the
                last one.
            observe: receives the rows and the seconds of each pass.
        """
        return self.fetch(self.launch(requests, first_feeds), observe)

    @torch.inference_mode()
    def launch(self, requests: Many[DraftRequest], first_feeds: Many[Feed]) -> LaunchedChains:
        """Enqueue all passes and the copy of their results, without waiting."""
        started_s = time.perf_counter()
        lengths = [min(request.max_tokens, LONGEST_CHAIN) for request in requests]
        sampling = self._sampling.of_plan(
            StepPlan(tuple([last_token(request.sequence) for request in requests]))
        )

        def write(host: HostFields) -> None:
            for name, column in sampling.items():
                host.write(name, column)
            host.write("remaining", lengths)

        # Only the tables of these feeds count. `advance_drafts` writes all other fields.
        last_feeds = [
            Feed((0,), len(request.sequence.token_ids) + length - 2, feed.pages, 1)
            for request, length, feed in zip(requests, lengths, first_feeds, strict=True)
        ]
        shape, fields = self._next.place(pack_feeds(last_feeds, self._page_tokens), write)
        packed = pack_feeds(first_feeds, self._page_tokens)
        logits, _ = self.forward.run(*self.forward.place(packed), len(requests))
        self._next.begin(logits, fields)
        passed = [_recorded(self._device)]
        for _ in range(max(lengths) - 1):
            self._next.launch(shape, fields, shape.rows)
            passed.append(_recorded(self._device))
        results = to_host(self._next.results[: 1 + max(lengths)])
        passed.append(_recorded(self._device))
        return LaunchedChains(lengths, len(packed.rows.token_ids), results, passed, started_s)

    def fetch(self, chains: LaunchedChains, observe: Observe) -> list[Draft]:
        """Wait for the passes, and return the chains."""
        *passed, copied = chains.passed
        copied.synchronize()
        pass_s = [first.elapsed_time(second) / 1e3 for first, second in pairwise(passed)]
        # The host packs all inputs before the first pass, so this time is part of that pass.
        observe(chains.first_rows, time.perf_counter() - chains.started_s - sum(pass_s))
        for drafted, seconds in enumerate(pass_s, 1):
            observe(sum(length > drafted for length in chains.lengths), seconds)
        rows = chains.results.tolist()
        return [
            Draft(
                tuple([rows[left][place] for left in range(length, 0, -1)]),
                evidence=rows[_EVIDENCE][place],
            )
            for place, length in enumerate(chains.lengths)
        ]


def _recorded(device: torch.device) -> torch.cuda.Event:
    event = new_event(device)
    event.record()
    return event
