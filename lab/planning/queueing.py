"""The mean time to first token of a prefill instance, as an M/D/1 queue (DistServe, section 3.1).

Requests arrive at random (Poisson) and wait in one line. A prompt takes a fixed time D. The mean
wait in front of a server with a service time s is `R s^2 / (2 (1 - R s))` (Pollaczek-Khinchine).
The mean time to first token is `D + R D^2 / (2 (1 - R D))` (Zhong et al., arXiv 2401.09670).

A server may accept a prompt before the previous one has ended. `highest_rate_rps` therefore takes
the service time apart from the time of a prompt.
"""

from __future__ import annotations

import math


def mean_wait_s(rate_rps: float, service_s: float) -> float:
    """Return the mean seconds in the line of an M/D/1 queue, infinite at a load of 1 or more."""
    load = rate_rps * service_s
    return math.inf if load >= 1.0 else load * service_s / (2.0 * (1.0 - load))


def mean_ttft_s(rate_rps: float, prompt_s: float) -> float:
    """Return the mean time to first token of a prefill instance, in seconds."""
    return prompt_s + mean_wait_s(rate_rps, prompt_s)


def highest_rate_rps(limit_s: float, prompt_s: float, service_s: float) -> float:
    """Return the requests per second at which the mean time to first token reaches a limit.

    The equation `prompt_s + mean_wait_s(rate, service_s) = limit_s`, solved for the rate.

    Args:
        limit_s: limit of the mean time to first token.
        prompt_s: seconds of a prompt.
        service_s: seconds after which the next prompt can start, more than 0.

    Returns:
        The rate, or 0 if even an idle instance exceeds the limit.
    """
    wait_s = limit_s - prompt_s
    if wait_s <= 0.0:
        return 0.0
    if math.isinf(wait_s):
        return 1.0 / service_s
    return 2.0 * wait_s / (service_s * (service_s + 2.0 * wait_s))
