"""Measure time and peak memory of loading a model, relative to its weights.

    python -m bench.engine.loading --json bench/results/loading.json

The benchmark writes a random checkpoint to a temporary directory. Each load runs in a separate
process, after the files were evicted from the page cache. The process records its peak memory,
without the memory held after imports and a first small product. Between loads, the benchmark reads
the same files at full speed for comparison.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch
from safetensors.torch import save_file

from bench.harness.provenance import provenance
from draftgate.backends.engine.checkpoint import Checkpoint
from draftgate.backends.engine.config import read_model_config
from draftgate.backends.engine.linear import Linear
from draftgate.backends.engine.weights import layer_shapes, load_weights

SHAPE: Final = {
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 25,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
}
"""Shape of the checkpoint: 806 million bytes in bfloat16, in the proportions of published models.
"""

SHARDS: Final = 2
ROUNDS: Final = 3
DTYPES: Final = ("bfloat16", "float32")
READ_BYTES: Final = 1 << 23


def random_checkpoint(directory: Path, **shape: object) -> Path:
    """Write a random Llama in bfloat16 shards, and return its directory."""
    raw = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        **shape,
    }
    (directory / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    config = read_model_config(directory)
    matrix = (config.vocab_size, config.hidden_size)
    shapes = layer_shapes(config) | {"model.norm.weight": (config.hidden_size,)}
    shapes |= {"model.embed_tokens.weight": matrix}
    if not config.tied_embeddings:
        shapes |= {"lm_head.weight": matrix}
    names = sorted(shapes)
    per_shard = -(-len(names) // SHARDS)
    weight_map = {}
    for index in range(SHARDS):
        file = f"model-{index + 1:05}-of-{SHARDS:05}.safetensors"
        part = names[index * per_shard : (index + 1) * per_shard]
        tensors = {name: _random(shapes[name]) for name in part}
        save_file(tensors, directory / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    index_path = directory / "model.safetensors.index.json"
    index_path.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}), encoding="utf-8")
    return directory


def _random(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16).uniform_(-0.05, 0.05)


def load_apart(directory: Path, dtype: str) -> dict[str, float]:
    """Load in a separate process, and return times and memory.

    Returns:
        `load_s`: seconds of the load.
        `cpu_s`: CPU seconds of all threads, including the hash.
        `peak_bytes`: peak memory while loading, without the memory held before.
        `weight_bytes`: bytes of the loaded weights.
    """
    command = [sys.executable, "-m", __spec__.name, "--apart", str(directory), dtype]
    # The command runs this module with a path that is created here.
    done = subprocess.run(command, check=True, capture_output=True, text=True)  # noqa: S603
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


def _load_here(directory: Path, dtype_name: str) -> dict[str, float]:
    dtype = getattr(torch, dtype_name)
    config = read_model_config(directory)
    Linear(torch.zeros(16, 16, dtype=dtype))(torch.zeros(16, 16, dtype=dtype))
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # reset the peak memory
    before_bytes = _status_bytes("VmRSS")
    started_s, computed_s = time.perf_counter(), time.process_time()
    weights = load_weights(directory, config, dtype)
    load_s, cpu_s = time.perf_counter() - started_s, time.process_time() - computed_s
    peak_bytes = _status_bytes("VmHWM") - before_bytes
    assert len(weights.layers) == config.num_layers
    weight_bytes = Checkpoint(directory).num_parameters * dtype.itemsize
    return {
        "load_s": load_s,
        "cpu_s": cpu_s,
        "peak_bytes": peak_bytes,
        "weight_bytes": weight_bytes,
    }


def _status_bytes(name: str) -> int:
    """Return a memory field of this process from /proc/self/status."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(name)


def _forget(files: list[Path]) -> None:
    """Evict the files from the page cache."""
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _read_s(files: list[Path]) -> float:
    """Return the seconds to read the files in sequence."""
    buffer = bytearray(READ_BYTES)
    started_s = time.perf_counter()
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return time.perf_counter() - started_s


def measure(directory: Path) -> dict[str, Any]:
    """Return medians of interleaved cold rounds for plain reading and for loads in each dtype."""
    files = sorted(directory.glob("*.safetensors"))
    read_s: list[float] = []
    loads: dict[str, list[dict[str, float]]] = {dtype: [] for dtype in DTYPES}
    for _ in range(ROUNDS):
        _forget(files)
        read_s.append(_read_s(files))
        for dtype, figures in loads.items():
            _forget(files)
            figures.append(load_apart(directory, dtype))
    file_bytes = sum(path.stat().st_size for path in files)
    disk_s = median(read_s)
    return {
        "file_bytes": file_bytes,
        "disk_read_s": [round(seconds, 3) for seconds in read_s],
        "disk_bytes_per_s": round(file_bytes / disk_s),
        "loads": {dtype: _summary(figures, disk_s) for dtype, figures in loads.items()},
    }


def _summary(figures: list[dict[str, float]], disk_s: float) -> dict[str, Any]:
    load_s = [each["load_s"] for each in figures]
    peak_bytes = max(each["peak_bytes"] for each in figures)
    weight_bytes = figures[0]["weight_bytes"]
    return {
        "load_s": [round(seconds, 3) for seconds in load_s],
        "cpu_s": round(median(each["cpu_s"] for each in figures), 3),
        "share_of_disk_speed": round(disk_s / median(load_s), 3),
        "weight_bytes": weight_bytes,
        "peak_bytes": peak_bytes,
        "peak_over_weights": round(peak_bytes / weight_bytes, 3),
    }


def main() -> None:
    """Measure the loads, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    group = parser.add_mutually_exclusive_group(required=True)
    group.add_argument("--json", type=Path)
    group.add_argument("--apart", nargs=2, metavar=("DIRECTORY", "DTYPE"))
    args = parser.parse_args()
    if args.apart:
        print(json.dumps(_load_here(Path(args.apart[0]), args.apart[1])))
        return
    facts = provenance()
    with tempfile.TemporaryDirectory() as directory:
        results = measure(random_checkpoint(Path(directory), **SHAPE))
    print(json.dumps(results, indent=1))
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps({**facts, **results}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
