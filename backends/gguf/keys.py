"""The metadata of an architecture, whose keys begin with its name."""

from __future__ import annotations

from typing import Final

from draftgate.backends.errors import CheckpointError
from draftgate.backends.gguf.reader import GgufModel

UPSTREAM_HINT: Final = (
    "to serve the file with llama.cpp, use `--backend openai --upstream URL` with its llama-server"
)
"""The end of an error about a model that the engine does not support."""


class ArchitectureKeys:
    """The metadata of a model by the names of keys without the architecture."""

    def __init__(self, model: GgufModel) -> None:
        self.model = model
        self.metadata = model.metadata
        self.architecture = self.metadata.text("general.architecture")

    def key(self, name: str) -> str:
        """Return the whole key."""
        return f"{self.architecture}.{name}"

    def __contains__(self, name: str) -> bool:
        return self.key(name) in self.metadata

    def count(self, name: str, default: int | None = None) -> int:
        """Return a whole number, as `Metadata.count`."""
        return self.metadata.count(self.key(name), default)

    def number(self, name: str, default: float | None = None) -> float:
        """Return a number, as `Metadata.number`."""
        return self.metadata.number(self.key(name), default)

    def error(self, name: str, problem: str) -> CheckpointError:
        """Return an error that names the file and the key."""
        return self.metadata.error(self.key(name), problem)

    @property
    def heads(self) -> int:
        """The number of query heads."""
        return self.count("attention.head_count")

    @property
    def head_dim(self) -> int:
        """The width of a head."""
        hidden, heads = self.count("embedding_length"), self.heads
        if heads < 1 or ("attention.key_length" not in self and hidden % heads):
            raise self.error("attention.head_count", f"cannot be {heads} for {hidden} values")
        dim = self.count("attention.key_length", hidden // heads)
        if dim < 1:
            raise self.error("attention.key_length", f"must be at least 1, not {dim}")
        values = self.count("attention.value_length", dim)
        if values != dim:
            raise self.error("attention.value_length", f"{values} is not that of keys, {dim}")
        return dim
