"""Stages that time unusual steps: skewed contexts, sampling methods and trees."""

from __future__ import annotations

from dataclasses import replace
from statistics import median
from typing import Any, Final

from bench.engine.bench_engine import GREEDY, BenchEngine, step_plan
from bench.engine.cases import Case
from bench.gpu.setting import Setting
from draftgate.backends.core.drafts import ROOT, Draft
from draftgate.backends.core.steps import StepPlan
from draftgate.backends.types import SamplingParams
from draftgate.policies.speculation.planning import MAX_DRAFT_TOKENS

RUNS: Final = 9
STALL_FACTOR: Final = 20.0
"""Ratio of the first to later steps of a tree size above which a kernel was compiled. A compilation
takes at least 0.1 s, and a step of the 1B model a few milliseconds."""


def run_skew(setting: Setting) -> dict[str, Any]:
    """Return a step of 63 short contexts and a long one, and one of equal contexts in total."""
    many, short, long = (3, 64, 512) if setting.tiny else (63, 1024, 32768)
    even = (many * short + long) // (many + 1)
    cases = {
        "skewed": [Case("decode", many, 1, short), Case("decode", 1, 1, long)],
        "even": [Case("decode", many + 1, 1, even)],
        "long alone": [Case("decode", 1, 1, long)],
    }
    # The pool holds the largest step, which has an additional block per sequence.
    room = [Case("decode", many + 1, 1, even + 16), Case("decode", 1, 1, long)]
    with setting.engine("random-8b", room) as engine:
        vocab = engine.model.config.vocab_size
        rows: list[dict[str, Any]] = []
        for name, parts in cases.items():
            rows.append({"step": name, **timed(engine, step_plan(parts, vocab), setting)})
            setting.keep({"skew": rows})
    key = "device_ms" if setting.on_gpu else "ms"
    return {"skew": rows, "skewed_over_even": round(rows[0][key] / rows[1][key], 3)}


def run_sampling(setting: Setting) -> dict[str, Any]:
    """Return steps of a sequence by sampling method."""
    drawn = {
        "greedy": GREEDY,
        "temperature": SamplingParams(1, seed=0, temperature=1.0),
        "top-p": SamplingParams(1, seed=0, temperature=1.0, top_p=0.9),
        "top-k": SamplingParams(1, seed=0, temperature=1.0, top_k=50),
        "top-p and top-k": SamplingParams(1, seed=0, temperature=1.0, top_p=0.9, top_k=50),
    }
    case = Case("decode", 1, 1, 64 if setting.tiny else 1024)
    with setting.engine("random-8b", [case]) as engine:
        vocab = engine.model.config.vocab_size
        rows: list[dict[str, Any]] = []
        for name, sampling in drawn.items():
            plan = step_plan([case], vocab, sampling)
            rows.append({"sampling": name, **timed(engine, plan, setting)})
            setting.keep({"sampling": rows})
    return {"sampling": rows}


def run_trees(setting: Setting) -> dict[str, Any]:
    """Return the first and later times of steps with trees of each size."""
    sizes = (2, 5) if setting.tiny else range(2, MAX_DRAFT_TOKENS + 1)
    context = 64 if setting.tiny else 1024
    rows: list[dict[str, Any]] = []
    with setting.engine("random-1b", [Case("verify", 8, MAX_DRAFT_TOKENS + 1, context)]) as engine:
        for size in sizes:
            case = Case("verify", 8, size + 1, context)
            chains = step_plan([case], engine.model.config.vocab_size)
            for shape, plan in (("chain", chains), ("tree", with_trees(chains))):
                first_ms = 1e3 * engine.plan_s(plan)
                times = {"first_ms": round(first_ms, 3), **timed(engine, plan, setting)}
                rows.append({"shape": shape, "tokens": size, **times})
                print(rows[-1], flush=True)
                setting.keep({"trees": rows})
    stalled = [
        f"{row['shape']} of {row['tokens']}"
        for row in rows
        if row["first_ms"] > STALL_FACTOR * row["ms"]
    ]
    return {"trees": rows, "first_step_stalled": stalled}


def with_trees(plan: StepPlan) -> StepPlan:
    """Return the step with a binary tree in place of each chain of drafts."""
    work = []
    for each in plan.work:
        size = len(each.draft)
        parents = tuple((place - 2) // 2 if place > 1 else ROOT for place in range(size))
        draft = Draft(each.draft.token_ids, parents).depth_first()
        work.append(replace(each, draft=draft))
    return StepPlan(tuple(work))


def timed(engine: BenchEngine, plan: StepPlan, setting: Setting) -> dict[str, float]:
    """Return the median milliseconds of a step after a warm-up, and those of the GPU."""
    runs = 2 if setting.tiny else RUNS
    engine.plan_s(plan)
    row = {"ms": round(1e3 * median(engine.plan_s(plan) for _ in range(runs)), 3)}
    if setting.on_gpu:
        taken_s = [engine.plan_device_s(plan) for _ in range(runs)]
        row["device_ms"] = round(1e3 * median(taken_s), 3)
    return row
