"""Backends by name, imported on demand, so that `--backend sim` never imports torch."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import EntryPoint
from typing import cast

from draftgate.backends.base import Backend, Upstream
from draftgate.backends.worker_config import WorkerConfig
from draftgate.extensions import extensions

BACKEND_GROUP = "draftgate.backends"

_BUILT_IN = {
    name: EntryPoint(name, f"draftgate.backends.{value}", BACKEND_GROUP)
    for name, value in {
        "engine": "engine.backend:EngineBackend",
        "sim": "sim.backend:SimBackend",
        "openai": "openai.upstream:OpenAIUpstream",
        "peer": "peer.backend:static_peer",
    }.items()
}


def backend_names() -> tuple[str, ...]:
    """Return the names of all backends, built in or installed by other packages."""
    return tuple(sorted(extensions(BACKEND_GROUP) | _BUILT_IN))


def backend_factory(name: str) -> Callable[[WorkerConfig], Backend | Upstream]:
    """Import a backend, which may take seconds, and return the function that builds it.

    Raises:
        ValueError: the backend does not exist. The message lists the names.
        ImportError: a package that the backend needs is not installed.
    """
    entry = _BUILT_IN.get(name) or extensions(BACKEND_GROUP).get(name)
    if entry is None:
        raise ValueError(f"unknown backend {name!r}; known: {', '.join(backend_names())}")
    return cast(Callable[[WorkerConfig], Backend | Upstream], entry.load())
