"""A cache of what a worker measures and learns, for later starts on the same machine.

Measurements make a start faster, and counts of accepted drafts make its first drafts better. An
entry is a JSON file in `$XDG_CACHE_HOME/draftgate`. The name of the file is a hash of everything
that the content depends on, so any change makes another entry. An unreadable entry counts as
missing.
"""

from __future__ import annotations

import hashlib
import logging
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, Generic, Protocol, TypeVar

import msgspec

from draftgate.backends.core.draft_scores import AcceptanceCounts, DraftScores
from draftgate.backends.core.scheduler import Scheduler
from draftgate.backends.recorded_run import RecordedCost
from draftgate.cache import cache_directory
from draftgate.policies.costs.step_cost import StepCost
from draftgate.policies.speculation.draft_prior import BAND_ENDS
from draftgate.policies.speculation.survival import (
    AGREEMENT_EDGES,
    EVIDENCE_EDGES,
    OUTCOME_ROWS,
    POSITIONS,
)

log = logging.getLogger(__name__)

MAX_ENTRIES: Final = 32
"""Maximum number of entries of a kind. The cache deletes the oldest, because every new version adds
entries."""


class Measurements(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Results of a start: whether the probe found exact bits, and costs of steps and of drafting.

    The cost of drafting is that of a draft model or head (`warmup.measure_depths`), or None without
    either.
    """

    exact: bool
    costs: RecordedCost
    depth_costs: RecordedCost | None = None

    @classmethod
    def from_costs(
        cls, cost: StepCost, depth_cost: StepCost | None, *, exact: bool
    ) -> Measurements:
        """Return the measurements with these results."""
        depths = None if depth_cost is None else RecordedCost.from_cost(depth_cost)
        return cls(exact, RecordedCost.from_cost(cost), depths)

    def check(self) -> None:
        """Check the costs.

        Raises:
            ValueError: the fields do not form a valid table.
        """
        _ = self.cost, self.depth_cost

    @property
    def cost(self) -> StepCost:
        """The step cost.

        Raises:
            ValueError: the fields do not form a valid table.
        """
        return self.costs.cost

    @property
    def depth_cost(self) -> StepCost | None:
        """The cost of drafting one more token, over sequences instead of tokens.

        Raises:
            ValueError: the fields do not form a valid table.
        """
        return None if self.depth_costs is None else self.depth_costs.cost


def source_hash() -> str:
    """Return a hash of the engine's Python sources, because edits may change bits and costs."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


class Checked(Protocol):
    """Content of an entry."""

    def check(self) -> None:
        """Raise a ValueError if the content is invalid."""
        ...


T = TypeVar("T", bound=Checked)


class _Entry(msgspec.Struct, Generic[T], frozen=True, forbid_unknown_fields=True):
    key: tuple[str, ...]
    content: T


# Workers start in threads, and msgspec crashes if two threads build the decoder of a type at once
# (msgspec 0.22.0, 2026-11-23).
_measurements: Final = msgspec.json.Decoder(_Entry[Measurements])
_acceptance: Final = msgspec.json.Decoder(_Entry[AcceptanceCounts])


class CacheEntry(Generic[T]):
    """The file of a key, whose content is one value."""

    def __init__(
        self, kind: str, decoder: msgspec.json.Decoder[_Entry[T]], key: Iterable[object]
    ) -> None:
        """Derive the name of the file.

        Args:
            kind: begin of the name.
            decoder: reads the content.
            key: everything on which the content depends.
        """
        self._kind, self._decoder = kind, decoder
        self._key = tuple(map(str, key))
        digest = hashlib.sha256("\0".join(self._key).encode()).hexdigest()[:20]
        self.path = cache_directory() / f"{kind}-{digest}.json"

    def read(self) -> T | None:
        """Return the content, or None if the file is missing, damaged or of another key."""
        try:
            entry = self._decoder.decode(self.path.read_bytes())
            entry.content.check()
        except (OSError, ValueError):  # msgspec raises subclasses of ValueError
            return None
        return entry.content if entry.key == self._key else None

    def write(self, content: T) -> None:
        """Replace the file atomically, and log an error instead of raising it."""
        encoded = msgspec.json.encode(_Entry(self._key, content))
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # Several workers may write the same entry to their own files. The last file remains.
            with tempfile.TemporaryDirectory(dir=self.path.parent) as folder:
                file = Path(folder) / self.path.name
                file.write_bytes(encoded)
                file.replace(self.path)
            self._prune()
        except OSError as error:
            log.info("the cache %s cannot be written: %s", self.path.parent, error)

    def _prune(self) -> None:
        entries = self.path.parent.glob(f"{self._kind}-*.json")
        by_age = sorted(entries, key=lambda path: path.stat().st_mtime, reverse=True)
        for path in by_age[MAX_ENTRIES:]:
            path.unlink(missing_ok=True)


def save_learned(
    scheduler: Scheduler,
    depth_cost: Callable[[], StepCost | None],
    costs: CacheEntry[Measurements] | None,
    acceptance: AcceptanceCache | None,
    *,
    exact: bool,
) -> None:
    """Store what a worker has learned for the next start.

    Args:
        scheduler: has the costs of steps.
        depth_cost: returns the cost of drafting.
        costs, acceptance: where to store the costs and the counts of drafts, or None.
        exact: whether the probe found exact bits.
    """
    if costs is not None:
        costs.write(Measurements.from_costs(scheduler.cost, depth_cost(), exact=exact))
    if acceptance is not None:
        acceptance.save()


def startup_cache(*key: object) -> CacheEntry[Measurements]:
    """Return the entry of measurements that depend on `key`."""
    return CacheEntry("startup", _measurements, key)


class AcceptanceCache:
    """The counts of accepted drafts of the workers of a checkpoint."""

    def __init__(self, scores: DraftScores, *key: object) -> None:
        """Let a worker start from the counts of earlier workers, if there are any.

        Args:
            scores: the worker's estimates.
            key: checkpoint, draft model and verification. The rows of the tables belong to the key,
                too, because counts fit no other rows.
        """
        self._scores = scores
        rows = EVIDENCE_EDGES, AGREEMENT_EDGES, POSITIONS, OUTCOME_ROWS, BAND_ENDS
        self.entry = CacheEntry("acceptance", _acceptance, (*key, *rows))
        counts = self.entry.read()
        if counts is not None:
            scores.restore(counts)

    def save(self) -> None:
        """Store the counts for the next start."""
        self.entry.write(self._scores.counts())
