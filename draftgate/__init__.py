"""Draftgate: an asyncio gateway for LLM inference that decides, per request, how far to speculate.

The subpackages `gateway`, `backends`, `policies`, `loadgen` and `lab` are folders at the top of the
repository; in a checkout they are linked from here.
"""

__version__ = "0.1.0"
