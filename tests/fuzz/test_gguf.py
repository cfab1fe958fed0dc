"""Tests of the readers of GGUF files on generated models, and of the judge."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftgate.backends.errors import CheckpointError
from draftgate.backends.gguf.architectures import config_fields, source_tensors
from draftgate.backends.gguf.reader import read_gguf
from tests.examples import examples
from tests.fuzz import gguf_judge
from tests.fuzz.gguf_cases import KEYS, Case, case_of
from tests.fuzz.gguf_judge import Finding, Judge
from tests.fuzz.gguf_trees import encoded, parsed, sound_models
from tests.gguf.files import Pair, tiny_model

INT32, UINT64 = 5, 10
SOUND = Case({"model.gguf": tiny_model()}, "model.gguf")


@pytest.fixture
def judge(tmp_path: Path) -> Judge:
    """A judge with an empty folder."""
    return Judge(tmp_path)


def test_generated_models_are_read_or_refused(judge: Judge) -> None:
    """Readers raise only errors that name the file, within bounds of memory, and find what the
    `gguf` package finds."""
    number = examples(1000)
    for seed in range(number):
        judge.check(case_of(seed))
    assert judge.counts["cases"] == number
    assert judge.counts["models loaded"] > number / 20
    assert judge.counts["refused"] > number / 4


@pytest.mark.parametrize("number", range(len(sound_models())))
def test_sound_models_are_loaded(judge: Judge, number: int) -> None:
    """The models without faults load, so that the fuzzer begins with all that is supported."""
    judge.check(Case({"model.gguf": sound_models()[number]}, "model.gguf"))
    assert judge.counts["models loaded"] == judge.counts["headers compared"] == 1


def test_no_number_of_a_shape_breaks_the_config(tmp_path: Path) -> None:
    """Zero, negative and huge values of every key of an architecture are accepted or refused."""
    path = tmp_path / "model.gguf"
    by_name = {parsed(data).pairs[0].value: data for data in sound_models()}
    for data in by_name.values():
        model = parsed(data)
        sound, architecture = model.pairs, model.pairs[0].value
        for key in (key.replace("ARCH", architecture) for key in KEYS if "ARCH" in key):
            rest = [one for one in sound if one.key != key]
            for kind, value in ((INT32, 0), (INT32, -1), (UINT64, (1 << 64) - 1)):
                model.pairs = [*rest, Pair(key, kind, value)]
                path.write_bytes(encoded(model).data)
                try:
                    read = read_gguf(path)
                    config_fields(read)
                    source_tensors(read)
                except CheckpointError as error:
                    assert str(path) in str(error)  # noqa: PT017 - not every value is refused


def _divides(_path: Path) -> Any:
    return 1 / 0


def _takes_memory(path: Path) -> Any:
    bytearray(gguf_judge.BASE_BYTES * 2)
    return read_gguf(path)


def _names_no_file(_path: Path) -> Any:
    raise CheckpointError("something is wrong")


def _forgets_a_tensor(path: Path) -> Any:
    model = read_gguf(path)
    model.tensors.pop("output_norm.weight")
    return model


@pytest.mark.parametrize(
    ("reader", "words"),
    [
        (_divides, "ZeroDivisionError"),
        (_takes_memory, "bytes for"),
        (_names_no_file, "names no file"),
        (_forgets_a_tensor, "other tensors"),
    ],
)
def test_judge_detects_faults_of_a_reader(
    judge: Judge, monkeypatch: pytest.MonkeyPatch, reader: Callable[[Path], Any], words: str
) -> None:
    """The judge rejects undocumented errors, errors without a file, memory and wrong tensors."""
    monkeypatch.setattr(gguf_judge, "read_gguf", reader)
    with pytest.raises(Finding, match=words):
        judge.check(SOUND)


@pytest.mark.long
def test_command_reads_models_in_children() -> None:
    """The command ends without findings, and reports its seeds and counts."""
    command = [sys.executable, "-m", "tests.fuzz.gguf", "60", "--seed", "5", "--count", "40"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert '"cases": 40' in done.stdout
