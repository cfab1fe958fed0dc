"""guidellm with each endpoint for texts."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from common import TOKENIZER, output_of

REQUESTS = 6


@pytest.mark.parametrize("endpoint", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
def test_run_succeeds_without_a_warning(tmp_path: Path, endpoint: str) -> None:
    """All requests succeed, and each has the requested number of tokens."""
    url = os.environ["SHIPPED"]
    report = tmp_path / "report.json"
    output_of(
        [
            "guidellm", "run", "--disable-console-interactive",
            "--backend", f"kind=openai_http,target={url},request_format={endpoint}",
            "--tokenizer", f"kind=huggingface_auto,model={TOKENIZER}",
            "--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=16",
            "--profile", "kind=concurrent,streams=2",
            "--constraint", f"kind=max_requests,count={REQUESTS}",
            "--output", f"kind=json,path={report}", "--output", "kind=console",
        ],
        tmp_path,
    )  # fmt: skip
    (run,) = json.loads(report.read_text())["benchmarks"]
    found = run["requests"]
    assert (found["errored"], found["incomplete"]) == ([], [])
    assert [one["output_tokens"] for one in found["successful"]] == [16] * REQUESTS
