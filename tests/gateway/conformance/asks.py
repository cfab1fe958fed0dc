"""Prompts of the conformance tests."""

from __future__ import annotations

PROMPT = "def read_config(path):\n    with open("
CHAT = [{"role": "user", "content": "def add(a, b):"}]
