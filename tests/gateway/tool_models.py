"""The shipped model with chat templates that support tools. The model's calls are random."""

from __future__ import annotations

import json
from pathlib import Path

from draftgate.backends.checkpoints import SHIPPED_MODEL

TEMPLATES = Path(__file__).parents[1] / "tokenizer" / "templates"


def with_template(directory: Path, name: str) -> Path:
    """Write a checkpoint of the shipped model with a published template."""
    return with_text(directory, (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8"))


def with_text(directory: Path, template: str) -> Path:
    """Write a checkpoint of the shipped model with a template."""
    directory.mkdir()
    for path in SHIPPED_MODEL.iterdir():
        if path.name != "tokenizer_config.json":
            (directory / path.name).symlink_to(path)
    settings = json.loads((SHIPPED_MODEL / "tokenizer_config.json").read_text())
    settings["chat_template"] = template
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Returns the weather.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"enum": ["Paris", "Rome"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
TOOLS = [WEATHER, NOW]
ANTHROPIC_TOOLS = [
    {
        "name": "weather",
        "description": "Returns the weather.",
        "input_schema": WEATHER["function"]["parameters"],
    },
    {"name": "now", "input_schema": {"type": "object"}},
]
"""The same tools in Anthropic's form."""
