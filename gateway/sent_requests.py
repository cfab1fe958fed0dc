"""The requests that a node has sent to a worker, and the capacity that they take."""

from __future__ import annotations

from collections import Counter

from draftgate.policies.capacity import NO_NEED, CapacityNeed, WorkerUsage
from draftgate.policies.types import WorkerLoad


class SentRequests:
    """The requests of this node that run on a worker, or have reserved it.

    Attributes:
        reserved_tokens: upper bound of their tokens, prompt and output.
    """

    def __init__(self) -> None:
        self.reserved_tokens = 0
        self._sequences = self._started = 0
        self._unstarted_prompt_tokens = 0
        self._sent: dict[str, CapacityNeed] = {}
        self._unstarted: dict[str, CapacityNeed] = {}  # those without a first token
        self._arriving: dict[str, int] = {}  # prompt tokens that arrive as KV blocks, by request
        self._promised: dict[str, float] = {}  # time per output token, by request

    def usage_at(self, load: WorkerLoad) -> WorkerUsage:
        """Return the usage of the worker at a load."""
        return WorkerUsage(
            load,
            self._sequences,
            self._started,
            self._unstarted_prompt_tokens,
            min(self._promised.values()) if self._promised else None,
            arriving_tokens=sum(self._arriving.values()) if self._arriving else 0,
        )

    def count_by_offer(self) -> Counter[str]:
        """Return the number of requests by what they need of a worker (`CapacityNeed.offer`)."""
        return Counter([need.offer for need in self._sent.values()])

    def reserve(self, request_id: str, need: CapacityNeed) -> None:
        """Count a request before it is sent. An offline one takes no capacity from others."""
        if need.offline:
            need = NO_NEED
        if request_id in self._sent:
            self.release(request_id)
        self._sent[request_id] = self._unstarted[request_id] = need
        self._sequences += need.sequences
        self._unstarted_prompt_tokens += need.prompt_tokens
        self.reserved_tokens += need.most_tokens
        if need.tpot_s is not None:
            self._promised[request_id] = need.tpot_s

    def await_blocks(self, request_id: str) -> None:
        """Count the prompt of a reserved request as KV blocks that arrive from another worker.

        The worker does not compute these tokens. The method is idempotent.
        """
        if request_id not in self._arriving:
            tokens = self._arriving[request_id] = self._unstarted[request_id].prompt_tokens
            self._unstarted_prompt_tokens -= tokens

    def started(self, request_id: str) -> bool:
        """Record a request's first token, and return whether this is the first call."""
        need = self._unstarted.pop(request_id, None)
        if need is None:
            return False
        if self._arriving.pop(request_id, None) is None:
            self._unstarted_prompt_tokens -= need.prompt_tokens
        self._started += need.sequences
        return True

    def release(self, request_id: str) -> None:
        """Stop counting a request.

        The method is idempotent.
        """
        self.started(request_id)
        need = self._sent.pop(request_id, None)
        if need is None:
            return
        self._sequences -= need.sequences
        self._started -= need.sequences
        self.reserved_tokens -= need.most_tokens
        self._promised.pop(request_id, None)
