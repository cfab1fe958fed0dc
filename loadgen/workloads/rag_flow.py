"""The requests that respond to one question, by a plan or by an agent that alternates.

    planned       plan, retrieve (once, or again for steps that use results), answer
    interleaved   next, retrieve, next, retrieve, next, retrieve, answer

A planned flow asks the model once for all searches, as in REAPER (Joshi et al., CIKM 2024). An
interleaved flow asks for one search at a time, over the passages so far, as in ReAct (Yao et al.,
ICLR 2023). It ends early if the model requests no further search.

The requests of a flow share its deadline (`split_deadline`). Work is counted in output tokens. A
request with a prompt of `p` tokens and a response of `n` has

    w = WAITING + p / PROMPT_TOKENS_PER_OUTPUT + n

A request that is sent `R` seconds before the deadline shares this time with the later requests in
proportion to their work. The time per unit of work is `u = R / (w + later w)`. The request
announces the limits

    TTFT = u (WAITING + p / PROMPT_TOKENS_PER_OUTPUT + 1)        TPOT = u

The whole request then takes TTFT + (n - 1) TPOT = u w = R - R later w / (w + later w). This is the
remaining time minus the expected time of the later requests. All later requests share the time that
a request saves or wastes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Final

from draftgate.loadgen.types import ChatMessage, Record, RequestSpec, Slo
from draftgate.loadgen.workloads.base import WorkloadSettings, prompt_text, to_endpoint
from draftgate.loadgen.workloads.rag_plan import (
    MOST_STEPS,
    PASSAGES,
    QUERY_CHARACTERS,
    PlanStep,
    answer_prompt,
    fit,
    next_prompt,
    parse_plan,
    plan_prompt,
    response_format,
)
from draftgate.loadgen.workloads.rag_search import Retriever, Searches

PROMPT_TOKENS_PER_OUTPUT: Final = 20.0
"""Prompt tokens that take as long as one output token. Six measurements gave 18 to 35 (TTFT 0.7 to
1.0 s over 1,300 tokens, TPOT 14 to 19 ms, shipped model, one busy core of an AMD EPYC Zen 4,
2026-11-21). GPUs reach 100 and more. A smaller number assigns more of the time to the first
text."""

WAITING: Final = 64.0
"""Output tokens of waiting time for every request, equal to the prompt of one other response of
1,280 tokens. Embeddings announced 130 ms of a deadline of 10 s without this term. The server then
refused embeddings after any such prompt, because it could not serve them in time. It refused four
of sixteen (shipped model, a busy AMD EPYC Zen 4 at 0.2 requests/s, 2026-11-21)."""

LEAST_S: Final = 1e-3
"""The announced time after the deadline, because a header must be positive. The flow is then late
already, and a server that sheds late requests may refuse it."""

MOST_ROUNDS: Final = 3
"""Rounds of an interleaved flow, as many as a plan has steps."""

STEP_TOKENS: Final = 64
"""Limit of a planned step, for a full query at two characters per token and its JSON."""

EXPECTED_PLAN_TOKENS: Final = 36
EXPECTED_STEP_TOKENS: Final = 20
"""Mean lengths of a plan and of the reply with the next step, for the split of a deadline. The
shipped model wrote 29 to 54 and 9 to 38 tokens (20 replies, 2026-11-26)."""

PLAN: Final = "plan"
NEXT: Final = "next"
RETRIEVE: Final = "retrieve"
_ANSWER: Final = "answer"


class Agent(StrEnum):
    """How a flow finds its passages."""

    PLANNED = "planned"
    INTERLEAVED = "interleaved"


class Deadlines(StrEnum):
    """How the requests of a flow announce its deadline."""

    FLOW = "flow"
    SPLIT = "split"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class RagOptions:
    """How `rag` plans, announces deadlines and embeds texts.

    Attributes:
        agent: whether one request plans all searches, or each search follows the previous results.
        deadlines: how requests announce the deadline. `flow` sends the flow's id and deadline with
            each request, `split` sends the targets of `split_deadline`, and `none` sends
            neither.
        embedding_model: the model that embeds passages, or empty for the model of the load.
        query_embedding_model: the model that embeds queries, or empty for `embedding_model`. Both
            models must produce vectors of one space.
        salt: the text before each prompt, by which runs on one server share no cached prefixes.

    Raises:
        ValueError: only the model of queries is named.
    """

    agent: Agent = Agent.PLANNED
    deadlines: Deadlines = Deadlines.FLOW
    embedding_model: str = ""
    query_embedding_model: str = ""
    salt: str = ""

    def __post_init__(self) -> None:
        if self.query_embedding_model and not self.embedding_model:
            raise ValueError("--query-embedding-model requires --embedding-model")

    def document_fields(self) -> tuple[tuple[str, Any], ...]:
        """Return the fields of requests that embed passages."""
        return _embedding_fields(self.embedding_model, "document")

    def query_fields(self) -> tuple[tuple[str, Any], ...]:
        """Return the fields of requests that embed queries."""
        return _embedding_fields(self.query_embedding_model or self.embedding_model, "query")


@dataclass(frozen=True, slots=True)
class RagFlow:
    """A flow that plans, retrieves and responds, even if a request on the way fails.

    Retrieval always searches for the question, and also for the steps of valid plans. It falls back
    to shared words if the server returned no vectors. The flow ends early if it announced its
    deadline and the server refused its first request, because that refuses the whole flow.

    Attributes:
        about: the position of the passage that answers the question and retrieval should find.
        by_words: the positions of the passages that a search by words finds for the question. The
            report compares them with those of the flow.
        context_tokens: the expected length of all passages of a prompt.
    """

    settings: WorkloadSettings
    options: RagOptions
    retriever: Retriever
    about: int
    question: str
    by_words: tuple[int, ...]
    context_tokens: int

    def next(
        self, request: RequestSpec, answered: Sequence[Record], elapsed_s: float
    ) -> RequestSpec | None:
        last = answered[-1].planned.request.hop if answered else ""
        if last == _ANSWER or self._is_refused(answered):
            return None
        searches, valid = self._replay(answered)
        rounds = sum(record.planned.request.hop == RETRIEVE for record in answered)
        if not answered and self.options.agent is Agent.PLANNED:
            hop = self._plan(request)
        elif searches.ready() and answered:
            hop = self._retrieve(request, searches)
        elif self.options.agent is Agent.INTERLEAVED and last != NEXT and rounds < MOST_ROUNDS:
            hop = self._next(request, searches)
        else:
            facts = (("plan_parsed", valid), ("by_vectors", _by_vectors(answered)))
            hop = self._answer(request, searches, facts)
        return self._announce(hop, request, elapsed_s, rounds)

    def _is_refused(self, answered: Sequence[Record]) -> bool:
        announced = self.options.deadlines is Deadlines.FLOW
        return announced and bool(answered) and answered[0].refused

    def _replay(self, answered: Sequence[Record]) -> tuple[Searches, bool]:
        """Return the searches of the earlier requests, and whether all plans were valid."""
        searches, valid = Searches(self.retriever, self.question, PASSAGES), True
        for record in answered:
            if record.planned.request.hop == RETRIEVE:
                searches.run(record.vectors)
            else:
                steps = self._steps(record, searches.steps)
                valid = valid and steps is not None
                searches.add(steps or ())
        return searches, valid

    def _steps(self, record: Record, earlier_steps: int) -> tuple[PlanStep, ...] | None:
        if not record.texts:
            return None
        alternates = self.options.agent is Agent.INTERLEAVED
        return parse_plan(record.texts[0], earlier_steps if alternates else None)

    def _plan(self, request: RequestSpec) -> RequestSpec:
        content = plan_prompt(self.question)
        limit = MOST_STEPS * STEP_TOKENS
        return self._chat(request, content, PLAN, limit, ("response_format", response_format()))

    def _next(self, request: RequestSpec, searches: Searches) -> RequestSpec:
        passages = self._passages(searches, next_prompt((), self.question), STEP_TOKENS)
        wanted = ("response_format", response_format(searches.steps))
        return self._chat(request, next_prompt(passages, self.question), NEXT, STEP_TOKENS, wanted)

    def _retrieve(self, request: RequestSpec, searches: Searches) -> RequestSpec:
        return replace(
            request,
            prompt=None,
            messages=(),
            inputs=tuple(search.text for search in searches.ready()),
            extra=self.options.query_fields(),
            hop=RETRIEVE,
        )

    def _answer(
        self, request: RequestSpec, searches: Searches, known: tuple[tuple[str, bool], ...]
    ) -> RequestSpec:
        found = searches.best()
        facts = (
            *known,
            ("passage_found_at_1", self.about in found[:1]),
            ("passage_found_at_5", self.about in found),
            ("words_find_at_1", self.about in self.by_words[:1]),
            ("words_find_at_5", self.about in self.by_words),
            ("five_most_popular_find", self.about < PASSAGES),
        )
        limit = request.max_tokens
        passages = self._passages(searches, answer_prompt((), self.question), limit)
        hop = self._chat(request, answer_prompt(passages, self.question), _ANSWER, limit)
        return replace(hop, facts=facts)

    def _passages(self, searches: Searches, prompt: str, answer_tokens: int) -> list[str]:
        passages = [self.retriever.pairs[place].passage for place in searches.best()]
        return fit(self.settings, passages, self.options.salt + prompt, answer_tokens)

    def _chat(
        self, request: RequestSpec, content: str, hop: str, max_tokens: int, *extra: tuple[str, Any]
    ) -> RequestSpec:
        """Return a hop at the endpoint of the planned request."""
        messages = (ChatMessage("user", self.options.salt + content),)
        chat = replace(
            request,
            prompt=None,
            messages=messages,
            max_tokens=max_tokens,
            extra=(*request.extra, *extra),
            hop=hop,
        )
        return chat if request.prompt is None else to_endpoint(chat, "completions")

    def _announce(
        self, hop: RequestSpec, request: RequestSpec, elapsed_s: float, rounds: int
    ) -> RequestSpec:
        """Return a hop with the limits that its headers announce."""
        if self.options.deadlines is Deadlines.SPLIT:
            work = self._work(hop)
            later = self._later(hop.hop, rounds, request)
            return replace(hop, slo=split_deadline(request.slo, elapsed_s, work, later))
        announced = self.options.deadlines is Deadlines.FLOW
        return replace(hop, slo=Slo(), flow_deadline_s=request.slo.latency_s if announced else None)

    def _work(self, hop: RequestSpec) -> RequestWork:
        count = self.settings.counter.count
        if hop.inputs:
            return RequestWork(sum(map(count, hop.inputs)))
        tokens = {PLAN: EXPECTED_PLAN_TOKENS, NEXT: EXPECTED_STEP_TOKENS}
        return RequestWork(count(prompt_text(hop)), tokens.get(hop.hop, hop.max_tokens))

    def _later(self, hop: str, rounds: int, request: RequestSpec) -> list[RequestWork]:
        """Return the expected work of the requests after a hop, with all rounds of an agent."""
        if hop == _ANSWER:
            return []
        count, context = self.settings.counter.count, self.context_tokens
        retrieval = RequestWork(count(self.question) + count(QUERY_CHARACTERS * "x"))
        later = [] if hop == RETRIEVE else [retrieval]
        if self.options.agent is Agent.INTERLEAVED:
            prompt_tokens = context + count(next_prompt((), self.question))
            following = RequestWork(prompt_tokens, EXPECTED_STEP_TOKENS)
            later += [following, retrieval] * max(MOST_ROUNDS - rounds - 1, 0)
        prompt_tokens = context + count(answer_prompt((), self.question))
        return [*later, RequestWork(prompt_tokens, request.max_tokens)]


def _by_vectors(answered: Sequence[Record]) -> bool:
    """Whether all retrievals so far returned vectors."""
    return all(r.vectors for r in answered if r.planned.request.hop == RETRIEVE)


def _embedding_fields(model: str, input_type: str) -> tuple[tuple[str, Any], ...]:
    return (("model", model), ("input_type", input_type)) if model else ()


@dataclass(frozen=True, slots=True)
class RequestWork:
    """The work of a request in tokens. Embeddings have one output token."""

    prompt_tokens: int
    output_tokens: int = 1

    @property
    def before_first(self) -> float:
        """The work before the first output token, in output tokens."""
        return WAITING + self.prompt_tokens / PROMPT_TOKENS_PER_OUTPUT

    @property
    def units(self) -> float:
        """The total work in output tokens."""
        return self.before_first + self.output_tokens


def split_deadline(
    promise: Slo, elapsed_s: float, work: RequestWork, later: Iterable[RequestWork] = ()
) -> Slo:
    """Return the SLO that a request announces, without limits if the user has no deadline.

    The user reads the text of the last request, so that request also keeps the user's own TTFT and
    TPOT where they are tighter.

    Args:
        promise: the user's SLO, counted from the time of the user's question.
        elapsed_s: seconds since that time.
        work: the work of this request.
        later: the expected work of the later requests.
    """
    after = list(later)
    ttft_s = tpot_s = None
    if promise.latency_s is not None:
        units = work.units + sum(one.units for one in after)
        unit_s = max(promise.latency_s - elapsed_s, LEAST_S) / units
        ttft_s = unit_s * (work.before_first + 1)
        tpot_s = unit_s if work.output_tokens > 1 else None
    if not after:
        if promise.ttft_s is not None:
            ttft_s = _tighter(ttft_s, max(promise.ttft_s - elapsed_s, LEAST_S))
        tpot_s = _tighter(tpot_s, promise.tpot_s)
    return Slo(ttft_s, tpot_s)


def _tighter(one_s: float | None, other_s: float | None) -> float | None:
    return min((limit_s for limit_s in (one_s, other_s) if limit_s is not None), default=None)
