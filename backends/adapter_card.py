"""LoRA adapters as workers describe them to the gateway."""

from __future__ import annotations

from draftgate.policies.values import immutable


@immutable
class AdapterCard:
    """A LoRA adapter of a model.

    Attributes:
        name: name that clients use.
        digest: digest of its content, by which requests select it.
        root: origin of its checkpoint.
    """

    name: str
    digest: str
    root: str
