"""The model as clients see it."""

from __future__ import annotations

from dataclasses import dataclass

from draftgate.backends.tokenizer import Tokenizer
from draftgate.gateway.errors import InvalidRequest, ModelNotFound


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What a request must be held against."""

    name: str
    tokenizer: Tokenizer
    max_model_len: int

    def check_token_id(self, token_id: int, param: str) -> None:
        """Return if the model has such a token.

        Raises:
            InvalidRequest: it has not; `param` is named.
        """
        vocab = self.tokenizer.vocab_size
        if not 0 <= token_id < vocab:
            raise InvalidRequest(
                f"{param}: token ids must be between 0 and {vocab - 1}, not {token_id}", param
            )

    def check_name(self, asked: str | None) -> None:
        """Return if the client means this model; no name means it too.

        Raises:
            ModelNotFound: it means another one.
        """
        if asked is not None and asked != self.name:
            raise ModelNotFound(asked, self.name)
