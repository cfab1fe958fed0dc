"""Gateways of the sections, and what they read from pages of metrics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import yaml

from bench.harness.processes import free_port, start, stop, wait_until_up
from bench.harness.servers import SERVE


@contextmanager
def gateway(
    folder: Path, upstreams: Sequence[Mapping[str, Any]], name: str = "gateway", **settings: Any
) -> Iterator[str]:
    """Run a gateway, and return its address.

    Args:
        folder: the folder of its configuration and its log.
        upstreams: the entries of `upstream` in its configuration.
        name: name of its files.
        settings: its other settings, as in a configuration file.
    """
    port = free_port()
    config = folder / f"{name}-{port}.yaml"
    listening = {"backend": "openai", "host": "127.0.0.1", "port": port}
    config.write_text(yaml.safe_dump({**listening, "upstream": list(upstreams), **settings}))
    process = start([*SERVE, "--config", str(config)], None, config.with_suffix(".log"), {})
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until_up(process, f"{url}/ready", None)
        yield url
    finally:
        stop(process)


def read_counter(url: str, name: str) -> float:
    """Return the sum of a metric's series on the page of a server."""
    lines = httpx.get(f"{url}/metrics", timeout=60).text.splitlines()
    return sum(
        float(line.split()[-1]) for line in lines if line.startswith((f"{name}{{", name + " "))
    )
