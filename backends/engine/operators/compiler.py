"""Compiles C sources for this machine once, and loads them.

The compilation requires only gcc, which Triton needs on GPUs as well. `$XDG_CACHE_HOME/draftgate`
keeps the libraries.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import platform
import shutil
import subprocess
import tempfile
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Final

from draftgate.backends.engine.cpu_isa import march
from draftgate.cache import cache_directory

log = logging.getLogger(__name__)

FOLDER: Final = Path(__file__).parent

FLAGS: Final = (
    "-std=gnu11", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-fopenmp", "-Wno-psabi",
    "-shared", "-fPIC", "--param=avoid-fma-max-bits=0",
)  # fmt: skip
"""Options of gcc.

-ffast-math is absent to keep the order of sums. gcc always fuses multiplications and additions. The
parameter is necessary on AMD Zen, for which gcc otherwise does not fuse them in the sums of some
loops. The bits of a row would then depend on the number of rows.
"""

COMPILE_CPU_S: Final = 120
"""Limit of the compiler's CPU time in seconds. A library takes up to 10. A limit of its elapsed
time would make a start on a busy machine use slower operators with other numerics."""


@lru_cache(maxsize=1)
def compiler_version() -> str | None:
    """Return the compiler and its version, such as `gcc-12.2.0`, or None without a compiler."""
    compiler = shutil.which("gcc")
    if compiler is None:
        return None
    # The user's own PATH provides the path.
    done = subprocess.run(  # noqa: S603
        [compiler, "-dumpfullversion"], capture_output=True, text=True, check=False
    )
    return f"gcc-{done.stdout.strip()}" if done.returncode == 0 else None


@lru_cache(maxsize=1)
def library_name() -> str:
    """Return a name of compiler, `-march`, and a hash of options and sources.

    All of these affect the results.
    """
    sources = hashlib.sha256(" ".join(FLAGS).encode())
    for path in sorted((*FOLDER.glob("*.c"), *FOLDER.glob("*.h"))):
        sources.update(path.read_bytes())
    return f"{compiler_version()}-{march()}-{sources.hexdigest()[:8]}"


@lru_cache(maxsize=16)
def compiled(*sources: str, **defines: int) -> ctypes.CDLL | None:
    """Return the library of these sources and definitions, or None if gcc cannot compile it.

    Args:
        sources: files of this folder, or absolute paths.
        defines: values of macros.
    """
    if compiler_version() is None:
        names = _names(sources)
        log.info(
            "gcc not found: torch or Python replaces %s and takes several times as long", names
        )
        return None
    try:
        return _library(sources, defines)
    except (OSError, subprocess.SubprocessError) as error:
        names = _names(sources)
        log.warning("%s do not compile, so torch or Python replaces them: %s", names, error)
        return None


def _names(sources: tuple[str, ...]) -> str:
    return ", ".join(Path(source).name for source in sources)


def _library(names: tuple[str, ...], defines: dict[str, int]) -> ctypes.CDLL:
    """Load the compiled library of some sources, from the cache or after compiling them.

    The name of a cached file ends with a digest of its contents, because loading a damaged library
    can end the process. A damaged file is replaced. A folder that cannot be written, or whose disk
    is full, only costs the time to compile again.
    """
    sources = [FOLDER / name for name in names]
    definitions = (f"-D{name}={value}" for name, value in sorted(defines.items()))
    options = [*FLAGS, f"-march={march()}", *definitions]
    key = hashlib.sha256()
    for part in (*options, compiler_version() or "", platform.machine(), _processor()):
        key.update(part.encode() + b"\0")
    for path in (*sources, *sorted(FOLDER.glob("*.h"))):
        key.update(path.read_bytes() + b"\0")
    prefix = f"operators-{key.hexdigest()[:20]}"
    arguments = [*options, *map(str, sources), "-lm"]
    for path in sorted(cache_directory().glob(f"{prefix}-*.so")):
        with suppress(OSError):  # another user owns the file
            if path.name == _cached_name(prefix, path):
                return ctypes.CDLL(str(path))
    try:
        return _compile(arguments, prefix, cache_directory())
    except (OSError, subprocess.CalledProcessError):
        return _compile(arguments, prefix, None)


def _cached_name(prefix: str, library: Path) -> str:
    return f"{prefix}-{hashlib.sha256(library.read_bytes()).hexdigest()[:20]}.so"


def _compile(arguments: list[str], prefix: str, cache: Path | None) -> ctypes.CDLL:
    """Compile a library and load it.

    Args:
        cache: the folder that keeps the library, or None to delete the file. Several processes may
            compile at the same time to files of their own. The last file remains.
    """
    if cache is not None:
        cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        library = Path(folder) / f"{prefix}.so"
        limited = f'ulimit -t {COMPILE_CPU_S} && exec gcc "$@"'
        subprocess.run(  # noqa: S603
            ["sh", "-c", limited, "gcc", *arguments, "-o", str(library)],  # noqa: S607
            check=True,
            capture_output=True,
        )
        if cache is not None:
            library = library.replace(cache / _cached_name(prefix, library))
        return ctypes.CDLL(str(library))


def _processor() -> str:
    """Return the features of the processor that decide `-march=native`.

    They are part of the cache key, because users may move a cache to another machine.
    """
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    named = ("vendor_id", "cpu family", "model", "flags", "Features")
    return "\n".join(sorted({line for line in lines if line.split("\t")[0].strip() in named}))
