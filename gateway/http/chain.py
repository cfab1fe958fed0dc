"""The models of a chain, of which the next one gets a request while the one before cannot respond.

Models of upstreams and of workers may follow each other in any order. Successive models of
upstreams are one step, because their request is admitted once (`dispatch.upstreams.fallbacks`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial

from draftgate.backends.errors import BackendFailed, RequestRejected
from draftgate.backends.openai.exchange import with_values
from draftgate.backends.types import Task
from draftgate.gateway.dispatch.run import Fallback
from draftgate.gateway.dispatch.upstreams.fallbacks import (
    FALLBACK_HEADER,
    MODEL_HEADER,
    FallbackReason,
    Turn,
    reason_of,
)
from draftgate.gateway.errors import GatewayError, ModelNotFound, Starting
from draftgate.gateway.http.context import (
    NOTES,
    PASSES_ON,
    add_note,
    error_format,
    read_body,
    replace_body,
    requested_model,
    requested_name,
)
from draftgate.gateway.http.direct import Request, Response
from draftgate.gateway.http.replies.rendering import error_event
from draftgate.gateway.http.stream import OneEnding, begun_stream
from draftgate.gateway.model_service import ModelService
from draftgate.gateway.node import Node
from draftgate.gateway.telemetry.watch import RequestWatch

Attempt = Callable[[Request, ModelService, RequestWatch, Turn | None], Awaitable[Response]]
"""A function that responds to a request with a model, which the body names."""


@dataclass(slots=True)
class Step:
    """What gets the request in turn: a model of this node, or some models of its upstreams."""

    model: ModelService
    names: list[str]


class Chain:
    """The steps of a request, with what serves each.

    Attributes:
        model: what serves the first step.
    """

    def __init__(
        self, requested: str, steps: Sequence[Step], reason: FallbackReason | None
    ) -> None:
        """Begin a chain.

        Args:
            requested: the name of the model that the client has asked for, or that it gets without
                a name.
            steps: at least one step.
            reason: why the requested model is none of them, or None if it is the first one.
        """
        self._requested = requested
        self._steps = steps
        self._reason = reason
        self.model = steps[0].model

    async def respond(self, request: Request, watch: RequestWatch, attempt: Attempt) -> Response:
        """Respond with the first model that can.

        Raises:
            GatewayError, BackendFailed, RequestRejected: the error of the last model.
        """
        reason = self._reason
        for step in self._steps[:-1]:
            turn = await self._next(request, watch, step, reason)
            try:
                return await attempt(request, step.model, watch, turn)
            except (GatewayError, BackendFailed, RequestRejected) as error:
                reason = reason_of(error)
                if reason is None:
                    raise
        step = self._steps[-1]
        turn = await self._next(request, watch, step, reason)
        events = begun_stream(request)
        if events is None:
            return await attempt(request, step.model, watch, turn)
        failure = partial(error_event, wanted=error_format(request))
        async with OneEnding(events, watch, failure):
            await attempt(request, step.model, watch, turn)
        return events.response

    async def _next(
        self,
        request: Request,
        watch: RequestWatch,
        step: Step,
        reason: FallbackReason | None,
    ) -> Turn:
        """Turn to a step, and return its models.

        Args:
            reason: why the step before did not respond, or None for the model of the client.
        """
        is_last = step is self._steps[-1]
        request[PASSES_ON] = not is_last
        fallback = None
        if reason is not None:
            before = self._requested if watch.fallback is None else watch.fallback.model
            fallback = Fallback(before, step.names[0], reason)
            watch.model = watch.model or self._requested
            watch(fallback)
            replace_body(request, with_values(await read_body(request), {"model": step.names[0]}))
            _note(request, None if step.model.forwards else fallback)
        watch.use(step.model.request_series)
        return Turn(step.names[1:], is_last, fallback)


async def find_chain(request: Request, node: Node, task: Task) -> Chain:
    """Return the chain of the model that a request names. Most have no other model.

    Raises:
        GatewayError: as `requested_model`, if the model has no fallback.
    """
    error, steps = None, list[Step]()
    try:
        model = await requested_model(request, node, task)
    except (ModelNotFound, Starting) as raised:
        if not node.fallbacks:
            raise
        error = raised
    else:
        steps.append(Step(model, [model.name]))
    requested = ""
    if node.fallbacks:
        requested = await requested_name(request) or model.name
        for name in _fallbacks(node, requested, steps):
            _add(node, name, steps)
    if error is not None and not steps:
        raise error
    return Chain(requested, steps, None if error is None else reason_of(error))


def _fallbacks(node: Node, requested: str, steps: Sequence[Step]) -> Sequence[str]:
    """Return the fallbacks of a model, which may be set for another one of its names."""
    names = [requested]
    if steps and requested in steps[0].model.names:
        names += [*steps[0].model.names, steps[0].model.fleet.card.model_id]
    return next((node.fallbacks[name] for name in names if name in node.fallbacks), ())


def _add(node: Node, name: str, steps: list[Step]) -> None:
    """Add a fallback to the steps, unless nothing has it.

    The error of such a model would say nothing about the requested one.
    """
    model = node.model_named(name)
    if model is None or (model.forwards and not model.forwarder.is_offered(name)):
        return
    if steps and model.forwards and steps[-1].model is model:
        steps[-1].names.append(name)
    else:
        steps.append(Step(model, [name]))


def _note(request: Request, fallback: Fallback | None) -> None:
    """Set the headers of a response of workers, to which those of upstreams are added later."""
    if fallback is not None:
        add_note(request, FALLBACK_HEADER, fallback.reason)
        add_note(request, MODEL_HEADER, fallback.model)
    else:
        for name in (FALLBACK_HEADER, MODEL_HEADER):
            request.get(NOTES, {}).pop(name, None)
