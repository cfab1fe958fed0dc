"""A rolling upgrade of a pool from another version, under load.

The protocols of the links between nodes may differ, as those of 0.1.0 and later versions do. Nodes
of two versions then share a pool, but gateways use only workers of their own version. So half of
the workers change first, then the gateways, then the other workers. Every gateway has a worker at
any time.
"""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path
from typing import Any

from draftgate.loadgen.sending.client import open_session
from tests.chaos.checker import Truths
from tests.chaos.clients import ChaosClients
from tests.chaos.injection import Injection
from tests.chaos.node import ChaosNode
from tests.chaos.part import Settings, log_folder, run_load
from tests.chaos.pool import ChaosPool, Size, chaos_pool
from tests.chaos.requests import distinct_requests

ROOT = Path(__file__).resolve().parents[2]

FIRST_VERSION = "a29a9bbc"
"""The commit of version 0.1.0."""

UPGRADED = Size(gateways=2, engines=4, simulated=0, edges=2)
"""The pool of an upgrade. A pool of 0.1.0 has one model."""

PAUSE_S = 10.0
"""Time with load before, between and after the upgrades of nodes."""


async def run_upgrade(settings: Settings, folder: Path) -> dict[str, Any]:
    """Upgrade every node once, and return the results.

    Args:
        folder: the folder of the expected texts.
    """
    assert settings.old is not None
    models, logs = settings.size.models, log_folder(folder, 0)
    requests = [one for one in distinct_requests(settings.seed) if one.model in models]
    truths = Truths(folder / "truths.json")
    async with open_session() as session:
        if any(one.key not in truths for one in requests):
            async with chaos_pool(logs, settings.size, settings.seed, (None,)) as pool:
                await ChaosClients(session, pool, truths).learn(requests)
        trees = settings.trees
        async with chaos_pool(logs, settings.size, settings.seed, trees, oldest=True) as pool:
            old_truths = Truths(folder / "truths-old.json")
            await ChaosClients(session, pool, old_truths).learn(requests)
            truths.merge(old_truths)
            clients = ChaosClients(session, pool, truths)

            async def disturb(injection: Injection, over: asyncio.Event) -> None:
                await asyncio.sleep(PAUSE_S)
                for node in upgrade_order(pool):
                    await injection.cause_upgrade(node)
                    await asyncio.sleep(PAUSE_S)
                over.set()

            return await run_load(settings, 0, clients, requests, disturb)


def upgrade_order(pool: ChaosPool) -> list[ChaosNode]:
    """Return half of the workers of each model, the gateways, and the other workers."""
    halves = [
        (nodes[: len(nodes) // 2], nodes[len(nodes) // 2 :])
        for nodes in (pool.groups["engine"], pool.groups["simulated"])
    ]
    first, second = ([node for half in halves for node in half[place]] for place in (0, 1))
    return [*first, *pool.groups["gateway"], *pool.groups["edge"], *second]


def old_tree(ref: str, out: Path) -> Path:
    """Return a folder with the source tree of a commit."""
    commit = subprocess.check_output(["git", "rev-parse", "--short", ref], cwd=ROOT, text=True)
    tree = out / f"tree-{commit.strip()}"
    if not tree.exists():
        unpacking = tree.with_suffix(".part")
        unpacking.mkdir()
        command = ["git", "archive", ref]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as archive:
            subprocess.run(["tar", "-x", "-C", str(unpacking)], stdin=archive.stdout, check=True)
        assert archive.returncode == 0
        unpacking.rename(tree)
    return tree.resolve()
