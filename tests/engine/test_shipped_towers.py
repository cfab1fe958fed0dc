"""The shipped towers in the engine: they load, share a space, and find unseen passages."""

from __future__ import annotations

import numpy as np
import pytest

from draftgate.backends.checkpoints import (
    SHIPPED_DOCUMENTS_ID,
    SHIPPED_QUERIES_ID,
    SHIPPED_TOWERS,
    checkpoint_id,
    find_checkpoint,
)
from draftgate.backends.engine.load import load_engine
from draftgate.backends.engine.loaded import LoadedEngine
from draftgate.backends.worker_config import WorkerConfig
from draftgate.loadgen.planning.corpus import open_corpus

QUESTIONS, PASSAGES = 100, 300
LEAST_RECALL = 0.6
"""Chance is 0.017. The test is of any Python, whose pairs differ a little."""

KEPT = 0.9
"""Least share of the recall of the document tower. A hundred questions are too few for 0.95."""


@pytest.fixture(scope="module")
def towers() -> dict[str, LoadedEngine]:
    """Both towers, loaded by their names."""
    return {name: load_engine(WorkerConfig(model=name, threads=1)) for name in SHIPPED_TOWERS}


def vectors(engine: LoadedEngine, texts: list[str]) -> np.ndarray:
    """Return unit vectors."""
    limit, encode = engine.served.card.max_model_len, engine.worker.tokenizer.encode
    found = np.stack(
        [np.frombuffer(engine.executor.pooled([encode(text)[:limit]])[0], "<f4") for text in texts]
    )
    return found / np.linalg.norm(found, axis=1, keepdims=True)


def test_shipped_names_resolve_without_a_hub() -> None:
    """The names are those of directories in the package, and the ids for clients."""
    for name, directory in SHIPPED_TOWERS.items():
        assert find_checkpoint(name) == directory
        assert checkpoint_id(name) == name


def test_towers_have_one_tokenizer_and_one_size(towers: dict[str, LoadedEngine]) -> None:
    """Both towers serve embeddings of one size, and read the same tokens."""
    documents, queries = (towers[name] for name in (SHIPPED_DOCUMENTS_ID, SHIPPED_QUERIES_ID))
    assert documents.worker.tokenizer.vocabulary == queries.worker.tokenizer.vocabulary
    cards = [documents.served.card, queries.served.card]
    assert [card.model_id for card in cards] == [SHIPPED_DOCUMENTS_ID, SHIPPED_QUERIES_ID]
    assert len({card.capabilities.embedding_size for card in cards}) == 1
    assert all(card.capabilities.exact and card.prompts == () for card in cards)


def test_towers_find_passages_of_unseen_modules(towers: dict[str, LoadedEngine]) -> None:
    """Recall at 5 is far above chance, and the query tower keeps its share."""
    pairs = open_corpus().pairs[:PASSAGES]
    documents, queries = (towers[name] for name in (SHIPPED_DOCUMENTS_ID, SHIPPED_QUERIES_ID))
    passages = vectors(documents, [pair.passage for pair in pairs])
    questions = [pair.question for pair in pairs[:QUESTIONS]]

    def recall(engine: LoadedEngine) -> float:
        scores = vectors(engine, questions) @ passages.T
        better = (scores > np.diag(scores)[:, None]).sum(1)
        return float((better < 5).mean())

    large, small = recall(documents), recall(queries)
    assert large > LEAST_RECALL
    assert small > KEPT * large


def test_identifiers_are_divided_into_words(towers: dict[str, LoadedEngine]) -> None:
    """A query in words is nearer to an identifier of these words than to another one."""
    documents = towers[SHIPPED_DOCUMENTS_ID]
    encode = documents.worker.tokenizer.encode
    assert encode("parseHeaderLine") == encode("parse header line") == encode("parse_header_line")
