"""The values of flows and their hops."""

from __future__ import annotations

from typing import NamedTuple

from draftgate.policies.values import immutable


class HopKind(NamedTuple):
    """The kind of a hop, by which the history distinguishes hops.

    Attributes:
        endpoint: path of the endpoint.
        model: name of the model.
    """

    endpoint: str
    model: str


@immutable
class HopRecord:
    """A hop of a flow that has ended.

    Attributes:
        begun_s: time from the begin of the flow to the arrival of the hop, in seconds.
        ended_s: time from the begin of the flow to the end of the hop, or None if it has no
            end, because it failed or still ran.
        prompt_tokens: tokens of all its prompts.
        output_tokens: mean output tokens of its sequences, which run at the same time.
        service_s: seconds from its first worker to its end, without its wait.
    """

    kind: HopKind
    begun_s: float
    ended_s: float | None = None
    prompt_tokens: int = 0
    output_tokens: int = 0
    service_s: float = 0.0


@immutable
class HopForecast:
    """An expected hop, by the history of the tenant's flows.

    Attributes:
        weight: expected number of such hops on the critical path, which is the probability of the
            hop, times the probability that no earlier hop still runs at its arrival.
        prompt_tokens, output_tokens: expected tokens.
        service_s: expected seconds from its first worker to its end.
        gap_s: expected seconds that the client takes before the hop, after the previous hops.
        elsewhere: whether the hop needs another model than the hop that has arrived, so that it
            neither waits for the same workers nor has their speed.
    """

    weight: float
    prompt_tokens: float
    output_tokens: float
    service_s: float
    gap_s: float
    elsewhere: bool = False


@immutable
class Division:
    """The remaining time of a flow, divided over a hop and the predicted later hops.

    Attributes:
        budget_s: seconds for the hop, from now to its end. It is more than 0 and at most the
            remaining time.
        own_s: predicted seconds of the hop, with its wait.
        service_s: the same seconds without the wait.
        later_s: predicted seconds of the later hops, with their waits.
        later_served_s: the same seconds without their waits.
        later_here_s: the part of these seconds on the model of the hop.
        gaps_s: predicted seconds that the client takes between the hops.
        least_s: predicted seconds to the end of the flow if this hop need not wait.
    """

    budget_s: float
    own_s: float
    service_s: float
    later_s: float
    later_served_s: float
    later_here_s: float
    gaps_s: float
    least_s: float
