"""Tests of store addresses with real processes: a server, a Sentinel service and a Cluster."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from draftgate.gateway.state.commands import ListWorkers, PublishReport, ReleaseLeases, RenewLeases
from draftgate.gateway.state.redis.client import open_client
from draftgate.gateway.state.redis.store import RedisStore
from draftgate.gateway.state.redis.url import RedisUrl, Topology, read_redis_url
from draftgate.gateway.state.store import StoreError
from tests.gateway.harness import eventually
from tests.gateway.redis_server import redis_running
from tests.gateway.stores import granted, leased_tokens, report

SENTINEL = """\
sentinel monitor service 127.0.0.1 {port} 1
sentinel down-after-milliseconds service 200
sentinel failover-timeout service 1000
"""


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (
            "redis://h",
            RedisUrl(Topology.SINGLE, "redis://h:6379", (("h", 6379),)),
        ),
        (
            "rediss://u:p%40@h:1/2?ssl_ca_certs=a",
            RedisUrl(Topology.SINGLE, "rediss://u:p%40@h:1/2?ssl_ca_certs=a", (("h", 1),)),
        ),
        (
            "redis://[::1]:7",
            RedisUrl(Topology.SINGLE, "redis://[::1]:7", (("::1", 7),)),
        ),
        (
            "unix:///run/redis.sock?db=1",
            RedisUrl(Topology.SINGLE, "unix:///run/redis.sock?db=1"),
        ),
        (
            "redis+sentinel://:pw@a,b:1/my%20service/3",
            RedisUrl(
                Topology.SENTINEL,
                "redis://:pw@a:26379/3",
                (("a", 26379), ("b", 1)),
                "my service",
            ),
        ),
        (
            "rediss+cluster://a:1,b",
            RedisUrl(Topology.CLUSTER, "rediss://a:1", (("a", 1), ("b", 6379))),
        ),
    ],
)
def test_an_address_is_parsed(text: str, found: RedisUrl) -> None:
    """The parser splits an address into topology, hosts, service and the URL for redis-py."""
    assert read_redis_url(text) == found


@pytest.mark.parametrize(
    "text",
    [
        "", "redis", "redis://", "http://h", "redis://:secret@", "redis://a,b", "redis://h:0",
        "redis://h:port", "redis://h/x", "redis://h/0/1", "redis+://h", "redis+ring://h",
        "redis+sentinel://h", "redis+sentinel://h/", "redis+sentinel://h/s/0/1",
        "redis+sentinel://,h/s", "redis+cluster://h/1", "unix://", "unix+cluster:///a",
        "redis://[::1",
    ],
)  # fmt: skip
def test_an_invalid_address_is_rejected_without_quoting_it(text: str) -> None:
    """The error for an invalid address does not quote the address, which may contain a password."""
    with pytest.raises(ValueError, match="expected the address of a Redis server") as caught:
        read_redis_url(text)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "text", ["redis://h?hue=blue", "redis+sentinel://h/s?hue=blue", "redis+cluster://h?hue=blue"]
)
async def test_an_unknown_option_is_rejected_before_connecting(text: str) -> None:
    """The client rejects an unknown option before the first request."""
    with pytest.raises(ValueError, match="unknown option"):
        open_client(text)


@asynccontextmanager
async def opened(url: str, pool: str = "p") -> AsyncIterator[RedisStore]:
    """Open the store of a pool at an address."""
    store = RedisStore.at(url, pool, "g")
    try:
        yield store
    finally:
        await store.close()


async def check_works(store: RedisStore, seq: int = 0) -> None:
    """Assert that the store reserves and releases tokens."""
    assert await store.call(PublishReport(report(seq=seq)))
    lease = await granted(store, "r", 100)
    await store.call(RenewLeases((lease,), 30.0))
    assert await leased_tokens(store) == 100
    await store.call(ReleaseLeases(("r",)))
    assert await leased_tokens(store) == 0


async def test_a_server_with_a_password(tmp_path: Path) -> None:
    """The store uses the user and password of its address and raises an error for a wrong
    password."""
    with redis_running(tmp_path) as server:
        server.command("ACL", "SETUSER", "gate", "on", ">p@ss/word", "~draftgate:*", "+@all")
        at = f"127.0.0.1:{server.port}"
        async with opened(f"redis://gate:p%40ss%2Fword@{at}") as store:
            await check_works(store)
        async with opened(f"redis://gate:wrong@{at}") as store:
            with pytest.raises(StoreError):
                await store.call(ListWorkers())


async def test_a_unix_socket(tmp_path: Path) -> None:
    """The store works over a Unix socket."""
    path = tmp_path / "s"
    with redis_running(tmp_path, "--unixsocket", str(path)):
        async with opened(f"unix://{path}") as store:
            await check_works(store)


async def test_a_service_of_sentinels_fails_over(tmp_path: Path) -> None:
    """The store finds the master by its service name and finds the new master after a failure."""
    folders = [tmp_path / name for name in ("master", "replica", "sentinel")]
    for folder in folders:
        folder.mkdir()
    with redis_running(folders[0]) as master:
        of_master = ("--replicaof", "127.0.0.1", str(master.port))
        config = folders[2] / "sentinel.conf"
        config.write_text(SENTINEL.format(port=master.port))
        with (
            redis_running(folders[1], *of_master) as replica,
            redis_running(folders[2], str(config), "--sentinel") as sentinel,
        ):
            async with opened(f"redis+sentinel://127.0.0.1:{sentinel.port}/service") as store:
                await check_works(store)

                async def replicated() -> bool:
                    return bool(sentinel.command("INFO", "sentinel")["master0"]["slaves"] == 1)

                await eventually(replicated, 60.0)
                master.kill()
                await eventually(lambda: is_writable(store), 60.0)
                assert replica.command("ROLE")[0] == "master"
                await check_works(store, 1)


async def test_a_cluster(tmp_path: Path) -> None:
    """The store runs all scripts of a pool on the shard with the pool's slot."""
    options = ("--cluster-enabled", "yes", "--cluster-config-file", "nodes.conf")
    with redis_running(tmp_path, *options) as server:
        server.command("CLUSTER", "ADDSLOTS", *range(16384))

        async def formed() -> bool:
            return "cluster_state:ok" in server.command("CLUSTER", "INFO")

        await eventually(formed)
        for pool in ("p", "q", "r"):
            async with opened(f"redis+cluster://127.0.0.1:{server.port}", pool) as store:
                await check_works(store)
                server.command("SCRIPT", "FLUSH")
                await check_works(store, 1)


async def is_writable(store: RedisStore) -> bool:
    """Return whether the store responds and is writable."""
    try:
        await store.call(RenewLeases((), 30.0))
    except StoreError:
        return False
    return True
