"""A process that serves shared memory stores on a Unix socket, as `draftgate serve --processes`."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import uvloop

from draftgate.gateway.state.local.server import SharedStores, serving_stores
from draftgate.gateway.state.memory.responses import MemoryResponses
from draftgate.gateway.state.memory.store import MemoryStore


@asynccontextmanager
async def shared_store() -> AsyncIterator[Path]:
    """Run the process until the block ends, and yield the path of its socket."""
    with TemporaryDirectory() as folder:
        path = Path(folder, "stores")
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", __name__, str(path), stdout=asyncio.subprocess.PIPE
        )
        assert process.stdout is not None
        await process.stdout.readline()  # the socket exists
        try:
            yield path
        finally:
            process.terminate()
            await process.wait()


async def _serve(path: Path) -> None:
    stores = SharedStores(MemoryStore(time.monotonic), MemoryResponses(1 << 20, 60.0))
    async with serving_stores(stores, path):
        print("ready", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(Path(sys.argv[1])))
