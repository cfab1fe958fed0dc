"""Targets: traces, recordings, profiles and configuration files, and addresses in them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from draftgate.addresses import mask_url
from draftgate.backends.recording import read_recording
from draftgate.backends.sim.profile import load_profile
from draftgate.gateway.accounts import read_accounts
from draftgate.gateway.config import ConfigError, effective_config
from draftgate.gateway.state.redis.url import read_redis_url
from draftgate.lab.sim.recording import Recording
from draftgate.loadgen.events import read_events
from draftgate.loadgen.planning.traces import read_trace
from draftgate.loadgen.workloads.base import WorkloadSettings
from draftgate.loadgen.workloads.request_file import RequestFile
from tests.fuzz.mutation import BYTES, JSON, Form
from tests.fuzz.target import Target

WORKLOAD = WorkloadSettings(0)


def replayed(path: Path) -> None:
    """Read a recording, and the drafts at each position of its texts."""
    file = read_recording(path)
    Recording(file)
    for text in file.texts:
        for name in text.drafts:
            for position in range(min(text.length, 1000)):
                guess = text.guess(name, position)
                assert 0 <= len(guess.right_places) <= guess.proposed


def traced(path: Path) -> None:
    """Read a trace, whose rows are in order of arrival."""
    times = [row.at_s for row in read_trace(path)]
    assert times == sorted(times)


def configured(path: Path) -> None:
    """Read a configuration file, which may be shown without its secrets."""
    effective_config({}, {}, str(path))


def addressed(data: bytes) -> None:
    """Read the address of a Redis server, and mask its password."""
    text = data.decode("utf-8", "replace")
    mask_url(text)
    read_redis_url(text)


FILES: dict[str, tuple[str, Callable[[Path], object], type[Exception], Form]] = {
    "trace": ("trace", traced, ValueError, BYTES),
    "recording": ("recording.json", replayed, ValueError, JSON),
    "recording_gz": ("recording.json.gz", replayed, ValueError, BYTES),
    "profile": ("profile.json", lambda path: load_profile(str(path)), ValueError, JSON),
    "api_keys": ("keys.yaml", read_accounts, ValueError, BYTES),
    "config": ("config.yaml", configured, ConfigError, BYTES),
    "load_events": ("run.jsonl", read_events, ValueError, BYTES),
    "load_requests": ("r.jsonl", lambda path: RequestFile(path, WORKLOAD), ValueError, BYTES),
}


class File:
    """A parser of one file."""

    def __init__(self, name: str, parse: Callable[[Path], object]) -> None:
        self._name, self._parse = name, parse

    def __call__(self, data: bytes) -> None:
        with TemporaryDirectory() as name:
            path = Path(name) / self._name
            path.write_bytes(data)
            self._parse(path)


TARGETS = [
    *(
        Target(name, File(path, parse), (error,), form)
        for name, (path, parse, error, form) in FILES.items()
    ),
    Target("redis_url", addressed, (ValueError,)),
]
