"""What a launch would run on a Hopper GPU that need not be there: code, registers, memory, spills.

A launch specialises its kernel on what it is given: on types, on pointers that begin at multiples
of 16 bytes (those of torch do) and on integers that are multiples of 16. So the public functions
themselves are called, on tensors without memory, with a driver in place that knows what GPU it is
for and has none; instead of being launched, each kernel is compiled with the tiles and the number
of warps that its function chose. The figures are what `cuobjdump`, which Triton carries, reads from
the machine code.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

HOPPER = GPUTarget("cuda", 90, 32)

REGISTERS = 65536
"""Of a multiprocessor of sm_90, which hands them out to warps by 256."""
SHARED_BYTES = 228 << 10
"""Of a multiprocessor; a program takes 1 KiB more than it asks for."""
WARPS = 64
"""A multiprocessor holds so many at most."""

_CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


class Usage(NamedTuple):
    """What a program takes of a multiprocessor."""

    registers: int
    """Of a thread."""
    stack_bytes: int
    """Of a thread, in local memory, which is device memory: spilled registers, indexed arrays."""
    shared_bytes: int
    """Of a program."""


class Launch(NamedTuple):
    """One kernel that a function would launch."""

    name: str
    num_warps: int
    ptx: str
    usage: Usage

    def programs(self) -> int:
        """Returns how many programs a multiprocessor holds at once."""
        # Handed out by 8 to a thread.
        registers = -(-self.usage.registers // 8) * 8 * 32 * self.num_warps
        shared = self.usage.shared_bytes + 1024
        return min(REGISTERS // registers, SHARED_BYTES // shared, WARPS // self.num_warps, 32)


class _NoDevice:
    """A driver of a Hopper GPU as far as compilation asks it."""

    def get_current_device(self) -> str:
        """Returns a key of kernels' caches that no device has."""
        return "none, for sm_90"

    def get_current_stream(self, device: str) -> int:
        """Returns a stream that nothing runs in."""
        return 0

    def get_current_target(self) -> GPUTarget:
        """Returns what is compiled for."""
        return HOPPER


def launches_of(call: Callable[[], Any]) -> list[Launch]:
    """Returns the kernels that a function launches, in order, compiled and not run.

    Args:
      call: calls the function, with tensors of the device `meta`.
    """
    compiled: list[Any] = []
    with _compiled_only(compiled):
        call()
    return [
        Launch(kernel.name, kernel.metadata.num_warps, kernel.asm["ptx"], _usage(kernel))
        for kernel in compiled
    ]


def assert_lean(launches: list[Launch], programs: int = 1) -> None:
    """Asserts that no launch spills, and that a multiprocessor holds so many programs of each."""
    for launch in launches:
        assert launch.usage.stack_bytes == 0, launch.usage
        assert launch.programs() >= programs, launch.usage


def on_paper(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Returns a tensor that has no memory, as the arguments of what is only compiled."""
    return torch.empty(shape, dtype=dtype, device="meta")


@contextmanager
def _compiled_only(compiled: list[Any]) -> Iterator[None]:
    """Within it launches compile for Hopper, and add what they compiled to the list."""
    run, active = JITFunction.run, driver._active

    def compile_it(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        compiled.append(run(kernel, *args, grid=grid, warmup=True, **options))

    driver.set_active(_NoDevice())
    JITFunction.run = compile_it
    try:
        yield
    finally:
        JITFunction.run = run
        driver._active = active


def _usage(kernel: Any) -> Usage:
    """Returns what the machine code says that a program takes."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [str(_CUOBJDUMP), "-res-usage", file.name]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {name: int(count) for name, count in re.findall(r"(REG|STACK|LOCAL):(\d+)", told)}
    return Usage(found["REG"], found["STACK"] + found["LOCAL"], kernel.metadata.shared)
