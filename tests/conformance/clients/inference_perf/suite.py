"""inference-perf with chats and completions.

Its package requires Python 3.12, but version 0.7 also runs with Python 3.11.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from common import TOKENIZER, output_of

REQUESTS = 6
DATA: dict[str, Any] = {
    "chat": {
        "type": "shared_prefix",
        "shared_prefix": {
            "num_groups": 2, "num_prompts_per_group": 3, "system_prompt_len": 32,
            "question_len": 16, "output_len": 8,
        },
    },
    "completion": {
        "type": "random",
        "input_distribution": {"min": 16, "mean": 32, "max": 48, "std_dev": 4, "total_count": 6},
        "output_distribution": {"min": 8, "mean": 8, "max": 8, "std_dev": 0, "total_count": 6},
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", DATA)
def test_run_succeeds_without_a_warning(tmp_path: Path, kind: str) -> None:
    """All requests succeed, and each has the requested number of tokens."""
    settings = {
        "api": {"type": kind, "streaming": True},
        "server": {"type": "vllm", "base_url": os.environ["SHIPPED"], "ignore_eos": True,
                   "model_name": "draftgate-demo"},
        "tokenizer": {"pretrained_model_name_or_path": str(TOKENIZER)},
        "data": DATA[kind],
        "load": {"type": "constant", "num_workers": 1, "base_seed": 1,
                 "stages": [{"rate": 2, "duration": REQUESTS // 2}]},
        "report": {"request_lifecycle": {"summary": True}, "prometheus": None},
        "storage": {"local_storage": {"path": str(tmp_path / "results")}},
    }  # fmt: skip
    # YAML includes JSON.
    (tmp_path / "settings.yaml").write_text(json.dumps(settings))
    output_of(["inference-perf", "--config_file", "settings.yaml"], tmp_path)
    found = json.loads((tmp_path / "results" / "summary_lifecycle_metrics.json").read_text())
    assert found["successes"]["count"] == REQUESTS
    assert found["failures"]["count"] == 0
