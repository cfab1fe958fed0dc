"""What a gateway needs to know of an engine, wherever that runs. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

from draftgate.backends.core.admission import Admission
from draftgate.backends.types import ModelCard


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What an engine serves.

    Attributes:
        admission: what can run there, with the tokenizer.
    """

    card: ModelCard
    admission: Admission
