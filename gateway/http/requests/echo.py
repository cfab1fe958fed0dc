"""The fields that return the prompt: `echo` and `prompt_logprobs`."""

from __future__ import annotations

from collections.abc import Sequence

from draftgate.backends.token_ids import TokenIds
from draftgate.backends.tokenizer import Tokenizer
from draftgate.gateway.errors import Unsupported
from draftgate.gateway.http.requests.schemas import CompletionBody, GenerationFields


def prompt_alternatives(wire: GenerationFields) -> int | None:
    """Return the number of alternatives to compute for each token of the prompt.

    Returns:
        None if the response has no log probabilities of the prompt.

    Raises:
        Unsupported: a stream cannot contain the log probabilities.
    """
    if wire.prompt_logprobs is None and not getattr(wire, "echo", None):
        return None  # the usual case
    if wire.prompt_logprobs is not None and wire.stream:
        raise Unsupported("prompt_logprobs", " together with stream")
    echoed = wire.logprobs if isinstance(wire, CompletionBody) and wire.echo else None
    # Only the first choice computes them, and its chunks may follow those of other choices.
    if echoed is not None and wire.stream and (wire.n or 1) > 1:
        raise Unsupported("echo", " together with logprobs and stream for n above 1")
    wanted = [number for number in (wire.prompt_logprobs, echoed) if number is not None]
    return max(wanted, default=None)


def echoed_texts(
    wire: CompletionBody, prompts: Sequence[TokenIds], tokenizer: Tokenizer
) -> tuple[str, ...]:
    """Return the text of each prompt with which its choices begin, or nothing without `echo`.

    Args:
        prompts: token ids of each prompt.
    """
    if not wire.echo:
        return ()
    given: Sequence[object] = wire.prompt if isinstance(wire.prompt, list) else (wire.prompt,)
    if isinstance(given[0], int):  # a single prompt of token ids
        given = (given,)
    return tuple(
        text
        if isinstance(text, str) and wire.truncate_prompt_tokens is None
        else tokenizer.decode(ids, skip_special_tokens=False)
        for text, ids in zip(given, prompts, strict=True)
    )
