"""The judge of what a node does with the bytes of a client: a second parser, h11.

A node may be stricter than h11: it refuses a request, and closes the connection. It must not be
more tolerant, except as in `TOLERATED`, and must not read the same bytes as other requests.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field, replace

import h11

from tests.differential.exchange import Answer, Responses
from tests.fuzz.http_nodes import Nodes, Seen
from tests.fuzz.http_streams import Ending, Sent

MOST_HEAD_BYTES = 1 << 22
"""h11 has no limit of its own here. The limits of a node are stricter."""

REFUSALS = frozenset({400, 408, 411, 413, 414, 417, 431, 501, 505})
"""Statuses of requests that a node does not read, after which it closes the connection."""

VOLATILE = re.compile(
    r"(?<![0-9a-zA-Z.])(?:(?=[0-9]*[a-f])[0-9a-f]{8,}|[0-9]{16,})(?![0-9a-zA-Z])"
    r"|\bw-[0-9a-f]{8}"
    r'|"(?:created|created_at|completed_at|cached_tokens|cache_read_input_tokens)":[0-9]+'
)
"""Ids, times, and what depends on earlier requests."""

TOLERATED = {
    r"illegal request line: bytearray\(b'[A-Z]+ +[!-~]+ +HTTP/1\.[01]'\)": "RFC 9112, section 3: a "
    "recipient may split the line at whitespace, and target and framing are the same",
}
"""Errors of h11 in requests that a node answers, with the reason why that is safe."""

CANONICAL_BYTES = 1 << 16

FRAMING = frozenset({b"content-length", b"transfer-encoding"})


class Finding(AssertionError):
    """A node did something that the judge does not accept."""


@dataclass(frozen=True)
class Request:
    """A request as h11 reads it."""

    method: bytes
    target: bytes
    version: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes

    @property
    def ends_connection(self) -> bool:
        """Whether the client allows no further request on the connection."""
        values = [value for name, value in self.headers if name.lower() == b"connection"]
        tokens = {token.strip() for value in values for token in value.lower().split(b",")}
        return b"close" in tokens or (self.version < b"1.1" and b"keep-alive" not in tokens)

    @property
    def canonical(self) -> bytes:
        """The same request in the simplest form."""
        framed = any(name.lower() in FRAMING for name, _ in self.headers)
        lines = [b"%b %b HTTP/%b" % (self.method, self.target, self.version)]
        lines += [b"%b: %b" % pair for pair in self.headers if pair[0].lower() not in FRAMING]
        if framed:
            lines.append(b"Content-Length: %d" % len(self.body))
        return b"\r\n".join(lines) + b"\r\n\r\n" + self.body


@dataclass
class Reading:
    """What h11 reads.

    Attributes:
        methods: the methods of all heads, of which the last one may lack its body.
        error: why h11 rejects the bytes after the complete requests, or empty.
        begun: whether a further request has begun.
        ends: whether the last request ends the connection.
    """

    requests: list[Request] = field(default_factory=list)
    methods: list[str] = field(default_factory=list)
    error: str = ""
    begun: bool = False
    ends: bool = False

    @property
    def lacks_body(self) -> bool:
        """Whether the last head is valid, and its body is incomplete or invalid."""
        return len(self.methods) > len(self.requests)


def read(data: bytes) -> Reading:
    """Return the requests in the bytes of a client.

    Nodes ignore the ends of lines before a request (RFC 9112, section 2.2).
    """
    reading = Reading()
    while data and not (reading.ends or reading.begun):
        reading.begun = True
        if not (data := data.lstrip(b"\r\n")):
            break
        parser = h11.Connection(h11.SERVER, MOST_HEAD_BYTES)
        parser.receive_data(data)
        try:
            _read_one(parser, reading)
        except h11.RemoteProtocolError as error:
            reading.error = str(error)
        data = parser.trailing_data[0]
    return reading


def _read_one(parser: h11.Connection, reading: Reading) -> None:
    """Read a request, if it is complete."""
    head = parser.next_event()
    if not isinstance(head, h11.Request):
        return
    reading.methods.append(head.method.decode())
    body = bytearray()
    while not isinstance(event := parser.next_event(), h11.EndOfMessage):
        if not isinstance(event, h11.Data):
            return
        body += event.data
    reading.begun = False
    headers = tuple(head.headers.raw_items())
    request = Request(head.method, head.target, head.http_version, headers, bytes(body))
    reading.requests.append(request)
    reading.ends = request.ends_connection


class Judge:
    """A judge of a pair of nodes.

    Attributes:
        nodes: the nodes.
        stricter: messages of refusals of requests that h11 accepts, with their numbers.
        counts: numbers of connections, responses and so on.
    """

    def __init__(self, nodes: Nodes) -> None:
        self.stricter: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        self.nodes = nodes
        self._expected: dict[tuple[bytes, bool], Answer | None] = {}

    def check(self, sent: Sent) -> None:
        """Send bytes to a node, and check what it does.

        Raises:
            Finding: the node misread the bytes, or did not answer, or logged an error.
        """
        seen, reading = self.nodes.send(sent), read(sent.data)
        self.counts["connections"] += 1
        self.counts["requests"] += len(reading.requests)
        self.counts["errors of h11"] += bool(reading.error)
        if seen.errors:
            raise Finding(f"errors: {seen.errors}")
        answers, closed = self._answers(sent, seen, reading)
        self.counts["responses"] += len(answers)
        if sent.ending is not Ending.WAIT:
            # The node stops when it sees the end, so that any number of responses is missing.
            answers = [answer for answer in answers if answer.complete]
        self._check_answers(sent, reading, answers, closed=closed)
        if sent.ending is not Ending.WAIT:
            return
        missing = len(reading.requests) - len(answers)
        ended = bool(answers) and _closes(answers[-1])
        if missing > 0 and not sent.waits:
            self.check(replace(sent, waits=True))  # a refusal may need a timeout
        elif missing > 0 and not (closed and ended):
            raise Finding(f"{missing} requests without a response after {len(answers)}")
        self._check_end(sent, seen, reading, answers)

    def _answers(self, sent: Sent, seen: Seen, reading: Reading) -> tuple[list[Answer], bool]:
        """Return the responses, and whether the node then closed the connection."""
        waits = sent.ending is Ending.WAIT
        received, ended = seen.early + seen.late, seen.closed_late and waits
        answers = _parsed([*reading.methods, *("GET" for _ in range(50))], received, ended=ended)
        if waits and not all(answer.complete for answer in answers):
            raise Finding("a response is incomplete")
        return answers, seen.closed_late

    def _check_answers(
        self, sent: Sent, reading: Reading, answers: list[Answer], *, closed: bool
    ) -> None:
        """Check each response against the request that h11 reads."""
        for place, answer in enumerate(answers):
            last = place == len(answers) - 1
            if place < len(reading.requests):
                request = reading.requests[place]
                expected = self._answer_to(request, proxy=sent.proxy)
                if expected is not None and _shown(answer) == _shown(expected):
                    continue
                if not (last and _refuses(answer) and closed):
                    raise Finding(f"{request} got {_shown(answer)}, not {_shown(expected)}")
                self.stricter[_message(answer)] += 1
            elif place > len(reading.requests) or not (reading.error or reading.begun):
                raise Finding(f"a response without a request: {_shown(answer)}")
            elif reading.error and not (last and closed and _closes(answer)):
                self._tolerate(reading.error, answer)
                return  # h11 does not read what follows
            elif reading.methods[place:] in ([], ["POST"]) and answer.status < 400:
                raise Finding(f"a request without its body got {_shown(answer)}")

    def _tolerate(self, error: str, answer: Answer) -> None:
        """Accept a response to a request that h11 rejects, if the error is in the table."""
        if not any(re.search(pattern, error) for pattern in TOLERATED):
            raise Finding(f"a response to what h11 rejects ({error}): {_shown(answer)}")
        self.counts["tolerated errors of h11"] += 1

    def _check_end(self, sent: Sent, seen: Seen, reading: Reading, answers: list[Answer]) -> None:
        """Check that the connection is open or closed as it must be."""
        announced = bool(answers) and _closes(answers[-1])
        if announced and sent.waits and not seen.closed_late:
            raise Finding("the connection stays open after Connection: close")
        if sent.ending is Ending.WAIT and sent.waits and not seen.closed_late:
            raise Finding("the connection stays open for longer than its timeout")
        usual = not (reading.error or reading.begun or reading.ends or announced)
        if usual and sent.ending is Ending.WAIT and seen.closed and not sent.pause_s:
            raise Finding("the connection closed without announcement")

    def _answer_to(self, request: Request, *, proxy: bool) -> Answer | None:
        """Return the response to a request in its simplest form, on a connection of its own."""
        data = request.canonical
        key = data, proxy
        if key not in self._expected:
            sent = Sent(data, proxy=proxy, waits=False)
            seen = self.nodes.send(sent)
            found = _parsed([request.method.decode()], seen.early, ended=seen.closed)
            if seen.errors or len(found) != 1:
                raise Finding(f"the simplest form {data!r} got {seen}")
            if len(data) > CANONICAL_BYTES:
                return found[0]
            if len(self._expected) >= 4096:
                self._expected.clear()
            self._expected[key] = found[0]
        return self._expected[key]


def _parsed(methods: list[str], received: bytes, *, ended: bool) -> list[Answer]:
    """Return the responses to requests with these methods.

    A request with an invalid head has no method for one of the parsers, so that its response may or
    may not have a body, as after HEAD. Its connection closes.
    """
    unknown = (
        ["HEAD" if i == place else name for i, name in enumerate(methods)] for place in range(5)
    )
    for names in (methods, [*methods[:-1], "GET"], ["GET"] * len(methods), *unknown):
        responses = Responses(names, 0.0)
        responses.feed(received, 0.0)
        if ended:
            responses.feed(b"", 0.0)
        found = responses.observed
        if not found.broken and (
            names is methods or (found.answers and _refuses(found.answers[-1]))
        ):
            return found.answers
    raise Finding(f"responses are not valid HTTP: {found.broken}: {received[:300]!r}")


def _shown(answer: Answer | None) -> tuple[int, list[tuple[str, str]], str] | None:
    """Return what must be equal in two responses to the same request."""
    if answer is None:
        return None
    body = b"".join(part.data for part in answer.parts).decode("utf-8", "backslashreplace")
    headers = sorted(
        (name.lower(), VOLATILE.sub("<>", value))
        for name, value in answer.headers
        if name.lower() not in {"date", "content-length", "connection"}
    )
    return answer.status, headers, VOLATILE.sub("<>", body)


def _closes(answer: Answer) -> bool:
    return any(n.lower() == "connection" and v.lower() == "close" for n, v in answer.headers)


def _refuses(answer: Answer) -> bool:
    return answer.status in REFUSALS and _closes(answer)


def _message(answer: Answer) -> str:
    """Return the status and the beginning of the message of an error."""
    body = b"".join(part.data for part in answer.parts).decode("utf-8", "replace")
    found = re.search(r'"message":"((?:[^"\\]|\\.){0,70})', body)
    return f"{answer.status} {found[1] if found else ''}"
