"""What a request has beside its body: the headers that Draftgate reads, and its sender."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from draftgate.backends.header_numbers import header_count, header_number
from draftgate.gateway.accounts import ANONYMOUS, Account
from draftgate.gateway.errors import invalid
from draftgate.policies.types import ANYTIME, ServiceLevel
from draftgate.policies.values import immutable

TTFT_HEADER: Final = "x-slo-ttft-ms"
TPOT_HEADER: Final = "x-slo-tpot-ms"
"""Latency targets, under the names that inference-perf uses."""

FLOW_HEADER: Final = "x-flow-id"
FLOW_DEADLINE_HEADER: Final = "x-flow-deadline-ms"

LONGEST_FLOW_ID: Final = 128
"""Maximum length of a flow's id, in characters."""

LEAST_FLOW_S: Final = 1e-3
"""Shorter deadlines of flows count as this one, because shares of the deadline divide by it."""

LONGEST_FLOW_S: Final = 86_400.0
"""The longest deadline of a flow, which bounds the time for which the store keeps a flow."""

CLIENT_RATE_HEADER: Final = "x-client-rate-tps"
"""Tokens per second that the client can take. A proxy that hides the paths to its clients may add
it."""

RETRIES_HEADER: Final = "x-stainless-retry-count"
"""The retry count that OpenAI's clients send."""

SESSION_HEADER: Final = "x-session-id"
"""The id of a client's session, such as a run of an agent."""

LONGEST_SESSION_ID: Final = 256
"""Maximum length of a session's id, in characters."""

OUTPUT_HEADER: Final = "x-expected-output-tokens"
"""The number of output tokens that the client expects of each choice."""

NEXT_CALL_HEADER: Final = "x-next-call-s"
"""The time in seconds within which the client will send the next request of its conversation, such
as an agent that runs a tool."""

LONGEST_NEXT_CALL_S: Final = 3600.0
"""The longest time until the next request, which bounds the memory that the hint takes."""

HINTS: Final = (
    TTFT_HEADER,
    TPOT_HEADER,
    FLOW_HEADER,
    FLOW_DEADLINE_HEADER,
    CLIENT_RATE_HEADER,
    SESSION_HEADER,
    OUTPUT_HEADER,
    NEXT_CALL_HEADER,
)
"""What clients state about a request, which upstreams get, too, because they may be Draftgates."""

_STATED: Final = (*HINTS, RETRIES_HEADER)

_SERVICE: Final = (TTFT_HEADER, TPOT_HEADER, OUTPUT_HEADER, NEXT_CALL_HEADER)

MOST_RETRIES: Final = 999
"""Larger retry counts are ignored."""


class Stated(NamedTuple):
    """What the headers of a request say about it.

    Attributes:
        service: the latency targets. The body of the request sets its priority.
        flow: the id and the deadline of its flow in seconds, or None without a flow.
        rate_tps: tokens per second that the client says it can take, or None.
        retries: how often the client has sent the request before, or None if unknown.
        session: the id of its session, or empty without one.
    """

    service: ServiceLevel
    flow: tuple[str, float | None] | None
    rate_tps: float | None
    retries: int | None
    session: str = ""


_NOTHING: Final = Stated(ANYTIME, None, None, None)


def read_stated(headers: Mapping[str, str]) -> Stated:
    """Return what the headers of a request say about it.

    Raises:
        InvalidRequest: a header has an invalid value.
    """
    if not any(name in headers for name in _STATED):
        return _NOTHING
    flow, service = flow_of(headers), service_level(headers)
    retries, session = retry_count(headers), session_of(headers)
    return Stated(service, flow, client_rate_tps(headers), retries, session)


def service_level(headers: Mapping[str, str]) -> ServiceLevel:
    """Return the latency targets, the expected output and the time of the next request.

    Raises:
        InvalidRequest: a target is not a positive number of milliseconds, the output not a number
            of tokens, or the time not a positive number of seconds.
    """
    if not any(name in headers for name in _SERVICE):
        return ANYTIME
    tokens, text = None, headers.get(OUTPUT_HEADER)
    if text is not None:
        tokens = header_count(text)
        if tokens is None:
            raise invalid(OUTPUT_HEADER, f"must be a number of tokens, not {text!r}")
    targets_s = _seconds(headers, TTFT_HEADER), _seconds(headers, TPOT_HEADER)
    return ServiceLevel(*targets_s, expected_tokens=tokens, next_call_s=_next_call_s(headers))


def _next_call_s(headers: Mapping[str, str]) -> float | None:
    text = headers.get(NEXT_CALL_HEADER)
    if text is None:
        return None
    seconds = header_number(text)
    if not seconds or seconds > LONGEST_NEXT_CALL_S:
        expected = f"must be a positive number of seconds, at most {LONGEST_NEXT_CALL_S:.0f}"
        raise invalid(NEXT_CALL_HEADER, f"{expected}, not {text!r}")
    return seconds


def flow_of(headers: Mapping[str, str]) -> tuple[str, float | None] | None:
    """Return the id and the deadline of a request's flow in seconds, or None without a flow.

    Raises:
        InvalidRequest: the id or the deadline is invalid.
    """
    flow_id = headers.get(FLOW_HEADER)
    if flow_id is None:
        if FLOW_DEADLINE_HEADER in headers:
            raise invalid(FLOW_DEADLINE_HEADER, f"requires {FLOW_HEADER}")
        return None
    if not (0 < len(flow_id) <= LONGEST_FLOW_ID and flow_id.isascii() and flow_id.isprintable()):
        raise invalid(FLOW_HEADER, f"must have 1 to {LONGEST_FLOW_ID} printable ASCII characters")
    deadline_s = _seconds(headers, FLOW_DEADLINE_HEADER)
    if deadline_s is not None and deadline_s > LONGEST_FLOW_S:
        most = f"{LONGEST_FLOW_S * 1e3:.0f} milliseconds"
        raise invalid(FLOW_DEADLINE_HEADER, f"must be at most {most}")
    return flow_id, None if deadline_s is None else max(deadline_s, LEAST_FLOW_S)


def client_rate_tps(headers: Mapping[str, str]) -> float | None:
    """Return the tokens per second that the client says it can take, or None.

    Raises:
        InvalidRequest: the rate is not a positive number.
    """
    text = headers.get(CLIENT_RATE_HEADER)
    if text is None:
        return None
    rate_tps = header_number(text)
    if not rate_tps:
        expected = "must be a positive number of tokens per second"
        raise invalid(CLIENT_RATE_HEADER, f"{expected}, not {text!r}")
    return rate_tps


def session_of(headers: Mapping[str, str]) -> str:
    """Return the id of a request's session, or an empty text without one.

    Raises:
        InvalidRequest: the id is empty or too long.
    """
    session = headers.get(SESSION_HEADER)
    if session is None:
        return ""
    if not 0 < len(session) <= LONGEST_SESSION_ID:
        raise invalid(SESSION_HEADER, f"must have 1 to {LONGEST_SESSION_ID} characters")
    return session


def retry_count(headers: Mapping[str, str]) -> int | None:
    """Return how often the client has sent the request before, or None if unknown."""
    text = headers.get(RETRIES_HEADER)
    if text is None:
        return None
    count = header_count(text)
    return count if count is not None and count <= MOST_RETRIES else None


def _seconds(headers: Mapping[str, str], name: str) -> float | None:
    text = headers.get(name)
    if text is None:
        return None
    milliseconds = header_number(text)
    if not milliseconds:
        raise invalid(name, f"must be a positive number of milliseconds, not {text!r}")
    return milliseconds / 1e3


@immutable
class Sender:
    """The account, the headers and the id of a request.

    Attributes:
        request_id: an id that is unique on this node.
        service: the latency targets in the headers.
        retries: how often the client has sent the request before, or None if unknown.
        fingerprint: a hash that is equal for a retry of the same request, or 0 if unknown.
    """

    request_id: str
    account: Account = ANONYMOUS
    service: ServiceLevel = ANYTIME
    retries: int | None = None
    fingerprint: int = 0

    def service_level(self, priority: int | None) -> ServiceLevel:
        """Return the service level of the request, within the bounds of its account.

        Args:
            priority: the priority in the body, or None.
        """
        return self.account.service_level(self.service, priority)
