"""From the body of an embedding request to what is to be computed. Pure; may run in a thread."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import msgspec

from draftgate.backends.types import Capabilities, SamplingParams, Task
from draftgate.gateway.dispatch.job import Job
from draftgate.gateway.errors import ContextTooLong, InvalidRequest
from draftgate.gateway.http.requests.decoding import decode, reject_unsupported
from draftgate.gateway.http.requests.limits import Range, check_ranges
from draftgate.gateway.http.requests.schemas import EmbeddingBody
from draftgate.gateway.http.requests.validation import prompts_of
from draftgate.gateway.served import Served
from draftgate.policies.types import ServiceLevel, SpeculationMode

MAX_INPUTS: Final = 2048
"""Texts of one request; OpenAI's bound."""

_NOTHING_TO_SAMPLE: Final = SamplingParams(max_tokens=0, seed=0, temperature=0.0)
_decoder: Final = msgspec.json.Decoder(EmbeddingBody)


@dataclass(frozen=True, slots=True)
class EmbeddingCall:
    """Texts to embed, and how their vectors are to be sent.

    Attributes:
        job: all of the texts, in order.
        dimensions: leading numbers of each vector that are wanted; None is all.
        base64: vectors as base64 of little-endian float32, not as lists of numbers.
    """

    job: Job
    dimensions: int | None
    base64: bool


def embedding_call(
    body: bytes,
    served: Served,
    capabilities: Capabilities,
    request_id: str,
    service: ServiceLevel,
) -> EmbeddingCall:
    """Return the call of a body.

    Args:
        capabilities: of the workers, which give embeddings.
        request_id: unique on this node.
        service: what the headers asked for.

    Raises:
        InvalidRequest: something is wrong with it; the parameter is named.
    """
    wire = decode(body, _decoder)
    served.check_name(wire.model)
    reject_unsupported(wire, 1)
    check_ranges(wire)
    Range(1, capabilities.embedding_size).check("dimensions", wire.dimensions)
    if isinstance(wire.input, list) and len(wire.input) > MAX_INPUTS and _are_many(wire.input):
        raise InvalidRequest(f"input: at most {MAX_INPUTS} texts, not {len(wire.input)}", "input")
    prompts = prompts_of("input", wire.input, served)
    for index, prompt in enumerate(prompts):
        if len(prompt) > served.max_model_len:
            name = f"input[{index}]" if len(prompts) > 1 else "input"
            raise ContextTooLong(
                f"{name}: the context holds {served.max_model_len} tokens, but the text has "
                f"{len(prompt)}",
                name,
            )
    job = Job(
        request_id,
        prompts,
        _NOTHING_TO_SAMPLE,
        max_tokens=0,
        mode=SpeculationMode.OFF,
        service=replace(service, priority=wire.priority or 0),
        task=Task.EMBED,
    )
    return EmbeddingCall(job, wire.dimensions, wire.encoding_format == "base64")


def _are_many(given: list[str | int | list[int]]) -> bool:
    """Return whether a list has texts, not the token ids of one."""
    return not all(isinstance(item, int) for item in given)
