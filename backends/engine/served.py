"""The facts about an engine that a gateway needs. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from draftgate.backends.core.admission import Admission
from draftgate.backends.types import ModelCard

PHASES: Final = (
    (0.7, "reading weights"),
    (0.85, "compiling and testing operators"),
    (1.0, "measuring step costs"),
)
"""Phases of loading, each with the progress at its end. Rough: with a small model measuring takes
the longest, with a large one reading."""


def loading_phase(progress: float) -> str:
    """Return the name of the phase at a progress of 0 to 1; empty at the end."""
    return next((name for end, name in PHASES if progress < end), "")


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model that an engine serves.

    Attributes:
        admission: checks requests, and has the tokenizer.
    """

    card: ModelCard
    admission: Admission
