"""A client's request, validated and tokenised, before any decision."""

from __future__ import annotations

from collections.abc import Callable

from draftgate.backends.token_ids import TokenIds
from draftgate.backends.types import GrammarSpec, SamplingParams, Task
from draftgate.policies.flows.types import HopKind
from draftgate.policies.types import ANYTIME, ServiceLevel, SpeculationMode
from draftgate.policies.values import immutable


@immutable
class FlowTag:
    """What a request says about its flow.

    Attributes:
        flow_id: id of the flow, which is unique within the tenant.
        deadline_s: deadline of the flow after the arrival of its first request in seconds, or None.
        kind: the kind of the request.
        arrived_s: time of its arrival, on the clock of the event loop.
        capped: limits latency targets to the values that the account permits.
    """

    flow_id: str
    deadline_s: float | None
    kind: HopKind
    arrived_s: float
    capped: Callable[[ServiceLevel], ServiceLevel]


@immutable
class Job:
    """One client request.

    Attributes:
        request_id: an id that is unique on this node.
        prompts: token ids of at least one prompt.
        sampling: the requested parameters. Sizing the job sets `max_tokens`.
        max_tokens: output limit per choice, or 0 to compute only the prompts. None generates until
            the context is full.
        usual_max_tokens: output limit if `max_tokens` is None, as far as the context has room, or
            None without one.
        n: choices per prompt.
        mode, max_draft_tokens: the requested speculation.
        grammar: the grammar that every choice must match, or None.
        service: the latency targets and priority of the request.
        tenant: the owner, or an empty string without API keys.
        share: the tenant's share relative to the default of 1.
        repetitions: how much each prompt repeats itself (`policies.speculation`), empty if unknown.
        fingerprint: a hash that is equal for a retry of the same request, or 0 if unknown.
        traced: whether the response reports each step.
        retries: the number of earlier attempts that the client reports, or None.
        task: the result to compute. If it is not text, `max_tokens` is 0 and no plan is made.
        prediction_ids: tokens of the predicted output, or empty without a prediction.
        flow: the flow that the request names, or None.
        cache_salt: `GenerationRequest.cache_salt`.
        second_segments: `GenerationRequest.second_segment` of each prompt, empty if all are 0.
        adapter: digest of the LoRA adapter to use, or empty for the model alone.
        corpus: `GenerationRequest.corpus`.
        fallback: why another model than the requested one gets the request, or empty.
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
    prediction_ids: tuple[int, ...] = ()
    flow: FlowTag | None = None
    second_segments: tuple[int, ...] = ()
    cache_salt: str = ""
    adapter: str = ""
    usual_max_tokens: int | None = None
    corpus: bool = True
    fallback: str = ""
