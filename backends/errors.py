"""Errors of backends.

BackendError
├── CheckpointError     a model cannot be loaded: says what and where
├── RequestRejected     this request can never run here: names the parameter
└── BackendFailed       the worker is broken; its streams end with this
    ├── WorkerLeft      it is going away in order, and had not ended them by then
    ├── WorkerStalled   it makes no progress any more, and nobody knows why
    └── UpstreamFailed  an upstream broke, or does not answer as it should
        └── UpstreamUnreachable  nothing of an answer came: another upstream may be asked
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
        limit_tokens: for a request that is too long, the most tokens of prompt and output
            together that can run here; None for any other fault.
    """

    def __init__(self, message: str, param: str, limit_tokens: int | None = None) -> None:
        """Name the fault and the parameter."""
        super().__init__(message)
        self.param = param
        self.limit_tokens = limit_tokens


class BackendFailed(BackendError):
    """The worker failed or stopped while requests were running."""


class WorkerLeft(BackendFailed):
    """The worker goes away in order: nothing that it ran is to blame."""


class WorkerStalled(BackendFailed):
    """The worker said nothing any more, though it had not failed: the watchdog left it."""


class UpstreamFailed(BackendFailed):
    """An upstream broke while it answered, or answered what cannot be passed on."""


class UpstreamUnreachable(UpstreamFailed):
    """No byte of an answer came from an upstream."""
