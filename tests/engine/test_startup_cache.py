"""A start reuses the measurements of an earlier start with the same key."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from draftgate.backends.engine import load, startup_cache
from draftgate.backends.engine.startup_cache import Measurements, StartupCache
from draftgate.backends.worker_config import WorkerConfig
from draftgate.policies.costs.step_cost import StepCost

COST = StepCost((4, 8, 16), (1e-3, 2e-3, 2.5e-3), 1e-9, 1e-5, 1e-10)
KEY = ("0.1.0", "0123456789ab/float32/cpu-avx2/torch-2.13.0/threads-2/exact", 2048, 64)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache directory in place of the user's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "draftgate"


def written(*key: object) -> StartupCache:
    cache = StartupCache(*key)
    cache.write(Measurements.of(COST, exact=True))
    return cache


def test_an_equal_key_finds_the_measurements(own_cache: Path) -> None:
    """The cache returns the written entry and leaves exactly one file."""
    cache = written(*KEY)
    found = StartupCache(*KEY).read()
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
    assert StartupCache(*other).read() is None


def test_an_entry_of_another_key_under_the_same_name_misses() -> None:
    """The cache ignores a file whose name matches but whose key differs."""
    cache, other = written(*KEY), StartupCache("other")
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
    monkeypatch.setattr(startup_cache, "MAX_ENTRIES", 2)
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
    second.save_costs()
    assert load.load_engine(config).worker._scheduler.cost == refitted
    load.load_engine(msgspec.structs.replace(config, max_num_seqs=3))
    assert measured == ["exact", "cost"] * 2
