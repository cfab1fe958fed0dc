"""The metrics that the processes of a node share."""

from __future__ import annotations

import logging
import secrets
from pathlib import Path
from typing import cast

from draftgate.gateway.state.local.client import Client
from draftgate.gateway.state.store import StoreError
from draftgate.gateway.telemetry.logs import log
from draftgate.gateway.telemetry.metric_snapshots import Row
from draftgate.gateway.telemetry.metrics import Metrics


class Siblings:
    """The other processes of a node, as one of them sees them."""

    def __init__(self, path: Path, process: str, metrics: Metrics) -> None:
        """Share metrics over a socket.

        Args:
            path: path of the socket of the parent.
            process: name of this process.
        """
        self._client = Client(path)
        self._process = process
        self._run = secrets.token_hex(8)
        self._metrics = metrics

    async def share(self) -> None:
        """Send a snapshot of this process's metrics to the others. Errors are logged."""
        snapshot = self._metrics.snapshot()
        try:
            await self._client.call("snapshots.share", self._process, self._run, snapshot)
        except StoreError as error:
            log(logging.WARNING, "cannot share metrics with other processes", reason=str(error))

    async def snapshots(self) -> list[list[Row]]:
        """Return the latest snapshots of the others, at most about a second old.

        The list is empty if the parent does not respond.
        """
        try:
            found = await self._client.call("snapshots.others", self._process)
        except StoreError:
            return []
        return cast(list[list[Row]], found)
