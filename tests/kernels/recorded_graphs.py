"""CUDA graphs without a GPU: recorded operations that a replay repeats on the same memory.

A replay gives the right result only if the recorded function reads everything that changes between
replays from memory, as on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map_
from triton.runtime.interpreter import InterpretedFunction


class RecordedGraph(TorchDispatchMode):
    """Replaces `torch.cuda.CUDAGraph` for operations of torch and interpreted kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Callable[[], None]] = []
        self.replays = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operation of torch, and record it."""
        kwargs = kwargs or {}
        result = function(*args, **kwargs)

        def repeat() -> None:
            again = function(*args, **kwargs)
            # A view needs no copy, and an operation in place has written its result.
            if all(returned.alias_info is None for returned in function._schema.returns):
                tree_map_(lambda old, new: old.copy_(new), result, again)

        self.calls.append(repeat)
        return result

    def replay(self) -> None:
        """Repeat the recorded calls."""
        self.replays += 1
        for call in self.calls:
            call()


@contextmanager
def recorded_graphs() -> Iterator[list[RecordedGraph]]:
    """Replace CUDA graphs, and yield the list that receives all captured graphs."""
    graphs: list[RecordedGraph] = []
    capturing: list[RecordedGraph] = []
    run = InterpretedFunction.run

    @contextmanager
    def capture(graph: RecordedGraph, *_: object, **__: object) -> Iterator[None]:
        graphs.append(graph)
        capturing.append(graph)
        with graph:
            yield
        capturing.pop()

    def record_run(kernel: InterpretedFunction, *args: Any, **options: Any) -> None:
        if capturing:
            capturing[-1].calls.append(partial(run, kernel, *args, **options))
        # The interpreter's own operations are no part of the graph.
        with _disable_current_modes():
            run(kernel, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpretedFunction, "run", record_run)
        patch.setattr(torch.cuda, "CUDAGraph", RecordedGraph)
        patch.setattr(torch.cuda, "graph", capture)
        patch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
        patch.setattr(torch.cuda, "Stream", lambda _device: None)
        yield graphs
