"""What a page of metrics says of an engine, in our words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from draftgate.policies.speculation.upstream_speculation import DraftMeans


class DraftTotals(NamedTuple):
    """Drafts since an engine was started.

    Attributes:
        drafts: that were verified.
        drafted: their tokens.
        accepted: of these, the ones that survived.
    """

    drafts: float
    drafted: float
    accepted: float


@dataclass(frozen=True, slots=True)
class Reading:
    """One reading.

    Attributes:
        engine: whose words the page was in.
        running, waiting: sequences in the batch, and queued for it, whoever sent them.
        max_sequences: most sequences that run at once; 0 where it does not say.
        kv_usage: share of the KV memory that running sequences hold, 0 to 1; None where it does not
            say, or counts as taken what it would give up.
        kv_blocks: of the KV memory; 0 where it does not say.
        kv_block_tokens: tokens of a block.
        drafts: where it says that it speculates; None where it does not.
        totals: counts of its drafts; None where it has means, or nothing.
        means: means of its latest drafts; None where it has counts, or nothing.
        price: of a draft slot, where it has one of its own; else None.
        acceptance: chance of a draft token, where it tells that itself; else None.
    """

    engine: str
    running: int
    waiting: int
    max_sequences: int = 0
    kv_usage: float | None = None
    kv_blocks: int = 0
    kv_block_tokens: int = 16
    drafts: bool = False
    totals: DraftTotals | None = None
    means: DraftMeans | None = None
    price: float | None = None
    acceptance: float | None = None
