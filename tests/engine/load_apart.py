"""Loads a checkpoint in a process of its own, and measures its peak memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import torch

from draftgate.backends.engine.checkpoint import Checkpoint
from draftgate.backends.engine.config import read_model_config
from draftgate.backends.engine.linear import Linear
from draftgate.backends.engine.weights import load_weights


def load_apart(directory: Path, dtype: str) -> dict[str, int]:
    """Load in a separate process, and return its memory.

    Returns:
        `peak_bytes`: peak memory while loading, without the memory held before.
        `weight_bytes`: bytes of the loaded weights.
    """
    command = [sys.executable, "-m", __spec__.name, str(directory), dtype]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    figures: dict[str, int] = json.loads(done.stdout)
    return figures


def _load_here(directory: Path, dtype_name: str) -> dict[str, int]:
    dtype = getattr(torch, dtype_name)
    config = read_model_config(directory)
    Linear(torch.zeros(16, 16, dtype=dtype))(torch.zeros(16, 16, dtype=dtype))
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # reset the peak memory
    before_bytes = _status_bytes("VmRSS")
    weights = load_weights(directory, config, dtype)
    peak_bytes = _status_bytes("VmHWM") - before_bytes
    assert len(weights.layers) == config.num_layers
    weight_bytes = Checkpoint(directory).num_parameters * dtype.itemsize
    return {"peak_bytes": peak_bytes, "weight_bytes": weight_bytes}


def _status_bytes(name: str) -> int:
    """Return a memory field of this process from /proc/self/status."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(name)


if __name__ == "__main__":
    sys.stdout.write(json.dumps(_load_here(Path(sys.argv[1]), sys.argv[2])))
