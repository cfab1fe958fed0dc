"""Training of the towers: what they never see, a run of every stage, and the model card."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from draftgate.backends.checkpoints import SHIPPED_DOCUMENTS_ID, SHIPPED_TOWERS
from draftgate.backends.engine.load import load_engine
from draftgate.backends.worker_config import WorkerConfig
from draftgate.loadgen.planning.corpus import open_corpus
from draftgate.loadgen.planning.pairs import is_held_out
from training.towers import train
from training.towers.card import CARD, METRICS, render
from training.towers.data import read_examples
from training.towers.examples import COMMENT, DETAIL, NAME, SENTENCE, SUMMARY, source_examples
from training.towers.model import Tower, embed, load
from training.towers.recipes import QUERIES, SHIPPED_ARM, Recipe, Shape
from training.towers.texts import (
    CopyFilter,
    Source,
    is_trained_on,
    is_validation,
    stdlib_sources,
)
from training.towers.train import FACTS

MODULES = ("argparse", "ast", "inspect", "logging", "pathlib", "random", "statistics", "typing")
SHAPE = Shape(hidden=32, layers=2, heads=2, inner=32)
QUERY_SHAPE = Shape(hidden=16, layers=1, heads=2, inner=32, dense=32)

FUNCTION = '''
def readConfig_file(path, *, strict):
    """Read a configuration file from the disk.

    The file must be small and in UTF-8. It is closed again.
    """
    # Open the file in text mode and parse its sections.
    with open(path, encoding="utf-8") as file:
        lines = file.read().splitlines()
    sections = {}
    for line in lines:
        name, _, value = line.partition("=")
        sections[name.strip()] = value.strip()
    return sections
'''


@pytest.fixture(scope="module")
def sources() -> list[Source]:
    """The files of the standard library that towers train on."""
    return stdlib_sources()


@pytest.mark.parametrize(
    ("name", "trained_on"),
    [
        *(("email/header.py", False), ("tarfile.py", False), ("pydoc_data/topics.py", False)),
        *(("test/test_tarfile.py", False), ("json/tests/test_decode.py", False)),
        *(("json/decoder.py", True), ("logging/__init__.py", True), ("os.py", True)),
    ],
)
def test_held_out_modules_and_tests_are_not_trained_on(name: str, trained_on: bool) -> None:
    """The selection follows `is_held_out`, and skips tests, which name the modules they test."""
    assert is_trained_on(name) == trained_on


def test_no_training_file_belongs_to_a_held_out_module(sources: list[Source]) -> None:
    """Training and test files of this Python are disjoint, and both have many modules."""
    held_out = {source.unit for source in stdlib_sources(held_out=True)}
    trained_on = {source.unit for source in sources}
    assert not held_out & trained_on
    assert not any(map(is_held_out, trained_on))
    assert all(map(is_held_out, held_out))
    assert min(len(held_out), len(trained_on)) > 20


def test_no_training_example_is_a_test_pair(sources: list[Source]) -> None:
    """No question of the collection is a query with its passage, whatever kind of example."""
    collection = {(pair.question, pair.passage[:1000]) for pair in open_corpus().pairs}
    chosen = [source for source in sources if source.unit in MODULES]
    found = {(e.query, e.passage[:1000]) for s in chosen for e in source_examples(s)}
    assert len(found) > 300
    assert not collection & found


def test_copies_of_held_out_code_in_packages_are_dropped() -> None:
    """A package that contains five lines of a held-out module loses that passage only."""
    held_out = CopyFilter([FUNCTION])
    own = FUNCTION.replace("sections", "parts").replace("lines", "rows").replace("name", "key")
    copied = Source("package/vendored.py", "package", f"import os\n{FUNCTION}")
    changed = Source("package/own.py", "package", own)
    assert read_examples([copied], held_out) == []
    assert {e.unit for e in read_examples([copied, changed], held_out)} == {"package/own.py"}


def test_a_function_has_examples_of_every_kind() -> None:
    """The queries are the summary, a sentence, the name and a comment."""
    found = {e.kind: e.query for e in source_examples(Source("m", "", FUNCTION))}
    assert found == {
        SUMMARY: "Read a configuration file from the disk.",
        SENTENCE: "The file must be small and in UTF-8.",
        NAME: "read Config file",
        COMMENT: "Open the file in text mode and parse its sections.",
    }
    longer = FUNCTION.replace("It is closed again.", "It is closed again. " * 8)
    assert DETAIL in {e.kind for e in source_examples(Source("m", "", longer))}


def test_validation_units_are_a_small_fixed_share() -> None:
    """One in twelve units validates, whatever else exists."""
    share = sum(is_validation(f"module_{n}") for n in range(4000)) / 4000
    assert share == pytest.approx(1 / 12, abs=0.02)


@pytest.mark.parametrize("shape", [SHAPE, QUERY_SHAPE])
def test_the_lexical_phase_trains_the_tower_that_the_next_phase_continues(shape: Shape) -> None:
    """A new tower gives the same vectors with its layers as in the shortcut of the first phase."""
    torch.manual_seed(0)
    tower = Tower(shape, 50).eval()
    last = tower.bert.encoder.layer[-1].output.LayerNorm
    torch.nn.init.normal_(last.weight)
    torch.nn.init.normal_(last.bias)
    rng = np.random.default_rng(0)
    texts = [rng.integers(50, size=length).astype(np.uint16) for length in (1, 2, 9, 30, 4)]
    with torch.no_grad():
        torch.testing.assert_close(tower(texts), tower.lexical(texts), atol=1e-5, rtol=0)


@pytest.fixture(scope="module")
def trained(
    sources: list[Source], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Path, dict[str, Shape]]]:
    """The folder of a run of every stage with tiny recipes on a few modules, and their shapes."""
    folder = tmp_path_factory.mktemp("towers")
    chosen = [source for source in sources if source.unit in MODULES]
    examples = read_examples(chosen, CopyFilter([]))
    (folder / "examples.jsonl").write_text("".join(json.dumps(e) + "\n" for e in examples))
    tiny = {"lexical_steps": 60, "lexical_batch": 64, "steps": 4, "batch": 32}
    arm = Recipe(SHAPE, **tiny)
    query = replace(QUERIES, shape=QUERY_SHAPE, **tiny)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "is_validation", lambda unit: unit == MODULES[0])
        patch.setitem(train.ARMS, SHIPPED_ARM, arm)
        patch.setattr(train, "QUERIES", query)
        train.main(["tokenizer", SHIPPED_ARM, "queries", "--folder", str(folder)])
        yield folder, {SHIPPED_ARM: SHAPE, "queries": QUERY_SHAPE}


def test_every_stage_runs_and_losses_fall(trained: tuple[Path, dict[str, Shape]]) -> None:
    """A tiny run learns: recall on unseen modules is far above chance, and vectors agree."""
    folder, shapes = trained
    facts = {name: json.loads((folder / name / FACTS).read_text())["history"] for name in shapes}
    first, *_, last = facts[SHIPPED_ARM]
    assert last["training_nats"] < first["training_nats"]
    assert last["validation_recall"]["5"] > 0.2
    assert facts["queries"][-1]["validation_cosine"] > 0.5


def test_the_engine_reads_what_training_writes(trained: tuple[Path, dict[str, Shape]]) -> None:
    """The engine's vectors are those of the training code, within the rounding of float16."""
    folder, shapes = trained
    for name, shape in shapes.items():
        engine = load_engine(WorkerConfig(model=str(folder / name), threads=1))
        ids = engine.worker.tokenizer.encode("def readConfig_file(path): return 1")
        found = np.frombuffer(engine.executor.pooled([ids])[0], "<f4")
        expected = embed(load(folder / name, shape), [np.array(ids, np.uint16)])[0].numpy()
        assert found / np.linalg.norm(found) == pytest.approx(expected, abs=1e-4)


def test_card_is_rendered_from_its_metrics() -> None:
    """The shipped card has the numbers of metrics.json."""
    folder = SHIPPED_TOWERS[SHIPPED_DOCUMENTS_ID]
    metrics = json.loads((folder / METRICS).read_text())
    assert (folder / CARD).read_text() == render(metrics)
    assert set(metrics["corpus"]["held_out"]) >= {"email", "tarfile"}
