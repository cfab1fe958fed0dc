"""Errors of backends.

BackendError
├── CheckpointError     a model cannot be loaded
├── RequestRejected     a request can never run here
└── BackendFailed       the worker is broken, and its streams end with this
    ├── WorkerLeft      it is shutting down in order, and the stream had not ended
    ├── WorkerStalled   it makes no progress, without an error
    └── UpstreamFailed  an upstream broke, or its answer cannot be passed on
        └── UpstreamUnreachable  it did not answer at all, so another one may be called
"""

from __future__ import annotations


class BackendError(Exception):
    """Any error of a backend."""


class CheckpointError(BackendError):
    """A checkpoint is missing, damaged, or of an unsupported architecture."""


class RequestRejected(BackendError):
    """A request can never run on this backend.

    Attributes:
        param: the request parameter at fault.
        limit_tokens: if the request is too long, the most tokens of prompt and output together
            that can run here; None for any other fault.
    """

    def __init__(self, message: str, param: str, limit_tokens: int | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.limit_tokens = limit_tokens


class BackendFailed(BackendError):
    """The worker failed or was stopped while requests ran."""


class WorkerLeft(BackendFailed):
    """The worker shuts down in order; the requests that it ran are not to blame."""


class WorkerStalled(BackendFailed):
    """The worker made no progress, without an error, and the watchdog gave it up."""


class UpstreamFailed(BackendFailed):
    """An upstream broke during its answer, or its answer cannot be passed on."""


class UpstreamUnreachable(UpstreamFailed):
    """No byte of an answer arrived from an upstream."""
