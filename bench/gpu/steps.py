"""Stages that time steps: rates, models of each size, profile, exact mode and transformers."""

from __future__ import annotations

import argparse
import importlib
import json
from dataclasses import asdict
from typing import Any, Final

from bench.engine.bench_engine import MAX_SEQS
from bench.engine.cases import Case, Grid
from bench.engine.device import measure_rates
from bench.engine.exact import add_exact, measure_exact
from bench.engine.profile import profile_of
from bench.engine.steps import measure_steps
from bench.gpu.setting import Setting, Skipped, fitting, load_engine
from bench.harness.provenance import provenance
from draftgate.backends.sim.profile import load_profile

FULL: Final = Grid((1, 8, 64, 256), (512, 1024, 2048, 8192), (0, 4), 8192)
"""The estimates are for contexts of 1,024 tokens."""

TINY: Final = Grid((1, 4), (64,), (0, 2), 128)
PEERS: Final = Grid((1, 8), (512, 2048), (0,), 2048)
ROUNDS: Final = 7
PROFILE_TOKENS: Final = 8192


def run_rates(setting: Setting) -> dict[str, Any]:
    """Return the bandwidth and the matrix rate, which are the limits of all later stages."""
    return {"rates": asdict(measure_rates(setting.device, setting.dtype))}


def run_steps_1b(setting: Setting) -> dict[str, Any]:
    """Return the steps of a model of 1B parameters."""
    return _steps(setting, "random-1b")


def run_steps_8b(setting: Setting) -> dict[str, Any]:
    """Return the steps of a model of 8B parameters, beside the estimates."""
    result = _steps(setting, "random-8b")
    return result | {"estimates": against_estimates(result["steps"])}


def run_steps_8b_fp8(setting: Setting) -> dict[str, Any]:
    """Return the steps of a model of 8B parameters in FP8 with blocks."""
    return _steps(setting, "random-8b-fp8")


def run_steps_8b_int4(setting: Setting) -> dict[str, Any]:
    """Return the steps of a model of 8B parameters with weights of 4 bits."""
    return _steps(setting, "random-8b-int4")


def run_steps_30b_a3b(setting: Setting) -> dict[str, Any]:
    """Return the steps of a mixture of 128 experts, of which a token uses 3B parameters."""
    return _steps(setting, "random-30b-a3b")


def _steps(setting: Setting, name: str, *, alone: bool = True) -> dict[str, Any]:
    grid = _grid(setting, FULL if alone else PEERS)
    rates = setting.rates()
    with setting.model(name) as model:
        cases, left_out = fitting(model, list(grid.cases()))
        engine = load_engine(model, cases)
        facts = {"model": name, "rates": asdict(rates), "left_out": left_out}

        def keep(rows: list[dict[str, Any]]) -> None:
            setting.keep(facts | {"steps": rows})

        rows = measure_steps(engine, cases, rates, _rounds(setting), alone=alone, keep=keep)
    return facts | {"steps": rows}


def _grid(setting: Setting, full: Grid) -> Grid:
    return TINY if setting.tiny else full


def _rounds(setting: Setting) -> int:
    return 1 if setting.tiny else ROUNDS


def run_profile(setting: Setting) -> dict[str, Any]:
    """Write the step costs as `profile-8b.json`, for `draftgate simulate --profile`."""
    context = 2048 if setting.tiny else PROFILE_TOKENS
    batch = Case("decode", 8 if setting.tiny else MAX_SEQS, 1, 512)
    with setting.engine("random-8b", [batch, Case("decode", 1, 1, context)]) as engine:
        profile = profile_of(provenance(setting.device), engine.model, engine.cost, {})
    path = setting.out / "profile-8b.json"
    path.write_text(json.dumps(profile, indent=1) + "\n", encoding="utf-8")
    load_profile(str(path))  # the simulator accepts it
    return {
        "profile": path.name,
        "token_buckets": profile["token_buckets"],
        "step_s": profile["step_s"],
    }


def run_exact(setting: Setting) -> dict[str, Any]:
    """Return the ratios of exact to plain steps of the 1B model.

    Raises:
        Skipped: the stage `steps-1b` has no result.
    """
    setting.need_gpu()
    try:
        plain = json.loads((setting.out / "steps-1b.json").read_text("utf-8"))["steps"]
    except (OSError, KeyError, ValueError):
        raise Skipped("needs the result of steps-1b") from None
    grid = PEERS._replace(drafts=(0, 4))
    args = argparse.Namespace(rounds=ROUNDS, threads=None)
    add_exact(plain, measure_exact(args, grid, "random-1b", "bfloat16", "cuda"))
    return {"steps": [row for row in plain if "exact_over_plain" in row]}


def run_transformers(setting: Setting) -> dict[str, Any]:
    """Return steps of the 1B model with `transformers` in the same rounds.

    Raises:
        Skipped: `transformers` cannot be imported.
    """
    try:
        importlib.import_module("transformers")
    except Exception as error:  # a broken installation may raise anything
        raise Skipped(f"transformers: {error!r}") from error
    return _steps(setting, "random-1b", alone=False)


# --- Step times that a review at the desk expects, to compare with the first measurements ---------


CONTEXT_TOKENS: Final = 1024
FLOOR_MS: Final = {1: 3.5, 8: 3.7, 64: 5.5, 256: 13.0}
OFF_MS: Final = {1: 4.9, 8: 5.1, 64: 7.6, 256: 17.6}
VERIFY_MS: Final = {1: 5.3, 8: 5.8, 64: 12.8}
"""Milliseconds of a step by number of sequences: the bandwidth's limit, a greedy step without
drafts, and a step that verifies 4 n-gram drafts per sequence. Llama-8B in bfloat16 after 1,024
tokens on an H200, within 30% (estimated, not measured, 2026-11-27)."""

TOLERANCE: Final = 0.3


def against_estimates(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows that have an estimate, with the ratio of measured to estimated time."""
    found = []
    for row in rows:
        expected = {1: OFF_MS, 5: VERIFY_MS}.get(row["tokens"], {}).get(row["batch"])
        if expected is None or row["context_tokens"] != CONTEXT_TOKENS or "ms" not in row:
            continue
        ratio = row["ms"] / expected
        found.append(
            {
                "step": row["name"],
                "batch": row["batch"],
                "floor_ms": FLOOR_MS[row["batch"]],
                "estimated_ms": expected,
                "measured_ms": row["ms"],
                "device_ms": row.get("device_ms"),
                "ratio": round(ratio, 2),
                "as_expected": abs(ratio - 1) <= TOLERANCE,
            }
        )
    return found
