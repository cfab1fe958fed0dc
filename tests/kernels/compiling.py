"""Compiles Triton kernels for a GPU that need not be there."""

from __future__ import annotations

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

HOPPER = GPUTarget("cuda", 90, 32)


def compile_for_hopper(
    kernel: Any, types: dict[str, str], constants: dict[str, Any], num_warps: int = 4
) -> CompiledKernel:
    """Compiles a kernel for sm_90; asks no driver.

    Args:
      kernel: a ``triton.jit`` function.
      types: type of every run-time argument, e.g. ``*fp32`` or ``i32``, by name.
      constants: value of every constexpr argument, by name.
      num_warps: warps per program.
    """
    names = [parameter.name for parameter in kernel.params]
    missing = set(names) ^ (types.keys() | constants.keys())
    assert not missing, f"{kernel.__name__}: arguments do not match the kernel: {sorted(missing)}"
    signature = {name: types.get(name, "constexpr") for name in names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    return triton.compile(source, target=HOPPER, options={"num_warps": num_warps})
