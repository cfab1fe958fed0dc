"""Runs the same requests on the servers of the comparison, and measures what each of them takes."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from statistics import fmean
from typing import Any, Final, NamedTuple, Self

import aiohttp

from bench.cpu.arms import Arm, Family
from bench.cpu.report import Cell, Run
from bench.harness.servers import Server
from draftgate.loadgen.checking.audit import Verdict
from draftgate.loadgen.measuring.metrics import completion_tokens, tpot_s, ttft_s
from draftgate.loadgen.measuring.speculation import total_speculation
from draftgate.loadgen.sending.client import (
    ClientTimeouts,
    OpenAIClient,
    first_model,
    open_session,
)
from draftgate.loadgen.sending.driver import run_plan
from draftgate.loadgen.types import LoadRun, PlannedRequest, Record, RequestSpec

TIMEOUTS: Final = ClientTimeouts(total_s=1800.0, stall_s=900.0)
"""A single busy core may take minutes for the prompts of 64 streams."""

LEAST_REQUESTS: Final = 4
"""Least number of requests of a cell that measures outputs. One that measures prompts has one."""

SCORED_TEXTS: Final = 4
"""Sampled texts of a run whose probability is computed."""

WARM_STREAMS: Final = 4
WARM_REQUESTS: Final = 4
WARM_TOKENS: Final = 16

_VLLM_COUNTERS: Final = (
    "vllm:spec_decode_num_draft_tokens_total",
    "vllm:spec_decode_num_accepted_tokens_total",
)

Prompt = tuple[int, ...]


class Contender(NamedTuple):
    """An arm with its server and a client of it."""

    arm: Arm
    server: Server
    client: OpenAIClient

    async def get(self, path: str) -> Any:
        """Return the JSON of a path."""
        async with self.client.session.get(self.client.url + path) as response:
            response.raise_for_status()
            return await response.json()

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """Return the JSON reply to a body.

        Raises:
            RuntimeError: the server refuses the request.
        """
        async with self.client.session.post(self.client.url + path, json=body) as response:
            reply = await response.json()
        if response.status != 200:
            raise RuntimeError(f"{self.arm.name} answered {response.status}: {reply}")
        return reply

    async def facts(self) -> dict[str, Any]:
        """Return the version of the server and the data type of its model."""
        if self.arm.family is Family.VLLM:
            return {"version": (await self.get("/version"))["version"]}
        if self.arm.family is Family.LLAMA_CPP:
            meta = (await self.get("/v1/models"))["data"][0].get("meta") or {}
            build = (await self.get("/props")).get("build_info")
            return {"version": build, "dtype": meta.get("ftype")}
        body = {"model": self.client.model, "prompt": [0], "max_tokens": 1}
        return {
            "numerics_class": (await self.post("/v1/completions", body))["metrics"][
                "numerics_class"
            ]
        }

    async def draft_counters(self) -> tuple[int, int] | None:
        """Return vLLM's numbers of drafted and accepted tokens, or None for other servers."""
        if self.arm.family is not Family.VLLM:
            return None
        async with self.client.session.get(self.client.url + "/metrics") as response:
            return vllm_counters(await response.text())


def vllm_counters(page: str) -> tuple[int, int]:
    """Return the drafted and accepted tokens of a page of vLLM's metrics."""
    found = dict.fromkeys(_VLLM_COUNTERS, 0.0)
    for line in page.splitlines():
        name = line.partition("{")[0].partition(" ")[0]
        if name in found:
            found[name] += float(line.rpartition(" ")[2])
    drafted, accepted = map(int, found.values())
    return drafted, accepted


class Sessions:
    """The clients of the running servers."""

    def __init__(self) -> None:
        self._stack = AsyncExitStack()
        self._contenders: dict[str, Contender] = {}

    async def __aenter__(self) -> Self:
        """Return the clients, of which none exists yet."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close all clients."""
        await self._stack.aclose()

    async def contender(self, arm: Arm, server: Server) -> tuple[Contender, bool]:
        """Return the client of a server, and whether the server is new."""
        known = self._contenders.get(arm.name)
        if known is not None and known.server == server:
            return known, False
        session = await self._stack.enter_async_context(open_session())
        model = await first_model(session, server.url)
        client = OpenAIClient(session, server.url, model, TIMEOUTS)
        self._contenders[arm.name] = Contender(arm, server, client)
        return self._contenders[arm.name], True


def requests_of(cell: Cell) -> int:
    """Return the number of requests of a cell."""
    return 1 if cell.prompt_tokens else max(cell.streams, LEAST_REQUESTS)


def planned(
    index: int, prompt: Prompt, tokens: int, temperature: float, salt: str = ""
) -> PlannedRequest:
    """Return a request of a closed loop whose output has exactly `tokens` tokens.

    All servers get the prompt as token ids, and sample from the whole vocabulary.

    Args:
        salt: prompts with another salt share no cached prefix on Draftgate.
    """
    extra: list[tuple[str, Any]] = [
        ("prompt", prompt),
        ("temperature", temperature),
        ("ignore_eos", True),
        ("top_p", 1.0),
        ("top_k", -1),
        ("min_p", 0.0),
    ]
    if salt:
        extra.append(("cache_salt", salt))
    return PlannedRequest(index, None, RequestSpec("", (), tokens, index, extra=tuple(extra)))


def intact_records(run: LoadRun) -> Sequence[Record]:
    """Return the records of a run in the order of their requests.

    Raises:
        RuntimeError: the run was interrupted, or a response was not intact.
    """
    if run.interrupted:
        raise RuntimeError("the run was interrupted")
    for record in run.records:
        if record.verdict != Verdict.OK:
            raise RuntimeError(f"a request failed: {record.verdict}: {record.detail}")
    return sorted(run.records, key=lambda record: record.planned.index)


async def warm_up(
    contender: Contender, prompts: Sequence[Prompt], temperatures: Sequence[float]
) -> None:
    """Run requests that are not measured, so that estimates and compiled code are warm."""
    for temperature in temperatures:
        requests = [planned(i, p, WARM_TOKENS, temperature) for i, p in enumerate(prompts)]
        intact_records(await run_plan(contender.client, requests, concurrency=WARM_STREAMS))


class Turn(NamedTuple):
    """The same requests for all servers of a group.

    Attributes:
        prompts: one for each request.
        tokens: output tokens of a request.
    """

    round: int
    group: int
    cell: Cell
    prompts: Sequence[Prompt]
    tokens: int

    async def run(
        self, contenders: Sequence[Contender], reference: Contender, others: Sequence[Server]
    ) -> tuple[list[Run], dict[str, str]]:
        """Run the requests on one server after another, and compare their texts.

        Args:
            reference: the server whose texts are expected, and which scores sampled texts.
            others: all running servers.

        Returns:
            The runs, and the error of each rival that failed.

        Raises:
            RuntimeError: a request to Draftgate failed, or has another number of tokens.
        """
        runs, texts, failed = [], dict[str, list[str]](), dict[str, str]()
        for contender in contenders:
            try:
                run, texts[contender.arm.name] = await self._run(contender, others)
            except (RuntimeError, aiohttp.ClientError) as error:
                if contender.arm.family is Family.DRAFTGATE:
                    raise
                failed[contender.arm.name] = f"in cell {self.cell.label}: {error}"
            else:
                runs.append(run)
        expected = texts[reference.arm.name]
        compared = [
            run._replace(
                same_texts=round(fmean(map(str.__eq__, texts[run.arm], expected)), 3),
                nats_per_token=await self._nats_per_token(reference, texts[run.arm]),
            )
            for run in runs
        ]
        return compared, failed

    async def _run(self, contender: Contender, others: Sequence[Server]) -> tuple[Run, list[str]]:
        salt = f"group-{self.group}" if contender.arm.family is Family.DRAFTGATE else ""
        requests = [
            planned(i, prompt, self.tokens, self.cell.temperature, salt)
            for i, prompt in enumerate(self.prompts)
        ]
        idle = [server for server in others if server.pid != contender.server.pid]
        counters = await contender.draft_counters()
        others_s = sum(server.cpu_s for server in idle)
        before_s = contender.server.cpu_s
        done = await run_plan(contender.client, requests, concurrency=self.cell.streams)
        if done.interrupted:
            raise asyncio.CancelledError
        cpu_s = contender.server.cpu_s - before_s
        others_s = sum(server.cpu_s for server in idle) - others_s
        records = intact_records(done)
        self._check_lengths(contender, records)
        drafted, accepted = _drafts(records, counters, await contender.draft_counters())
        tokens = sum(completion_tokens(record) or 0 for record in records)
        run = Run(
            *(self.round, *self.cell, contender.arm.name, self.group),
            tokens=sum(map(len, self.prompts)) if self.cell.prompt_tokens else tokens,
            seconds=round(done.duration_s, 4),
            cpu_s=round(cpu_s, 2),
            others_cpu_s=round(others_s, 2),
            ttft_s=[round(ttft_s(record) or 0.0, 4) for record in records],
            tpot_s=[round(tpot_s(record) or 0.0, 5) for record in records],
            drafted=drafted,
            accepted=accepted,
            resident_mb=round(contender.server.resident_bytes / 1e6, 1),
        )
        return run, ["".join(record.texts) for record in records]

    def _check_lengths(self, contender: Contender, records: Sequence[Record]) -> None:
        for record, prompt in zip(records, self.prompts, strict=True):
            usage = record.usage or {}
            lengths = usage.get("prompt_tokens"), usage.get("completion_tokens")
            if lengths != (len(prompt), self.tokens):
                raise RuntimeError(
                    f"{contender.arm.name} counted {lengths} tokens of prompt and output, not "
                    f"{(len(prompt), self.tokens)}"
                )

    async def _nats_per_token(self, reference: Contender, texts: Sequence[str]) -> float | None:
        """Return the mean negative log probability of sampled texts under the model.

        A server whose drafts change the distribution writes less probable texts.
        """
        if self.cell.temperature == 0:
            return None
        nats: list[float] = []
        model = reference.client.model
        for prompt, text in list(zip(self.prompts, texts, strict=True))[:SCORED_TEXTS]:
            body = {"model": model, "prompt": text, "add_special_tokens": False}
            output = (await reference.post("/tokenize", body))["tokens"]
            body = {
                "model": model,
                "prompt": [*prompt, *output],
                "max_tokens": 0,
                "echo": True,
                "logprobs": 0,
                "cache_salt": "scores",
            }
            (choice,) = (await reference.post("/v1/completions", body))["choices"]
            nats.extend(-each for each in choice["logprobs"]["token_logprobs"][len(prompt) :])
        return round(fmean(nats), 4) if nats else 0.0


def _drafts(
    records: Sequence[Record],
    before: tuple[int, int] | None,
    after: tuple[int, int] | None,
) -> tuple[int | None, int | None]:
    """Return the drafted and accepted tokens by the server's counters, or else by its responses."""
    if before is not None and after is not None:
        return after[0] - before[0], after[1] - before[1]
    totals = total_speculation(records)
    return (totals.sum("drafted"), totals.sum("accepted")) if totals else (0, 0)


def windows(prompts: Sequence[Prompt], tokens: int, count: int) -> list[Prompt]:
    """Return `count` prompts of `tokens` tokens that begin differently, made from other prompts."""
    joined = [token for prompt in prompts for token in prompt]
    repeated = joined * (1 + tokens // len(joined))
    step = max(1, len(joined) // count)
    return [
        tuple((repeated + repeated)[start : start + tokens])
        for start in range(0, step * count, step)
    ]


async def chat_tokens(contender: Contender, text: str, *, chat: bool) -> Prompt:
    """Return the token ids of a user's message with the model's template, or of the plain text."""
    content = {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
    reply = await contender.post("/tokenize", {"model": contender.client.model, **content})
    return tuple(reply["tokens"])


async def model_facts(session: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    """Return what Draftgate lists about its model."""
    async with session.get(f"{url}/v1/models") as response:
        listed: list[dict[str, Any]] = (await response.json())["data"]
    return listed[0]
