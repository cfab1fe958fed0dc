"""Copies of hot prefixes to a second worker."""

from __future__ import annotations

from contextlib import AsyncExitStack

from msgspec import structs

from draftgate.backends.kv_transfer.transfer import TransferEnd
from draftgate.backends.sim.backend import SimBackend
from draftgate.gateway.dispatch.kv_pulls import FetchCause, KvFetch
from tests.gateway.harness import eventually
from tests.gateway.test_prefix_fetch import CONFIG, HELD_TOKENS, PREFIX_TOKENS, answered, make_job
from tests.gateway.troubles import (
    Dispatched,
    RecordingWatch,
    dispatching,
    run_job,
    run_scenario,
)

EIGHT = structs.replace(CONFIG, max_num_seqs=8)


async def run_together(dispatched: Dispatched, count: int) -> RecordingWatch:
    """Run requests that share a prefix at the same time, and return what was observed."""
    watch = RecordingWatch()
    async with AsyncExitStack() as stack:
        for number in range(count):
            job = make_job(f"p{number}", tail=number, output_tokens=HELD_TOKENS)
            run = await stack.enter_async_context(dispatched.dispatcher.run(job, watch=watch))
            await anext(run.deltas)
    await eventually(dispatched.is_idle)
    return watch


def copies(watch: RecordingWatch) -> list[KvFetch]:
    return [fetch for fetch in watch.fetches if fetch.cause is FetchCause.HOT]


def test_hot_prefix_gets_a_second_holder_before_the_first_is_full() -> None:
    """When the requests of a prefix take half of its worker, another worker gets a copy. A later
    request finds it in the cache there, with the same text."""

    async def scenario() -> None:
        async with dispatching(
            SimBackend, 2, config=EIGHT, routing="prefix_affinity"
        ) as dispatched:
            few = await run_together(dispatched, 4)
            assert not few.fetches  # the first of them found nothing cached, so three count
            watch = await run_together(dispatched, 5)
            (copy,) = copies(watch)
            assert copy.end is TransferEnd.COMPLETE
            assert copy.source == watch.workers[0]
            assert copy.blocks == PREFIX_TOKENS // 16
            source, sink = dispatched.fleet.workers
            assert {copy.source, copy.sink} == {source.worker_id, sink.worker_id}
            holder = source if source.worker_id == copy.source else sink
            holder.hung = True
            job = make_job("r", tail=99)
            answer = await answered(dispatched, job)
            assert answer.watch.workers == [copy.sink]
            assert (answer.cached_tokens, answer.watch.fetches) == (PREFIX_TOKENS, [])
            holder.hung = False
        async with dispatching(SimBackend, 1, config=EIGHT) as dispatched:
            assert answer.choices == await run_job(dispatched.dispatcher, job)

    run_scenario(scenario())


def test_prefix_is_copied_once_while_it_stays_hot() -> None:
    """More requests of the same prefix cause no second copy to the same worker."""

    async def scenario() -> None:
        async with dispatching(
            SimBackend, 2, config=EIGHT, routing="prefix_affinity"
        ) as dispatched:
            await run_together(dispatched, 1)
            watch = await run_together(dispatched, 12)
            assert len(copies(watch)) == 1

    run_scenario(scenario())
