"""What can run on a worker in another process or on another machine, answered here."""

from __future__ import annotations

from draftgate.backends.core.admission import Admission
from draftgate.backends.grammar import LlGrammars
from draftgate.backends.tokenizer import Tokenizer
from draftgate.backends.types import ModelCard


def remote_admission(card: ModelCard, tokenizer: Tokenizer) -> Admission:
    """Return the bounds that a worker's card tells, with the model's tokenizer."""
    able = card.capabilities
    grammars = LlGrammars(tokenizer, frozenset(card.eos_ids)) if able.formats else None
    pool_tokens = card.pool_tokens or card.max_model_len
    return Admission(tokenizer, card.max_model_len, pool_tokens, grammars, embeds=able.embeddings)
