"""`bench.engine.acceptance`: its conversations, its texts, and their recording."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("llguidance")

from bench.engine import acceptance
from bench.engine.acceptance import as_file, load, record
from bench.engine.recorded_tasks import TEMPLATES, Conversation, Turn, conversations, templated
from bench.engine.recorded_texts import Answer, Talk, generate, read_answers, save_answer
from bench.harness.loops import loop_start
from draftgate.backends.engine.loaded import LoadedEngine
from draftgate.backends.grammar import LlGrammars
from draftgate.backends.recording import DIGITS, SLOTS, Text
from draftgate.backends.types import GrammarKind, GrammarSpec

DIGITS_ONLY = GrammarSpec(GrammarKind.REGEX, r"\[([0-9]+, )+[0-9]+\]")
CODE = "def first(items):\n    return items[0]\n\n\ndef last(items):\n    return items[-1]\n"
TALKS = [
    Conversation("chat", 0, (Turn("Hello!", 60), Turn("Why?", 60))),
    Conversation("list", 1, (Turn("Count.", 60, DIGITS_ONLY),)),
    Conversation("edit", 2, (Turn(CODE, 60, prediction=CODE, begun=CODE[:40]),)),
]


@pytest.fixture(scope="module")
def engine() -> LoadedEngine:
    """The shipped model, with one thread."""
    return load(None)


def talks() -> list[Talk]:
    return [Talk(one, temperature) for one in TALKS for temperature in (0.0, 1.0)]


@pytest.fixture(scope="module")
def answers(engine: LoadedEngine) -> dict[str, Answer]:
    """The answers of all conversations."""
    return {answer.key: answer for answer in generate(engine, talks(), {})}


@pytest.fixture(scope="module")
def texts(engine: LoadedEngine, answers: dict[str, Answer]) -> list[Text]:
    """The recorded texts of all answers."""
    return record(engine, list(answers.values()), TALKS, trees=True)


def test_every_turn_has_an_answer_at_every_temperature(
    engine: LoadedEngine, answers: dict[str, Answer]
) -> None:
    """The prompt of a later turn begins with the conversation so far."""
    decode = engine.worker.tokenizer.decode
    assert len(answers) == 2 * sum(len(one.turns) for one in TALKS)
    for temperature in (0.0, 1.0):
        first, second = (answers[f"chat/0/{turn}/{temperature}"] for turn in (0, 1))
        before = decode(first.prompt_ids) + decode(first.output_ids).strip()
        assert decode(second.prompt_ids).startswith(before[:20])
        assert "Why?" in decode(second.prompt_ids)


def test_interrupted_command_generates_only_missing_answers(
    engine: LoadedEngine, answers: dict[str, Answer], tmp_path: Path
) -> None:
    """The file keeps the answers of the first run, and the second run adds equal ones."""
    path = tmp_path / "texts.jsonl"
    kept = list(answers)[::2]
    with path.open("ab") as lines:
        for key in kept:
            save_answer(answers[key], lines)
    known = read_answers(path)
    assert known == {key: answers[key] for key in kept}
    added = {answer.key: answer for answer in generate(engine, talks(), known)}
    assert known | added == answers
    assert not known.keys() & added.keys()


def test_texts_end_before_a_loop_and_before_a_cut(
    texts: list[Text], answers: dict[str, Answer]
) -> None:
    """A text lacks the first position, a loop but its first token, and the end of a cut answer."""
    lengths = {(text.task, text.temperature, text.length) for text in texts}
    for answer in answers.values():
        end = len(answer.output_ids) - (0 if answer.ended else SLOTS)
        end = min(end, loop_start(answer.output_ids) + 1)
        if end > 24:
            assert (answer.task, answer.temperature, end - 1) in lengths
    assert texts
    assert {text.held_out for text in texts if text.task == "list"} <= {True}
    assert {text.held_out for text in texts if text.task != "list"} <= {False}


def test_text_records_the_proposers_of_its_request(texts: list[Text]) -> None:
    """Forced tokens are recorded with a grammar, and a prediction's drafts with a prediction."""
    of_all = {"ngram", "draft_model"}
    expected = {"chat": of_all, "list": {*of_all, "grammar"}, "edit": {*of_all, "prediction"}}
    found = {text.task: set(text.drafts) for text in texts}
    assert found == {task: expected[task] for task in found}
    assert "list" in found
    for text in texts:
        text.check()


def test_draft_model_drafts_with_the_noise_of_the_answer(
    engine: LoadedEngine,
    answers: dict[str, Answer],
    texts: list[Text],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Drafts of sampled answers are right more often with the seed of the answer."""
    sampled = [answer for answer in answers.values() if answer.temperature]

    def right_tokens(found: list[Text]) -> int:
        guesses = [text.guess("draft_model", at) for text in found for at in range(text.length)]
        return sum(guess.agreed for guess in guesses)

    coupled = right_tokens([text for text in texts if text.temperature])
    monkeypatch.setattr(acceptance, "seed_of", lambda *_: 999)
    assert right_tokens(record(engine, sampled, TALKS, trees=True)) < 0.8 * coupled


def strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from (key, *strings(item))
    elif isinstance(value, list):
        for item in value:
            yield from strings(item)


def test_recording_contains_no_text(texts: list[Text]) -> None:
    """Apart from names, every string of the file consists of digits of lengths."""
    content = json.loads(as_file(texts, {}).encode())
    names = {"task", "temperature", "prompt", "drafts", "held_out", "chat", "list", "edit"}
    names |= {"ngram", "draft_model", "grammar", "prediction"}
    names |= {"evidence", "agreement", "proposed", "agreed", "tree", "trees"}
    others = {one for one in strings(content["texts"]) if one not in names}
    assert {character for one in others for character in one} <= set(DIGITS)


@pytest.fixture
def spec_bench(tmp_path: Path) -> Path:
    """A file with three questions of each of three categories."""
    path = tmp_path / "question.jsonl"
    rows = [
        {"question_id": 10 * at + number, "category": category, "turns": [f"{category} {number}"]}
        for at, category in enumerate(("writing", "rag", "summarization"))
        for number in range(3)
    ]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


def test_conversation_depends_on_its_task_and_index_alone(spec_bench: Path) -> None:
    """More conversations per task add some, and change none."""
    few, many = (conversations(spec_bench, count) for count in (2, 3))
    assert {one.task for one in many} == {"chat", "rag", "summary", *TEMPLATES}
    assert set(map(repr, few)) < set(map(repr, many))
    assert len(many) == 3 * (3 + len(TEMPLATES))


def test_both_halves_have_every_kind_of_prompt(spec_bench: Path) -> None:
    """Every second conversation of a task is held out, with all its turns."""
    for task in TEMPLATES:
        halves = [one.held_out for one in templated(task, 8)]
        assert halves == [False, True] * 4


def test_grammars_of_templates_are_valid(engine: LoadedEngine) -> None:
    """The grammars of the first conversations compile, and none allows an empty output."""
    grammars = LlGrammars(engine.worker.tokenizer, engine.served.card.eos_ids)
    specs = [
        turn.grammar
        for task in TEMPLATES
        for conversation in templated(task, 8)
        for turn in conversation.turns
        if turn.grammar is not None
    ]
    assert {spec.kind for spec in specs} == {GrammarKind.JSON_SCHEMA, GrammarKind.CALLS}
    assert not any(grammars.start(spec).is_complete for spec in specs)


def test_a_loop_starts_at_the_first_repeated_gram() -> None:
    """The loop starts where 8-grams begin to repeat, and an output without a loop has no start."""
    assert loop_start([*range(20), *range(12, 20), *range(12, 20)]) == 20
    assert loop_start("abcdefghijklmnop" + "x") == 17
