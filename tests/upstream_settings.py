"""Settings of upstreams that have only an address."""

from __future__ import annotations

from draftgate.backends.worker_config import UpstreamSettings


def at(*urls: str) -> tuple[UpstreamSettings, ...]:
    """Return the settings of servers at these addresses."""
    return tuple(UpstreamSettings(url=url) for url in urls)
