"""Stages that run whole requests: idle share, replayed drafts and the shipped model."""

from __future__ import annotations

from typing import Any, Final

from bench.engine.bench_engine import BenchEngine
from bench.engine.cases import Case
from bench.engine.generation import measure_generation
from bench.engine.idle import measure_idle
from bench.engine.models import StoredModel
from bench.engine.random_model import MOST_PROMPT
from bench.engine.serving import BATCHES
from bench.engine.speedup import Replayed, measure_speedups
from bench.gpu.setting import Setting
from draftgate.backends.checkpoints import SHIPPED_MODEL
from draftgate.lab.sim.recording import load_recording
from draftgate.policies.speculation.planning import MAX_DRAFT_TOKENS

RECORDING: Final = "llama-3.1-8b"
LENGTHS: Final = (1, 2, 4, 8)
NEW_TOKENS: Final = 128
ROUNDS: Final = 3


def run_idle(setting: Setting) -> dict[str, Any]:
    """Return the idle shares of decode steps without drafts."""
    setting.need_gpu()
    with setting.engine("random-8b", [Case("decode", 64, 1, 1024)]) as engine:
        return {"idle": measure_idle(engine, 64)}


def run_replay(setting: Setting) -> dict[str, Any]:
    """Return the speed of `off`, fixed lengths and `auto` with recorded drafts of each proposer."""
    settings = Replayed("", LENGTHS, NEW_TOKENS, ROUNDS, RECORDING)
    if setting.tiny:
        settings = Replayed("", (2,), 8, 1, RECORDING, (1, 2))
    rates, rows = setting.rates(), []
    longest = MOST_PROMPT + settings.new_tokens + MAX_DRAFT_TOKENS
    with setting.engine("random-8b", [Case("decode", max(settings.batches), 1, longest)]) as engine:
        for proposer in load_recording(RECORDING).proposers:
            rows += measure_speedups(engine, settings._replace(acceptance=proposer), rates)
            setting.keep({"replay": rows})
    return {"replay": rows}


def run_shipped(setting: Setting) -> dict[str, Any]:
    """Return the speed of the shipped model with every proposer."""
    model = StoredModel("shipped", SHIPPED_MODEL, setting.dtype, setting.device)
    new_tokens, rounds = (4, 1) if setting.tiny else (64, ROUNDS)
    longest = MOST_PROMPT + new_tokens
    engine = BenchEngine.load(model, max(BATCHES) * longest, longest)
    return {"generation": measure_generation(engine, new_tokens, rounds)}
