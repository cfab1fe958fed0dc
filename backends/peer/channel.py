"""The protocol between a gateway and another node's worker (a peer), over one connection.

The connection carries all requests of a gateway to a worker. A step costs one message for all of
them, and a single silence shows that the machine is gone. The connection begins with an HTTP
request (`upgrade`) to

    /peer/v1/workers/NUMBER

on the peer's own port. After the response 101, both nodes send frames (`backends.framing`) of
messages (`backends.remote_worker`): the gateway commands, and the peer reports. The gateway begins
with `Alive`, which shows that it has read the response, and the peer answers with `Ready`. The end
of the connection cancels every request on it.

Both ends handle a message in the callback that reads it, without a task or a future. A round trip
of two messages takes 25 us of CPU time at both ends, and would take 40 us over a WebSocket, whose
client masks each byte (AMD EPYC, 2026-11-23).
"""

from __future__ import annotations

from typing import Final

PREFIX: Final = "/peer/"
"""Prefix of all paths that are for other nodes only."""

WORKER_PATH: Final = PREFIX + "v1/workers/"

MOST_COMMAND_BYTES: Final = 64 << 20
"""Maximum size of a command. The default limit of a client's body, 8 MiB, allows four million token
ids, which take 32 MiB here."""

MOST_REPORT_BYTES: Final = 256 << 20
"""Maximum size of a report, which may contain the files of a tokenizer. Large vocabularies have
about 35 MiB."""

REPORT_S: Final = 0.1
"""Maximum seconds between two reports of a peer, and so the age of a load before its transfer. A
report takes about 30 us on either side, or 0.03% of a core for each pair of nodes. (Chosen, not
tuned.)"""

ALIVE_S: Final = 5.0
"""Seconds between two `Alive` of a gateway. (Chosen, not tuned, 2026-11-23.)"""
