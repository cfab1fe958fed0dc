"""The runner of batches, which sends their lines as requests and stores the results.

Every gateway has a runner, and any of them may run a batch. The one that holds the batch's slot in
the store runs it (`run`). The slot of a gateway that has crashed ends after `lease_s`.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from draftgate.gateway.batches.files import Files
from draftgate.gateway.batches.run import BatchRun, Limits, LostSlot, Send, Stopped
from draftgate.gateway.logs import log
from draftgate.gateway.state.commands import FreeSlots, HoldSlots
from draftgate.gateway.state.store import Store

MOST_BATCHES: Final = 16
"""Maximum number of batches that a gateway runs at a time. Their lines share its concurrency."""


class BatchRunner:
    """The runner of a gateway."""

    def __init__(
        self,
        files: Files,
        store: Store,
        send: Send,
        limits: Limits,
        *,
        accepts: Callable[[], bool] = lambda: True,
    ) -> None:
        """Prepare a runner.

        Args:
            accepts: returns whether the gateway accepts requests. Otherwise its batches stop.
        """
        self.files = files
        self.store = store
        self.send = send
        self.limits = limits
        self.holder = secrets.token_hex(6)
        self.places = asyncio.Semaphore(limits.concurrency)
        self.accepts = accepts
        self._running: dict[str, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()
        self._keys_changed = asyncio.Event()

    def wake(self) -> None:
        """Search for new batches at once."""
        self._changed.set()

    def retry(self) -> None:
        """Send the lines that wait at once, because keys, budgets or quotas have changed."""
        self._keys_changed.set()
        self._keys_changed = asyncio.Event()

    async def pause(self, seconds: float) -> bool:
        """Wait, and return whether `retry` has ended the wait early."""
        with suppress(TimeoutError):
            return await asyncio.wait_for(self._keys_changed.wait(), seconds)
        return False

    async def run(self) -> None:
        """Run batches until cancelled."""
        try:
            while True:
                self._changed.clear()
                try:
                    await self._start_open()
                except OSError as error:
                    log(logging.WARNING, "the storage of batches failed", reason=str(error))
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), self.limits.scan_s)
        finally:
            await self._stop_all()

    async def hold(self, batch_id: str) -> bool:
        """Take or renew the slot of a batch, and return whether this gateway has it."""
        command = HoldSlots(self.holder, (_slot(batch_id),), self.limits.lease_s)
        return await self.store.call(command)

    async def _start_open(self) -> None:
        """Start the open batches that no other gateway runs."""
        if not self.accepts():
            await self._stop_all()
            return
        for batch_id in await asyncio.to_thread(self.files.open_batches):
            if len(self._running) >= MOST_BATCHES:
                return
            if batch_id not in self._running and await self.hold(batch_id):
                task = asyncio.create_task(self._run(batch_id), name=f"run {batch_id}")
                self._running[batch_id] = task

    async def _stop_all(self) -> None:
        """Stop all batches. Their results so far are stored."""
        for task in self._running.values():
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)

    async def _run(self, batch_id: str) -> None:
        """Run a batch until its end, and free its slot."""
        try:
            tenant = await asyncio.to_thread(self.files.owner, batch_id)
            if tenant is not None:
                await BatchRun(self, tenant, batch_id).run()
        except Stopped:
            log(logging.INFO, "a batch stops with this gateway", batch=batch_id)
        except LostSlot:
            log(logging.WARNING, "another gateway may run a batch of this one", batch=batch_id)
        except OSError as error:
            log(logging.WARNING, "a batch pauses", batch=batch_id, reason=str(error))
        except Exception as error:  # noqa: BLE001 - another attempt follows
            log(logging.ERROR, "a batch failed and is tried again", batch=batch_id, error=error)
        finally:
            del self._running[batch_id]
            await self.store.call(FreeSlots(self.holder, (_slot(batch_id),)))


def _slot(batch_id: str) -> str:
    return f"batch:{batch_id}"
