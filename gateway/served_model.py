"""The model that clients use, and the checks of requests against it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from draftgate.backends.adapter_card import AdapterCard
from draftgate.backends.checkpoints import is_shipped_model
from draftgate.backends.generation_defaults import GenerationDefaults
from draftgate.backends.tokenizer import Tokenizer
from draftgate.backends.types import ModelCard
from draftgate.gateway.config.schema import MAX_REQUEST_TOKENS
from draftgate.gateway.errors import ModelNotFound, invalid
from draftgate.gateway.tools.dialects import Dialect, dialect_for


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model of a node, alone or with a LoRA adapter.

    Attributes:
        adapters: returns the adapters that clients may request, by name.
        adapter: digest of the adapter, or empty for the model alone.
        max_request_tokens: maximum work of a request of several choices (`http.requests.work`).
        defaults: returns the parameters of requests that do not set them.
        describes_tools: whether prompts describe tools that the chat template cannot.
        eos_ids: tokens that end a sequence.
        further_names: other names that clients may use for the model without an adapter.
    """

    name: str
    tokenizer: Tokenizer
    max_model_len: int
    adapters: Callable[[], Mapping[str, AdapterCard]] = dict
    adapter: str = ""
    max_request_tokens: int = MAX_REQUEST_TOKENS
    defaults: Callable[[], GenerationDefaults] = GenerationDefaults
    describes_tools: bool = True
    eos_ids: tuple[int, ...] = ()
    further_names: tuple[str, ...] = ()

    @property
    def dialect(self) -> Dialect | None:
        """The format in which the model gets tools and calls them, or None if it gets none."""
        template = self.tokenizer.tool_template
        return dialect_for(template, describes_tools=self.describes_tools)

    def chats(self, card: ModelCard) -> bool:
        """Return whether the model follows instructions, as far as its chat template shows.

        The shipped model has a template for tools, but completes code.
        """
        completes_code = is_shipped_model(card.root) and not card.is_simulated
        return self.tokenizer.tool_template is not None and not completes_code

    def named(self, requested: str | None) -> ServedModel:
        """Return the model, with its adapter if the client names an adapter.

        Args:
            requested: the name from the client, or None or an empty text for this model.

        Raises:
            ModelNotFound: the client names another model.
        """
        if not requested or requested == self.name or requested in self.further_names:
            return self
        adapters = self.adapters()
        if requested not in adapters:
            raise ModelNotFound(requested, self.name, *self.further_names, *adapters)
        return replace(self, name=requested, adapter=adapters[requested].digest)

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
        """Raise `InvalidRequest` if the client names an adapter, which only generates text.

        Args:
            requested: as in `named`.

        Raises:
            ModelNotFound: the client names another model.
        """
        if self.named(requested).adapter:
            raise invalid("model", f"{requested} is a LoRA adapter, which only generates text")
