"""The house keeps its shape: who may import torch, how large a room is, what lies beside a kernel.

import-linter (`make check`) guards the directions between packages; here stands what it cannot see.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
PACKAGES = ("gateway", "backends", "policies", "loadgen")
TOP_LEVEL = ("pyproject.toml", *PACKAGES, "tests", "compose.yaml", "README.md", "LICENSE")
DEVICE_ROOM = ROOT / "backends" / "engine"
KERNELS = DEVICE_ROOM / "kernels"
DEVICE_LIBRARIES = {"torch", "triton"}

FILE_LINES = 450
FUNCTION_LINES = 60
"""Of the body: a signature and a docstring may be as long as the contract needs."""


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _functions(tree: ast.Module) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]


def _length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function's body; signature and docstring are its contract and do not count."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    return (body[-1].end_lineno or body[-1].lineno) - body[0].lineno + 1 if body else 0


def _is_triton_kernel(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any("triton.jit" in ast.unparse(decorator) for decorator in function.decorator_list)


def _has_triton_kernel(tree: ast.Module) -> bool:
    return any(map(_is_triton_kernel, _functions(tree)))


def _reference_of(kernel: Path) -> Path:
    """The torch module that defines a kernel: x_ref beside x, or x beside x_triton."""
    if kernel.stem.endswith("_triton"):
        return kernel.with_name(f"{kernel.stem.removesuffix('_triton')}.py")
    return kernel.with_name(f"{kernel.stem}_ref.py")


def _imported_names(tree: ast.Module) -> set[str]:
    """Every dotted name an import statement may mean: `from a import b` gives a and a.b."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def _imported_packages(tree: ast.Module) -> set[str]:
    return {name.partition(".")[0] for name in _imported_names(tree)}


def _parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


MODULES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
TREES = {path: _parse(path) for path in MODULES}
KERNEL_MODULES = [path for path, tree in TREES.items() if _has_triton_kernel(tree)]
NAMES_IN_TESTS = set().union(*(_imported_names(_parse(p)) for p in HERE.rglob("*.py")))


@pytest.mark.parametrize("entry", TOP_LEVEL)
def test_the_top_level_of_the_card_exists(entry: str) -> None:
    """A reader of the README finds every room it names at the top of the tree."""
    assert (ROOT / entry).exists()


@pytest.mark.parametrize("path", MODULES, ids=_name)
def test_torch_and_triton_stay_in_the_engine(path: Path) -> None:
    """No module outside backends/engine imports a device library, not even inside a function."""
    if path.is_relative_to(DEVICE_ROOM):
        return
    assert not _imported_packages(TREES[path]) & DEVICE_LIBRARIES


@pytest.mark.parametrize("path", MODULES, ids=_name)
def test_files_and_functions_can_be_held_in_mind(path: Path) -> None:
    """No file is longer than 450 lines and no function longer than 60, without exception."""
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= FILE_LINES
    too_long = {f.name: _length(f) for f in _functions(TREES[path]) if _length(f) > FUNCTION_LINES}
    assert not too_long


@pytest.mark.parametrize("path", KERNEL_MODULES, ids=_name)
def test_a_kernel_has_a_reference_and_a_test(path: Path) -> None:
    """A Triton kernel lies in kernels/ beside its torch reference, and tests import both."""
    assert path.parent == KERNELS
    reference = _reference_of(path)
    assert reference.exists()
    for module in (path, reference):
        assert f"draftgate.backends.engine.kernels.{module.stem}" in NAMES_IN_TESTS
