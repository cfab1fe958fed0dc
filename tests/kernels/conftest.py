"""Keeps the interpreted tests out of a run that is not interpreted."""

from __future__ import annotations

import os

collect_ignore_glob: list[str] = []
if os.environ.get("TRITON_INTERPRET", "0") != "1":
    # Triton reads the variable when a kernel is defined: they need a process of their own, which
    # test_interpreted.py starts.
    collect_ignore_glob.append("interpreted/*")
