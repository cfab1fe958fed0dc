"""Skips the interpreted tests in a run without the interpreter."""

from __future__ import annotations

import os

collect_ignore_glob: list[str] = []
if os.environ.get("TRITON_INTERPRET", "0") != "1":
    # Triton reads the variable when a kernel is defined, so these tests need processes of their
    # own, which test_interpreted.py starts.
    collect_ignore_glob.append("interpreted/*")
