"""A start reuses the measurements of an earlier start with the same key."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from draftgate.backends.core.draft_scores import DraftScores
from draftgate.backends.core.drafts import Draft
from draftgate.backends.core.sequence import Sequence
from draftgate.backends.engine import load, loop
from draftgate.backends.engine import startup_cache as cache_module
from draftgate.backends.engine.proposers import registry
from draftgate.backends.engine.startup_cache import (
    AcceptanceCache,
    CacheEntry,
    Measurements,
    startup_cache,
)
from draftgate.backends.worker_config import WorkerConfig
from draftgate.policies.costs.step_cost import StepCost
from draftgate.policies.speculation.survival import RESTORED_DRAFTS, RESTORED_SHARE
from tests.core.fakes import request

COST = StepCost((4, 8, 16), (1e-3, 2e-3, 2.5e-3), 1e-9, 1e-5, 1e-10)
KEY = ("0.1.0", "0123456789ab/float32/cpu-avx2/torch-2.13.0/threads-2/exact", 2048, 64)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache directory in place of the user's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "draftgate"


def written(*key: object) -> CacheEntry[Measurements]:
    cache = startup_cache(*key)
    cache.write(Measurements.from_costs(COST, None, exact=True))
    return cache


def test_an_equal_key_finds_the_measurements(own_cache: Path) -> None:
    """The cache returns the written entry and leaves exactly one file."""
    cache = written(*KEY)
    found = startup_cache(*KEY).read()
    assert found is not None
    assert (found.exact, found.cost) == (True, COST)
    assert list(own_cache.iterdir()) == [cache.path]


@pytest.mark.parametrize("place", range(len(KEY)))
def test_any_other_part_of_the_key_misses(place: int) -> None:
    """The cache has no entry for another version, checkpoint, processor, library, thread count or
    bound."""
    written(*KEY)
    other = [*KEY]
    other[place] = f"{other[place]}1"
    assert startup_cache(*other).read() is None


def test_an_entry_of_another_key_under_the_same_name_misses() -> None:
    """The cache ignores a file whose name matches but whose key differs."""
    cache, other = written(*KEY), startup_cache("other")
    cache.path.rename(other.path)
    assert other.read() is None


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x00\xff",
        b"{}",
        b"[1, 2]",
        b'{"key": [], "measurements": null}',
    ],
)
def test_a_foreign_file_counts_as_missing(content: bytes) -> None:
    """A start ignores a foreign file or directory at the entry's path, and the next start replaces
    it."""
    cache = written(*KEY)
    cache.path.write_bytes(content)
    assert cache.read() is None
    assert written(*KEY).read() is not None


def test_a_truncated_or_impossible_table_counts_as_missing() -> None:
    """The cache ignores a truncated file and a table with falling steps."""
    cache = written(*KEY)
    content = cache.path.read_bytes()
    cache.path.write_bytes(content[: len(content) // 2])
    assert cache.read() is None
    cache.path.write_bytes(content.replace(b"0.0025", b"0.0001"))
    assert cache.read() is None


def test_a_cache_that_cannot_be_written_is_no_error(own_cache: Path) -> None:
    """A start succeeds when a file blocks the path of the cache directory."""
    own_cache.write_text("a file")
    assert written(*KEY).read() is None


def test_old_entries_are_deleted(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache keeps the newest entries and does not touch other files."""
    monkeypatch.setattr(cache_module, "MAX_ENTRIES", 2)
    own_cache.mkdir()
    (own_cache / "operators-1.so").touch()
    paths = []
    for age in (30, 20, 10):
        cache = written("key", age)
        os.utime(cache.path, (1000 - age, 1000 - age))
        paths.append(cache.path)
    written("key", 0)
    assert not paths[0].exists()
    assert not paths[1].exists()
    assert paths[2].exists()
    assert (own_cache / "operators-1.so").exists()


def test_the_second_start_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second start reuses the probe's result and the costs, including refitted costs."""
    config = WorkerConfig(device="cpu", kv_bytes=1 << 24, proposer="ngram")
    measured = []

    def measure(*_: object, **__: object) -> StepCost:
        measured.append("cost")
        return COST

    def probe(*_: object, **__: object) -> bool:
        measured.append("exact")
        return True

    monkeypatch.setattr(load, "measure_step_cost", measure)
    monkeypatch.setattr(load, "steps_are_exact", probe)
    first = load.load_engine(config)
    assert measured == ["exact", "cost"]
    second = load.load_engine(config)
    assert measured == ["exact", "cost"]
    assert second.served.card.numerics_class == first.served.card.numerics_class
    assert second.worker._scheduler.cost == COST
    refitted = replace(COST, sequence_s=7e-5)
    second.worker._scheduler._fit.cost = refitted
    second.save_learned()
    assert load.load_engine(config).worker._scheduler.cost == refitted
    load.load_engine(msgspec.structs.replace(config, max_num_seqs=3))
    assert measured == ["exact", "cost"] * 2


def sequences(count: int, *, temperature: float = 0.0) -> list[Sequence]:
    """Return new sequences of a temperature."""
    wanted = request(prompt=4, max_tokens=8)
    sampling = replace(wanted.sampling, temperature=temperature)
    wanted = replace(wanted, sampling=sampling)
    return [Sequence.for_choice(key, wanted, wanted.choices[0]) for key in range(count)]


def learned_scores(*, temperatures: tuple[float, ...] = (0.0, 0.7)) -> DraftScores:
    """Scores of drafts whose matches of 3 tokens are right, and of 9 tokens wrong."""
    scores = DraftScores()
    for temperature in temperatures:
        (one,) = sequences(1, temperature=temperature)
        for evidence, emitted in ((3, (1, 2, 9)), (9, (7,))) * 200:
            scores.learn(one, "ngram", Draft((1, 2), evidence=evidence), emitted)
    return scores


def first_chances(scores: DraftScores, temperature: float) -> list[float]:
    """Return the survivals of the first tokens of drafts with matches of 3 and of 9 tokens."""
    (one,) = sequences(1, temperature=temperature)
    drafts = [Draft((1, 2), evidence=evidence) for evidence in (3, 9)]
    return [scores.found(one, "ngram", draft)[1][0] for draft in drafts]


def test_next_worker_starts_with_the_counts_of_the_last_one() -> None:
    """A worker expects what an earlier one has learned by evidence and temperature, and no other
    checkpoint does."""
    AcceptanceCache(learned_scores(temperatures=(0.7,)), "model").save()
    found, other, fresh = DraftScores(), DraftScores(), DraftScores()
    AcceptanceCache(found, "model")
    AcceptanceCache(other, "other model")
    assert first_chances(found, 0.8)[0] > 0.9
    assert first_chances(found, 0.8)[1] < 0.2
    assert found.acceptance.rate() != fresh.acceptance.rate()
    assert first_chances(found, 0.0) == first_chances(fresh, 0.0)
    for temperature in (0.0, 0.8):
        assert first_chances(other, temperature) == first_chances(fresh, temperature)


def test_counts_of_an_earlier_worker_weigh_less() -> None:
    """New drafts change restored estimates faster than the estimates of the worker that counted."""
    earlier, later = learned_scores(), DraftScores()
    AcceptanceCache(earlier, "model").save()
    AcceptanceCache(later, "model")
    (one,) = sequences(1, temperature=0.0)
    for scores in (earlier, later):
        for _ in range(200):
            scores.learn(one, "ngram", Draft((1, 2), evidence=3), (7,))
        scores.refresh()
    assert first_chances(later, 0.0)[0] < first_chances(earlier, 0.0)[0] - 0.1
    again, counts = DraftScores(), earlier.counts()
    again.restore(counts)
    (before, after) = (one.models[0].by_evidence.drafts for one in (counts, again.counts()))
    assert after == pytest.approx(min(RESTORED_SHARE * before, RESTORED_DRAFTS), abs=0.01)


def test_stored_counts_contain_no_tokens() -> None:
    """Texts with the same outcomes leave the same file, whatever their tokens are."""
    contents = []
    for token in (1, 4242):
        scores = DraftScores()
        (one,) = sequences(1)
        for _ in range(20):
            scores.learn(one, "ngram", Draft((token, token + 1), evidence=4), (token, 9))
        cache = AcceptanceCache(scores, "model")
        cache.save()
        contents.append(cache.entry.path.read_bytes())
        cache.entry.path.unlink()
    assert contents[0] == contents[1]
    assert b"4242" not in contents[1]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"band":1', b'"band":7'),
        (b'"accepted":', b'"accepted":-'),
        (b'"rejected":', b'"refused":'),
        (b'"by_outcome":[', b'"by_outcome":[1e999,'),
        (b'"by_evidence":[', b'"by_evidence":[1,[[999999,[1.0],[1.0]]]],"more":['),
    ],
)
def test_damaged_counts_count_as_missing(old: bytes, new: bytes) -> None:
    """A worker ignores counts that no worker can have written, and replaces them when it stops."""
    AcceptanceCache(learned_scores(temperatures=(0.7,)), "model").save()
    cache = AcceptanceCache(DraftScores(), "model")
    content = cache.entry.path.read_bytes()
    assert old in content
    for damaged in (content.replace(old, new, 1), content[: len(content) // 2], b""):
        cache.entry.path.write_bytes(damaged)
        scores = DraftScores()
        AcceptanceCache(scores, "model").save()
        assert first_chances(scores, 0.7) == first_chances(DraftScores(), 0.7)
        assert cache.entry.read() is not None


def test_counts_that_cannot_be_written_are_no_error(own_cache: Path) -> None:
    """A worker starts and stops when a file blocks the path of the cache directory."""
    own_cache.write_text("a file")
    cache = AcceptanceCache(learned_scores(), "model")
    cache.save()
    assert cache.entry.read() is None


def test_only_workers_of_a_server_read_and_store_counts(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker without `acceptance_cache` leaves no counts."""
    monkeypatch.setattr(load, "measure_step_cost", lambda *_, **__: COST)
    monkeypatch.setattr(load, "steps_are_exact", lambda *_: True)
    config = WorkerConfig(device="cpu", kv_bytes=1 << 24, proposer="ngram")
    load.load_engine(config).save_learned()
    assert not list(own_cache.glob("acceptance-*"))
    config = msgspec.structs.replace(config, acceptance_cache=True)
    first = load.load_engine(config)
    first.worker.scores.restore(learned_scores().counts())
    first.save_learned()
    second = load.load_engine(config).worker.scores
    assert first_chances(second, 0.7)[0] > 0.9


def test_busy_worker_stores_what_it_has_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that takes steps saves every `SAVE_EVERY_S` seconds, not only when it stops."""
    now_s, saved = [100.0], []
    monkeypatch.setattr(loop.time, "monotonic", lambda: now_s[0])
    thread = loop.EngineLoop(lambda _progress: None, None)
    engine = SimpleNamespace(save_learned=lambda: saved.append(now_s[0]))
    for _ in range(30):
        now_s[0] += loop.SAVE_EVERY_S / 8
        thread._save_if_due(engine)
    assert len(saved) == 3


def test_the_second_start_does_not_time_the_draft_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second start with a draft model knows the cost of drafting from the first."""
    config = WorkerConfig(device="cpu", kv_bytes=1 << 24)
    depths = StepCost((1, 64), (1e-4, 9e-4))
    timed = []

    def measure(*_: object) -> StepCost:
        timed.append("depths")
        return depths

    monkeypatch.setattr(load, "measure_step_cost", lambda *_, **__: COST)
    monkeypatch.setattr(load, "steps_are_exact", lambda *_, **__: True)
    monkeypatch.setattr(registry, "measure_depths", measure)
    for _ in range(2):
        engine = load.load_engine(config)
        assert engine.proposers["draft_model"].depth_s(64) == 9e-4
    assert timed == ["depths"]
    load.load_engine(msgspec.structs.replace(config, draft_window_tokens=32))
    assert timed == ["depths"] * 2
