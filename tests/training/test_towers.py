"""Training of the query tower: what it never sees, a run of every stage, and the model card."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import BertConfig, BertModel

from draftgate.backends.checkpoints import SHIPPED_QUERIES
from draftgate.backends.engine.load import load_engine
from draftgate.backends.worker_config import WorkerConfig
from draftgate.loadgen.planning.corpus import open_corpus
from draftgate.loadgen.planning.pairs import is_held_out
from training.towers import train
from training.towers.card import CARD, METRICS, render
from training.towers.queries import source_queries, training_queries
from training.towers.student import Shape, Student, cut_tokenizer, regress_words
from training.towers.texts import (
    HELD_OUT_PACKAGES,
    PACKAGES,
    Source,
    is_trained_on,
    is_validation,
    stdlib_sources,
)

MODULES = ("argparse", "ast", "inspect", "logging", "pathlib", "random", "statistics", "typing")
SIZE = 64
SHAPE = Shape(words=600, inner=32)

FUNCTION = '''
def read(path):
    """Read a configuration
    file from the disk. It is closed again."""

def write(path):
    """Write it."""

class Parser:
    """>>> a doctest of many words"""
'''


@pytest.fixture(scope="module")
def sources() -> list[Source]:
    """The files of the standard library that the tower trains on."""
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


def test_held_out_files_are_not_trained_on(sources: list[Source]) -> None:
    """Training and test files of this Python are disjoint, and so are the packages."""
    held_out = {source.unit for source in stdlib_sources(held_out=True)}
    trained_on = {source.unit for source in sources}
    assert not held_out & trained_on
    assert not any(map(is_held_out, trained_on))
    assert min(len(held_out), len(trained_on)) > 20
    assert not {*PACKAGES, *PACKAGES.values()} & {*HELD_OUT_PACKAGES, *HELD_OUT_PACKAGES.values()}


def test_queries_are_first_sentences_of_docstrings() -> None:
    """A query is on one line. Doctests and very short sentences are none."""
    found = list(source_queries(Source("m", "", FUNCTION)))
    assert [query.text for query in found] == ["Read a configuration file from the disk."]


def test_questions_of_held_out_sources_are_no_queries(sources: list[Source]) -> None:
    """A query that a held-out source contains is dropped, whatever its case and punctuation."""
    copied = Source(
        "copy", "package", FUNCTION.replace("Read a", "READ a").replace("disk.", "disk!")
    )
    other = Source("other", "package", FUNCTION.replace("configuration", "picture"))
    found = training_queries([copied, other], [Source("m", "", FUNCTION)], 9)
    assert [query.unit for query in found] == ["other"]
    questions = {pair.question for pair in open_corpus().pairs}
    chosen = [source for source in sources if source.unit in MODULES]
    texts = [q.text for q in training_queries(chosen, stdlib_sources(held_out=True), 10**6)]
    assert len(texts) > 300
    assert not questions & set(texts)


def test_validation_units_are_a_small_fixed_share() -> None:
    """One in twelve units validates, whatever else exists."""
    share = sum(is_validation(f"module_{n}") for n in range(4000)) / 4000
    assert share == pytest.approx(1 / 12, abs=0.02)


def test_a_new_tower_returns_the_means_of_its_word_vectors() -> None:
    """Word vectors of unlike norms pass all layers, because the fillers absorb the norms."""
    rng = np.random.default_rng(0)
    words = (rng.normal(size=(50, SIZE)) * rng.uniform(0.1, 3, size=(50, 1))).astype(np.float32)
    torch.manual_seed(0)
    tower = Student(replace(SHAPE, layers=2), words).eval()
    texts = [rng.integers(50, size=length).tolist() for length in (1, 2, 9, 30, 4)]
    with torch.no_grad():
        found = tower(texts).numpy()
    assert found == pytest.approx(np.stack([words[text].mean(0) for text in texts]), abs=1e-3)


def test_regression_finds_the_word_vectors_of_means() -> None:
    """If the vectors of texts are means of word vectors, the regression returns these."""
    rng = np.random.default_rng(0)
    words = rng.normal(size=(30, SIZE)).astype(np.float32)
    texts = [rng.integers(30, size=length).tolist() for length in rng.integers(1, 9, size=400)]
    vectors = np.stack([words[text].mean(0) for text in texts])
    assert regress_words(texts, vectors, 30, 1e-6) == pytest.approx(words, abs=1e-2)


@pytest.fixture(scope="module")
def teacher(sources: list[Source]) -> tuple[BertModel, Tokenizer]:
    """A random encoder with words of the standard library, in place of MiniLM."""
    names = [chr(code) for code in range(33, 127) if not chr(code).isupper()]
    text = "".join(source.text for source in sources if source.unit in MODULES).lower()
    common = sorted({word for word in text.split() if word.isalpha()})
    entries = ["[PAD]", "[UNK]", "[CLS]", *names, *(f"##{name}" for name in names), *common]
    ids = {token: n for n, token in enumerate(dict.fromkeys(entries))}
    tokenizer = Tokenizer(models.WordPiece(ids, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(ids),
        hidden_size=SIZE,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=SIZE,
        initializer_range=0.2,
    )
    return BertModel(config, add_pooling_layer=False).eval(), tokenizer


@pytest.fixture(scope="module")
def trained(
    sources: list[Source],
    teacher: tuple[BertModel, Tokenizer],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Path]:
    """The folder of a run of the stages on a few modules, whose training was interrupted."""
    folder = tmp_path_factory.mktemp("towers")
    chosen = [source for source in sources if source.unit in MODULES]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "is_validation", lambda unit: unit == MODULES[0])
        patch.setattr(train, "stdlib_sources", lambda held_out=False: [] if held_out else chosen)
        patch.setattr(train, "package_sources", lambda *_: [])
        patch.setattr(train, "open_teacher", lambda: teacher)
        patch.setattr(train, "SHAPE", SHAPE)
        patch.setattr(train, "RECIPE", replace(train.RECIPE, batch=32, epochs=3, pool=4))
        patch.setattr(train, "CHECKPOINT_STEPS", 10)
        train.main(["queries", "teacher", "--folder", str(folder)])
        run = train.Distillation(folder, 1, train.start_from_words, train.RECIPE)
        steps = iter(range(15))
        step = run._step
        run._step = lambda *given: (next(steps), step(*given))[1]
        with pytest.raises(StopIteration):
            run.run()
        train.main(["train", "--seed", "1", "--folder", str(folder)])
        yield folder


def test_an_interrupted_training_continues_and_learns(trained: Path) -> None:
    """Every checkpoint occurs once, the loss falls, and unseen queries are near the teacher's."""
    history = json.loads((trained / train.FACTS).read_text())["history"]
    steps = [row["step"] for row in history]
    assert steps == sorted({*steps}), steps
    assert steps[:3] == [0, 10, 20]
    assert history[-1]["training_loss"] < history[1]["training_loss"]
    assert history[-1]["validation_cosine"] > 0.8


def test_the_engine_reads_what_training_writes(trained: Path) -> None:
    """The engine's vectors are those of the stored weights in transformers."""
    engine = load_engine(WorkerConfig(model=str(trained / "tower"), threads=1))
    model = BertModel.from_pretrained(trained / "tower", add_pooling_layer=False)
    from safetensors.torch import load_file

    dense = load_file(trained / "tower" / "2_Dense" / "model.safetensors")["linear.weight"].float()
    ids = engine.worker.tokenizer.encode("Return the configuration of a parser.")
    with torch.no_grad():
        states = model.float().eval()(input_ids=torch.tensor([ids])).last_hidden_state
        expected = (states.mean(1) @ dense.T)[0].numpy()
    found = np.frombuffer(engine.executor.pooled([ids])[0], "<f4")
    found, expected = (each / np.linalg.norm(each) for each in (found, expected))
    assert found == pytest.approx(expected, abs=1e-5)


def test_a_cut_vocabulary_has_the_most_frequent_words(
    teacher: tuple[BertModel, Tokenizer],
) -> None:
    """A frequent word stays one token, and a rare one is divided."""
    texts = ["return the parser"] * 9 + ["a statistics module"]
    tokenizer = cut_tokenizer(teacher[1], texts, 200)
    assert tokenizer.encode("Return").tokens == ["[CLS]", "return"]
    assert "".join(tokenizer.encode("zebra").tokens) == "[CLS]z##e##b##r##a"


def test_card_is_rendered_from_its_metrics() -> None:
    """The shipped card has the numbers of metrics.json."""
    metrics = json.loads((SHIPPED_QUERIES / METRICS).read_text())
    assert (SHIPPED_QUERIES / CARD).read_text() == render(metrics)
    assert set(metrics["corpus"]["held_out"]) >= {"email", "tarfile"}
