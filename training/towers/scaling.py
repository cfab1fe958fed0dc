"""Measure how the recall of query towers depends on their start, their size and their queries.

    draftgate pull minilm
    python -m training.towers.train queries teacher
    python -m training.towers.scaling --language-model SMOLLM2 --json OUT

An interrupted run continues after its last checkpoint.

All towers are distilled from MiniLM, which also embeds the passages. They are `words`, the start of
the shipped tower, `random` with random weights, and `smollm2`, which is SmolLM2-135M with low-rank
updates. Recall is that of `bench.engine.retrieval`, before and after the training.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import nn
from transformers import LlamaModel

from bench.engine.retrieval import EngineEncoder, package_pairs, ranks, recall
from bench.harness.provenance import bench_parser, provenance, write_results
from draftgate.backends.model_store.known_models import DOCUMENT_TOWER
from draftgate.loadgen.planning.corpus import open_corpus
from training.towers.language import LanguageTower
from training.towers.student import Shape, Student, Texts, Vectors, cut_tokenizer
from training.towers.train import (
    FOLDER,
    QUERY_TOKENS,
    RECIPE,
    Distillation,
    Recipe,
    Start,
    Tower,
    embed,
    encode,
    open_teacher,
    start_from_words,
)

LARGE: Final = Shape(layers=6, inner=1536)
"""The layers of MiniLM with the vocabulary of the shipped tower."""

RANK: Final = 16
LORA: Final = Recipe(batch=64, epochs=2, rate=0.0005)
"""Recipe of the language model, which gets fewer queries and so smaller batches."""

RIDGE: Final = 0.001


@dataclass(frozen=True)
class Arm:
    """A tower that is trained.

    Attributes:
        queries: maximum number of queries.
    """

    start: str
    queries: int
    layers: int = 1

    def __str__(self) -> str:
        return f"{self.start}-{self.layers}-{self.queries}"


ARMS: Final = (
    *(Arm("words", queries) for queries in (2048, 8192, 32_768)),
    *(Arm("random", queries) for queries in (2048, 8192, 32_768)),
    *(Arm("random", queries, LARGE.layers) for queries in (2048, 8192)),
    *(Arm("smollm2", queries, 30) for queries in (2048, 8192)),
)


def start_randomly(
    shape: Shape, texts: Sequence[str], wanted: Vectors
) -> tuple[Student, Tokenizer]:
    """Return a tower with random weights."""
    tokenizer = cut_tokenizer(open_teacher()[1], texts, shape.words)
    tower = Student(shape, np.zeros((shape.words, wanted.shape[1]), np.float32))
    for module in tower.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        elif isinstance(module, nn.LayerNorm):
            nn.init.ones_(module.weight)
    return tower, tokenizer


def start_from_language(
    folder: Path, texts: Sequence[str], wanted: Vectors
) -> tuple[LanguageTower, Tokenizer]:
    """Return a language model with a dense layer that is regressed from its hidden states."""
    model = LlamaModel.from_pretrained(folder, dtype=torch.bfloat16)
    words = Tokenizer.from_file(str(folder / "tokenizer.json"))
    words.no_truncation()
    words.no_padding()
    tower = LanguageTower(model, wanted.shape[1], RANK)
    with torch.no_grad():
        parts = _parts(encode(words, texts, QUERY_TOKENS))
        states = torch.cat([tower.states(part) for part in parts])
    tower.regress(states.numpy(), wanted, RIDGE)
    return tower, words


def _parts(texts: Texts, size: int = 128) -> list[Texts]:
    return [texts[start : start + size] for start in range(0, len(texts), size)]


def start_of(arm: Arm, language_model: Path) -> tuple[Start[Any], Recipe]:
    """Return how a tower starts, and how it is trained."""
    if arm.start == "words":
        return start_from_words, RECIPE
    if arm.start == "random":
        shape = Shape() if arm.layers == 1 else LARGE
        # Random weights have further to go.
        return partial(start_randomly, shape), replace(RECIPE, epochs=6)
    return partial(start_from_language, language_model), LORA


@dataclass(frozen=True)
class Collection:
    """Questions, and the vectors of the passages that answer them, [questions, D]."""

    name: str
    questions: list[str]
    passages: Vectors

    def recall(self, tower: Tower, tokenizer: Tokenizer) -> dict[str, dict[str, float]]:
        """Return the recalls of a tower with intervals."""
        found = embed(tower, encode(tokenizer, self.questions, QUERY_TOKENS))
        return recall(ranks(found @ self.passages.T))


def collections() -> list[Collection]:
    """Return the two collections of the retrieval benchmark, embedded by MiniLM."""
    corpus, documents = open_corpus(), EngineEncoder(DOCUMENT_TOWER, "bfloat16")
    chosen = {corpus.source: corpus.pairs, "installed packages": package_pairs()}
    return [
        Collection(
            name,
            [pair.question for pair in pairs],
            documents.embed([pair.passage for pair in pairs]),
        )
        for name, pairs in chosen.items()
    ]


def measure(arm: Arm, options: Any, held_out: Sequence[Collection]) -> dict[str, Any]:
    """Train a tower, and return its recalls before and after."""
    start, recipe = start_of(arm, options.language_model)
    run = Distillation(
        options.folder,
        options.seed,
        start,
        recipe,
        most=arm.queries,
        checkpoint=f"scaling-{arm}.pt",
    )
    before = {each.name: each.recall(run.tower, run.tokenizer) for each in held_out}
    run.run()
    return {
        **asdict(arm),
        "parameters": sum(p.numel() for p in run.tower.parameters()),
        "trained_parameters": sum(p.numel() for p in run.tower.parameters() if p.requires_grad),
        "recipe": asdict(recipe),
        "before": before,
        "after": {each.name: each.recall(run.tower, run.tokenizer) for each in held_out},
        "training": run.history[-1],
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Train all towers."""
    parser = bench_parser("training.towers.scaling", __doc__)
    parser.add_argument("--only", default="", help="names of arms, such as words-1-2048")
    parser.add_argument("--seed", type=int, default=20)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the queries are")
    parser.add_argument(
        "--language-model", type=Path, required=True, help="folder of SmolLM2-135M-Instruct"
    )
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", force=True)
    torch.set_num_threads(1)
    results = {**provenance(), "seed": options.seed, "towers": []}
    held_out = collections()
    for arm in ARMS:
        if not options.only or str(arm) in options.only.split(","):
            results["towers"].append(measure(arm, options, held_out))
            write_results(options.json, results)  # also if a later tower is stopped


if __name__ == "__main__":
    main()
