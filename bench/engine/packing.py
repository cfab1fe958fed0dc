"""Measure the host time of packing a step for a GPU, without a GPU.

    python -m bench.engine.packing --json OUT

The steps decode, or verify 4 drafts, for sequences with contexts of 1,024 tokens, top-p and a
temperature. Each step packs its rows, page tables, sampling parameters and drafts into main memory
(`backends/engine/gpu/packing.py`). Each result is the lowest decile of the CPU time of 200 steps of
the same sequences, because other programs hardly change it.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any, Final

import torch

from bench.engine.bench_engine import step_plan
from bench.engine.cases import Case
from bench.engine.host import lowest_decile_us
from bench.harness.provenance import provenance
from draftgate.backends.core.steps import StepPlan
from draftgate.backends.engine.gpu.layout import HostFields, StepLayout
from draftgate.backends.engine.gpu.packing import pack_rows, pack_walks
from draftgate.backends.engine.gpu.shapes import ROW_BUCKETS, Shapes
from draftgate.backends.engine.inputs import lay_out_plan
from draftgate.backends.engine.kv_pool import BLOCK_TOKENS
from draftgate.backends.engine.sampler import SamplingColumns
from draftgate.backends.types import SamplingParams

BATCHES: Final = (1, 8, 64, 256)
DRAFTS: Final = (0, 4)
CONTEXT_TOKENS: Final = 1024
STEPS: Final = 200
SAMPLING: Final = SamplingParams(max_tokens=64, seed=1, temperature=0.8, top_p=0.95)
VOCABULARY: Final = 32_000


def packing_us(sequences: int, drafts: int) -> float:
    """Return the microseconds of packing a step of this number of sequences and drafts."""
    case = Case("verify", sequences, 1 + drafts, CONTEXT_TOKENS)
    work = step_plan([case], VOCABULARY, SAMPLING).work
    shapes = Shapes(ROW_BUCKETS[-1], max(BATCHES), 2 * CONTEXT_TOKENS, BLOCK_TOKENS)
    sampling, layouts, taken_s = SamplingColumns(), dict[Any, StepLayout](), []
    for _ in range(STEPS):
        plan = StepPlan(work)
        started_s = time.thread_time()
        packed = pack_rows(lay_out_plan(plan))
        walks = pack_walks(plan)
        rows = len(packed.rows.token_ids)
        shape, _ = shapes.shape(rows, sequences, packed.longest_context)
        layout = layouts.get(shape) or layouts.setdefault(shape, StepLayout(shape))
        host = HostFields(layout, torch.empty(layout.num_bytes, dtype=torch.uint8))
        packed.write(host, dump_slot=0)
        walks.write(sampling.of(plan), host)
        taken_s.append(time.thread_time() - started_s)
    return lowest_decile_us(taken_s)


def main(arguments: list[str] | None = None) -> None:
    """Measure the packing of steps, and write the JSON."""
    parser = argparse.ArgumentParser(prog="python -m bench.engine.packing", description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows = []
    for drafts in DRAFTS:
        for sequences in BATCHES:
            us = packing_us(sequences, drafts)
            rows.append({"sequences": sequences, "drafts": drafts, "packing_us": us})
            print(rows[-1], flush=True)
    result = {**provenance(), "context_tokens": CONTEXT_TOKENS, "steps": rows}
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
