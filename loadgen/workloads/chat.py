"""chat: conversations of several turns, each turn a request that holds the turns before it.

What the assistant said in earlier turns is scripted, so that the plan depends on no answer: a turn
may be sent while the one before is still being answered, if the rate is high for the server.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from draftgate.loadgen.types import ChatMessage, RequestSpec
from draftgate.loadgen.workloads.base import Lengths, WorkloadSettings
from draftgate.loadgen.workloads.tokens import cut

OPEN_SESSIONS: Final = 32
"""Conversations at a time: a turn comes 32 requests after the one before it."""

ASKING: Final = "Explain: "
SYSTEM: Final = "You are a helpful assistant. Answer precisely, and show code where it helps."

MEAN_TURNS: Final = 2.0
MOST_TURNS: Final = 20
TURN: Final = Lengths(median=42, sigma=1.0, least=8, most=1024)
"""A geometric number of turns, and a user's mean of 69 tokens: the means of LMSYS-Chat-1M (Zheng et
al., ICLR 2024: 2.0 turns, 69.5 tokens); the spread is an assumption."""

ANSWER: Final = Lengths(median=129, sigma=0.86, least=16, most=601)
"""Azure's conversation trace of 2023 (19,366 requests; Patel et al., Splitwise, ISCA 2024): median,
spread, 1st and 99th percentiles of generated tokens."""


@dataclass(frozen=True, slots=True)
class Dialogue:
    """A script: what is said, user and assistant by turns, and each answer's limit in tokens."""

    said: tuple[ChatMessage, ...]
    answer_tokens: tuple[int, ...]

    def asked(self, turn: int) -> tuple[ChatMessage, ...]:
        """Return the messages of a turn from 0: all before it, and the user's."""
        return (ChatMessage("system", SYSTEM), *self.said[: 2 * turn + 1])


class Chat:
    """Conversations about the corpus' prose, in `OPEN_SESSIONS` slots which take turns.

    Question i belongs to slot i mod `OPEN_SESSIONS`; when a slot's conversation has ended, its next
    one begins. A conversation ends early where the next turn would not fit the server's context.
    """

    name = "chat"

    def __init__(self, setting: WorkloadSettings) -> None:
        self._setting = setting
        self._ends: list[list[int]] = [[] for _ in range(OPEN_SESSIONS)]
        self._dialogue = lru_cache(maxsize=4 * OPEN_SESSIONS)(self._written)

    def request(self, index: int) -> RequestSpec:
        turn_of_slot, slot = divmod(index, OPEN_SESSIONS)
        session, turn = self._session(slot, turn_of_slot)
        dialogue = self._dialogue(slot, session)
        return RequestSpec(
            prompt=None,
            messages=dialogue.asked(turn),
            max_tokens=dialogue.answer_tokens[turn],
            seed=self._setting.seed + index,
            class_name=self.name,
            session=f"{self.name}-{slot}-{session}",
            slo=self._setting.slo,
        )

    def _session(self, slot: int, turn_of_slot: int) -> tuple[int, int]:
        """Return which of a slot's conversations its n-th turn is in, and which turn of it."""
        ends = self._ends[slot]
        while not ends or ends[-1] <= turn_of_slot:
            dialogue = self._dialogue(slot, len(ends))
            ends.append((ends[-1] if ends else 0) + len(dialogue.answer_tokens))
        session = bisect_right(ends, turn_of_slot)
        return session, turn_of_slot - (ends[session - 1] if session else 0)

    def _written(self, slot: int, session: int) -> Dialogue:
        setting = self._setting
        rng = setting.rng(self.name, slot, session)
        prose, said, answers = setting.corpus.prose, list[ChatMessage](), list[int]()
        tokens = setting.counter.count(SYSTEM)
        while True:
            user, answer = TURN.draw(rng), setting.answer_tokens(ANSWER.draw(rng))
            fitting = setting.prompt_tokens(tokens + user, answer) - tokens
            if said and fitting < user:
                break
            tokens += user + answer
            question = ASKING + setting.text(prose, rng, user)
            said.append(ChatMessage("user", cut(question, max(fitting, 1), setting.counter)))
            said.append(ChatMessage("assistant", setting.text(prose, rng, answer)))
            answers.append(answer)
            if len(answers) == MOST_TURNS or rng.random() < 1 / MEAN_TURNS:
                break
        return Dialogue(tuple(said), tuple(answers))
