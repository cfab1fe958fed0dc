"""The field `stop_reason` of vLLM: the stop text or the stop token that ended a choice."""

from __future__ import annotations

from msgspec import UNSET

from draftgate.backends.types import Delta, FinishReason
from draftgate.gateway.http.replies.rendering import WholeChoice
from draftgate.gateway.http.replies.shapes import StopReason
from draftgate.gateway.http.requests.validation import ParsedRequest


def stop_reason(parsed: ParsedRequest, output: Delta | WholeChoice) -> StopReason:
    """Return what ended a choice, or None if neither a stop text nor a stop token did.

    The result is unset for a delta that does not end its choice.
    """
    if output.finish_reason is None:
        return UNSET
    if output.stop_text:
        return output.stop_text
    sampling = parsed.job.sampling
    if output.finish_reason is not FinishReason.STOP or not output.token_ids:
        return None
    last = output.token_ids[-1]
    ends = () if sampling.ignore_eos and parsed.job.grammar is None else parsed.served.eos_ids
    return last if last in sampling.stop_token_ids and last not in ends else None
