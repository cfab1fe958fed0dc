"""Turns a `StepPlan` into a `StepResult` on a GPU, which works while the host goes on.

`launch` copies the plan over, enqueues all that is to be done with it, and reads nothing back:
forward pass, draw, walk, compaction, and one copy of what was emitted into pinned memory. `fetch`
waits for the mark behind that copy. Grammars, penalties, log probabilities and rejection come in
between as they do on a CPU (`runner.py`); only rejection makes the host wait.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from draftgate.backends.core.steps import PENDING, StepPlan, StepResult
from draftgate.backends.engine import logprobs, pooling
from draftgate.backends.engine.gpu.forward import DeviceForward
from draftgate.backends.engine.gpu.layout import HostFields, StepFields, StepShape
from draftgate.backends.engine.gpu.packing import PackedFeeds, PackedWalks, pack_feeds, pack_walks
from draftgate.backends.engine.gpu.shapes import ROW_BUCKETS, Shapes
from draftgate.backends.engine.inputs import Feed, feed_of
from draftgate.backends.engine.kernels.accept_walk import accept_walk
from draftgate.backends.engine.kernels.accept_walk_ref import Acceptance, StopRules
from draftgate.backends.engine.kernels.kv_move import kv_move
from draftgate.backends.engine.kernels.kv_move_ref import NO_MOVE
from draftgate.backends.engine.kernels.sample_verify import sample
from draftgate.backends.engine.kv_pool import BLOCK_TOKENS, KvPool
from draftgate.backends.engine.logits import adjust, forbid
from draftgate.backends.engine.logprobs import RowLogprobs
from draftgate.backends.engine.model import Decoder
from draftgate.backends.engine.operators.base import Operators
from draftgate.backends.engine.sampler import Verify, Walks, draw, settles_drafts
from draftgate.backends.engine.transfer import new_event, to_device, to_host

_PENDING: Final = ("pending_rows", "pending_sources")

WALK_ROWS: Final = 65
"""Rows that the walk is compiled for: the longest draft of any policy and the row before it."""


@dataclass(frozen=True, slots=True)
class LaunchedGpuStep:
    """A step whose results are, or will be, in main memory.

    Attributes:
        row_of: the sampled row behind the last confirmed token, by sequence key.
        tokens: int64 [sampled rows], drawn in each, on the device.
        starts: the first sampled row of each part, and the end of the last one.
        results: int64 [2 * sampled rows + parts]: emitted tokens and the rows that drew them, by
            row, then how many there are of each part. Undefined before `ended` is passed.
        logprobs: one entry for each part of the plan, in main memory, None where it does not ask;
            None where nobody does.
        began, ended: around the step's work.
        pooled: what the plan pools, float32 [pooled rows, hidden_size], in main memory; None where
            nothing does. Undefined before `ended` is passed.
    """

    row_of: dict[int, int]
    tokens: Tensor
    starts: list[int]
    results: Tensor
    logprobs: tuple[RowLogprobs | None, ...] | None
    began: torch.cuda.Event
    ended: torch.cuda.Event
    pooled: Tensor | None


class GpuRunner:
    """Runs steps of one model over one KV pool. Use in one thread only."""

    def __init__(
        self, decoder: Decoder, pool: KvPool, forward: DeviceForward, verify: Verify = "coupled"
    ) -> None:
        """Keep them. `forward` runs the decoder over the pool."""
        self._decoder = decoder
        self._pool = pool
        self._forward = forward
        self._verify = verify
        self._eos_ids = decoder.config.known_eos_ids
        ends = torch.tensor(sorted(self._eos_ids), dtype=torch.int64)
        self._ends = to_device(ends, decoder.device)

    def capture(self) -> None:
        """Capture the graphs of all shapes that recur. Takes seconds to minutes."""
        self._forward.capture()

    @property
    def launcher(self) -> GpuRunner:
        """The runner itself: a GPU works while the host does something else."""
        return self

    @property
    def operators(self) -> Operators:
        """What computes between the products."""
        return self._decoder.operators

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step to its end."""
        return self.fetch(self.launch(plan))

    @torch.inference_mode()
    def launch(self, plan: StepPlan, previous: LaunchedGpuStep | None = None) -> LaunchedGpuStep:
        """Enqueue one step and the copy of its results. Waits for nothing.

        Args:
            previous: the step launched before, which samples the `PENDING` tokens of this one.
        """
        device = self._decoder.device
        began, ended = new_event(device), new_event(device)
        began.record()
        pooled_rows = pooling.rows_to_pool(plan)
        packed = pack_feeds(map(feed_of, plan.work), pooled_rows=pooled_rows)
        walks = pack_walks(plan)
        shape, fields = self._place(plan, packed, walks, previous)
        num_samples, num_pooled = len(packed.rows.sample_rows), len(pooled_rows)
        logits, pooled = self._forward.run(shape, fields, num_samples, num_pooled)
        pooled = None if pooled is None else to_host(pooled)
        tokens, found = self._sample(plan, logits, fields)
        walked = self._walk(tokens, fields, walks)
        parts = walked.num_emitted[: len(plan.work)]
        results = to_host(torch.cat([walked.emitted, walked.kept_rows.long(), parts.long()]))
        ended.record()
        rows = _rows_of_sequences(plan)
        return LaunchedGpuStep(
            rows, tokens, walks.sample_starts, results, found, began, ended, pooled
        )

    def fetch(self, step: LaunchedGpuStep) -> StepResult:
        """Wait for a launched step. The one place that waits for the device."""
        step.ended.synchronize()
        walks = _walks(step.starts, step.results.tolist())
        found = logprobs.read(step.logprobs, walks)
        step_s = step.began.elapsed_time(step.ended) / 1e3
        return StepResult(walks.emitted, found, step_s, pooling.pooled_bytes(step.pooled))

    def logits(self, plan: StepPlan) -> Tensor:
        """Run the forward pass alone; return float32 [sampling rows, vocab_size]."""
        return self.forward(map(feed_of, plan.work))

    def forward(self, feeds: Iterable[Feed]) -> Tensor:
        """Run the forward pass over any feeds; return float32 [sampled rows, vocab_size]."""
        return self._forward(feeds)

    def _place(
        self,
        plan: StepPlan,
        packed: PackedFeeds,
        walks: PackedWalks,
        behind: LaunchedGpuStep | None,
    ) -> tuple[StepShape, StepFields]:
        """Bring a step to the device, and fill in the tokens that are known there alone."""
        pending = _pending(plan, behind) if behind is not None else ([], [])

        def write(host: HostFields) -> None:
            walks.write(plan, host)
            for name, places in zip(_PENDING, pending, strict=True):
                host.write(name, places)

        shape, fields = self._forward.place(packed, write)
        if behind is not None and pending[0]:
            rows, sources = (fields[name][: len(pending[0])] for name in _PENDING)
            fields["token_ids"].index_copy_(0, rows, behind.tokens[sources])
        return shape, fields

    def _sample(
        self, plan: StepPlan, logits: Tensor, fields: StepFields
    ) -> tuple[Tensor, tuple[RowLogprobs | None, ...] | None]:
        """Return the token of every row, and what was asked about them, on its way here."""
        if plan.is_plain:
            return self._draw(plan, logits, fields), None
        wanted = logprobs.model_logprobs(plan, logits)
        forbid(plan, logits)
        adjust(plan, logits, self._eos_ids)
        tokens = self._draw(plan, logits, fields)
        found = tuple(
            None if row is None else RowLogprobs(*map(to_host, row))
            for row in logprobs.look_up(plan, wanted, tokens)
        )
        return tokens, found

    def _draw(self, plan: StepPlan, logits: Tensor, fields: StepFields) -> Tensor:
        """Return the token of every row: int64 [rows]."""
        if self._verify == "rejection" and settles_drafts(plan):
            return draw(plan, logits, self._verify)
        return sample(logits, fields.sampling(len(logits)))

    def _walk(self, tokens: Tensor, fields: StepFields, walks: PackedWalks) -> Acceptance:
        """Walk the drafts up to where a sequence ends; put what was accepted where it belongs."""
        rows = len(tokens)
        walked = accept_walk(
            tokens,
            fields["draft_tokens"][:rows],
            fields["draft_parents"][:rows],
            fields["sample_starts"],
            StopRules(fields["remaining"], self._ends, fields["ignore_eos"]),
            max_rows=max(walks.longest, WALK_ROWS),
        )
        if walks.has_trees:
            slots = fields["slots"][fields["sample_rows"][:rows]]
            starts = fields["sample_starts"]
            _compact(self._pool.memory, slots, starts, walked.kept_rows, walks.longest)
        return walked


def gpu_runner(
    decoder: Decoder,
    pool: KvPool,
    *,
    max_num_seqs: int,
    max_model_len: int,
    verify: Verify = "coupled",
) -> GpuRunner:
    """Return a runner whose steps run kernel by kernel until `capture`.

    Args:
        max_num_seqs: most parts of a step.
        max_model_len: most slots of a context.
    """
    shapes = Shapes(ROW_BUCKETS[-1], max_num_seqs, max_model_len, BLOCK_TOKENS)
    forward = DeviceForward(decoder, pool.layers, pool.dump_slot, shapes)
    return GpuRunner(decoder, pool, forward, verify)


def _compact(
    memory: Tensor, row_slots: Tensor, sample_starts: Tensor, kept_rows: Tensor, longest: int
) -> None:
    """Move what an accepted path wrote; never synchronises with the device.

    The token that a row was fed lies in the row's slot; accepted at depth d it belongs into the
    slot of row d. `kept_rows` says which row that was (`accept_walk`), and the walk ascends.

    Args:
        memory: [strips, slots, head_dim], all layers of a pool; modified.
        row_slots: int64 [sampled rows], slot of each.
        sample_starts: int32 [sequences + 1], the first sampled row of each sequence.
        kept_rows: int32 [sampled rows], of the emitted tokens, `NO_ROW` behind the last.
        longest: most sampled rows of a sequence.
    """
    depths = torch.arange(longest, device=memory.device)
    starts, ends = sample_starts[:-1, None].long(), sample_starts[1:, None]
    targets = starts + depths
    inside = targets < ends
    targets = torch.where(inside, targets, 0)
    kept = torch.where(inside, kept_rows[targets].long(), 0)
    moves = kept > depths
    sources = torch.where(moves, starts + kept, 0)
    kv_move(memory, row_slots[sources], torch.where(moves, row_slots[targets], NO_MOVE))


def _pending(plan: StepPlan, behind: LaunchedGpuStep) -> tuple[list[int], list[int]]:
    """Return the rows of pending tokens, and the rows of the step before that draw them."""
    rows: list[int] = []
    sources: list[int] = []
    first = 0
    for work in plan.work:
        if work.token_ids[-1] == PENDING:
            rows.append(first + len(work.token_ids) - 1)
            sources.append(behind.row_of[work.sequence.key])
        first += work.num_tokens
    return rows, sources


def _rows_of_sequences(plan: StepPlan) -> dict[int, int]:
    rows: dict[int, int] = {}
    first = 0
    for work in plan.work:
        if work.samples:
            rows[work.sequence.key] = first
        first += work.num_samples
    return rows


def _walks(starts: Many[int], results: list[int]) -> Walks:
    """Return what each part emits."""
    rows = starts[-1]
    walks = Walks([], [])
    for begin, count in zip(starts, results[2 * rows :], strict=False):
        walks.rows.append(tuple(results[rows + begin : rows + begin + count]))
        walks.emitted.append(tuple(results[begin : begin + count]))
    return walks
