"""A stream over an emulated path, in virtual time, whose pacing follows the policy."""

from __future__ import annotations

from collections import deque

from draftgate.policies.pacing import Pacing, ReaderView, check_interval_s, next_pacing
from draftgate.policies.types import Pace

TICK_S = 0.01
FRAME_BYTES = 225


class EmulatedPath:
    """A queue with a rate, and the delay of a round trip until bytes are acknowledged.

    Attributes:
        bytes_s: present rate, in bytes per second, which tests may change.
        rtt_s: round trip of an empty queue, in seconds.
    """

    def __init__(self, bytes_s: float, rtt_s: float) -> None:
        self.bytes_s = bytes_s
        self.rtt_s = rtt_s
        self.queued_bytes = 0.0
        self._under_way: deque[tuple[float, float]] = deque()  # due time and bytes

    def pass_time(self, now_s: float) -> float:
        """Let a tick pass, and return the bytes that are acknowledged by its end."""
        passed = min(self.queued_bytes, self.bytes_s * TICK_S)
        self.queued_bytes -= passed
        if passed:
            self._under_way.append((now_s + self.rtt_s, passed))
        acknowledged = 0.0
        while self._under_way and self._under_way[0][0] <= now_s:
            acknowledged += self._under_way.popleft()[1]
        return acknowledged


class EmulatedStream:
    """A request whose worker generates tokens at an even rate, less at a lower pace.

    Attributes:
        pacing: present result of the policy, and `pacings` all of them.
    """

    def __init__(self, path: EmulatedPath, tokens_s: float, token_bytes: float = 5.0) -> None:
        self.pacing = Pacing()
        self.pacings: list[Pacing] = []
        self.writes = 0
        self.made_tokens = self.sent_tokens = 0.0
        self.sent_bytes = self.arrived_bytes = 0.0
        self._path = path
        self._tokens_s = tokens_s
        self._token_bytes = token_bytes
        self._now_s = self._next_write_s = self._moved_s = self._checked_s = 0.0
        self._sizes = FRAME_BYTES + token_bytes, 1.0  # bytes of a token, and tokens of a chunk
        self._before = (0.0,) * 5  # tokens made and sent, chunks, bytes sent and arrived

    @property
    def held_bytes(self) -> float:
        """Bytes that are sent and not acknowledged."""
        return self.sent_bytes - self.arrived_bytes

    def run(self, seconds: float) -> None:
        """Let some time pass."""
        for _ in range(round(seconds / TICK_S)):
            self.tick()

    def tick(self) -> None:
        """Let a tick pass."""
        self._now_s += TICK_S
        self._generate()
        self._write()
        arrived = self._path.pass_time(self._now_s)
        self.arrived_bytes += arrived
        if arrived or self.held_bytes < 1.0:
            self._moved_s = self._now_s
        if self._now_s - self._checked_s >= check_interval_s(self._path.rtt_s, self.pacing.hold_s):
            self._check()

    def _generate(self) -> None:
        rate = self._tokens_s
        if self.pacing.pace is Pace.PAUSED:
            return
        if self.pacing.tpot_s:
            rate = min(rate, 1.0 / self.pacing.tpot_s)
        self.made_tokens += rate * TICK_S

    def _write(self) -> None:
        waiting = int(self.made_tokens) - int(self.sent_tokens)
        if not waiting or self._now_s < self._next_write_s:
            return
        chunks = 1 if self.pacing.hold_s else waiting
        size = chunks * FRAME_BYTES + waiting * self._token_bytes
        self.writes += chunks
        self.sent_tokens += waiting
        self.sent_bytes += size
        self._path.queued_bytes += size
        self._next_write_s = self._now_s + self.pacing.hold_s

    def _check(self) -> None:
        interval_s = self._now_s - self._checked_s
        now = self.made_tokens, self.sent_tokens, self.writes, self.sent_bytes, self.arrived_bytes
        differences = (a - b for a, b in zip(now, self._before, strict=True))
        made, tokens, writes, sent, arrived = differences
        if tokens:
            self._sizes = sent / tokens, tokens / writes
        token_bytes, chunk_tokens = self._sizes
        busy = self.held_bytes >= 1.0 or self._path.rtt_s > TICK_S
        view = ReaderView(
            int(self.held_bytes),
            self._now_s - self._moved_s,
            int(self.made_tokens) - int(self.sent_tokens),
            arrived / interval_s,
            made * token_bytes / interval_s,
            token_bytes,
            chunk_tokens,
            int(self._before[3] - self._before[4]),
            self.pacing.hold_s,
            interval_s,
            self._tokens_s,
            rtt_s=self._path.rtt_s,
            busy_share=1.0 if busy else 0.0,
        )
        self.pacing = next_pacing(view, self.pacing)
        self.pacings.append(self.pacing)
        self._before, self._checked_s = now, self._now_s
