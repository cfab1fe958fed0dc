"""Requests that generate nothing: embeddings of texts and scores of pairs."""

from __future__ import annotations

from typing import Final, NamedTuple

from msgspec import UNSET, UnsetType

from draftgate.backends.errors import BackendFailed
from draftgate.backends.token_ids import TokenIds
from draftgate.backends.types import SamplingParams, Task
from draftgate.gateway.dispatch.job import Job
from draftgate.gateway.http.replies.metric_shapes import PoolingMetrics, pooling_metrics
from draftgate.gateway.http.requests.decoding import RenamedParams
from draftgate.gateway.http.requests.headers import Sender
from draftgate.gateway.model_service import ModelService
from draftgate.gateway.telemetry.watch import RequestWatch
from draftgate.policies.types import SpeculationMode

_NOTHING_TO_SAMPLE: Final = SamplingParams(max_tokens=0, seed=0, temperature=0.0)


class Pooled(NamedTuple):
    """What a worker computed for a request.

    Attributes:
        results: the result of each prompt (`Delta.pooled`).
        metrics: the field `metrics` of the response.
    """

    results: list[bytes]
    metrics: PoolingMetrics | UnsetType = UNSET


def pooling_job(
    task: Task,
    prompts: tuple[TokenIds, ...],
    sender: Sender,
    priority: int | None,
    second_segments: tuple[int, ...] = (),
) -> Job:
    """Return the job of a request that generates nothing.

    Args:
        priority: the priority in the body, or None.
        second_segments: as in `Job`.
    """
    return Job(
        sender.request_id,
        prompts,
        _NOTHING_TO_SAMPLE,
        max_tokens=0,
        mode=SpeculationMode.OFF,
        service=sender.service_level(priority),
        tenant=sender.account.name,
        share=sender.account.share,
        fingerprint=sender.fingerprint,
        retries=sender.retries,
        task=task,
        second_segments=second_segments,
    )


async def pooled_results(model: ModelService, job: Job, watch: RequestWatch, param: str) -> Pooled:
    """Return the result of each prompt from a worker.

    Args:
        param: the client's name of the prompts.

    Raises:
        RequestRejected: a prompt can never be computed.
        Overloaded, QuotaExceeded: the request is rejected for now.
        BackendFailed: a worker failed.
    """
    results: dict[int, bytes] = {}
    with RenamedParams({"prompt": param}):
        async with model.dispatcher.run(job, watch.span, watch) as run:
            async for delta in run.deltas:
                watch.observe(delta)
                if delta.pooled is not None:
                    results[delta.choice] = delta.pooled
    if len(results) < len(job.prompts):
        raise BackendFailed("the worker ended the stream too early")
    ordered = [results[index] for index in range(len(job.prompts))]
    return Pooled(ordered, pooling_metrics(run.hop))
