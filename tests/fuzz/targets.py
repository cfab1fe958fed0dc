"""All fuzz targets, by name."""

from __future__ import annotations

from tests.fuzz import (
    checkpoint_files,
    gguf_files,
    grammars,
    headers,
    http_bodies,
    http_edge,
    local_files,
    peer_messages,
    upstream_answers,
)
from tests.fuzz.target import Target

MODULES = (
    http_bodies,
    http_edge,
    headers,
    grammars,
    peer_messages,
    upstream_answers,
    checkpoint_files,
    gguf_files,
    local_files,
)

TARGETS: dict[str, Target] = {
    target.name: target for module in MODULES for target in module.TARGETS
}
