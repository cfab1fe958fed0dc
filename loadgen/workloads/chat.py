"""Workload `chat`: conversations of several turns, where each request holds the earlier turns.

The assistant's earlier turns are scripted, so that the plan depends on no responses. If the rate is
high for the server, the client may send a turn before the previous response has ended.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from draftgate.loadgen.types import ChatMessage, RequestSpec
from draftgate.loadgen.workloads.base import LengthDistribution, WorkloadSettings, cut

OPEN_SESSIONS: Final = 32
"""Concurrent conversations. A turn follows 32 requests after the previous turn."""

_QUESTION_START: Final = "Explain: "
SYSTEM: Final = "You are a helpful assistant. Answer precisely, and show code where it helps."

MEAN_TURNS: Final = 2.0
MOST_TURNS: Final = 20
TURN: Final = LengthDistribution(median=42, sigma=1.0, least=8, most=1024)
"""A geometric number of turns, and user messages with a mean of 69 tokens. Both means are those of
LMSYS-Chat-1M (Zheng et al., ICLR 2024: 2.0 turns, 69.5 tokens). The spread is an assumption."""

_ANSWER: Final = LengthDistribution(median=129, sigma=0.86, least=16, most=601)
"""Median, spread, 1st and 99th percentiles of generated tokens in Azure's conversation trace of
2023 (19,366 requests, Patel et al., Splitwise, ISCA 2024)."""


@dataclass(frozen=True, slots=True)
class Dialogue:
    """A script of the turns of user and assistant, and the limit of each response in tokens."""

    turns: tuple[ChatMessage, ...]
    answer_tokens: tuple[int, ...]

    def messages(self, turn: int) -> tuple[ChatMessage, ...]:
        """Return the messages of a turn (from 0): all earlier messages, and the user's."""
        return (ChatMessage("system", SYSTEM), *self.turns[: 2 * turn + 1])


class Chat:
    """Conversations about the prose of the corpus, in `OPEN_SESSIONS` slots that take turns.

    Request i belongs to slot i mod `OPEN_SESSIONS`. When a slot's conversation has ended, the slot
    starts another. A conversation ends early if the next turn would not fit the server's context.
    """

    name = "chat"

    def __init__(self, settings: WorkloadSettings) -> None:
        self._settings = settings
        self._ends: list[list[int]] = [[] for _ in range(OPEN_SESSIONS)]
        self._dialogue = lru_cache(maxsize=4 * OPEN_SESSIONS)(self._write_dialogue)

    def request(self, index: int) -> RequestSpec:
        turn_of_slot, slot = divmod(index, OPEN_SESSIONS)
        conversation, turn = self._locate(slot, turn_of_slot)
        dialogue = self._dialogue(slot, conversation)
        return self._settings.spec(
            self.name,
            index,
            dialogue.answer_tokens[turn],
            dialogue.messages(turn),
            session=f"{self.name}-{slot}-{conversation}",
        )

    def _locate(self, slot: int, turn_of_slot: int) -> tuple[int, int]:
        """Return the conversation of a slot's n-th turn, and the turn within it."""
        ends = self._ends[slot]
        while not ends or ends[-1] <= turn_of_slot:
            dialogue = self._dialogue(slot, len(ends))
            ends.append((ends[-1] if ends else 0) + len(dialogue.answer_tokens))
        conversation = bisect_right(ends, turn_of_slot)
        return conversation, turn_of_slot - (ends[conversation - 1] if conversation else 0)

    def _write_dialogue(self, slot: int, conversation: int) -> Dialogue:
        settings = self._settings
        rng = settings.rng(self.name, slot, conversation)
        prose, turns, answers = settings.corpus.prose, list[ChatMessage](), list[int]()
        tokens = settings.counter.count(SYSTEM)
        while True:
            user, answer = TURN.draw(rng), settings.answer_tokens(_ANSWER.draw(rng))
            fitting = settings.prompt_tokens(tokens + user, answer) - tokens
            if turns and fitting < user:
                break
            tokens += user + answer
            message = _QUESTION_START + settings.text(prose, rng, user)
            turns.append(ChatMessage("user", cut(message, max(fitting, 1), settings.counter)))
            turns.append(ChatMessage("assistant", settings.text(prose, rng, answer)))
            answers.append(answer)
            if len(answers) == MOST_TURNS or rng.random() < 1 / MEAN_TURNS:
                break
        return Dialogue(tuple(turns), tuple(answers))
