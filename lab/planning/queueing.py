"""The mean time to first token of a prefill instance, as an M/D/1 queue (DistServe, section 3.1).

Requests arrive at random (Poisson) and wait in one line. A prompt takes a fixed time D. The mean
wait in front of a server with a service time s is `R s^2 / (2 (1 - R s))` (Pollaczek-Khinchine).

A pipeline of S equal stages takes D for a prompt, but accepts the next one after D / S. Later
stages never have a line, since prompts leave the first one at least D / S apart. Tensor parallelism
with a speed-up of K takes D / K. With `wait` as above, the mean time to first token is therefore

    one device         D + wait(D)            = D + R D^2 / (2 (1 - R D))
    two stages         D + wait(D / 2)        = D + R D^2 / (4 (2 - R D))
    tensor parallel    D / K + wait(D / K)    = D / K + R D^2 / (2 K (K - R D))

These are the formulas of DistServe (Zhong et al., arXiv 2401.09670).
"""

from __future__ import annotations

import math


def mean_wait_s(rate_rps: float, service_s: float) -> float:
    """Return the mean seconds in the line of an M/D/1 queue, infinite at a load of 1 or more."""
    load = rate_rps * service_s
    return math.inf if load >= 1.0 else load * service_s / (2.0 * (1.0 - load))


def mean_ttft_s(rate_rps: float, prompt_s: float, stages: int = 1, speed_up: float = 1.0) -> float:
    """Return the mean time to first token of a prefill instance, in seconds.

    Args:
        rate_rps: requests per second.
        prompt_s: seconds of a prompt on one device.
        stages: number of equal pipeline stages.
        speed_up: ratio of `prompt_s` to the time with tensor parallelism.
    """
    latency_s = prompt_s / speed_up
    return latency_s + mean_wait_s(rate_rps, latency_s / stages)


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
