"""Upper bounds of the request rate of a machine, from its step costs and the mean lengths.

A bound costs microseconds, where a simulation takes seconds. A planner therefore simulates only the
deployments whose bound exceeds the best simulated rate. The bounds are optimistic. They treat
requests as a fluid, so that batches are always full, and a machine never waits.

* **Prefill.** The mean time to first token is that of an M/D/1 queue (`queueing`). A prompt takes
  its own time in a step. The next prompt waits for less, since prompts of one step share the fixed
  part of its time.
* **Decode.** The largest batch whose step is within the TPOT limit, and whose KV fits the memory.
  With drafts, a step has more tokens, and the limit is that of all tokens which it gives.
* **Both.** The shares of time for prompts and for decodes add up to 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Final

from draftgate.lab.planning.queueing import highest_rate_rps
from draftgate.lab.planning.throughput import NO_DRAFTS, DraftPoint, Machine, Targets
from draftgate.policies.values import immutable

_LEAST_S: Final = 1e-9
"""Least time of a prompt, so that profiles without a cost per token have finite rates."""

_HALVINGS: Final = 40
"""Halvings of the interval of a rate, to a relative precision of 1e-12."""


@immutable
class MeanLengths:
    """The lengths of a workload.

    Attributes:
        prompt_tokens, output_tokens: means.
        prompt_pairs: mean number of pairs of tokens of a prompt that attend to each other.
        context_tokens: mean context of a decode step, over all output tokens.
        longest_prompt: the prompt length that `share` of the requests do not exceed.
    """

    prompt_tokens: float
    output_tokens: float
    prompt_pairs: float
    context_tokens: float
    longest_prompt: int

    @classmethod
    def from_requests(cls, requests: Sequence[tuple[int, int]], share: float) -> MeanLengths:
        """Return the lengths of requests.

        Args:
            requests: tokens of prompt and output of each request.
            share: share of the requests that must meet their limits.

        Raises:
            ValueError: there are no requests.
        """
        if not requests:
            raise ValueError("the workload has no requests")
        count = len(requests)
        outputs = math.fsum(output for _, output in requests)
        contexts = math.fsum(output * (prompt + output / 2.0) for prompt, output in requests)
        prompts = sorted(prompt for prompt, _ in requests)
        return cls(
            math.fsum(prompts) / count,
            outputs / count,
            math.fsum(prompt * prompt / 2.0 for prompt in prompts) / count,
            contexts / outputs,
            prompts[min(math.ceil(share * count), count) - 1],
        )


@immutable
class RateBounds:
    """The highest rates of a machine, in requests per second.

    Attributes:
        prefill_rps: prompts of a machine that only prefills.
        decode_rps: outputs of a machine that only decodes.
        prefill_share_rps: prompts per second of the time that a machine with both spends on them.
    """

    prefill_rps: float
    decode_rps: float
    prefill_share_rps: float

    @property
    def both_rps(self) -> float:
        """The rate of a machine that does both for each request."""
        if not self.prefill_share_rps or not self.decode_rps:
            return 0.0
        return 1.0 / (1.0 / self.prefill_share_rps + 1.0 / self.decode_rps)


def bounds(
    machine: Machine, lengths: MeanLengths, targets: Targets, drafts: Iterable[DraftPoint] = ()
) -> RateBounds:
    """Return the bounds of a machine for a workload.

    Args:
        drafts: ways to draft. The bounds are those of the best one, or without drafts.
    """
    cost, step_tokens = machine.cost, machine.step_tokens
    fixed_s = cost.seconds(1)
    token_s = (cost.seconds(step_tokens) - fixed_s) / (step_tokens - 1) + cost.kv_token_s
    service_s = token_s * lengths.prompt_tokens + cost.pair_s * lengths.prompt_pairs
    service_s = max(service_s, _LEAST_S)
    prompt_s = fixed_s + service_s
    longest_s = fixed_s + token_s * lengths.longest_prompt
    longest_s += cost.pair_s * lengths.longest_prompt**2 / 2.0
    prefill_rps = 0.0
    if longest_s <= targets.ttft_s:
        prefill_rps = highest_rate_rps(targets.ttft_s, prompt_s, service_s)

    each = [_outputs(machine, lengths, targets, point) for point in (NO_DRAFTS, *drafts)]
    decode_rps = max(outputs_rps for outputs_rps, _ in each)
    free = max(share for _, share in each)
    return RateBounds(prefill_rps, decode_rps, min(prefill_rps, free / service_s))


def _outputs(
    machine: Machine, lengths: MeanLengths, targets: Targets, drafts: DraftPoint
) -> tuple[float, float]:
    """Return the outputs per second with a way to draft, and the share of time for prompts."""
    context, tokens = lengths.context_tokens, 1.0 + drafts.accepted
    limit_s = targets.tpot_s * max(tokens, drafts.least_tokens)
    batch = largest_batch(machine, context, limit_s, drafts)
    if not batch:
        return 0.0, 0.0
    tokens_per_s = max(
        sequences * tokens / _decode_s(machine, sequences, context, drafts)
        for sequences in range(1, batch + 1)
    )
    # The TPOT limit is the longest step, which has its fixed time. Without this limit, prompts may
    # make steps so long that their fixed time hardly counts.
    free = 1.0
    if batch < _most_sequences(machine, context, drafts):
        free -= machine.cost.seconds(1) / limit_s
    return tokens_per_s / lengths.output_tokens, free


def largest_batch(
    machine: Machine, context_tokens: float, limit_s: float, drafts: DraftPoint = NO_DRAFTS
) -> int:
    """Return the most sequences whose KV fits and whose decode step is within a limit."""
    low, high = 0, _most_sequences(machine, context_tokens, drafts)
    while low < high:
        middle = (low + high + 1) // 2
        if _decode_s(machine, middle, context_tokens, drafts) <= limit_s:
            low = middle
        else:
            high = middle - 1
    return low


def pool_bound(
    prefill: Iterable[RateBounds], decode: Iterable[RateBounds], both: Iterable[RateBounds]
) -> float:
    """Return the highest rate of a pool, in requests per second.

    Args:
        prefill, decode: machines that do one phase.
        both: machines that do both, which share their time between the phases as it suits the pool.
    """
    prompts_rps = math.fsum(one.prefill_rps for one in prefill)
    outputs_rps = math.fsum(one.decode_rps for one in decode)
    # The machines that are relatively fastest at prompts fill the lack of prompts first.
    shared = sorted(both, key=_prefill_advantage, reverse=True)
    most_prompts = prompts_rps + math.fsum(one.prefill_share_rps for one in shared)
    low, high = 0.0, most_prompts
    for _ in range(_HALVINGS):
        middle = (low + high) / 2.0
        if outputs_rps + _decoded(shared, middle - prompts_rps) >= middle:
            low = middle
        else:
            high = middle
    return low


def _decoded(machines: Sequence[RateBounds], prompts_rps: float) -> float:
    """Return the outputs per second of machines beside a rate of prompts."""
    outputs_rps = 0.0
    for one in machines:
        taken = min(max(prompts_rps, 0.0), one.prefill_share_rps)
        prompts_rps -= taken
        free = 1.0 - taken / one.prefill_share_rps if one.prefill_share_rps else 1.0
        outputs_rps += free * one.decode_rps
    return outputs_rps


def _prefill_advantage(one: RateBounds) -> float:
    return one.prefill_share_rps / one.decode_rps if one.decode_rps else math.inf


def _most_sequences(machine: Machine, context_tokens: float, drafts: DraftPoint) -> int:
    fitting = min(machine.kv_tokens / context_tokens, machine.step_tokens / (1.0 + drafts.slots))
    return min(int(fitting), machine.max_sequences)


def _decode_s(machine: Machine, batch: int, context_tokens: float, drafts: DraftPoint) -> float:
    slots = batch * drafts.slots
    kv_tokens = round(batch * context_tokens)
    step_s = machine.cost.seconds(math.ceil(batch + slots), kv_tokens, batch, math.ceil(slots))
    # The host is left out, because its work may overlap with that of the device.
    return step_s + drafts.slots * machine.depths.seconds(batch)
