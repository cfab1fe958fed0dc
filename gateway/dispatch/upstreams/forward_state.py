"""The states of a forwarded request. All transitions are in `forwarding`."""

from __future__ import annotations

from enum import Enum, auto


class ForwardState(Enum):
    """The states of a forwarded request.

    NEW -> ADMITTED -> SENT -> ANSWERED -> ENDED
    ADMITTED -> PREFILLING -> SENT, for upstreams with roles
    SENT -> REFUSED or FAILED -> SENT to another upstream, or ENDED
    SENT -> ADMITTED, preempted by another request
    any of these -> NEW or ADMITTED with another model
    ANSWERED -> LOST -> SENT to another upstream, or ANSWERED with the error
    """

    NEW = auto()
    ADMITTED = auto()
    PREFILLING = auto()
    """Another upstream may compute the prompt for the one that has reserved capacity for it."""
    SENT = auto()
    """An upstream has reserved capacity for it, and gets it."""
    ANSWERED = auto()
    """The client gets the response of the upstream."""
    REFUSED = auto()
    """The upstream refused it, and another one may take it."""
    FAILED = auto()
    """The upstream did not respond, and another one may."""
    LOST = auto()
    """Its stream has lost its upstream, and another one may continue it."""
    ENDED = auto()


# A name of the module is found in a tenth of the time of a member of an enum.
NEW, ADMITTED, PREFILLING, SENT, ANSWERED, REFUSED, FAILED, LOST, ENDED = ForwardState
