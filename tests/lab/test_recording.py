"""Recordings: the shipped files, their selection, and damaged files."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given

from bench.simulation.recordings import table
from draftgate.backends.core.drafts import Draft
from draftgate.backends.engine.proposers.ngram_lookup import MAX_EVIDENCE
from draftgate.backends.recording import DIGITS, Columns, Guess, RecordingFile, Text, Tree
from draftgate.backends.sim.profile import load_profile, profile_names
from draftgate.lab.sim.environment import proposer_names
from draftgate.lab.sim.recording import (
    RECORDINGS,
    load_recording,
    recording_names,
)

DEMO = load_recording("draftgate-demo")
LLAMA = load_recording("llama-3.1-8b")
REAL_NAMES = ("gemma-3-270m", "smollm2-135m")
REAL = tuple(map(load_recording, REAL_NAMES))
NAMES = ("draftgate-demo", "llama-3.1-8b", *REAL_NAMES)
REAL_TASKS = {
    *("chat", "translation", "summary", "qa", "math", "rag"),
    *("structured", "tool_calls", "code_edit", "retrieval", "agent"),
}


def test_shipped_recordings_are_complete() -> None:
    """Every draft of the shipped recordings agrees in at most as many tokens as it has."""
    assert recording_names() == tuple(sorted(NAMES))
    for recording in (DEMO, LLAMA, *REAL):
        for task in recording.tasks:
            for text in recording.texts(task, 0.0) + recording.texts(task, 1.0):
                assert text.length >= 24
                for name in text.drafts:
                    guesses = [text.guess(name, position) for position in range(text.length)]
                    assert all(0 <= guess.agreed <= guess.proposed <= 16 for guess in guesses)
                    assert all(0 <= guess.agreement <= 1000 for guess in guesses)


def test_demo_recording_has_two_temperatures() -> None:
    """Each task of the shipped model has greedy texts and sampled texts."""
    assert set(DEMO.tasks) == {"completion", "rewrite", "long_context"}
    assert DEMO.proposers == ("draft_model", "ngram", "sparse_self")
    for task in DEMO.tasks:
        assert DEMO.texts(task, 0.0) != DEMO.texts(task, 1.0)


def test_llama_recording_has_700_texts() -> None:
    """The recording has the texts of four tasks, and every second text is held out."""
    assert set(LLAMA.tasks) == {"chat", "summary", "code_edit", "math"}
    assert LLAMA.proposers == ("draft_model", "ngram")
    assert len(LLAMA.texts("unknown", 0.0)) == 700
    assert len(LLAMA.held_out().texts("unknown", 0.0)) == 350
    assert not {text.held_out for text in LLAMA.held_out().texts("unknown", 0.0)} - {True}


@pytest.mark.parametrize("recording", REAL)
def test_halves_of_recordings_have_every_task_and_share_no_conversation(recording) -> None:
    """No conversation is in both halves, and each half has texts of all tasks."""
    tuning, held_out = (
        {(text.task, text.prompt) for text in recording.all_texts if text.held_out == half}
        for half in (False, True)
    )
    assert {task for task, _ in tuning} == {task for task, _ in held_out} == REAL_TASKS
    assert not tuning & held_out


def test_halves_of_smollm2_have_every_task_at_three_temperatures() -> None:
    """The recording has over 180,000 positions, of every cell in each half."""
    texts = load_recording("smollm2-135m").all_texts
    cells = {
        (task, temperature, half)
        for task in REAL_TASKS
        for temperature in (0.0, 0.7, 1.0)
        for half in (False, True)
    }
    assert {(text.task, text.temperature, text.held_out) for text in texts} == cells
    assert sum(text.length for text in texts) > 180_000


@pytest.mark.parametrize("recording", REAL)
def test_recordings_of_real_models_have_the_drafts_of_every_request(recording) -> None:
    """Tasks with a grammar have forced tokens, and code edits have drafts from the prediction."""
    for text in recording.all_texts:
        forced = text.task in {"structured", "tool_calls"}
        assert ("grammar" in text.drafts) == forced or text.task == "agent"
        assert ("prediction" in text.drafts) == (text.task == "code_edit")
        assert "ngram" in text.drafts


def test_recordings_of_real_models_contain_numbers_alone() -> None:
    """Strings of a text are its task, or lengths; numbers are bounded by their meaning."""
    for recording in REAL:
        assert {text.task for text in recording.all_texts} == REAL_TASKS
        for text in recording.all_texts:
            assert not text.tenant
            for name, columns in text.drafts.items():
                assert set(columns.proposed + columns.agreed) <= set(DIGITS)
                assert all(set(tree.parents) <= set(DIGITS) for tree in columns.trees)
                most = 1000 if name == "sparse_self" else MAX_EVIDENCE
                assert max(columns.evidence) <= most
                assert max(columns.agreement, default=0) <= 1000


def test_shipped_recordings_stay_small() -> None:
    """All recordings of the package take less than 4 MiB."""
    assert sum(path.stat().st_size for path in RECORDINGS.glob("*.json*")) < 4 << 20


def test_card_has_the_figures_of_the_recordings() -> None:
    """The tables of the card are those of `bench.simulation.recordings`, line by line."""
    card = (RECORDINGS / "README.md").read_text(encoding="utf-8")
    for name in REAL_NAMES:
        assert "\n".join(table(name)) in card


def test_profiles_replay_texts_of_their_model() -> None:
    """Each shipped profile names a shipped recording, the 8B profiles that of the 8B model."""
    recordings = {name: load_profile(name).recording for name in profile_names()}
    assert recordings == {
        "cpu-demo": "draftgate-demo",
        "h100-8b": "llama-3.1-8b",
        "h200-8b": "llama-3.1-8b",
    }


@pytest.mark.parametrize(("recording", "task"), [(DEMO, "completion"), (LLAMA, "chat")])
def test_recorded_acceptance_is_autocorrelated(recording, task) -> None:
    """Long accepted drafts tend to follow each other, with a correlation above 0.3."""
    pairs = [
        (text.guess("ngram", at).agreed, text.guess("ngram", at + 1).agreed)
        for text in recording.texts(task, 0.8)
        for at in range(text.length - 1)
    ]
    mean = sum(first for first, _ in pairs) / len(pairs)
    covariance = sum((first - mean) * (second - mean) for first, second in pairs)
    assert covariance / sum((first - mean) ** 2 for first, _ in pairs) > 0.3


def test_class_without_a_task_replays_the_default_texts() -> None:
    """An unknown class replays the task of `*`, or all texts of a recording without it."""
    assert DEMO.texts("poetry", 0.0) == DEMO.texts("completion", 0.0)
    assert DEMO.texts("rag", 0.0) == DEMO.texts("rewrite", 0.0)
    assert LLAMA.texts("interactive", 0.8) == LLAMA.texts("code_edit", 0.0)


lengths = st.integers(0, 16)
per_mille = st.integers(0, 1000)
chains = st.builds(Guess, per_mille, per_mille, lengths, lengths, tree=st.none(), path=st.just(()))


@st.composite
def trees(draw: st.DrawFn) -> Guess:
    """Draw the guess of a tree in which the tokens on a random path are right."""
    count = draw(st.integers(1, 16))
    parents = tuple(draw(st.integers(-1, place - 1)) for place in range(count))
    shares = tuple(draw(st.floats(0, 1)) for _ in range(count))
    draft = Draft(tuple(range(count)), parents, shares, draw(per_mille), draw(per_mille))
    place, path = draw(st.integers(-1, count - 1)), []
    while place >= 0:
        path.insert(0, place)
        place = parents[place]
    return Guess.from_draft(draft, path)


guesses = st.lists(chains | trees(), min_size=1)


@given(guesses)
def test_encoded_recording_is_decoded_unchanged(drafts: list[Guess]) -> None:
    """A recording that is written and read again has the same drafts at each position."""
    text = Text("chat", 0.8, 3, {"ngram": Columns.from_guesses(drafts)})
    file = RecordingFile(format="acceptance/2", source="a test", slots=16, texts=(text, text))
    read = msgspec.json.decode(file.encode(), type=RecordingFile)
    assert read == file
    assert [read.texts[1].guess("ngram", at) for at in range(len(drafts))] == drafts
    assert read.texts[0].guess("draft_model", 0) == Guess(0, 0, 0, 0)


@pytest.mark.parametrize(
    ("parents", "shares", "tree", "message"),
    [
        ("011", (), 1, "no tree 1 of 2 tokens"),
        ("00", (), 2, "no tree 2 of 2 tokens"),
        ("02", (), 1, "parent that follows its child"),
        ("0!", (), 1, "parent that follows its child"),
        ("00", ((2, 0.5),), 1, "shares of other tokens"),
    ],
)
def test_damaged_tree_is_rejected(parents, shares, tree, message: str) -> None:
    """The error names the position without a tree, or the parents of the damaged tree."""
    columns = Columns((3,), "2", "1", tree=(tree,), trees=(Tree(parents, shares),))
    with pytest.raises(ValueError, match=message):
        Text("chat", 0.0, 1, {"ngram": columns}).check()


def test_first_form_is_still_read(tmp_path: Path) -> None:
    """A file of the form `acceptance/1` has no agreement, and a compressed file is read as well."""
    columns = {"evidence": [1, 2], "proposed": "g1", "agreed": "30"}
    content = {
        "source": "a test",
        "slots": 16,
        "texts": [{"task": "chat", "temperature": 0.0, "prompt": 1, "drafts": {"ngram": columns}}],
    }
    path = tmp_path / "old.json.gz"
    path.write_bytes(gzip.compress(json.dumps(content).encode()))
    (text,) = load_recording(str(path)).texts("chat", 0.0)
    assert [text.guess("ngram", at) for at in (0, 1)] == [Guess(1, 0, 16, 3), Guess(2, 0, 1, 0)]


def longer(content: dict[str, Any]) -> None:
    content["texts"][0]["drafts"]["ngram"]["agreed"] += "0"


def unknown_length(content: dict[str, Any]) -> None:
    columns = content["texts"][0]["drafts"]["ngram"]
    columns["agreed"] = "z" + columns["agreed"][1:]


def unknown_format(content: dict[str, Any]) -> None:
    content["format"] = "acceptance/9"


def empty(content: dict[str, Any]) -> None:
    content["texts"] = []


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (longer, "differ in length"),
        (unknown_length, "lengths \\['z'\\]"),
        (unknown_format, "acceptance/9"),
        (empty, "no texts"),
    ],
)
def test_damaged_recording_is_rejected_by_name(tmp_path: Path, damage, message: str) -> None:
    """The error names the file and what is wrong with it."""
    content = json.loads((RECORDINGS / "draftgate-demo.json").read_text())
    damage(content)
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=rf"damaged recording .*bad\.json.*{message}"):
        load_recording(str(path))


def test_missing_recording_is_rejected_with_the_known_names() -> None:
    """The error lists the shipped recordings."""
    with pytest.raises(ValueError, match=", ".join(sorted(NAMES)).replace(".", r"\.")):
        load_recording("poetry")


def test_forced_tokens_are_replayed_without_a_cost_of_drafting() -> None:
    """A profile need not have a cost of `grammar`, which is a lookup."""
    profile = load_profile("h100-8b")
    for recording in REAL:
        assert proposer_names("grammar,ngram", profile, recording) == ("grammar", "ngram")
    with pytest.raises(ValueError, match="no proposer 'grammar' was recorded"):
        proposer_names("grammar", profile, LLAMA)
