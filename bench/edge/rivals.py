"""Create an environment for each compared gateway, separate from Draftgate's dependencies.

    python -m bench.edge.rivals DIR

The command creates `DIR/NAME` and installs `NAME` into it with pip. All packages are wheels that
support Python 3.11. `draftgate bench edge --rivals DIR` then measures the installed gateways.
"""

from __future__ import annotations

import argparse
import subprocess
import venv
from pathlib import Path
from typing import Final

PACKAGES: Final = {
    "litellm": "litellm[proxy]==1.106.2",
    "vllm-router": "vllm-router==0.1.17",
    "sglang-router": "sglang-router==0.3.2",
}
"""Latest versions of the packages on 2026-11-21."""


def main() -> None:
    """Create the missing environments."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    directory = parser.parse_args().directory
    for name, package in PACKAGES.items():
        environment = directory / name
        if (environment / "bin" / name).exists():
            continue
        venv.create(environment, with_pip=True)
        command = [str(environment / "bin" / "pip"), "install", "--quiet", package]
        subprocess.run(command, check=True)  # noqa: S603 - our own list


if __name__ == "__main__":
    main()
