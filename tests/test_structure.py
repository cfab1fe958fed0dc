"""Rules of the repository: imports of torch and between folders, sizes of files, tests of kernels.

import-linter (`make check`) checks the dependencies between packages, and these tests check the
other rules.
"""

from __future__ import annotations

import ast
import json
import tomllib
from collections import defaultdict
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
PACKAGES = ("gateway", "backends", "policies", "loadgen", "lab")
TOP_LEVEL = ("pyproject.toml", *PACKAGES, "tests", "compose.yaml", "README.md", "LICENSE")
ENGINE = ROOT / "backends" / "engine"
KERNELS = ENGINE / "kernels"
DEVICE_LIBRARIES = {"torch", "triton"}

FILE_LINES = 450
FUNCTION_LINES = 60
"""The limit of a function body, without its signature and docstring, in lines."""


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _functions(tree: ast.Module) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]


def _length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the lines of a function's body, without its signature and docstring."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    return (body[-1].end_lineno or body[-1].lineno) - body[0].lineno + 1 if body else 0


def _is_triton_kernel(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any("triton.jit" in ast.unparse(decorator) for decorator in function.decorator_list)


def _has_triton_kernel(path: Path) -> bool:
    if "triton.jit" not in path.read_text(encoding="utf-8"):
        return False
    return any(map(_is_triton_kernel, _functions(_parse(path))))


def _reference_of(kernel: Path) -> Path:
    """Return the torch module that defines a kernel, which is x_ref for x and for x_triton."""
    if kernel.stem.endswith("_triton"):
        return kernel.with_name(f"{kernel.stem.removesuffix('_triton')}.py")
    return kernel.with_name(f"{kernel.stem}_ref.py")


def _imported_names(tree: ast.Module) -> set[str]:
    """Return every dotted name that imports may mean, such as a and a.b for `from a import b`."""
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


def _module_paths(names: set[str]) -> set[Path]:
    """Return the files of those names that are modules or packages of ours."""
    ours = [name.split(".")[1:] for name in names if name.startswith("draftgate.")]
    places = [ROOT.joinpath(*parts) for parts in ours]
    files = {file for at in places for file in (at.with_suffix(".py"), at / "__init__.py")}
    return {file for file in files if file.exists()}


@cache
def _names_in_tests() -> set[str]:
    return set().union(*(_imported_names(_parse(path)) for path in HERE.rglob("*.py")))


# Every process of a parallel run imports this module, so the tests parse the files later.
MODULES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
KERNEL_MODULES = [path for path in MODULES if _has_triton_kernel(path)]


@pytest.mark.parametrize("entry", TOP_LEVEL)
def test_top_level_entries_exist(entry: str) -> None:
    """The folders and files that the README names exist at the top level."""
    assert (ROOT / entry).exists()


def test_editors_see_each_module_under_one_path() -> None:
    """The settings of pyright and VS Code hide the targets of the links in draftgate/."""
    links = {path.name for path in (ROOT / "draftgate").iterdir() if path.is_symlink()}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    lines = (ROOT / ".vscode" / "settings.json").read_text(encoding="utf-8").splitlines()
    settings = json.loads("".join(line for line in lines if not line.lstrip().startswith("//")))
    assert links == set(PACKAGES)
    assert links <= set(project["tool"]["pyright"]["exclude"])
    assert links == set(settings["files.exclude"])


@pytest.mark.parametrize("path", MODULES, ids=_name)
def test_torch_and_triton_stay_in_the_engine(path: Path) -> None:
    """No module outside backends/engine imports a device library, not even inside a function."""
    if path.is_relative_to(ENGINE):
        return
    assert not _imported_packages(_parse(path)) & DEVICE_LIBRARIES


@pytest.mark.parametrize("package", ["gateway", "lab"])
def test_folders_have_no_import_cycle(package: str) -> None:
    """Folders, and modules directly in their package, do not import each other in a cycle."""
    root = ROOT / package

    def place(module: Path) -> Path:
        return module if module.parent == root else module.parent

    imported = defaultdict[Path, set[Path]](set)
    for path in root.rglob("*.py"):
        found = _module_paths(_imported_names(_parse(path)))
        places = {place(module) for module in found if module.is_relative_to(root)}
        imported[place(path)] |= places - {place(path)}
    TopologicalSorter(imported).prepare()


@pytest.mark.parametrize("path", sorted((ROOT / "gateway" / "web").glob("*.js")), ids=_name)
def test_scripts_of_the_page_are_short(path: Path) -> None:
    """No script of the page is longer than 450 lines."""
    assert len(path.read_text(encoding="utf-8").splitlines()) <= FILE_LINES


@pytest.mark.parametrize("path", MODULES, ids=_name)
def test_files_and_functions_are_short(path: Path) -> None:
    """No file is longer than 450 lines, and no function body is longer than 60."""
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= FILE_LINES
    functions = _functions(_parse(path))
    assert not {f.name: _length(f) for f in functions if _length(f) > FUNCTION_LINES}


@pytest.mark.parametrize("path", KERNEL_MODULES, ids=_name)
def test_triton_kernel_has_a_reference_and_a_test(path: Path) -> None:
    """A Triton kernel is in kernels/ beside its torch reference, and tests import both."""
    assert path.parent == KERNELS
    reference = _reference_of(path)
    assert reference.exists()
    for module in (path, reference):
        assert f"draftgate.backends.engine.kernels.{module.stem}" in _names_in_tests()
