"""What the host asks of a GPU, counted on the device `meta`, which has no data.

A call that waits for a result of the device raises an error on `meta`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import JITFunction

_WITHOUT_LAUNCH = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.new_empty.default,
}
"""Operations that only allocate memory."""


def _launches(operation: Any) -> bool:
    # A conversion may return its argument, so torch counts it among the views.
    converts = operation is torch.ops.aten.to.dtype
    return operation not in _WITHOUT_LAUNCH and (converts or not operation.is_view)


class DeviceCalls(TorchDispatchMode):
    """Counts calls.

    Attributes:
        launches: kernels, of torch and of Triton, outside of graphs.
        replays: launches of graphs.
        copies: copies from the host to the device.
    """

    def __init__(self) -> None:
        super().__init__()
        self.launches = self.replays = self.copies = 0
        self._in_graph = False

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Count an operation of torch, unless it only makes a view or allocates memory."""
        result = function(*args, **kwargs or {})
        on_device = any(isinstance(arg, Tensor) and arg.is_meta for arg in args)
        if function is torch.ops.aten.copy_.default and on_device and not args[1].is_meta:
            self.copies += 1
        elif on_device and _launches(function):
            self.add_launch()
        return result

    def add_launch(self) -> None:
        """Count a kernel."""
        self.launches += not self._in_graph

    @contextmanager
    def capture(self, *_: object, **__: object) -> Iterator[None]:
        """Count no launches, which become part of a graph."""
        self._in_graph = True
        yield
        self._in_graph = False

    def replay(self) -> None:
        """Count the launch of a graph."""
        self.replays += 1


@contextmanager
def device_calls() -> Iterator[DeviceCalls]:
    """Count calls, without compiling a kernel or capturing a graph."""
    calls = DeviceCalls()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "run", lambda *_, **__: calls.add_launch())
        patch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=calls.replay))
        patch.setattr(torch.cuda, "graph", calls.capture)
        patch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
        patch.setattr(torch.cuda, "Stream", lambda _device: None)
        with calls:
            yield calls
