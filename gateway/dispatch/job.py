"""What a client asked for, validated and tokenised; nothing is decided yet."""

from __future__ import annotations

from dataclasses import dataclass

from draftgate.backends.token_ids import TokenIds
from draftgate.backends.types import GrammarSpec, SamplingParams, Task
from draftgate.policies.types import ANYTIME, ServiceLevel, SpeculationMode


@dataclass(frozen=True, slots=True)
class Job:
    """One client request.

    Attributes:
        request_id: unique on this node.
        prompts: token ids, at least one prompt.
        sampling: as asked for; its `max_tokens` is filled in when it is sized.
        max_tokens: most tokens to generate per choice; None is all that fits.
        n: choices per prompt.
        mode, max_draft_tokens: the client's wishes about speculation.
        grammar: what every choice must be; None leaves it to the model.
        service: how soon its tokens are wanted, and how much they matter.
        tenant: whose it is; "" while nobody is told from others.
        share: what its tenant gets beside others who have 1.
        repetitions: of each prompt (`policies.speculation`); empty where ids stand for no text.
        fingerprint: the same for what a client sends again; 0 if nobody can tell.
        traced: whether the answer tells what each step did.
        retries: how often its client says to have sent it before; None if it does not say.
        task: whether to continue the prompts, or to embed them: then there are no tokens to
            generate (`max_tokens` 0), and nothing is decided about drafts.
    """

    request_id: str
    prompts: tuple[TokenIds, ...]
    sampling: SamplingParams
    max_tokens: int | None
    n: int = 1
    mode: SpeculationMode = SpeculationMode.AUTO
    max_draft_tokens: int | None = None
    grammar: GrammarSpec | None = None
    service: ServiceLevel = ANYTIME
    tenant: str = ""
    share: float = 1.0
    repetitions: tuple[float | None, ...] = ()
    fingerprint: int = 0
    retries: int | None = None
    traced: bool = False
    task: Task = Task.GENERATE
