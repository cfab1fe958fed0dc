"""Send the cases of a file to one version of the code, and write what was observed.

    python -m tests.differential.host CASES OBSERVATIONS BATCH

`PYTHONPATH` chooses the version. The process never waits: its time is virtual, its network is in
memory, and its random numbers only depend on the case.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from tests.memory_network import Chance, MemoryLoop

LOOP = MemoryLoop()
LOOP.clock.replace_time()
CHANCE = Chance()
CHANCE.replace()

from tests.differential.exchange import Case, Client, Exchange, Observed  # noqa: E402
from tests.differential.record import Outcome, Record  # noqa: E402
from tests.differential.servers import Lines, running  # noqa: E402

INTERVAL_S = 2.0
"""Virtual time between the beginnings of two cases, unless the first one takes longer. Both
versions begin each case at the same time, so that they do not drift apart."""

STAGGER_S = 3e-4
"""Virtual time between requests at the same time. Otherwise their order would depend on how often
a version yields to the event loop, and with it random numbers and batches."""

PAGES = ("/metrics", "/decisions?limit=1000", "/workers", "/v1/models")


class Driver:
    """A client of a node.

    Attributes:
        record: what was observed.
    """

    def __init__(self, port: int, received: list[bytes], lines: Lines, batch: int) -> None:
        self._batch = batch
        self.record = Record([], {})
        self._port = port
        self._received = received
        self._lines = lines
        self._last: Client | None = None

    async def send_all(self, cases: list[Case]) -> None:
        """Send all cases, one after another."""
        for number, case in enumerate(cases):
            CHANCE.seed(number)
            await self._until_next()
            self._received.clear()
            self._lines.lines.clear()
            exchanges = enumerate(case.exchanges)
            found = await asyncio.gather(*(self._perform(e, i * STAGGER_S) for i, e in exchanges))
            await asyncio.sleep(0.1)
            outcome = Outcome(list(found), list(self._received), list(self._lines.lines))
            self.record.outcomes.append(outcome)
            if (number + 1) % self._batch == 0 or number + 1 == len(cases):
                await self._until_next()
                await asyncio.sleep(1.0)
                pages = {page: await self._perform(_get(page)) for page in PAGES}
                self.record.pages[number + 1] = pages

    async def _until_next(self) -> None:
        await asyncio.sleep(INTERVAL_S - LOOP.time() % INTERVAL_S)
        LOOP.clock.now_s = round(LOOP.clock.now_s, 6)

    async def _perform(self, exchange: Exchange, delay_s: float = 0.0) -> Observed:
        await asyncio.sleep(delay_s)
        client, self._last = self._last, None
        if client is None or client.closed or exchange.new:
            if client is not None and not client.closed:
                client.transport.close()
            _, client = await LOOP.create_connection(lambda: Client(LOOP), port=self._port)
        observed = await client.perform(exchange)
        self._last = client
        return observed


def _get(page: str) -> Exchange:
    head = f"GET {page} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer sk-boss\r\n\r\n"
    return Exchange(head.encode(), ["GET"])


async def observe(scenario: str, cases: list[Case], batch: int) -> Record:
    """Run the servers of a scenario, and send the cases to them.

    Args:
        batch: number of cases between two readings of the pages.
    """
    with TemporaryDirectory(dir="/tmp", prefix="draftgate-") as folder:
        async with running(scenario, LOOP, Path(folder)) as (port, received):
            driver = Driver(port, received, Lines(), batch)
            await driver.send_all(cases)
    return driver.record


def main() -> None:
    """Observe the cases of the first file, and write the observations into the second."""
    cases = msgspec.msgpack.decode(Path(sys.argv[1]).read_bytes(), type=list[Case])
    names = dict.fromkeys(case.scenario for case in cases)
    found = {}
    for name in names:
        chosen = [case for case in cases if case.scenario == name]
        found[name] = LOOP.run_until_complete(observe(name, chosen, int(sys.argv[3])))
    Path(sys.argv[2]).write_bytes(msgspec.msgpack.encode(found))


if __name__ == "__main__":
    main()
