"""The model that clients use, and the checks of requests against it."""

from __future__ import annotations

from dataclasses import dataclass

from draftgate.backends.tokenizer import Tokenizer
from draftgate.gateway.errors import ModelNotFound, invalid


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model of a node."""

    name: str
    tokenizer: Tokenizer
    max_model_len: int

    def check_token_id(self, token_id: int, param: str) -> None:
        """Raise `InvalidRequest` if a token id is outside the vocabulary.

        Args:
            param: path of the token id in the request.
        """
        vocab = self.tokenizer.vocab_size
        if not 0 <= token_id < vocab:
            known = f"between 0 and {vocab - 1}, the vocabulary of {self.name}"
            raise invalid(param, f"token ids must be {known}, not {token_id}")

    def check_name(self, requested: str | None) -> None:
        """Raise `ModelNotFound` if the client names another model.

        Args:
            requested: the name from the client, or None for this model.
        """
        if requested is not None and requested != self.name:
            raise ModelNotFound(requested, self.name)
