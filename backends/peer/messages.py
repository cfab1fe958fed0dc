"""What a gateway and a peer say to each other, over a WebSocket (RFC 6455).

One connection carries all requests of a gateway to a worker, so that a step costs one message for
all of them, and one silence tells that the machine is gone. On it they have numbers, each used
once: what comes late for one that was given up is not taken for one that came again. It begins with

    GET /peer/v1/workers/NUMBER        with a proof that the secret is known (`proof`)

on the peer's own port. First the peer says `Welcome`; only a gateway that accepts its proof goes
on. From then on there are commands one way and reports the other, one to a WebSocket message, as
`backends.wire` writes them, large ones in pieces (`channel`). The end of the connection cancels
every request on it.
"""

from __future__ import annotations

from typing import Final

import msgspec

from draftgate.backends.types import Delta, GenerationRequest, ModelCard, Pace
from draftgate.policies.types import WorkerLoad

PREFIX: Final = "/peer/"
"""Of all paths that only nodes of the cluster may use."""

WORKER_PATH: Final = PREFIX + "v1/workers/"

MOST_COMMAND_BYTES: Final = 64 << 20
"""The largest bodies that a gateway takes by default (8 MiB) hold four million token ids, which are
32 MiB here."""

MOST_REPORT_BYTES: Final = 256 << 20
"""A tokenizer's files come as one report; those of large vocabularies have some 35 MiB."""

REPORT_S: Final = 0.1
"""A peer reports at least so often, so no load is older than this and the way here. Each takes some
30 us on either side: 0.03% of a core for each pair of nodes. (Chosen.)"""


class Submit(msgspec.Struct, tag=True, frozen=True):
    """To a peer: run this, which was checked.

    Attributes:
        lease_number: of the lease on its worker's capacity; 0 without one.
    """

    number: int
    request: GenerationRequest
    lease_number: int = 0


class Cancel(msgspec.Struct, tag=True, frozen=True):
    """To a peer: end this request, if it has not ended."""

    number: int


class SetPace(msgspec.Struct, tag=True, frozen=True):
    """To a peer: go on with this request so far, if it has not ended."""

    number: int
    pace: Pace


class Piece(msgspec.Struct, tag=True, frozen=True):
    """Either way: a part of a large message (`channel`), whose pieces come in their order."""

    data: bytes
    last: bool


class AskTokenizer(msgspec.Struct, tag=True, frozen=True):
    """To a peer: send the files of the model's tokenizer."""


class Welcome(msgspec.Struct, tag=True, frozen=True):
    """From a peer, first of all: who it is.

    Attributes:
        proof: that it knows the secret, too; empty if it has none.
        epoch: of this life of the worker: a greater one after each restart.
        tokenizer: digest of its tokenizer's files.
    """

    proof: str
    epoch: str
    card: ModelCard
    tokenizer: str


class TokenizerFiles(msgspec.Struct, tag=True, frozen=True):
    """From a peer: what it was asked for, by path."""

    files: dict[str, bytes]


class Update(msgspec.Struct, tag=True, frozen=True):
    """From a peer: what is new since the last one; nothing, if only to say that it lives.

    Attributes:
        deltas: in the order of their coming, each with its request's number.
        broken: requests that ended with an error behind these, with the reasons.
        load: of the worker, behind them.
        sent_s: when it was sent, by the clock that the deltas' `phases` are in.
        refusing: why it takes no further requests; empty while it takes some.
        watermark: number of the last lease that `load` includes.
        leaving: whether it is going away in order; what is broken then is so for that.
    """

    deltas: list[tuple[int, Delta]]
    broken: list[tuple[int, str]]
    load: WorkerLoad
    sent_s: float
    refusing: str
    watermark: int = 0
    leaving: bool = False


Command = Submit | Cancel | SetPace | AskTokenizer
Report = Welcome | TokenizerFiles | Update
