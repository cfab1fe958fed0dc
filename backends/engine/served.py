"""The facts about an engine that a gateway needs. This module does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from draftgate.backends.core.admission import Admission
from draftgate.backends.types import ModelCard

THREAD_NAME: Final = "draftgate-engine"
"""Name of an engine's thread, which may still load when the process exits."""

PHASES: Final = (
    (0.7, "reading weights"),
    (0.85, "compiling and testing operators"),
    (1.0, "measuring step costs"),
)
"""Phases of loading, each with the progress at its end.

The values are rough. Measuring takes the longest with a small model, reading with a large model.
"""


def loading_phase(progress: float) -> str:
    """Return the name of the phase at a progress of 0 to 1, or an empty string at the end."""
    return next((name for end, name in PHASES if progress < end), "")


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model that an engine serves.

    Attributes:
        card: the model card.
        admission: the check of requests, which includes the tokenizer.
    """

    card: ModelCard
    admission: Admission
