"""Backends by name, loaded only when asked for: `--backend sim` never imports torch."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.metadata import entry_points
from typing import cast

from draftgate.backends.base import Backend, Upstream
from draftgate.backends.worker_config import WorkerConfig

BACKEND_GROUP = "draftgate.backends"

_BUILT_IN = {
    "engine": "draftgate.backends.engine.backend:EngineBackend",
    "sim": "draftgate.backends.sim.backend:SimBackend",
    "openai": "draftgate.backends.openai.upstream:OpenAIUpstream",
    "peer": "draftgate.backends.peer.backend:static_peer",
}


def backend_names() -> tuple[str, ...]:
    """Return the names of every backend there is, built in or installed beside."""
    installed = {entry.name for entry in entry_points(group=BACKEND_GROUP)}
    return tuple(sorted(installed | set(_BUILT_IN)))


def backend_factory(name: str) -> Callable[[WorkerConfig], Backend | Upstream]:
    """Import the backend of that name, which may take seconds, and return what builds it.

    Raises:
        ValueError: no such backend. The message lists the names.
        ImportError: what the backend needs is not installed.
    """
    if name in _BUILT_IN:
        module, _, attribute = _BUILT_IN[name].partition(":")
        factory = getattr(import_module(module), attribute)
    else:
        found = {entry.name: entry for entry in entry_points(group=BACKEND_GROUP)}
        if name not in found:
            known = ", ".join(backend_names())
            raise ValueError(f"unknown backend {name!r}; known: {known}")
        factory = found[name].load()
    return cast(Callable[[WorkerConfig], Backend | Upstream], factory)


def create_backend(name: str, config: WorkerConfig) -> Backend | Upstream:
    """Build the backend of that name; it is not started.

    Raises:
        ValueError, ImportError: as `backend_factory`.
    """
    return backend_factory(name)(config)
