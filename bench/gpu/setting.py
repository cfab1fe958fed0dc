"""What every stage of the first run knows: its device, sizes and folder."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import torch

    from bench.engine.bench_engine import BenchEngine
    from bench.engine.cases import Case
    from bench.engine.device import Rates
    from bench.engine.models import Model

TINY_SHAPE: Final[dict[str, Any]] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}
"""Shape of the models of a rehearsal. Dense models ignore the sizes of experts."""

MEMORY_SHARE: Final = 0.85
"""Share of the memory left by the weights that the KV cache may take. Activations, graphs and the
logits of 1,280 rows need the rest (a guess at the desk, 2026-11-27)."""


class Skipped(Exception):
    """A stage that this machine cannot run. The message says why."""


@dataclass(frozen=True)
class Setting:
    """A stage, with its folder and device.

    Attributes:
        name: name of the stage.
        out: folder of the results of all stages.
        device_type: `cuda`, or `cpu` for a rehearsal.
        tiny: whether models and numbers of steps are tiny.
    """

    name: str
    out: Path
    device_type: str
    tiny: bool

    @property
    def device(self) -> torch.device:
        """Device of the run."""
        from draftgate.backends.engine.numerics import choose_device

        return choose_device(self.device_type)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of all measured models."""
        import torch

        return torch.bfloat16 if self.on_gpu else torch.float32

    @property
    def on_gpu(self) -> bool:
        """Whether the run measures a GPU."""
        return self.device_type == "cuda"

    def need_gpu(self) -> None:
        """Skip the stage without a GPU.

        Raises:
            Skipped: the run is on a CPU.
        """
        if not self.on_gpu:
            raise Skipped("needs a GPU")

    def keep(self, result: dict[str, Any]) -> None:
        """Write the results of the stage so far, which remain if the stage crashes."""
        path = self.out / f"{self.name}.json"
        part = path.with_suffix(".part")
        part.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        part.replace(path)

    @contextmanager
    def model(self, name: str) -> Iterator[Model]:
        """Yield a model of random weights, which is tiny in a rehearsal.

        Args:
            name: key of `SHAPES`.
        """
        from bench.engine.models import make_model
        from bench.engine.random_model import SHAPES, RandomModel

        with tempfile.TemporaryDirectory() as folder:
            if self.tiny:
                shape = SHAPES[name] | TINY_SHAPE | {"head_dim": 16}
                yield RandomModel(f"{name}, tiny", Path(folder), shape, self.dtype, self.device)
            else:
                yield make_model(name, Path(folder), self.dtype, self.device)

    @contextmanager
    def engine(self, name: str, cases: list[Case]) -> Iterator[BenchEngine]:
        """Yield an engine of a random model with KV memory for each of the cases alone."""
        with self.model(name) as model:
            yield load_engine(model, cases)

    def rates(self) -> Rates:
        """Return the rates that the stage `rates` measured, or measure them."""
        from bench.engine.device import Rates, measure_rates

        try:
            return Rates(**json.loads((self.out / "rates.json").read_text("utf-8"))["rates"])
        except (OSError, KeyError, TypeError, ValueError):
            return measure_rates(self.device, self.dtype)


def load_engine(model: Model, cases: list[Case]) -> BenchEngine:
    """Return an engine with KV memory for each of the cases alone."""
    from bench.engine.bench_engine import BenchEngine, most_kv_tokens

    return BenchEngine.load(
        model,
        most_kv_tokens(cases),
        max(case.context_tokens + case.tokens for case in cases),
        max_seqs=max(case.batch for case in cases),
    )


def fitting(model: Model, cases: list[Case]) -> tuple[list[Case], list[str]]:
    """Return the cases whose keys and values fit into the free memory, and those that do not."""
    from bench.engine.bench_engine import most_kv_tokens

    room = _free_bytes(model.device) * MEMORY_SHARE
    token_bytes = model.config.kv_bytes_per_token(model.dtype.itemsize)
    fit, left_out = [], []
    for case in cases:
        needed = most_kv_tokens([case]) * token_bytes
        if needed <= room:
            fit.append(case)
        else:
            words = f"{case.batch} x {case.context_tokens} tokens need {needed / 2**30:.0f} GiB"
            left_out.append(f"{words}, and {room / 2**30:.0f} GiB are free")
    return fit, left_out


def _free_bytes(device: torch.device) -> float:
    import torch

    return float(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else 2.0**30
