"""Skips the interpreted tests in a run without Triton's interpreter."""

from __future__ import annotations

import os

collect_ignore_glob: list[str] = []
if os.environ.get("TRITON_INTERPRET", "0") != "1":
    # Triton reads the variable when a kernel is defined, so test_interpreted.py runs these tests in
    # separate processes.
    collect_ignore_glob.append("interpreted/*")
