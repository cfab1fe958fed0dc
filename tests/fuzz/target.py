"""A fuzz target: a parser of outside bytes, the errors that it documents, and its input's form."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.fuzz.mutation import BYTES, Form

CORPUS = Path(__file__).parent / "corpus"


@dataclass(frozen=True)
class Target:
    """A parser.

    Attributes:
        parse: reads the bytes as the product does, and asserts what it promises about the result.
        errors: the only exceptions that it may raise.
        form: the structure that mutations keep.
    """

    name: str
    parse: Callable[[bytes], object]
    errors: tuple[type[Exception], ...] = ()
    form: Form = BYTES

    @property
    def corpus(self) -> Path:
        """The folder of its committed inputs."""
        return CORPUS / self.name

    def run(self, data: bytes) -> None:
        """Parse an input. An exception that is not documented passes through."""
        with suppress(*self.errors):
            self.parse(data)
