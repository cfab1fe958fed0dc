"""Measure recall and cost of the query tower, of its teacher MiniLM, and of a search by words.

    python -m bench.engine.retrieval --json OUT

There are two collections of questions with the passage that answers each: the held-out modules of
the standard library (those of the `rag` workload), and the packages of `HELD_OUT_PACKAGES`. Recall
at k is the share of questions whose passage is among the first k of the collection. Intervals are
95% percentile intervals of a bootstrap over the questions. All encoders run in the engine with one
thread, for queries with float32 and for passages with bfloat16. The CPU times of queries alternate
question by question, so that a busy machine slows all models.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from importlib.metadata import version
from statistics import mean, median
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from bench.harness.provenance import bench_parser, provenance, write_results
from draftgate.backends.checkpoints import SHIPPED_QUERIES_ID, find_checkpoint
from draftgate.backends.engine.checkpoint import Checkpoint
from draftgate.backends.engine.encoder.config import read_encoder_config
from draftgate.backends.engine.encoder.runner import EncoderRunner
from draftgate.backends.engine.load import load_engine
from draftgate.backends.model_store.known_models import DOCUMENT_TOWER
from draftgate.backends.worker_config import WorkerConfig
from draftgate.loadgen.planning.corpus import open_corpus
from draftgate.loadgen.planning.pairs import Pair, source_pairs
from training.towers.texts import HELD_OUT_PACKAGES, package_sources

Vectors = NDArray[np.float32]
Ranks = NDArray[np.int64]

CUTS: Final = (1, 5, 20)

BATCH: Final = 16
"""Texts of similar length that are embedded together."""
COMPARED_CUT: Final = 5
"""The cut of the ratios between two methods."""

TIMED_QUERIES: Final = 100
TIMED_ROUNDS: Final = 3
"""Rounds of the timed queries. The fastest round of each query counts."""

RESAMPLES: Final = 4000
"""Resamples of an interval."""

PACKAGE_PAIRS: Final = 600
"""Maximum questions of the second collection."""

BM25: Final = "bm25"

_WORD: Final = re.compile(r"[a-z]+|\d+")
_CASE_BORDER: Final = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


class EngineEncoder:
    """An encoder in the engine, with one thread."""

    def __init__(self, name: str, dtype: str = "float32") -> None:
        engine = load_engine(WorkerConfig(model=name, threads=1, dtype=dtype))
        assert isinstance(engine.executor, EncoderRunner)
        self._runner = engine.executor
        self._tokenizer = engine.worker.tokenizer
        self._most_tokens = engine.served.card.max_model_len
        self._directory = find_checkpoint(name)

    def tokens(self, text: str) -> list[int]:
        """Return the token ids of a text, cut to the model's limit."""
        return self._tokenizer.encode(text)[: self._most_tokens]

    def embed(self, texts: Sequence[str]) -> Vectors:
        """Return the unit vectors of texts, [texts, size]."""
        ids = [self.tokens(text) for text in texts]
        order = sorted(range(len(ids)), key=lambda place: len(ids[place]))
        found: dict[int, bytes] = {}
        for start in range(0, len(order), BATCH):
            places = order[start : start + BATCH]
            found |= zip(places, self._runner.pooled([ids[n] for n in places]), strict=True)
        vectors = np.stack([np.frombuffer(found[n], "<f4") for n in range(len(ids))])
        unit: Vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
        return unit

    def cpu_s(self, ids: list[int]) -> float:
        """Return the CPU seconds that one text takes, without its tokenisation."""
        started_s = time.thread_time()
        self._runner.pooled([ids])
        return time.thread_time() - started_s

    def facts(self) -> dict[str, Any]:
        """Return the size of the model."""
        config = read_encoder_config(self._directory)
        files = [path for path in self._directory.rglob("*") if path.is_file()]
        dense = self._directory / "2_Dense"
        parts = [self._directory, *([dense] if dense.exists() else [])]
        return {
            "parameters": sum(Checkpoint(part).num_parameters for part in parts),
            "megabytes": round(sum(path.stat().st_size for path in files) / 1e6, 2),
            "layers": config.num_layers,
            "hidden_size": config.hidden_size,
            "intermediate_size": config.intermediate_size,
        }


def ranks(scores: Vectors) -> Ranks:
    """Return the rank of the right passage of each question, from 0.

    Args:
        scores: [questions, passages]. Passage n answers question n, and comes after passages of
            the same score.
    """
    right = scores.diagonal()[:, None]
    found: Ranks = (scores >= right).sum(1) - 1
    return found


def recall(found: Ranks) -> dict[str, dict[str, float]]:
    """Return recall at `CUTS` with intervals."""
    return {str(cut): _with_interval(found < cut, np.ones(len(found), bool)) for cut in CUTS}


def kept_share(found: Ranks, reference: Ranks, cut: int = COMPARED_CUT) -> dict[str, float]:
    """Return the ratio of two recalls with an interval, whose resamples have the same questions."""
    return _with_interval(found < cut, reference < cut)


def _with_interval(hits: NDArray[np.bool_], wanted: NDArray[np.bool_]) -> dict[str, float]:
    drawn = np.random.default_rng(0).integers(len(hits), size=(RESAMPLES, len(hits)))
    low, high = np.quantile(hits[drawn].sum(1) / wanted[drawn].sum(1), (0.025, 0.975))
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


def measure_recall(
    pairs: Sequence[Pair], documents: EngineEncoder, encoders: dict[str, EngineEncoder]
) -> dict[str, Any]:
    """Return the recall of each method on a collection, and their ratios.

    Args:
        documents: embeds the passages.
        encoders: embed the questions.
    """
    passages = documents.embed([pair.passage for pair in pairs])
    questions = [pair.question for pair in pairs]
    found = {BM25: ranks(bm25_scores(pairs))}
    for name, encoder in encoders.items():
        found[name] = ranks(encoder.embed(questions) @ passages.T)
    small = found[SHIPPED_QUERIES_ID]
    return {
        "pairs": len(pairs),
        "recall": {name: recall(each) for name, each in found.items()},
        "kept_by_queries": kept_share(small, found[DOCUMENT_TOWER]),
        "queries_over_bm25": kept_share(small, found[BM25]),
    }


def measure_costs(
    questions: Sequence[str], encoders: dict[str, EngineEncoder]
) -> dict[str, dict[str, float]]:
    """Return the CPU time of a query for each encoder, measured in turns."""
    chosen = questions[:TIMED_QUERIES]
    ids = {name: [each.tokens(text) for text in chosen] for name, each in encoders.items()}
    best = {name: [float("inf")] * len(chosen) for name in encoders}
    for _ in range(TIMED_ROUNDS):
        for place in range(len(chosen)):
            for name, encoder in encoders.items():
                best[name][place] = min(best[name][place], encoder.cpu_s(ids[name][place]))
    return {
        name: {
            "query_tokens": round(mean(map(len, ids[name])), 1),
            "mean_us": round(1e6 * mean(best[name]), 1),
            "median_us": round(1e6 * median(best[name]), 1),
        }
        for name in encoders
    }


def package_pairs() -> list[Pair]:
    """Return the questions of the held-out packages, mixed."""
    sources = package_sources(HELD_OUT_PACKAGES)
    return source_pairs(source.text for source in sources)[:PACKAGE_PAIRS]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    parser = bench_parser("retrieval", __doc__)
    parser.add_argument(
        "--queries", default=SHIPPED_QUERIES_ID, help="the query tower: a name or a directory"
    )
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    facts = provenance()
    corpus = open_corpus()
    encoders = {
        DOCUMENT_TOWER: EngineEncoder(DOCUMENT_TOWER),
        SHIPPED_QUERIES_ID: EngineEncoder(options.queries),
    }
    documents = EngineEncoder(DOCUMENT_TOWER, "bfloat16")
    costs = measure_costs([pair.question for pair in corpus.pairs], encoders)
    collections = {corpus.source: corpus.pairs, "installed packages": package_pairs()}
    results = {
        **facts,
        "models": {name: encoder.facts() for name, encoder in encoders.items()},
        "query_cost": costs,
        "share_of_time": round(
            costs[SHIPPED_QUERIES_ID]["mean_us"] / costs[DOCUMENT_TOWER]["mean_us"], 4
        ),
        "packages": {package: version(package) for package in HELD_OUT_PACKAGES},
        "collections": {
            name: measure_recall(pairs, documents, encoders) for name, pairs in collections.items()
        },
    }
    write_results(options.json, results)
    print(results)


if __name__ == "__main__":
    main()
