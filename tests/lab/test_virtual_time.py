"""Virtual time."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from draftgate.lab.sim.virtual_time import loop_time_s, run_virtual, skip_time


def test_time_jumps_to_the_next_timer() -> None:
    """Timers fire in order, exactly for seconds and within 10 us for a year."""
    log: list[tuple[float, str]] = []
    year_s = 365 * 24 * 3600.0

    async def sleeper(name: str, *naps: float) -> None:
        for nap in naps:
            await asyncio.sleep(nap)
            log.append((loop_time_s(), name))

    async def main() -> None:
        await asyncio.gather(
            sleeper("a", 1.0, 2.0, 3.0), sleeper("b", 2.0, 2.0), sleeper("c", year_s)
        )

    run_virtual(main())
    assert log[:-1] == [(1.0, "a"), (2.0, "b"), (3.0, "a"), (4.0, "b"), (6.0, "a")]
    assert log[-1] == (pytest.approx(year_s, abs=1e-5), "c")


def test_time_does_not_pass_while_a_task_can_run() -> None:
    """Tasks that only yield take no virtual time."""

    async def main() -> float:
        for _ in range(1000):
            await asyncio.sleep(0.0)
        await asyncio.sleep(-1.0)
        return loop_time_s()

    assert run_virtual(main()) == 0.0


def test_timeouts_are_virtual_too() -> None:
    """An asyncio timeout fires at its virtual time."""

    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(3600.0):
                await asyncio.Event().wait()
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == 3600.0


def test_deadlock_raises_an_error() -> None:
    """A run raises an explanation if every task waits for another task and no timer is set."""

    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(RuntimeError, match="deadlock in virtual time"):
        run_virtual(main())


def test_time_is_skipped_only_up_to_the_next_event() -> None:
    """A callback skips time unless a timer is due or a callback is ready."""
    fired = list[float]()

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(1.0, lambda: fired.append(loop_time_s()))
        assert not skip_time(1.0)  # the timer is due at that moment
        assert skip_time(0.25)
        loop.call_soon(lambda: None)
        assert not skip_time(0.25)
        await asyncio.sleep(0.0)
        assert skip_time(0.25)
        assert not skip_time(0.5)
        assert skip_time(-0.25)
        assert loop_time_s() == 0.5
        await asyncio.sleep(1.0)

    run_virtual(main())
    assert fired == [1.0]


def test_skipped_time_equals_the_time_of_timers() -> None:
    """Many short times add up to the same bits as timers of these lengths."""
    random = Random(0)
    naps_s = [random.expovariate(100.0) for _ in range(1000)]

    async def main(*, skips: bool) -> float:
        for nap_s in naps_s:
            if skips:
                assert skip_time(nap_s)
            else:
                await asyncio.sleep(nap_s)
        return loop_time_s()

    assert run_virtual(main(skips=True)) == run_virtual(main(skips=False))
