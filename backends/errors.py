"""Errors of backends.

BackendError
├── CheckpointError     a model cannot be loaded
├── RequestRejected     the worker can never run the request
└── BackendFailed       the worker failed, and its streams end with this error
    ├── WorkerLeft      the worker is shutting down in order, and the stream had not ended
    ├── WorkerStalled   the worker makes no progress, without an error
    ├── AdapterFailed   the LoRA adapter of the request cannot be loaded
    ├── StreamMoved     the stream continues on another worker, so this worker has stopped it
    └── UpstreamFailed  an upstream failed, or its response cannot be forwarded
        └── UpstreamUnreachable  the upstream did not respond, so another one may be called
            └── UpstreamLate     it has sent no byte within its timeout
"""

from __future__ import annotations


class BackendError(Exception):
    """Base class of all errors of backends."""


class CheckpointError(BackendError):
    """A checkpoint is missing, damaged, or of an unsupported architecture."""


class RequestRejected(BackendError):
    """The backend can never run the request.

    Attributes:
        param: request parameter at fault.
        limit_tokens: if the request is too long, the maximum number of prompt and output tokens
            together on this backend. None for any other fault.
    """

    def __init__(self, message: str, param: str, limit_tokens: int | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.limit_tokens = limit_tokens


class BackendFailed(BackendError):
    """The worker failed or was stopped while requests ran."""


class WorkerLeft(BackendFailed):
    """The worker is shutting down in order, so its requests are not to blame."""


class WorkerStalled(BackendFailed):
    """The watchdog declared the worker lost, because it made no progress and raised no error."""


class AdapterFailed(BackendFailed):
    """The LoRA adapter of the request cannot be loaded. Other requests of the worker continue."""


class StreamMoved(BackendFailed):
    """The stream continues on another worker, so its request on this worker was cancelled."""


class UpstreamFailed(BackendFailed):
    """An upstream failed during its response, or its response cannot be forwarded."""


class UpstreamUnreachable(UpstreamFailed):
    """No byte of a response arrived from an upstream."""


class UpstreamLate(UpstreamUnreachable):
    """No byte of a response arrived within the timeout. The upstream may still work on it."""
