"""What the launcher of Ray's workers makes of settings, and what it says of workers. No Ray."""

from __future__ import annotations

import subprocess
import sys

import pytest

from draftgate.gateway.config import ConfigError, effective_config
from draftgate.gateway.launch.launcher import State, line_of, state_of
from draftgate.gateway.launch.messages import Notice, Order, WorkerStatus
from draftgate.gateway.launch.plan import name_of, number_in, orders_of

JOIN = {"join": "redis://:hush@10.0.0.1:6379"}


def orders(
    numbers: range = range(3),
    cpus: float = 2.0,
    environ: dict[str, str] | None = None,
    **flags: str,
) -> list[Order]:
    given = effective_config({**JOIN, **flags}, {})
    return list(orders_of(given, numbers, cpus, environ or {}).values())


def test_ports_are_free_ones_or_count_up() -> None:
    """Without `--port` each life takes one that is free; with it a worker's is always the same."""
    assert [order.config.port for order in orders()] == [0, 0, 0]
    assert [order.config.port for order in orders(range(2, 4), port="8100")] == [8102, 8103]
    with pytest.raises(ConfigError, match="--port: the last worker would need port"):
        orders(port="65534")


def test_threads_are_the_cores_that_ray_gives() -> None:
    """So that workers on unlike machines are of one numerics class; what was said holds."""
    assert {order.config.threads for order in orders(cpus=2.5)} == {2}
    assert {order.config.threads for order in orders(cpus=0.5)} == {1}
    assert {order.config.threads for order in orders(cpus=2.5, threads="7")} == {7}


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"host": "10.0.0.9"}, "--host: workers listen at"),
        ({"advertise": "http://10.0.0.9:1"}, "--advertise: workers advertise"),
        ({"no_worker": "true"}, "--no-worker: a gateway does not need Ray"),
        ({"backend": "openai", "upstream": "http://x:1"}, "--upstream: a node with upstreams"),
    ],
)
def test_what_ray_decides_is_refused(flags: dict[str, str], said: str) -> None:
    """A setting that could not hold is named, not dropped."""
    with pytest.raises(ConfigError, match=said):
        orders(**flags)


def test_workers_need_a_pool() -> None:
    """Without `--join` nobody would find them."""
    with pytest.raises(ConfigError, match="--join is missing"):
        orders_of(effective_config({}, {}), range(1), 1.0, {})


def test_an_order_survives_its_journey() -> None:
    """Every setting and the secret arrive as they were, whatever type they have."""
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
    assert orders(range(1), peer_secret_env="S")[0].secret is None  # the machine's own counts


def test_names_are_of_one_pool() -> None:
    """A pool finds its workers by their names, and no other pool's."""
    assert number_in("blue", name_of("blue", 12)) == 12
    assert number_in("blue", name_of("blue.1", 12)) is None
    assert number_in("blue", "somebody-else") is None


@pytest.mark.parametrize(
    ("notice", "again", "state", "line"),
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
        (Notice(failure="once more"), True, State.LOADING, None),  # Ray tries again
    ],
)
def test_a_line_says_where_a_worker_is_and_how(
    notice: Notice, again: bool, state: State, line: str | None
) -> None:
    """Its name, its state, its address, its GPUs, and the reason if it ended."""
    status = WorkerStatus("10.0.0.2", ("3",), 1, again, notice)
    assert state_of(status) is state
    if line is not None:
        assert line_of("blue/0", state, status) == line


def test_without_ray_the_command_says_what_to_install() -> None:
    """One line, status 1, no traceback."""
    script = (
        "import sys; sys.modules['ray'] = None\nfrom draftgate.gateway.cli import main\n"
        "sys.argv = ['draftgate', 'ray', 'start', '--join', 'redis://127.0.0.1:1']\nmain()"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert done.stderr == "draftgate: Ray is not installed: pip install 'draftgate[ray]'\n"
