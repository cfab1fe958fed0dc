"""Count the lines of code, docstrings and comments in each part of the tree.

    python -m bench.code_size [ROOT]

A line of code holds a Python token that is neither a comment nor part of a docstring.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

PARTS: Final = {
    "policies": ("policies",),
    "backends/core": ("backends/core",),
    "backends/engine": ("backends/engine",),
    "backends/sim": ("backends/sim",),
    "backends, the rest": ("backends",),
    "gateway/cli": ("gateway/cli",),
    "gateway, the rest": ("gateway", "draftgate"),
    "loadgen": ("loadgen",),
    "lab": ("lab", "gateway/cli/plan", "gateway/cli/simulate", "policies/planning"),
    "bench": ("bench", "backends/engine/bench", "gateway/cli/studies"),
    "training": ("training", "backends/engine/demo"),
    "tests": ("tests",),
}
PRODUCT: Final = (
    "lab",
    "bench",
    "training",
    "tests",
)  # all other parts are product code
SMALL_FILE_LINES: Final = 30


@dataclass(slots=True)
class Size:
    """The line counts of a set of files."""

    files: int = 0
    code: int = 0
    docstrings: int = 0
    comments: int = 0

    def add(self, other: Size) -> None:
        """Add the line counts of other files."""
        self.files += other.files
        self.code += other.code
        self.docstrings += other.docstrings
        self.comments += other.comments


def size_of(source: str) -> Size:
    """Count the lines of a source text."""
    docstrings = _docstring_lines(ast.parse(source))
    code, comments = set[int](), set[int]()
    layout = (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            comments.add(token.start[0])
        elif token.type not in layout and token.type != tokenize.ENDMARKER:
            code.update(range(token.start[0], token.end[0] + 1))
    code -= docstrings
    return Size(1, len(code), len(docstrings), len(comments - code))


def _docstring_lines(tree: ast.Module) -> set[int]:
    lines = set[int]()
    for node in ast.walk(tree):
        for body in (getattr(node, "body", None),):
            for statement in body if isinstance(body, list) else ():
                is_text = isinstance(statement, ast.Expr) and isinstance(
                    statement.value, ast.Constant
                )
                if is_text and isinstance(statement.value.value, str):
                    lines.update(range(statement.lineno, (statement.end_lineno or 0) + 1))
    return lines


def part_of(path: str) -> str | None:
    """Return the part of a file, or None if no listed folder contains the file."""
    found = [
        (len(folder), part)
        for part, folders in PARTS.items()
        for folder in folders
        if path.startswith(folder + "/")
    ]
    return max(found)[1] if found else None


def python_files(root: Path) -> Iterator[tuple[str, str]]:
    """Yield the path and the source of each Python file below the counted top-level folders."""
    for folder in sorted({name.split("/")[0] for names in PARTS.values() for name in names}):
        if not (root / folder).is_dir():
            continue
        for path in sorted((root / folder).rglob("*.py")):
            inside = path.relative_to(root)
            if any((root / parent).is_symlink() for parent in inside.parents):
                continue
            yield inside.as_posix(), path.read_text(encoding="utf-8")


def imports(files: Iterable[tuple[str, str]]) -> dict[str, set[str]]:
    """Return the imports between the given files, as sets of paths by path."""
    sources = dict(files)
    names = {_module(path): path for path in sources}
    graph: dict[str, set[str]] = {}
    for path, source in sources.items():
        package = (
            _module(path) if path.endswith("/__init__.py") else _module(path).rpartition(".")[0]
        )
        asked = _imported(ast.parse(source), package)
        graph[path] = {names[name] for name in asked if name in names} - {path}
    return graph


def _module(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _imported(tree: ast.Module, package: str) -> set[str]:
    found = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = f"{package}.{node.module}" if node.level else str(node.module)
            found.add(base)
            found.update(f"{base}.{alias.name}" for alias in node.names)
    return {name.removeprefix("draftgate.") for name in found}


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the groups of files that import each other (Tarjan, 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    groups: list[list[str]] = []

    def visit(path: str) -> None:
        index[path] = low[path] = len(index)
        stack.append(path)
        for target in sorted(graph[path]):
            if target not in index:
                visit(target)
                low[path] = min(low[path], low[target])
            elif target in stack:
                low[path] = min(low[path], index[target])
        if low[path] == index[path]:
            group = stack[stack.index(path) :]
            del stack[stack.index(path) :]
            if len(group) > 1:
                groups.append(sorted(group))

    for path in sorted(graph):
        if path not in index:
            visit(path)
    return groups


def main() -> None:
    """Print the table and the import cycles."""
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent.parent
    sys.setrecursionlimit(10_000)
    files = [(path, source) for path, source in python_files(root) if part_of(path)]
    sizes = {part: Size() for part in PARTS}
    for path, source in files:
        sizes[str(part_of(path))].add(size_of(source))
    total = Size()
    for part in PARTS:
        if part not in PRODUCT:
            total.add(sizes[part])
    print(f"{'part':<28}{'files':>8}{'code':>9}{'docstrings':>12}{'comments':>10}")
    for part, size in {**sizes, "product and loadgen": total}.items():
        print(f"{part:<28}{size.files:>8}{size.code:>9}{size.docstrings:>12}{size.comments:>10}")

    product = [(path, source) for path, source in files if part_of(path) not in PRODUCT]
    small = [p for p, s in product if len(s.splitlines()) < SMALL_FILE_LINES]
    modules = [p for p in small if not p.endswith("__init__.py")]
    graph = imports(product)
    importers = {path: [p for p in graph if path in graph[p]] for path in graph}
    single = [p for p, by in importers.items() if len(by) == 1 and not p.endswith("__init__.py")]
    print(f"\nfiles under {SMALL_FILE_LINES} lines: {len(small)} ({len(modules)} not __init__.py)")
    print(f"modules with one importer: {len(single)} of {len(graph)}")
    found = cycles(graph)
    print(f"import cycles: {len(found)}")
    for group in found:
        print("  " + ", ".join(group))


if __name__ == "__main__":
    main()
