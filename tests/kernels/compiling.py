"""Compiles kernels for Hopper or Blackwell without a GPU, and reports their code and resources.

A launch specialises its kernel on argument types, on pointers aligned to 16 bytes, and on integers
that are multiples of 16. The helpers therefore call the public functions with tensors without
memory and a driver without a device. Each kernel is compiled with the tiles and warps of its
function instead of launched. `cuobjdump`, which Triton ships, reads the resource usage from the
machine code.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

HOPPER = GPUTarget("cuda", 90, 32)
BLACKWELL = GPUTarget("cuda", 100, 32)

REGISTERS = 65536
"""Registers of an sm_90 multiprocessor, allocated to warps in units of 256."""
SHARED_BYTES = 228 << 10
"""Shared memory of a multiprocessor, of which a program takes 1 KiB more than requested."""
WARPS = 64
"""The maximum number of warps of a multiprocessor."""

_CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


class Usage(NamedTuple):
    """Resources of a program.

    Attributes:
      registers: registers per thread.
      stack_bytes: local memory per thread, for spilled registers and indexed arrays.
      shared_bytes: shared memory per program.
    """

    registers: int
    stack_bytes: int
    shared_bytes: int


class Launch(NamedTuple):
    """A compiled kernel that a function would launch."""

    name: str
    num_warps: int
    ptx: str
    usage: Usage

    def programs(self) -> int:
        """Return the number of programs that a multiprocessor runs concurrently."""
        # Registers are allocated in units of 8 per thread.
        registers = -(-self.usage.registers // 8) * 8 * 32 * self.num_warps
        shared = self.usage.shared_bytes + 1024
        return min(REGISTERS // registers, SHARED_BYTES // shared, WARPS // self.num_warps, 32)


class _NoDevice:
    """The parts of a GPU driver that compilation needs."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_device(self) -> str:
        """Return a key for kernel caches that no real device has."""
        return f"none, for sm_{self._target.arch}"

    def get_current_stream(self, device: str) -> int:
        """Return a stream that is never used."""
        return 0

    def get_current_target(self) -> GPUTarget:
        """Return the target of the compilation."""
        return self._target


def launches_of(call: Callable[[], Any], target: GPUTarget = HOPPER) -> list[Launch]:
    """Compile the kernels that a function launches and return them in order, without running them.

    Args:
      call: a function that launches kernels with tensors of the device `meta`.
      target: the GPU to compile for.
    """
    compiled: list[Any] = []
    with _compiled_only(compiled, target):
        call()
    return [
        Launch(kernel.name, kernel.metadata.num_warps, kernel.asm["ptx"], _usage(kernel))
        for kernel in compiled
    ]


def variants_of(call: Callable[[int], Any], sizes: Iterable[int]) -> Counter[str]:
    """Return how many variants of each kernel the launches for different sizes compile.

    Args:
      call: a function that launches kernels for a size, with tensors of the device `meta`.
      sizes: the sizes.
    """
    compiled: list[Any] = []
    with _compiled_only(compiled, HOPPER):
        for size in sizes:
            call(size)
    return Counter(name for name, _ in {(kernel.name, kernel.hash) for kernel in compiled})


def assert_lean(launches: list[Launch], programs: int = 1) -> None:
    """Assert that no kernel spills and that a multiprocessor runs `programs` of each kernel."""
    for launch in launches:
        assert launch.usage.stack_bytes == 0, launch.usage
        assert launch.programs() >= programs, launch.usage


def meta_tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a tensor without memory, for use as an argument during compilation."""
    return torch.empty(shape, dtype=dtype, device="meta")


@contextmanager
def _compiled_only(compiled: list[Any], target: GPUTarget) -> Iterator[None]:
    """Make launches compile for a GPU and append the compiled kernels to the list."""
    run, active = JITFunction.run, driver._active

    def compile_it(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        compiled.append(run(kernel, *args, grid=grid, warmup=True, **options))

    driver.set_active(_NoDevice(target))
    JITFunction.run = compile_it
    try:
        yield
    finally:
        JITFunction.run = run
        driver._active = active


def _usage(kernel: Any) -> Usage:
    """Return the resources of a compiled program."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [str(_CUOBJDUMP), "-res-usage", file.name]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {name: int(count) for name, count in re.findall(r"(REG|STACK|LOCAL):(\d+)", output)}
    return Usage(found["REG"], found["STACK"] + found["LOCAL"], kernel.metadata.shared)
