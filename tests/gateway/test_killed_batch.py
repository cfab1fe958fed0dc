"""A batch whose server is killed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from openai import OpenAI

from tests.gateway.redis_server import free_port

LINES = 40


@contextmanager
def serving(folder: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server whose worker takes 0.1 s for a request, and kill it at the end of the block."""
    command = [
        sys.executable, "-m", "draftgate", "serve", "--backend", "sim", "--sim-service-ms", "100",
        "--port", str(port), "--files", str(folder), "--batch-concurrency", "2",
        "--log-level", "error",
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


@pytest.mark.long
def test_a_batch_survives_kill_9_of_its_server(tmp_path: Path) -> None:
    """After SIGKILL, the next server completes the batch with one result for each line, and keeps
    the results that the first one has stored."""
    port = free_port()
    # The client waits until the server has started.
    api = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="unused", max_retries=20)
    rows = [
        {
            "custom_id": str(number),
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": "import ", "max_tokens": 4},
        }
        for number in range(LINES)
    ]
    folder = tmp_path / "files"
    with serving(folder, port):
        data = "\n".join(map(json.dumps, rows)).encode()
        file = api.files.create(file=("in.jsonl", data), purpose="batch")
        batch = api.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="1h"
        )
        while (counts := api.batches.retrieve(batch.id).request_counts) is None or (
            counts.completed == 0
        ):
            time.sleep(0.05)
        assert counts.completed < LINES
    stored = [
        json.loads(line)["id"]
        for part in folder.glob("tenants/*/results/*/*")
        for line in part.read_text().splitlines()
    ]
    assert 0 < len(stored) < LINES
    with serving(folder, port):
        while (batch := api.batches.retrieve(batch.id)).status != "completed":
            assert batch.status in {"in_progress", "finalizing"}
            time.sleep(0.05)
        assert batch.output_file_id is not None
        text = api.files.content(batch.output_file_id).text
    output = [json.loads(line) for line in text.splitlines()]
    assert Counter(row["custom_id"] for row in output) == Counter(map(str, range(LINES)))
    assert set(stored) <= {row["id"] for row in output}
