"""Distil the query tower from MiniLM, the document tower.

    draftgate pull minilm
    python -m training.towers.train all

The stages are `queries`, which collects the texts, `teacher`, which embeds them with MiniLM,
`train`, `ship`, which copies the tower into the package, and `card`, which writes the model card
from measurements in bench/results. The others write to .train/towers. An interrupted stage
continues: `teacher` after its last block, and `train` after its last checkpoint.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import logging
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Generic, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional
from transformers import BertModel

from draftgate.backends.checkpoints import SHIPPED_QUERIES, find_checkpoint
from draftgate.backends.model_store.known_models import DOCUMENT_TOWER
from draftgate.loadgen.planning.pairs import Pair, source_pairs
from training.towers import card
from training.towers.queries import Query, training_queries
from training.towers.student import (
    Shape,
    Student,
    Texts,
    Vectors,
    cut_tokenizer,
    distillation,
    pooled,
    regress_words,
)
from training.towers.texts import (
    HELD_OUT_PACKAGES,
    is_validation,
    package_sources,
    stdlib_sources,
)
from training.train import CLIP, ROOT, WORK, device_name

FOLDER: Final = WORK / "towers"

QUERIES: Final = "queries.jsonl"
VALIDATION: Final = "validation.jsonl"
FACTS: Final = "facts.json"
CHECKPOINT: Final = "checkpoint.pt"

MEASURED: Final = ROOT / "bench" / "results" / "retrieval.json"
"""Results of `draftgate bench retrieval`."""

SHAPE: Final = Shape()

MOST_QUERIES: Final = 32_768
"""Queries with those that validate. The teacher embeds about 400 per CPU second, and a step of the
training takes 0.5 CPU seconds (one busy core of a Xeon with AMX, 2026-11-30)."""

QUERY_TOKENS: Final = 48
"""Maximum tokens of a training query. Nearly all are shorter."""

PASSAGE_TOKENS: Final = 256
"""Maximum tokens of a passage, as in MiniLM's configuration."""

VALIDATION_PAIRS: Final = 600
"""Pairs of a validation, whose standard error of recall is 2 points."""

BLOCK: Final = 4096
"""Queries that the teacher embeds between two writes to the disk."""

MICRO_TOKENS: Final = 8192
"""Tokens per forward pass, including padding."""

CHECKPOINT_STEPS: Final = 50

logger = logging.getLogger("towers")

T = TypeVar("T", bound="Tower")


@dataclass(frozen=True)
class Recipe:
    """The settings of the distillation.

    Attributes:
        ridge: see `regress_words`.
        pool: batches that are sorted by length together, which saves padding.
        warmup: share of the steps over which the rate rises to its peak. It then falls to zero.
    """

    ridge: float = 0.01
    batch: int = 256
    epochs: int = 3
    rate: float = 0.001
    pool: int = 16
    warmup: float = 0.05


RECIPE: Final = Recipe()


def queries_stage(folder: Path, _seed: int) -> None:
    """Collect the queries."""
    held_out = [*stdlib_sources(held_out=True), *package_sources(HELD_OUT_PACKAGES)]
    training = [*stdlib_sources(), *package_sources()]
    found = training_queries(training, held_out, MOST_QUERIES)
    (folder / QUERIES).write_text("".join(json.dumps(query) + "\n" for query in found))
    logger.info("%d queries", len(found))
    validating = (source.text for source in training if is_validation(source.unit))
    pairs = source_pairs(validating)[:VALIDATION_PAIRS]
    (folder / VALIDATION).write_text("".join(json.dumps(pair) + "\n" for pair in pairs))


def read_queries(folder: Path) -> list[Query]:
    """Return the queries that towers train on."""
    lines = (folder / QUERIES).read_text().splitlines()
    found = (Query(*json.loads(line)) for line in lines)
    return [query for query in found if not is_validation(query.unit)]


def validation_pairs(folder: Path) -> list[Pair]:
    """Return questions of files that no tower trains on, with their passages."""
    return [Pair(*json.loads(line)) for line in (folder / VALIDATION).read_text().splitlines()]


def open_teacher() -> tuple[BertModel, Tokenizer]:
    """Return MiniLM and its tokenizer, which neither cuts nor pads."""
    folder = find_checkpoint(DOCUMENT_TOWER)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    model = BertModel.from_pretrained(folder, add_pooling_layer=False, dtype=torch.float32)
    return model.eval(), tokenizer


def encode(tokenizer: Tokenizer, texts: Sequence[str], most: int) -> list[list[int]]:
    """Return the token ids of texts, at most `most` for each."""
    return [item.ids[:most] for item in tokenizer.encode_batch_fast(list(texts))]


@torch.no_grad()
def embed(forward: Callable[[Texts], Tensor], texts: Texts) -> Vectors:
    """Return the unit vectors of many texts, [B, D]."""
    order, parts = sorted(range(len(texts)), key=lambda n: len(texts[n])), []
    backwards = order[::-1]
    while backwards:
        size = max(1, MICRO_TOKENS // len(texts[backwards[0]]))
        part, backwards = backwards[:size], backwards[size:]
        parts.append(functional.normalize(forward([texts[n] for n in part]), dim=-1))
    found = np.empty((len(texts), parts[0].shape[1]), np.float32)
    found[order[::-1]] = torch.cat(parts).numpy()
    return found


def teacher_stage(folder: Path, _seed: int) -> None:
    """Embed the training queries and the validation pairs with the teacher."""
    model, tokenizer = open_teacher()
    forward = partial(pooled, model)
    texts = encode(tokenizer, [query.text for query in read_queries(folder)], QUERY_TOKENS)
    cached = folder / DOCUMENT_TOWER
    cached.mkdir(exist_ok=True)
    for start in range(0, len(texts), BLOCK):
        path = cached / f"{start:08d}.npy"
        if not path.exists():
            part = cached / "part.npy"
            np.save(part, embed(forward, texts[start : start + BLOCK]).astype(np.float16))
            part.replace(path)
            logger.info("the teacher has embedded %d of %d", start + BLOCK, len(texts))
    pairs = validation_pairs(folder)
    questions = encode(tokenizer, [pair.question for pair in pairs], QUERY_TOKENS)
    passages = encode(tokenizer, [pair.passage for pair in pairs], PASSAGE_TOKENS)
    np.savez(
        folder / "validation.npz",
        questions=embed(forward, questions),
        passages=embed(forward, passages),
    )


def epoch_batches(
    lengths: NDArray[np.int64], recipe: Recipe, rng: np.random.Generator
) -> list[NDArray[np.int64]]:
    """Return the queries of each batch of an epoch. The queries of a batch have similar lengths."""
    order = rng.permutation(len(lengths))
    pool = recipe.batch * recipe.pool
    batches = []
    for start in range(0, len(order) - recipe.batch + 1, pool):
        part = order[start : start + pool]
        part = part[np.argsort(lengths[part], kind="stable")]
        batches += [part[n : n + recipe.batch] for n in range(0, len(part), recipe.batch)]
    return [batches[n] for n in rng.permutation(len(batches))]


class Tower(Protocol):
    """A model that is trained, whose outputs need not have the length 1."""

    def __call__(self, texts: Texts) -> Tensor:
        """Return the vectors of texts, [B, D]."""

    def groups(self, rate: float) -> list[dict[str, object]]:
        """Return the trained parameters for an optimiser."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield all parameters."""

    def state_dict(self) -> dict[str, Any]:
        """Return the weights of a checkpoint."""

    def load_state_dict(self, stored: dict[str, Any], /) -> object:
        """Set the weights of a checkpoint."""


Start = Callable[[Sequence[str], Vectors], tuple[T, Tokenizer]]
"""Returns an untrained tower and its tokenizer, given the queries and their vectors, [B, D]."""


def start_from_words(texts: Sequence[str], wanted: Vectors) -> tuple[Student, Tokenizer]:
    """Return the tower whose word vectors are regressed from the vectors of the queries."""
    _, teacher_words = open_teacher()
    tokenizer = cut_tokenizer(teacher_words, texts, SHAPE.words)
    ids = encode(tokenizer, texts, QUERY_TOKENS)
    return Student(SHAPE, regress_words(ids, wanted, SHAPE.words, RECIPE.ridge)), tokenizer


class Distillation(Generic[T]):
    """The training of a query tower, which continues after its last checkpoint.

    Attributes:
        history: loss, cosine and recall of each validation.
        cpu_s, wall_s: time of the steps, in seconds.
    """

    def __init__(
        self,
        folder: Path,
        seed: int,
        start: Start[T],
        recipe: Recipe,
        *,
        most: int = MOST_QUERIES,
        checkpoint: str = CHECKPOINT,
    ) -> None:
        torch.manual_seed(seed)
        self._seed, self._recipe, self._checkpoint = seed, recipe, folder / checkpoint
        texts = [query.text for query in read_queries(folder)][:most]
        blocks = [np.load(path) for path in sorted((folder / DOCUMENT_TOWER).glob("0*.npy"))]
        wanted = torch.from_numpy(np.concatenate(blocks)[:most].astype(np.float32))
        self._wanted = functional.normalize(wanted, dim=-1)
        self.tower, self.tokenizer = start(texts, self._wanted.numpy())
        self._texts = encode(self.tokenizer, texts, QUERY_TOKENS)
        self._lengths = np.array([len(text) for text in self._texts])
        self._validation = np.load(folder / "validation.npz")
        questions = [pair.question for pair in validation_pairs(folder)]
        self._questions = encode(self.tokenizer, questions, QUERY_TOKENS)
        self.history: list[dict[str, Any]] = []
        self.cpu_s = self.wall_s = 0.0
        self._optimizer = torch.optim.AdamW(self.tower.groups(recipe.rate), betas=(0.9, 0.98))

    def run(self) -> None:
        """Train all epochs."""
        epochs = [
            epoch_batches(self._lengths, self._recipe, np.random.default_rng([self._seed, epoch]))
            for epoch in range(self._recipe.epochs)
        ]
        batches = [batch for epoch in epochs for batch in epoch]
        step, loss = self._resume(), None
        if not step:
            self._validate(step, loss)
        started = time.process_time() - self.cpu_s, time.perf_counter() - self.wall_s
        while step < len(batches):
            value = self._step(batches[step], step / len(batches))
            # Average over about 50 steps, because the loss of a single step is too noisy.
            loss = value if loss is None else 0.98 * loss + 0.02 * value
            step += 1
            if step % CHECKPOINT_STEPS == 0 or step == len(batches):
                self.cpu_s = time.process_time() - started[0]
                self.wall_s = time.perf_counter() - started[1]
                self._validate(step, loss)
                self._save(step)

    def _step(self, batch: NDArray[np.int64], progress: float) -> float:
        """Take a step, and return its loss."""
        warmup = self._recipe.warmup
        factor = min(progress / warmup, (1 - progress) / (1 - warmup), 1.0)
        for group in self._optimizer.param_groups:
            group["lr"] = self._recipe.rate * factor
        loss = distillation(self.tower([self._texts[n] for n in batch]), self._wanted[batch])
        self._optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.tower.parameters(), CLIP)
        self._optimizer.step()
        return loss.item()

    def _validate(self, step: int, loss: float | None) -> None:
        found = embed(self.tower, self._questions)
        wanted, passages = (self._validation[name] for name in ("questions", "passages"))
        facts = {
            "step": step,
            "training_loss": loss and round(loss, 4),
            "validation_cosine": round(float((found * wanted).sum(1).mean()), 4),
            "validation_recall_at_5": recall(found @ passages.T),
            "teacher_recall_at_5": recall(wanted @ passages.T),
            "cpu_s": round(self.cpu_s),
        }
        self.history.append(facts)
        logger.info("%s", facts)

    def _resume(self) -> int:
        """Read the last checkpoint if there is one, and return the steps that it has taken."""
        if not self._checkpoint.exists():
            return 0
        stored = torch.load(self._checkpoint, weights_only=True)
        self.tower.load_state_dict(stored["tower"])
        self._optimizer.load_state_dict(stored["optimizer"])
        self.history = stored["history"]
        self.cpu_s, self.wall_s = stored["cpu_s"], stored["wall_s"]
        return int(stored["step"])

    def _save(self, step: int) -> None:
        stored = {
            "step": step,
            "tower": self.tower.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "history": self.history,
            "cpu_s": self.cpu_s,
            "wall_s": self.wall_s,
        }
        part = self._checkpoint.with_suffix(".part")
        torch.save(stored, part)
        part.replace(self._checkpoint)


def recall(scores: Vectors, cut: int = 5) -> float:
    """Return the share of questions whose passage is among the best.

    Args:
        scores: [N, N]. Passage n answers question n, and is last among those of its score.
    """
    better = (scores >= scores.diagonal()[:, None]).sum(1) - 1
    return round(float((better < cut).mean()), 4)


def train_stage(folder: Path, seed: int) -> None:
    """Distil the query tower, and write it with its facts."""
    run = Distillation(folder, seed, start_from_words, RECIPE)
    run.run()
    run.tower.save(run.tokenizer, folder / "tower")
    facts = {
        "words": SHAPE.words,
        "max_tokens": SHAPE.max_tokens,
        "size": run.tower.dense.out_features,
        "parameters": sum(p.numel() for p in run.tower.parameters()),
        "cpu_minutes": round(run.cpu_s / 60, 1),
        "wall_minutes": round(run.wall_s / 60, 1),
        "seed": seed,
        "device": device_name(),
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "history": run.history,
    }
    (folder / FACTS).write_text(json.dumps(facts, indent=2) + "\n")


def ship_stage(folder: Path, _seed: int) -> None:
    """Copy the tower into the package, with its metrics."""
    metrics = {
        "run": json.loads((folder / FACTS).read_text()),
        "corpus": card.corpus_facts(read_queries(folder)),
    }
    shutil.rmtree(SHIPPED_QUERIES, ignore_errors=True)
    shutil.copytree(folder / "tower", SHIPPED_QUERIES)
    card.write(metrics, SHIPPED_QUERIES)


def card_stage(_folder: Path, _seed: int) -> None:
    """Add the measurements of the benchmark to the metrics, and render the model card."""
    metrics = json.loads((SHIPPED_QUERIES / card.METRICS).read_text())
    metrics["retrieval"] = json.loads(MEASURED.read_text())
    card.write(metrics, SHIPPED_QUERIES)


STAGES: Final[dict[str, Callable[[Path, int], None]]] = {
    "queries": queries_stage,
    "teacher": teacher_stage,
    "train": train_stage,
    "ship": ship_stage,
}
"""The stages in order. `card` follows a run of the benchmark on the shipped tower."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run stages in order."""
    parser = argparse.ArgumentParser(prog="python -m training.towers.train", description=__doc__)
    parser.add_argument("stages", nargs="+", choices=(*STAGES, "card", "all"))
    parser.add_argument("--seed", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where stages write")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", force=True)
    torch.set_num_threads(options.threads)
    options.folder.mkdir(parents=True, exist_ok=True)
    stages = {**STAGES, "card": card_stage}
    for name in STAGES if "all" in options.stages else options.stages:
        stages[name](options.folder, options.seed)


if __name__ == "__main__":
    main()
