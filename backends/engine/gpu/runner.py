"""Turns a `StepPlan` into a `StepResult` on a GPU, asynchronously to the host.

`launch` copies the plan to the device and enqueues the whole step: forward pass, sampling, accept
walk, compaction, and a copy of the emitted tokens into pinned memory. The host does not wait in
`launch`. `fetch` waits for the event after that copy.

Grammars, penalties, log probabilities and rejection work as on a CPU (`engine/runner.py`). Only
rejection makes the host wait within a step.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from draftgate.backends.core.steps import PENDING, StepPlan, StepResult
from draftgate.backends.engine import logprobs, pooling, prompt_logprobs
from draftgate.backends.engine.gpu.forward import DeviceForward
from draftgate.backends.engine.gpu.layout import HostFields, StepFields, StepShape
from draftgate.backends.engine.gpu.packing import PackedFeeds, PackedWalks, pack_rows, pack_walks
from draftgate.backends.engine.gpu.shapes import ROW_BUCKETS, Shapes
from draftgate.backends.engine.inputs import Feed, feed_of, lay_out_plan
from draftgate.backends.engine.kernels.accept_walk import accept_walk
from draftgate.backends.engine.kernels.accept_walk_ref import AcceptedWalk, StopRules
from draftgate.backends.engine.kernels.kv_move import kv_move
from draftgate.backends.engine.kernels.kv_move_ref import NO_MOVE
from draftgate.backends.engine.kernels.sample_verify import sample
from draftgate.backends.engine.kv_pool import BLOCK_TOKENS, KvPool
from draftgate.backends.engine.logits import adjust, forbid
from draftgate.backends.engine.logprobs import StepLogprobs
from draftgate.backends.engine.model import Decoder
from draftgate.backends.engine.prompt_logprobs import ScoredChunk
from draftgate.backends.engine.sampler import (
    SamplingColumns,
    Verify,
    Walks,
    draw_tokens,
    needs_rejection,
)
from draftgate.backends.engine.transfer import new_event, to_device, to_host

_PENDING: Final = ("pending_rows", "pending_sources")

WALK_ROWS: Final = 65
"""Maximum rows of a compiled accept walk: the longest draft of any policy, and its root."""


@dataclass(frozen=True, slots=True)
class LaunchedGpuStep:
    """An enqueued step, whose tensors in main memory are undefined until `ended` has passed.

    Attributes:
        row_of: the sampled row after the last confirmed token, by sequence key.
        tokens: int64 [sampled rows], the token of each row, on the device.
        starts: the first sampled row of each sequence, then the end of the last sequence.
        results: int64 [2 * sampled rows + sequences], in main memory: the emitted tokens, the rows
            that sampled them, then their number for each sequence.
        logprobs: log probabilities of the sequences that request them, in main memory, or None.
        began, ended: events around the work of the step.
        pooled: float32 [pooled rows, hidden_size] in main memory, None without pooled rows.
        scored: one chunk in main memory for each entry of `StepPlan.scored`.
    """

    row_of: dict[int, int]
    tokens: Tensor
    starts: list[int]
    results: Tensor
    logprobs: StepLogprobs | None
    began: torch.cuda.Event
    ended: torch.cuda.Event
    pooled: Tensor | None
    scored: tuple[ScoredChunk, ...]


class GpuRunner:
    """Runs steps of a model over a KV pool. Only one thread may use a runner.

    `forward` runs the decoder over the pool.
    """

    def __init__(
        self, decoder: Decoder, pool: KvPool, forward: DeviceForward, verify: Verify = "coupled"
    ) -> None:
        self._decoder = decoder
        self._pool = pool
        self._forward = forward
        self._verify = verify
        self._sampling = SamplingColumns()
        self._eos_ids = decoder.config.known_eos_ids
        ends = torch.tensor(sorted(self._eos_ids), dtype=torch.int64)
        self._ends = to_device(ends, decoder.device)

    def capture(self) -> None:
        """Capture the graphs of all recurring shapes, which takes seconds to minutes."""
        self._forward.capture()

    @property
    def launcher(self) -> GpuRunner:
        """This runner, because a GPU works asynchronously."""
        return self

    def execute(self, plan: StepPlan) -> StepResult:
        """Run a step and return its result."""
        return self.fetch(self.launch(plan))

    @torch.inference_mode()
    def launch(self, plan: StepPlan, previous: LaunchedGpuStep | None = None) -> LaunchedGpuStep:
        """Enqueue a step and the copy of its results, without waiting.

        Args:
            plan: the work of the step.
            previous: the last launched step, which samples the `PENDING` tokens of this step.
        """
        device = self._decoder.device
        began, ended = new_event(device), new_event(device)
        hidden_rows = pooling.rows_to_pool(plan) + prompt_logprobs.rows_to_score(plan)
        packed = pack_rows(lay_out_plan(plan), hidden_rows)
        walks = pack_walks(plan)
        shape, fields = self._place(plan, packed, walks, previous, began)
        num_samples = len(packed.rows.sample_rows)
        logits, hidden = self._forward.run(shape, fields, num_samples, len(hidden_rows))
        pooled = pooling.select_pooled(hidden, num_samples, len(plan.pooled))
        pooled = None if pooled is None else to_host(pooled)
        scored = prompt_logprobs.score_rows(plan, hidden, num_samples, self._decoder.logits)
        scored = tuple(chunk.moved(to_host) for chunk in scored)
        tokens, found = self._sample(plan, logits, fields)
        walked = self._walk(tokens, fields, walks)
        parts = walked.num_emitted[: len(plan.work)]
        results = to_host(torch.cat([walked.emitted, walked.kept_rows.long(), parts.long()]))
        ended.record()
        rows = _rows_of_sequences(plan)
        return LaunchedGpuStep(
            rows, tokens, walks.sample_starts, results, found, began, ended, pooled, scored
        )

    def fetch(self, step: LaunchedGpuStep) -> StepResult:
        """Wait for a launched step and return its result.

        Only this method waits for the device.
        """
        step.ended.synchronize()
        walks = _walks(step.starts, step.results.tolist())
        found = logprobs.emitted_logprobs(step.logprobs, walks)
        step_s = step.began.elapsed_time(step.ended) / 1e3
        pooled = pooling.pooled_bytes(step.pooled)
        scored = prompt_logprobs.packed_chunks(step.scored)
        return StepResult(walks.emitted, walks.accepted, found, step_s, pooled, scored)

    def logits(self, plan: StepPlan) -> Tensor:
        """Return the logits of a forward pass alone: float32 [sampled rows, vocab_size]."""
        return self.forward(map(feed_of, plan.work))

    def forward(self, feeds: Iterable[Feed]) -> Tensor:
        """Return the logits of a forward pass over feeds: float32 [sampled rows, vocab_size]."""
        return self._forward(feeds)

    def _place(
        self,
        plan: StepPlan,
        packed: PackedFeeds,
        walks: PackedWalks,
        previous: LaunchedGpuStep | None,
        began: torch.cuda.Event,
    ) -> tuple[StepShape, StepFields]:
        """Copy a step to the device, and insert the tokens that only the device knows.

        `began` is recorded just before the copy, because packing is work of the host.
        """
        pending = _pending(plan, previous) if previous is not None else ([], [])

        def write(host: HostFields) -> None:
            walks.write(self._sampling.of_plan(plan), host)
            for name, places in zip(_PENDING, pending, strict=True):
                host.write(name, places)
            began.record()

        shape, fields = self._forward.place(packed, write)
        if previous is not None and pending[0]:
            rows, sources = (fields[name][: len(pending[0])] for name in _PENDING)
            fields["token_ids"].index_copy_(0, rows, previous.tokens[sources])
        return shape, fields

    def _sample(
        self, plan: StepPlan, logits: Tensor, fields: StepFields
    ) -> tuple[Tensor, StepLogprobs | None]:
        """Return the token of every row, and start the copy of log probabilities to the host."""
        if plan.is_plain:
            return self._draw(plan, logits, fields), None
        wanted = logprobs.model_logprobs(plan, logits)
        forbid(plan, logits)
        adjust(plan, logits, self._eos_ids)
        tokens = self._draw(plan, logits, fields)
        found = logprobs.row_logprobs(plan, wanted, tokens)
        return tokens, None if found is None else found.moved(to_host)

    def _draw(self, plan: StepPlan, logits: Tensor, fields: StepFields) -> Tensor:
        """Return the token of every row: int64 [rows]."""
        if self._verify == "rejection" and needs_rejection(plan):
            return draw_tokens(plan, logits, self._verify)
        return sample(logits, fields.sampling(len(logits)))

    def _walk(self, tokens: Tensor, fields: StepFields, walks: PackedWalks) -> AcceptedWalk:
        """Walk the drafts, and move the keys and values of accepted tokens to their slots."""
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
            _compact(self._pool.cells, slots, starts, walked.kept_rows, walks.longest)
        return walked


def gpu_runner(
    decoder: Decoder,
    pool: KvPool,
    *,
    max_num_seqs: int,
    max_model_len: int,
    verify: Verify = "coupled",
) -> GpuRunner:
    """Return a runner, which launches kernels one by one until `capture` has captured graphs.

    Args:
        decoder: the decoder to run.
        pool: the KV memory of the decoder.
        max_num_seqs: maximum sequences of a step.
        max_model_len: maximum slots of a context.
        verify: the verification method.
    """
    shapes = Shapes(ROW_BUCKETS[-1], max_num_seqs, max_model_len, BLOCK_TOKENS)
    forward = DeviceForward(decoder, pool.layers, pool.dump_slot, shapes)
    return GpuRunner(decoder, pool, forward, verify)


def _compact(
    memory: Tensor, row_slots: Tensor, sample_starts: Tensor, kept_rows: Tensor, longest: int
) -> None:
    """Move the keys and values of accepted paths to their slots, without waiting.

    Args:
        memory: [strips, slots, head_dim], the cells of a pool, modified in place.
        row_slots: int64 [sampled rows], the slot of each row's input token.
        sample_starts: int32 [sequences + 1], the first sampled row of each sequence.
        kept_rows: int32 [sampled rows], from `accept_walk`.
        longest: maximum number of sampled rows of a sequence.
    """
    # The step wrote a token accepted at depth d to the slot of its row, kept_rows[d]. The token
    # belongs in the slot of row d, as in a chain. The rows of a path ascend.
    depths = torch.arange(longest, device=memory.device)
    starts, ends = sample_starts[:-1, None].long(), sample_starts[1:, None]
    targets = starts + depths
    inside = targets < ends
    targets = torch.where(inside, targets, 0)
    kept = torch.where(inside, kept_rows[targets].long(), 0)
    moves = kept > depths
    sources = torch.where(moves, starts + kept, 0)
    kv_move(memory, row_slots[sources], torch.where(moves, row_slots[targets], NO_MOVE))


def _pending(plan: StepPlan, previous: LaunchedGpuStep) -> tuple[list[int], list[int]]:
    """Return the rows of pending tokens, and the rows of the previous step that sample them."""
    rows: list[int] = []
    sources: list[int] = []
    first = 0
    for work in plan.work:
        if work.token_ids[-1] == PENDING:
            rows.append(first + len(work.token_ids) - 1)
            sources.append(previous.row_of[work.sequence.key])
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
    """Return the emitted tokens of each sequence."""
    rows = starts[-1]
    walks = Walks([], [])
    for begin, count in zip(starts, results[2 * rows :], strict=False):
        kept = results[rows + begin : rows + begin + count]
        walks.accepted.append(tuple([row - 1 for row in kept[1:]]))
        walks.emitted.append(tuple(results[begin : begin + count]))
    return walks
