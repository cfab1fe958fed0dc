"""Pauses of an upstream that does not respond or has requested a pause."""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Final

from draftgate.backends.base import DENIED, UpstreamPause
from draftgate.backends.header_numbers import header_count
from draftgate.backends.openai.connection import Response
from draftgate.policies.resilience.breaker import Breaker, Patience

DEFAULT_PAUSE_S: Final = 1.0
"""Pause in seconds after a refusal (429, 503) without a duration."""

_PATIENCE: Final = Patience(
    failures=3, timeouts_span_s=5.0, first_pause_s=1.0, longest_pause_s=30.0
)
"""Patience with an upstream. The restart of an engine takes tens of seconds to minutes. No pause
exceeds `--upstream-max-pause-s`."""

_REFUSALS: Final = (429, 503)

_FORBIDDEN: Final = 403
_MOST_DOUBLINGS: Final = 10


class Pauses:
    """The pauses of one upstream.

    A pause that the upstream requests is bounded, because one wrong response must not switch a
    healthy upstream off. A successful probe ends it early. If the upstream then refuses the next
    requests, probes say nothing about its load, and the next pause lasts until its end.

    An upstream that sends no response within its timeout several times in a row, and none in
    between, gets pauses that double, too. Probes do not end them, because the server of a hung
    engine still responds to them. After such a pause, the upstream gets one request on trial. Any
    response ends the pause.

    An upstream that denies access gets pauses that double with each denial. Probes do not end them,
    because most servers need no key for `/health`. A single 403 causes no pause, because it may
    concern one request only.

    Times are seconds of one monotonic clock.

    Attributes:
        breaker: open while the upstream is out.
        requested: whether the upstream has requested a pause, which may have ended.
    """

    def __init__(self, url: str, longest_s: float) -> None:
        """Start without a pause.

        Args:
            url: the address of the upstream, for messages.
            longest_s: maximum length of any pause in seconds.
        """
        first_s = min(_PATIENCE.first_pause_s, longest_s)
        self.breaker = Breaker(replace(_PATIENCE, first_pause_s=first_s, longest_pause_s=longest_s))
        self._url = url
        self._longest_s = longest_s
        self._pause = UpstreamPause(0.0, 503, "")
        self._until_s = 0.0
        self.requested = False
        self._probes_count = True  # whether a successful probe ends a requested pause
        self._denials = 0  # in a row
        self._late = self._late_pauses = 0  # since the last response
        self._late_since_s = -math.inf  # the last pause after late responses

    def pause(self, failure: str | None, now_s: float) -> UpstreamPause | None:
        """Return the rest of a pause, or None if the gateway may call the upstream.

        Args:
            failure: cause of the outage, or None if the upstream has at most requested a pause.
        """
        if failure is not None:
            remaining_s = max(
                self.breaker.remaining_s(now_s), min(DEFAULT_PAUSE_S, self._longest_s)
            )
            return UpstreamPause(remaining_s, 503, f"{self._url}: {failure}")
        if now_s >= self._until_s:
            self.requested = False
            return None
        return self._pause._replace(remaining_s=self._until_s - now_s)

    def may_probe(self, now_s: float) -> bool:
        """Return whether the gateway may send a probe now, also during a requested pause."""
        return self.breaker.remaining_s(now_s) <= 0

    def note_probe(self, now_s: float) -> None:
        """Record a successful probe, which may end a requested pause."""
        self.breaker.succeeded()
        if now_s < self._until_s and self._probes_count:
            self._until_s = now_s
            self._probes_count = False

    def note_answer(self, response: Response, now_s: float) -> None:
        """Record a response, which may request a pause."""
        if self.breaker.reason is None:
            self.breaker.succeeded()
        if self._late:
            self._end_late(now_s)
        status = response.status
        if status in DENIED:
            self._note_denial(status, now_s)
            return
        self._denials = 0
        if status not in _REFUSALS:
            self._probes_count = True
            return
        asked_s = retry_after_s(response.headers.get("Retry-After"), datetime.now(UTC))
        seconds = DEFAULT_PAUSE_S if asked_s is None else asked_s
        self._begin(seconds, status, now_s, f"responded with status {status}")

    @property
    def is_late(self) -> bool:
        """Whether the latest requests have got no response in time, so the next one is a trial."""
        return self._late >= _PATIENCE.failures

    def note_late(self, sent_s: float, now_s: float) -> None:
        """Record that a response has not begun in time, after which a pause may begin.

        Args:
            sent_s: time at which its request was sent.
        """
        self._late += 1
        # Requests that were sent before the last pause say nothing new.
        if self.is_late and sent_s > self._late_since_s:
            self._late_pauses += 1
            self._late_since_s = now_s
            self._begin_late(_doubled_s(self._late_pauses), now_s)

    def begin_trial(self, limit_s: float, now_s: float) -> None:
        """Begin a pause until the response to the next request, which must arrive in a time."""
        self._begin_late(limit_s, now_s)

    def _begin_late(self, seconds: float, now_s: float) -> None:
        self._probes_count = False
        self._begin(seconds, 503, now_s, "has not responded in time", late=True)

    def _end_late(self, now_s: float) -> None:
        """End a pause of late responses, because one has arrived."""
        if self.is_late:
            self._until_s, self._probes_count = min(self._until_s, now_s), True
        self._late = self._late_pauses = 0

    def _note_denial(self, status: int, now_s: float) -> None:
        """Begin a pause after a denial, unless the request was sent before the present pause."""
        if now_s < self._until_s:
            return
        self._denials += 1
        if status == _FORBIDDEN and self._denials == 1:
            return
        self._probes_count = False
        reason = f"responded with status {status}"
        self._begin(_doubled_s(self._denials), 503, now_s, reason, denied=status)

    def _begin(
        self,
        seconds: float,
        status: int,
        now_s: float,
        reason: str,
        *,
        denied: int = 0,
        late: bool = False,
    ) -> None:
        """Begin a pause, unless a longer one has begun."""
        until_s = now_s + min(seconds, self._longest_s)
        if until_s >= self._until_s:
            pause = UpstreamPause(0.0, status, f"{self._url} {reason}", denied, late)
            self._until_s, self._pause, self.requested = until_s, pause, True


def _doubled_s(number: int) -> float:
    """Return the length of the pause with a number, from 1, before it is bounded."""
    return DEFAULT_PAUSE_S * 2.0 ** min(number - 1, _MOST_DOUBLINGS)


def retry_after_s(value: str | None, now: datetime) -> float | None:
    """Return the seconds of a `Retry-After` header, 0 or more, or None if it is invalid.

    The header holds seconds or a date (RFC 9110, section 10.2.3).
    """
    if value is None:
        return None
    text = value.strip()
    seconds = header_count(text)
    if seconds is not None:
        return float(seconds)
    try:
        moment = parsedate_to_datetime(text)
    except (ValueError, OverflowError):
        return None
    if moment.tzinfo is None:  # the dates of RFC 850 and asctime are in GMT
        moment = moment.replace(tzinfo=UTC)
    return max(0.0, (moment - now).total_seconds())
