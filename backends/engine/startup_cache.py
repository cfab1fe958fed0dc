"""A cache of startup measurements, so that later starts on the same machine are faster.

An entry is a JSON file in `$XDG_CACHE_HOME/draftgate`. The name of the file is a hash of everything
that the measurements depend on, so any change makes another entry. An unreadable entry counts as
missing.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from pathlib import Path
from typing import Final

import msgspec

from draftgate.policies.costs.step_cost import StepCost

log = logging.getLogger(__name__)

MAX_ENTRIES: Final = 32
"""Maximum number of entries. The cache deletes the oldest, because every new version adds entries.
"""


def cache_directory() -> Path:
    """Return the directory of compiled operators and measurements."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "draftgate"


class Measurements(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Results of a start: whether the probe found exact bits, and the fields of the step cost."""

    exact: bool
    token_buckets: tuple[int, ...]
    step_s: tuple[float, ...]
    kv_token_s: float
    sequence_s: float
    pair_s: float

    @classmethod
    def of(cls, cost: StepCost, *, exact: bool) -> Measurements:
        """Return the measurements with these results."""
        linear = (cost.kv_token_s, cost.sequence_s, cost.pair_s)
        step_s = tuple(map(float, cost.step_s))  # a fitted table holds NumPy numbers
        return cls(exact, cost.token_buckets, step_s, *map(float, linear))

    @property
    def cost(self) -> StepCost:
        """The step cost.

        Raises:
            ValueError: the fields do not form a valid table.
        """
        fields = (self.token_buckets, self.step_s, self.kv_token_s, self.sequence_s, self.pair_s)
        return StepCost(*fields)


def source_hash() -> str:
    """Return a hash of the engine's Python sources, because edits may change bits and costs."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    key: tuple[str, ...]
    measurements: Measurements


# Workers start in threads, and msgspec crashes if two threads build the decoder of a type at once
# (msgspec 0.22.0, 2026-11-23).
_decoder: Final = msgspec.json.Decoder(_Entry)


class StartupCache:
    """The cache entry of a key."""

    def __init__(self, *key: object) -> None:
        """Derive the name of the entry from `key`: everything that the measurements depend on."""
        self._key = tuple(map(str, key))
        digest = hashlib.sha256("\0".join(self._key).encode()).hexdigest()[:20]
        self.path = cache_directory() / f"startup-{digest}.json"

    def read(self) -> Measurements | None:
        """Return the measurements, or None if the entry is missing, damaged or of another key."""
        try:
            entry = _decoder.decode(self.path.read_bytes())
            _ = entry.measurements.cost
        except (OSError, ValueError):  # msgspec raises subclasses of ValueError
            return None
        return entry.measurements if entry.key == self._key else None

    def write(self, measurements: Measurements) -> None:
        """Replace the entry atomically, and log an error instead of raising it."""
        content = msgspec.json.encode(_Entry(self._key, measurements))
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # Several workers may write the same entry to their own files. The last file remains.
            with tempfile.TemporaryDirectory(dir=self.path.parent) as folder:
                file = Path(folder) / self.path.name
                file.write_bytes(content)
                file.replace(self.path)
            self._prune()
        except OSError as error:
            log.info("the start-up cache %s cannot be written: %s", self.path.parent, error)

    def _prune(self) -> None:
        entries = self.path.parent.glob("startup-*.json")
        by_age = sorted(entries, key=lambda path: path.stat().st_mtime, reverse=True)
        for path in by_age[MAX_ENTRIES:]:
            path.unlink(missing_ok=True)
