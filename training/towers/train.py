"""Train the document tower on question and passage pairs, and distil the query tower from it.

    python -m training.towers.train all

The stages are `tokenizer`, the arms of `recipes.ARMS`, `queries`, and `ship`, which copies the
towers into the package. The others write to .train/towers. The stage `card` writes the model card
from measurements in bench/results. On Linux, set the environment variables of `training.train` for
the allocator.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import logging
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from tokenizers import Tokenizer

from training.towers import card, model
from training.towers.data import (
    EncodedExample,
    all_texts,
    encode_examples,
    installed_examples,
    is_selected,
)
from training.towers.examples import SUMMARY, Example
from training.towers.recipes import ARMS, QUERIES, SHIPPED_ARM
from training.towers.runs import DocumentRun, QueryRun
from training.towers.texts import is_validation
from training.towers.tokenization import train_tokenizer
from training.train import DEMO, ROOT, WORK, device_name

FOLDER: Final = WORK / "towers"
SHIPPED: Final = {SHIPPED_ARM: DEMO / "documents", "queries": DEMO / "queries"}
"""Folders of the shipped towers by stage."""

MEASURED: Final = ROOT / "bench" / "results" / "retrieval-zen5.json"
"""Results of `draftgate bench retrieval`, whose code is at commit 6d635970."""

FACTS: Final = "facts.json"

VALIDATION_PAIRS: Final = 1000
"""Validation pairs, about as many as the test collection has."""

VALIDATION_TOKENS: Final = 256

logger = logging.getLogger("towers")


class Corpus(NamedTuple):
    """All examples with their token ids."""

    tokenizer: Tokenizer
    examples: Sequence[Example]
    encoded: Sequence[EncodedExample]

    def training(self, share: float) -> list[EncodedExample]:
        """Return the examples of the standard library and of a share of the packages' files."""
        pairs = zip(self.examples, self.encoded, strict=True)
        return [
            encoded
            for example, encoded in pairs
            if not is_validation(example.unit) and is_selected(example, share)
        ]

    def validation(self) -> list[EncodedExample]:
        """Return evenly spread summaries that no tower trains on, with cut passages."""
        pairs = zip(self.examples, self.encoded, strict=True)
        found = [n for e, n in pairs if is_validation(e.unit) and e.kind == SUMMARY]
        spread = found[:: max(1, len(found) // VALIDATION_PAIRS)][:VALIDATION_PAIRS]
        return [example._replace(passage=example.passage[:VALIDATION_TOKENS]) for example in spread]


def open_corpus(folder: Path) -> Corpus:
    """Return the corpus, which is read and encoded once."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    examples = installed_examples(folder / "examples.jsonl")
    return Corpus(
        tokenizer, examples, encode_examples(tokenizer, examples, folder / "examples.npz")
    )


def tokenizer_stage(folder: Path, _seed: int) -> None:
    """Train the tokenizer on the training examples."""
    examples = installed_examples(folder / "examples.jsonl")
    training = [example for example in examples if not is_validation(example.unit)]
    train_tokenizer(all_texts(training)).save(str(folder / "tokenizer.json"))
    (folder / "examples.npz").unlink(missing_ok=True)


def arm_stage(folder: Path, seed: int, *, name: str) -> None:
    """Train an arm of the scaling study."""
    corpus, recipe = open_corpus(folder), ARMS[name]
    training = corpus.training(recipe.share)
    run = DocumentRun(recipe, corpus.tokenizer, training, corpus.validation(), seed)
    logger.info("%s: %d examples", name, len(training))
    _finish(run, folder / name, seed, corpus, {"examples": len(training)})


def queries_stage(folder: Path, seed: int) -> None:
    """Distil the query tower from the shipped arm."""
    corpus, teacher = open_corpus(folder), folder / SHIPPED_ARM
    facts = json.loads((teacher / FACTS).read_text())
    tower = model.load(teacher, ARMS[SHIPPED_ARM].shape)
    run = QueryRun(
        QUERIES,
        tower,
        facts["scale"],
        corpus.tokenizer,
        corpus.training(ARMS[SHIPPED_ARM].share),
        corpus.validation(),
        seed,
    )
    _finish(run, folder / "queries", seed, corpus, {})


def _finish(
    run: DocumentRun | QueryRun, folder: Path, seed: int, corpus: Corpus, facts: dict[str, Any]
) -> None:
    """Train, and write the tower and its facts."""
    started_s = time.perf_counter()
    run.run()
    run.tower.save(folder, corpus.tokenizer)
    facts |= {
        "parameters": sum(p.numel() for p in run.tower.parameters()),
        "minutes": round((time.perf_counter() - started_s) / 60, 1),
        "seed": seed,
        "device": device_name(),
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "history": run.history,
    }
    if isinstance(run, DocumentRun):
        facts["scale"] = round(run.scale, 2)
    (folder / FACTS).write_text(json.dumps(facts, indent=2) + "\n")


def ship_stage(folder: Path, _seed: int) -> None:
    """Copy the towers into the package, with their metrics."""
    metrics = card.collect(open_corpus(folder).examples, folder, FACTS)
    for stage, shipped in SHIPPED.items():
        shutil.rmtree(shipped, ignore_errors=True)
        shutil.copytree(folder / stage, shipped, ignore=shutil.ignore_patterns(FACTS))
    card.write(metrics, SHIPPED[SHIPPED_ARM])


def card_stage(_folder: Path, _seed: int) -> None:
    """Add the measurements of the benchmark to the metrics, and render the model card."""
    shipped = SHIPPED[SHIPPED_ARM]
    metrics = json.loads((shipped / card.METRICS).read_text())
    measured = json.loads(MEASURED.read_text())
    rows = [row for row in measured["rows"] if "examples" not in row]
    kept = ("pairs", "query_cost", "kept_by_queries")
    metrics["retrieval"] = {**{name: measured[name] for name in kept}, "rows": rows}
    card.write(metrics, shipped)


STAGES: Final[dict[str, Callable[[Path, int], None]]] = {
    "tokenizer": tokenizer_stage,
    **{name: partial(arm_stage, name=name) for name in ARMS},
    "queries": queries_stage,
    "ship": ship_stage,
}
"""The stages in order. `card` follows a run of the benchmark on the shipped towers."""


def main(arguments: list[str] | None = None) -> None:
    """Run stages in order."""
    parser = argparse.ArgumentParser(prog="python -m training.towers.train", description=__doc__)
    parser.add_argument("stages", nargs="+", choices=(*STAGES, "card", "all"))
    parser.add_argument("--seed", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where stages write")
    options = parser.parse_args(sys.argv[1:] if arguments is None else arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", force=True)
    torch.set_num_threads(options.threads)
    options.folder.mkdir(parents=True, exist_ok=True)
    stages = {**STAGES, "card": card_stage}
    for name in STAGES if "all" in options.stages else options.stages:
        stages[name](options.folder, options.seed)


if __name__ == "__main__":
    main()
