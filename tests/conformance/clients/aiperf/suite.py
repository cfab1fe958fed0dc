"""aiperf, which also reads the report on speculation and the metrics of the server.

aiperf reads no usage of embeddings, nor of a streamed response that ends as incomplete. The test of
responses therefore uses the scripted model, whose responses are complete.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from common import TOKENIZER, output_of

REQUESTS = 4
FIXED = ["--osl", "16", "--extra-inputs", "ignore_eos:true"]


def profiled(folder: Path, url: str, model: str, *options: str) -> dict[str, Any]:
    """Return the report of a run."""
    output_of(
        [
            "aiperf", "profile", "--model", model, "--url", url, "--tokenizer", str(TOKENIZER),
            "--use-server-token-count", "--isl", "32", "--concurrency", "2",
            "--request-count", str(REQUESTS), "--random-seed", "1", "--ui", "none",
            "--no-gpu-telemetry", "--output-artifact-dir", str(folder), *options,
        ],
        folder,
    )  # fmt: skip
    report = json.loads((folder / "profile_export_aiperf.json").read_text())
    assert report["error_summary"] == []
    assert report["request_count"]["avg"] == REQUESTS
    return report


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_run_reads_the_report_on_speculation(tmp_path: Path, endpoint: str, stream: bool) -> None:
    """The requests succeed, and the report has the acceptance of their drafts."""
    options = ["--endpoint-type", endpoint, *FIXED, *(["--streaming"] * stream)]
    report = profiled(tmp_path, os.environ["SHIPPED"], "draftgate-demo", *options)
    assert report["usage_completion_tokens"]["avg"] == 16
    assert report["spec_decode_acceptance_length"]["avg"] >= 1
    assert ("time_to_first_token" in report) == stream


def test_run_of_messages(tmp_path: Path) -> None:
    """The requests to Anthropic's API succeed, with usage."""
    options = ["--endpoint-type", "messages", "--streaming", "--osl", "16",
               "--extra-inputs", "min_tokens:16"]  # fmt: skip
    report = profiled(tmp_path, os.environ["SHIPPED"], "draftgate-demo", *options)
    assert report["usage_completion_tokens"]["avg"] == 16


def test_run_of_responses(tmp_path: Path) -> None:
    """The requests to the API of responses succeed, with usage."""
    options = ["--endpoint-type", "responses", "--streaming"]
    report = profiled(tmp_path, os.environ["SCRIPTED"], "scripted", *options)
    assert report["usage_completion_tokens"]["avg"] > 1


def test_metrics_of_the_server_are_read(tmp_path: Path) -> None:
    """aiperf reads `/metrics` during the run."""
    profiled(tmp_path, os.environ["SHIPPED"], "draftgate-demo", "--endpoint-type", "chat", *FIXED)
    found = json.loads((tmp_path / "server_metrics_export.json").read_text())
    assert found["summary"]["endpoints_successful"] == [os.environ["SHIPPED"] + "/metrics"]
    assert any(name.startswith("draftgate_") for name in found["metrics"])
