"""Compute the perplexity of a text as `llama-perplexity` does, and compare the two.

    python -m bench.engine.perplexity MODEL TEXT --json OUT [--llama PROGRAM] [--packed]

MODEL is a GGUF file or a checkpoint. The tokens of the text are cut into chunks of 512, which begin
with the BOS token if the model wants one. The second half of each chunk counts: 255 tokens. PROGRAM
is `llama-perplexity` of llama.cpp, which reads the same file and tokenizes the text itself.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import time
from math import exp
from pathlib import Path
from statistics import fmean
from typing import Final

import torch

from bench.engine.bound import cpu_config
from bench.harness.provenance import provenance
from draftgate.backends.core.pipeline import run_until_idle
from draftgate.backends.core.worker import WorkerCore
from draftgate.backends.engine.load import load_engine
from draftgate.backends.token_ids import compact
from draftgate.backends.types import GenerationRequest, SamplingParams
from draftgate.backends.worker_config import WorkerConfig
from draftgate.policies.types import SpeculationMode, SpeculationPlan

CHUNK_TOKENS: Final = 512
SKIPPED: Final = CHUNK_TOKENS // 2
"""Tokens of a chunk, and how many of them at its start are only context for the others."""
ARMS: Final = (
    ("packed", "auto", "stored"),
    ("unpacked, float32", "float32", "none"),
    ("unpacked, bfloat16", "bfloat16", "none"),
)
"""Names, data types and quantizations of Draftgate's workers."""
NO_DRAFTS: Final = SpeculationPlan("off", SpeculationMode.OFF, None, 0, "a benchmark")


def chunks_of(tokens: list[int], bos: list[int]) -> list[list[int]]:
    """Return the whole chunks of a text. If there is a BOS token, it replaces their first token."""
    starts = range(0, len(tokens) - CHUNK_TOKENS + 1, CHUNK_TOKENS)
    return [bos + tokens[start + len(bos) : start + CHUNK_TOKENS] for start in starts]


def chunk_losses(config: WorkerConfig, text: str, most: int) -> list[float]:
    """Return the mean negative log probability of the counted tokens of each chunk."""
    engine = load_engine(config)
    assert isinstance(engine.worker, WorkerCore)
    encode = engine.worker.tokenizer.encode
    sampling = SamplingParams(max_tokens=1, seed=0, prompt_logprobs=0)
    losses = []
    for index, chunk in enumerate(chunks_of(encode(text), encode(""))[:most]):
        request = GenerationRequest(str(index), compact(chunk), sampling, NO_DRAFTS)
        engine.worker.submit(request, 0.0)
        scores = [
            token.logprob
            for step in run_until_idle(engine.worker, engine.executor, time.monotonic)
            for _, delta in step.deltas
            if delta.prompt_logprobs is not None
            for token in delta.prompt_logprobs.scored_tokens()
        ]
        losses.append(-fmean(scores[SKIPPED:]))  # the first score is that of the second token
    return losses


def llama_perplexity(program: Path, model: str, text: Path, chunks: int) -> float:
    """Return the final estimate of llama.cpp."""
    command = [program, "-m", model, "-f", text, "-c", CHUNK_TOKENS, "--chunks", chunks, "-t", 1]
    arguments = [str(part) for part in command]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True)  # noqa: S603
    found = re.search(r"Final estimate: PPL = ([0-9.]+)", done.stdout + done.stderr)
    assert found is not None, done.stderr[-1000:]
    return float(found[1])


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("text", type=Path)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--llama", type=Path)
    parser.add_argument("--chunks", type=int, default=80)
    parser.add_argument("--packed", action="store_true", help="leave out the unpacked weights")
    options = parser.parse_args()
    torch.set_num_threads(1)
    text = options.text.read_text("utf-8")
    found = {}
    for name, dtype, quantization in ARMS[: 1 if options.packed else None]:
        config = cpu_config(options.model, 1, dtype=dtype, quantization=quantization)
        losses = chunk_losses(config, text, options.chunks)
        found[name] = round(exp(fmean(losses)), 4)
        print(name, found[name], flush=True)
    if options.llama is not None:
        found["llama.cpp"] = llama_perplexity(
            options.llama, options.model, options.text, len(losses)
        )
        print("llama.cpp", found["llama.cpp"])
    tokens = len(losses) * (CHUNK_TOKENS - SKIPPED - 1)
    facts = {**provenance(), "tokens": tokens, "perplexity": found}
    options.json.write_text(json.dumps(facts, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
