"""Workloads build each request from settings and an index, so a plan can be rebuilt."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

from draftgate.loadgen.workloads.base import Workload, WorkloadSettings
from draftgate.loadgen.workloads.chat import Chat
from draftgate.loadgen.workloads.code import Code
from draftgate.loadgen.workloads.long_document import LongDocument
from draftgate.loadgen.workloads.mixed import Mixed
from draftgate.loadgen.workloads.rag import Rag
from draftgate.loadgen.workloads.request_file import RequestFile
from draftgate.loadgen.workloads.shared_prefix import SharedPrefix

WORKLOADS: Final[Mapping[str, Callable[[WorkloadSettings], Workload]]] = MappingProxyType(
    {made.name: made for made in (Code, Chat, LongDocument, SharedPrefix, Mixed, Rag)}
)
"""The built-in workloads by name."""


def make_workload(name: str, settings: WorkloadSettings) -> Workload:
    """Return a workload by its name, or from a file of requests.

    Raises:
        OSError: the file cannot be read.
        ValueError: the workload or file is unknown, or the file holds no requests.
    """
    if name in WORKLOADS:
        return WORKLOADS[name](settings)
    path = Path(name)
    if not path.is_file():
        raise ValueError(f"no workload {name!r}: expected {', '.join(WORKLOADS)} or a file")
    return RequestFile(path, settings)
