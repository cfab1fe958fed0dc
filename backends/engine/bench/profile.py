"""Write the step costs of this machine as a `profile/1` for the simulator.

python -m backends.engine.bench.profile --json backends/sim/profiles/cpu-demo.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from backends.base import WorkerConfig
from backends.engine.bench.record import provenance
from backends.engine.config import read_model_config
from backends.engine.load import load_engine
from backends.engine.runner import Runner
from backends.engine.warmup import TIMED_CONTEXT, measure_step_cost
from backends.shipped import SHIPPED_MODEL

MAX_TOKENS = TIMED_CONTEXT + 1
MAX_SEQUENCES = 256


def measure() -> dict[str, Any]:
    """Return the profile of the shipped model on this machine."""
    facts = provenance()
    engine = load_engine(WorkerConfig())
    runner = engine.executor
    assert isinstance(runner, Runner)
    cost = measure_step_cost(runner, MAX_TOKENS, MAX_SEQUENCES)
    source = (
        f"measured: {facts['command']}, commit {facts['commit']}, {facts['date']}, "
        f"torch {facts['torch']}, {facts['threads']} threads"
    )
    return {
        "device": facts["device"],
        "model": engine.served.card.model_id,
        "dtype": "float32",
        "source": source + (", machine disturbed" if facts["disturbed"] else ""),
        "token_buckets": cost.token_buckets,
        "step_s": [round(seconds, 7) for seconds in cost.step_s],
        "kv_token_s": round(cost.kv_token_s, 12),
        "sequence_s": round(cost.sequence_s, 9),
        "prefill_attention_s": 0.0,
        "draft": {},
        "kv_token_bytes": read_model_config(SHIPPED_MODEL).kv_bytes_per_token(4),
    }


def main() -> None:
    """Measure and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    path = parser.parse_args().json
    path.write_text(json.dumps(measure(), indent=1) + "\n", encoding="utf-8")
    print(path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
