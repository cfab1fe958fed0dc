"""Tests of the launcher's orders for workers and of its printed lines, without Ray."""

from __future__ import annotations

import subprocess
import sys

import pytest

from draftgate.gateway.config import ConfigError, effective_config
from draftgate.gateway.launch.launcher import State, status_line, worker_state
from draftgate.gateway.launch.messages import WorkerStatus
from draftgate.gateway.launch.plan import actor_name, unused_numbers, worker_number, worker_orders
from draftgate.gateway.processes.messages import Notice, Order

JOIN = {"join": "redis://:hush@10.0.0.1:6379"}


def orders(
    numbers: range = range(3),
    cpus: float = 2.0,
    environ: dict[str, str] | None = None,
    **flags: str,
) -> list[Order]:
    given = effective_config({**JOIN, **flags}, {})
    return list(worker_orders(given, numbers, cpus, environ or {}).values())


def test_ports_are_free_or_count_up_from_the_setting() -> None:
    """Each worker uses a free port, or a fixed port that counts up from `--port`."""
    assert [order.config.port for order in orders()] == [0, 0, 0]
    assert [order.config.port for order in orders(range(2, 4), port="8100")] == [8102, 8103]
    with pytest.raises(ConfigError, match="--port: the last worker would need port"):
        orders(port="65534")


def test_new_workers_get_the_smallest_unused_numbers() -> None:
    """Numbers of ended workers are used again, and no number twice."""
    assert unused_numbers({0, 2, 3}, 3) == [1, 4, 5]
    assert unused_numbers(set(), 0) == []


def test_threads_equal_the_cores_that_ray_reserves() -> None:
    """Each worker uses the cores that Ray reserves, unless `--threads` is set."""
    assert {order.config.threads for order in orders(cpus=2.5)} == {2}
    assert {order.config.threads for order in orders(cpus=0.5)} == {1}
    assert {order.config.threads for order in orders(cpus=2.5, threads="7")} == {7}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"host": "10.0.0.9"}, "--host: workers listen at"),
        ({"advertise": "http://10.0.0.9:1"}, "--advertise: workers advertise"),
        ({"no_worker": "true"}, "--no-worker: a gateway does not need Ray"),
        ({"backend": "openai", "upstream": "http://x:1"}, "--upstream: a node with upstreams"),
    ],
)
def test_settings_that_ray_decides_are_rejected(flags: dict[str, str], message: str) -> None:
    """The launcher rejects settings that Ray decides and names each setting."""
    with pytest.raises(ConfigError, match=message):
        orders(**flags)


def test_workers_need_a_pool() -> None:
    """The launcher requires `--join`, because gateways find workers in the pool."""
    with pytest.raises(ConfigError, match="--join is missing"):
        worker_orders(effective_config({}, {}), range(1), 1.0, {})


def test_an_order_survives_encoding() -> None:
    """An order is equal after encoding and decoding."""
    (order,) = orders(
        range(1),
        environ={"S": "a secret of the cluster"},
        peer_secret_env="S",
        api_keys=["one", "two"],
        kv_bytes="16MiB",
        devices="0,1",
        speculation="off",
    )
    assert order.secret == "a secret of the cluster"
    assert b"\n" not in order.encoded()
    assert Order.decoded(order.encoded()) == order
    # Without a secret in the order, the worker uses the secret of its machine.
    assert orders(range(1), peer_secret_env="S")[0].secret is None


def test_a_worker_name_belongs_to_one_pool() -> None:
    """The name of a worker belongs to exactly one pool."""
    assert worker_number("blue", actor_name("blue", 12)) == 12
    assert worker_number("blue", actor_name("blue.1", 12)) is None
    assert worker_number("blue", "other-name") is None


@pytest.mark.parametrize(
    ("notice", "restarted", "state", "line"),
    [
        (Notice(), False, State.LOADING, "blue/0       loading                10.0.0.2 GPU 3"),
        (
            Notice("http://10.0.0.2:5"),
            False,
            State.READY,
            "blue/0       ready, not in the pool http://10.0.0.2:5 GPU 3",
        ),
        (
            Notice("http://10.0.0.2:5", joined=True),
            True,
            State.JOINED,
            "blue/0       joined                 http://10.0.0.2:5 GPU 3 (restarted)",
        ),
        (
            Notice(failure="no such model"),
            False,
            State.FAILED,
            "blue/0       failed                 10.0.0.2 GPU 3 (no such model)",
        ),
        (Notice(failure="will retry"), True, State.LOADING, None),  # Ray retries
    ],
)
def test_a_line_shows_a_worker_and_its_state(
    notice: Notice, restarted: bool, state: State, line: str | None
) -> None:
    """The line of a worker contains its name, state, address, GPUs and failure."""
    status = WorkerStatus("10.0.0.2", ("3",), 1, restarted, notice)
    assert worker_state(status) is state
    if line is not None:
        assert status_line("blue/0", state, status) == line


def test_missing_ray_is_one_line_with_the_install_command() -> None:
    """The command without Ray prints one line with the install command and exits with 1."""
    script = (
        "import sys; sys.modules['ray'] = None\nfrom draftgate.gateway.cli import main\n"
        "sys.argv = ['draftgate', 'ray', 'start', '--join', 'redis://127.0.0.1:1']\nmain()"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert done.stderr == "draftgate: Ray is not installed: pip install 'draftgate[ray]'\n"
