"""The computation of a prompt by another upstream than that of the output.

Every failure leads to the same end: the upstream of the output computes the prompt itself, and
reports errors of the request.
"""

from __future__ import annotations

from typing import Final

from draftgate.backends.base import Upstream, UpstreamCall
from draftgate.backends.errors import UpstreamFailed
from draftgate.backends.openai.kv_transfer_params import (
    NotDivisible,
    decode_call,
    prefill_body,
    read_params,
)
from draftgate.gateway.dispatch.admission import Entry
from draftgate.gateway.dispatch.routing import Routed, View, decode_id
from draftgate.gateway.dispatch.run import Prefill, PrefillEnd, Watch
from draftgate.gateway.dispatch.upstreams.forwarder import Forwarder
from draftgate.gateway.dispatch.upstreams.refusals import (
    FIRST_ERROR,
    PASSED_ON,
    read_and_close,
    reason,
)
from draftgate.gateway.dispatch.worker_spans import open_dispatch
from draftgate.gateway.fleet import FleetWorker
from draftgate.gateway.tracing import Span

MOST_PREFILLS: Final = 2
"""Maximum upstreams that are called for a prompt. Each failed call delays the first token."""


class DividedCall:
    """A request for upstreams with roles, whose prompt and output may have different upstreams.

    Attributes:
        worker: the upstream of the output, which the request has reserved.
        prefilled_by: id of the upstream that has computed the prompt, if `worker` gets its KV
            cache, or empty.
    """

    def __init__(
        self,
        forwarder: Forwarder,
        entry: Entry,
        routed: Routed,
        view: View,
        span: Span,
        watch: Watch,
    ) -> None:
        """Reserve the upstreams of a decision.

        Args:
            view: a function that returns the routing policy's view of the request.
            watch: takes an event for each call for the prompt.
        """
        self.prefilled_by = ""
        self.worker = routed.worker
        self._source: FleetWorker | None = None  # has reserved capacity for the prompt
        self._forwarder = forwarder
        self._entry = entry
        self._view = view
        self._span = span
        self._watch = watch
        if routed.decode is not None:
            self._source, self.worker = routed.worker, routed.decode.worker
            self.worker.release(decode_id(entry.request_id))
            self.worker.reserve(entry.request_id, entry.needs[0])
            self.worker.await_blocks(entry.request_id)

    def undivided(self, call: UpstreamCall) -> UpstreamCall:
        """Return the call for one upstream that computes prompt and output.

        An upstream may have copied the KV cache of the prompt, which is freed then.
        """
        self.prefilled_by = ""
        return decode_call(call, None)

    async def compute(self, call: UpstreamCall) -> UpstreamCall:
        """Return the call for the output, for which the prompt has been computed if possible.

        The upstream of the prompt is released.
        """
        prompt, tried = call._replace(rewrite=prefill_body, sequences=1), list[str]()
        found, self._source = self._source, None
        if found is None:
            self._watch(Prefill("", PrefillEnd.DIRECT))
        while found is not None:
            tried.append(found.worker_id)
            begin_s = self._forwarder.queue.now_s()
            end, params, retries = PrefillEnd.FAILED, None, True
            try:
                params = await self._ask(prompt, found)
                end, retries = PrefillEnd.COMPUTED, False
            except UpstreamFailed:
                pass
            except NotDivisible:
                end, retries = PrefillEnd.DIRECT, False
            except (ValueError, RecursionError):  # another upstream would not help
                retries = False
            finally:
                found.release(self._entry.request_id)
                self._forwarder.queue.dispatch_waiting(found)
            seconds = self._forwarder.queue.now_s() - begin_s
            self._watch(Prefill(found.worker_id, end, seconds))
            if end is PrefillEnd.COMPUTED:
                self.prefilled_by = found.worker_id
                return decode_call(call, params)
            found = self._next(tried) if retries else None
        return self.undivided(call)

    def _next(self, tried: list[str]) -> FleetWorker | None:
        """Return another upstream for the prompt, which is reserved, or None."""
        if len(tried) >= MOST_PREFILLS:
            return None
        need = self._entry.needs[0]
        found = self._forwarder.choose_prefill(need, self._view, tried)
        if found is not None:
            found.reserve(self._entry.request_id, need)
        return found

    async def _ask(self, call: UpstreamCall, worker: FleetWorker) -> bytes | None:
        """Return the parameters of an upstream that has computed the prompt, or None without any.

        Raises:
            UpstreamFailed: it has not computed the prompt.
            ValueError, RecursionError: no upstream can compute it for another one.
        """
        upstream: Upstream = worker.backend  # type: ignore[assignment]
        span = self._span
        if span.recording:
            placed = {"draftgate.phase": "prefill"}
            span = open_dispatch(span, worker.worker_id, worker.server, placed)
            call = call._replace(headers={**call.headers, **span.propagation()})
        try:
            exchange = await upstream.forward(call)
            status, body = exchange.status, await read_and_close(exchange)
            if status in PASSED_ON:
                raise ValueError(reason(status, body))
            if status >= FIRST_ERROR or exchange.streaming:
                raise UpstreamFailed(reason(status, body))
            return read_params(body)
        except BaseException as error:
            if self._span.recording:
                span.fail(error)
            raise
        finally:
            if self._span.recording:
                span.end()
