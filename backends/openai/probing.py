"""Asking an upstream whether it is there, and what it serves."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import aiohttp

from draftgate.backends.reasons import plain_reason

PROBE_S: Final = 2.0
"""Between probes of an upstream that is well: an outage (three failures) is known in 6 s, or as
soon as three requests have failed."""

PATIENCE_S: Final = 2.0
"""An engine whose event loop is this late serves nobody well."""


class Unwell(NamedTuple):
    """Why a probe failed, and whether it only took too long."""

    text: str
    timeout: bool


class FoundModel(NamedTuple):
    """The first model of an upstream's list.

    Attributes:
        max_model_len: 0 where it does not say.
        is_llama_cpp: whether it is llama.cpp's server, which tells of its slots.
    """

    model_id: str
    max_model_len: int
    created_s: int
    is_llama_cpp: bool = False


class Prober:
    """Asks `GET /health` (vLLM, SGLang, llama.cpp, Draftgate), where there is one, else the list.

    Attributes:
        model: what is served; None until the list was read once.
    """

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        """Know where to ask."""
        self.model: FoundModel | None = None
        self._session = session
        self._url = url
        self._has_health = True

    async def probe(self) -> Unwell | None:
        """Return None if the upstream serves, else why it does not."""
        try:
            if self._has_health:
                status = await self._status("/health")
                self._has_health = status in {200, 204} or status >= 500
                if status >= 500:
                    return Unwell(f"/health answered {status}", timeout=False)
            if self.model is None or not self._has_health:
                return await self._read_models()
        except TimeoutError:
            return Unwell(f"it did not answer in {PATIENCE_S:g} s", timeout=True)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            return Unwell(plain_reason(error), timeout=False)
        return None

    async def _status(self, path: str) -> int:
        async with self._session.get(self._url + path, timeout=_PATIENCE) as response:
            await response.read()
            return response.status

    async def _read_models(self) -> Unwell | None:
        """Read the list; one that may not be read (401, 404) shows that somebody is there."""
        async with self._session.get(self._url + "/v1/models", timeout=_PATIENCE) as response:
            if response.status >= 500:
                return Unwell(f"/v1/models answered {response.status}", timeout=False)
            if response.status == 200:
                self.model = _first_model(await response.json(content_type=None))
            return None


_PATIENCE: Final = aiohttp.ClientTimeout(total=PATIENCE_S)


def _first_model(listing: Any) -> FoundModel | None:
    data = listing.get("data") if isinstance(listing, dict) else None
    first = data[0] if isinstance(data, list) and data else None
    if not isinstance(first, dict) or not isinstance(first.get("id"), str):
        return None
    meta = first.get("meta")  # where llama.cpp says it, of each of its slots
    context = _number(meta, "n_ctx") if isinstance(meta, dict) else 0
    return FoundModel(
        first["id"],
        _number(first, "max_model_len") or context,
        _number(first, "created"),
        first.get("owned_by") == "llamacpp",
    )


def _number(model: dict[str, Any], key: str) -> int:
    value = model.get(key)
    return int(value) if isinstance(value, int | float) else 0
