"""Tests of the compilation of operators."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from draftgate.backends.engine.operators import compiler

SPINS = "#!/bin/sh\nwhile :; do :; done\n"
"""A compiler that uses CPU time and does not end."""

WAITS = '#!/bin/sh\nsleep 1.2\nexec "$REAL_GCC" "$@"\n'
"""A compiler that waits for longer than its limit of CPU time, as on a busy machine."""

pytestmark = pytest.mark.skipif(compiler.compiler_version() is None, reason="needs gcc")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the PATH for a compiler, and an empty cache."""
    monkeypatch.setattr(compiler, "COMPILE_CPU_S", 1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("REAL_GCC", str(compiler.shutil.which("gcc")))
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    return tmp_path


def compiled_by(folder: Path, script: str) -> object:
    """Compile a source with a compiler."""
    (folder / "gcc").write_text(script)
    (folder / "gcc").chmod(0o700)
    source = folder / "source.c"
    source.write_text("int answer(void) { return 42; }\n")
    return compiler.compiled.__wrapped__(str(source))


def test_endless_compilation_ends(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A compiler that does not end is stopped, and the operators are replaced."""
    assert compiled_by(folder, SPINS) is None
    assert "source.c do not compile" in caplog.text


def test_busy_machine_compiles_all_operators(folder: Path) -> None:
    """Only the compiler's own CPU time counts, because other operators have other numerics."""
    library = compiled_by(folder, WAITS)
    assert library.answer() == 42  # type: ignore[attr-defined]
