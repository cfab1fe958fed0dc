"""The bound of the work that one request may ask for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from draftgate.backends.token_ids import TokenIds
from draftgate.gateway.errors import invalid

LEAST_TOKENS: Final = 1024
"""The tokens for which each choice counts at least, because a choice without tokens still costs
some kilobytes of memory and time of the event loop."""


def check_choices(prompts: int, n: int, bound: int, name: str = "n") -> None:
    """Check the number of choices, which needs no tokenised prompts.

    Args:
        prompts: number of prompts.
        n: number of choices of each prompt.
        bound: maximum work of the request, in tokens.
        name: name of the parameter that sets the number of choices.

    Raises:
        InvalidRequest: there are too many choices.
    """
    most = max(bound // LEAST_TOKENS, 1)
    if prompts * n > most:
        what = f"{prompts} prompts with {n} choices each are more than {most} choices"
        raise invalid(
            name if n > 1 else "prompt",
            f"{what} (--max-request-tokens, where each choice counts for {LEAST_TOKENS} tokens or "
            "more); send several requests",
        )


def most_output_tokens(
    prompts: Sequence[TokenIds],
    n: int,
    max_tokens: int | None,
    alternatives: tuple[int | None, int | None],
    bound: int,
) -> int | None:
    """Return the output limit of each choice that the work of a request allows.

    The tokens of prompts and outputs count, and so does each alternative of their log
    probabilities. A request of one choice may always fill the context.

    Args:
        n: number of choices of each prompt.
        max_tokens: the requested output limit, or None to fill the context.
        alternatives: number of alternatives of each token of the prompt and of the output, or None.
        bound: maximum work of the request, in tokens.

    Returns:
        None if only the context limits the output.

    Raises:
        InvalidRequest: the request asks for too much work.
    """
    choices = len(prompts) * n
    if choices == 1:
        return max_tokens
    of_prompt, of_output = (1 + (number or 0) for number in alternatives)
    of_prompts = of_prompt * sum(map(len, prompts))
    left = (bound - of_prompts) // choices // of_output
    if left < max(max_tokens or 0, 1):
        work = of_prompts + choices * of_output * (max_tokens or 1)
        raise invalid(
            "max_tokens" if max_tokens else "prompt",
            f"{choices} choices with their prompts and log probabilities have up to {work} tokens, "
            f"but a request may have {bound} (--max-request-tokens); send several requests",
        )
    return left if max_tokens is None else max_tokens
