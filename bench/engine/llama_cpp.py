"""Compare decode steps with llama.cpp's server on the same weights, in the same run.

    python -m bench.engine.llama_cpp --gguf FILE --model DIR --dtype bfloat16 --json OUT

The source distribution of `llama-cpp-python` contains the sources of `llama-server`, and
`convert_hf_to_gguf.py`, which writes the GGUF. The time of the server is the median gap between the
tokens of a stream while all streams run. The time of the engine is a step of the same batch with
the same context, without a server. Rounds alternate.
"""

from __future__ import annotations

import argparse
import http.client
import json
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch

from bench.engine.bench_engine import BenchEngine
from bench.engine.cases import Case
from bench.engine.models import StoredModel
from bench.harness.provenance import provenance, require_quiet
from draftgate.backends.engine.kv_pool import BLOCK_TOKENS

STREAMS: Final = (1, 8)
CONTEXT_TOKENS: Final = 512
NEW_TOKENS: Final = 48
ROUNDS: Final = 5
START_TIMEOUT_S: Final = 60.0


@contextmanager
def running(server: str, gguf: Path, threads: int) -> Iterator[int]:
    """Run `llama-server` and yield its port.

    Raises:
        RuntimeError: the server does not respond in time.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    slots = max(STREAMS)
    context = slots * (CONTEXT_TOKENS + NEW_TOKENS + 16)
    command = [server, "-m", str(gguf), "--host", "127.0.0.1", "--port", str(port)]
    command += ["-np", str(slots), "-c", str(context), "-t", str(threads), "-tb", str(threads)]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)  # noqa: S603
        try:
            _wait(port)
            yield port
        finally:
            process.terminate()
            process.wait()


def _wait(port: int) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline_s:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return
        except OSError:
            pass
        time.sleep(0.2)
    raise RuntimeError("llama-server did not respond in time. See its log")


def stream_times(port: int, seed: int) -> list[float]:
    """Return the arrival time of each token of a stream, in seconds."""
    prompt = [(seed * 131 + place * 7) % 3000 + 300 for place in range(CONTEXT_TOKENS)]
    body = {
        "prompt": prompt,
        "n_predict": NEW_TOKENS,
        "temperature": 0.0,
        "ignore_eos": True,
        "cache_prompt": False,
        "stream": True,
    }
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    connection.request("POST", "/completion", json.dumps(body), {"content-type": "text/json"})
    lines = connection.getresponse()
    return [time.perf_counter() for line in lines if line.startswith(b"data: ")]


def llama_cpp_step_s(port: int, streams: int, turn: int) -> float:
    """Return the median seconds between tokens while all streams decode."""
    with ThreadPoolExecutor(streams) as pool:
        seeds = [turn * streams + index for index in range(streams)]
        all_times = list(pool.map(lambda seed: stream_times(port, seed), seeds))
    begin, end = max(times[0] for times in all_times), min(times[-1] for times in all_times)
    gaps = [
        late - early
        for times in all_times
        for early, late in pairwise(times)
        if begin <= early and late <= end
    ]
    return median(gaps)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Return the times of both engines, with their provenance.

    Raises:
        SystemExit: the machine is busy.
    """
    facts = provenance()
    require_quiet(facts, allow_busy=args.allow_busy)
    dtype = getattr(torch, args.dtype)
    model = StoredModel(args.model.name, args.model, dtype, torch.device("cpu"))
    longest = CONTEXT_TOKENS + BLOCK_TOKENS
    bench_engine = BenchEngine.load(model, max(STREAMS) * longest, longest)
    rows = []
    with running(args.server, args.gguf, torch.get_num_threads()) as port:
        for streams in STREAMS:
            case = Case("decode", streams, 1, CONTEXT_TOKENS)
            taken: list[tuple[float, float]] = []
            for turn in range(ROUNDS):
                theirs_s = llama_cpp_step_s(port, streams, turn)
                taken.append(
                    (median(bench_engine.step_s(case) for _ in range(NEW_TOKENS)), theirs_s)
                )
            ratios = sorted(theirs / own for own, theirs in taken)
            rows.append(
                {
                    "streams": streams,
                    "context_tokens": CONTEXT_TOKENS,
                    "ms": round(1e3 * median(own for own, _ in taken), 3),
                    "llama_cpp_ms": round(1e3 * median(theirs for _, theirs in taken), 3),
                    "speedup": round(median(ratios), 3),
                    "speedup_of_rounds": [round(ratio, 3) for ratio in ratios],
                }
            )
            print(rows[-1], flush=True)
    return {**facts, "model": args.model.name, "dtype": args.dtype, "results": rows}


def main() -> None:
    """Measure both engines, and append the result to the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--server", default="llama-server")
    parser.add_argument("--gguf", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--allow-busy", action="store_true")
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    found = json.loads(args.json.read_text()) if args.json.exists() else []
    found.append(measure(args))
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
