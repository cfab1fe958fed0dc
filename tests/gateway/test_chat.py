"""Tests of `draftgate chat` and `draftgate run` with a worker that the test controls."""

from __future__ import annotations

import asyncio
import os
import pty
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from draftgate.backends.types import GenerationRequest
from draftgate.gateway.app import Listening
from draftgate.gateway.cli import app
from tests.gateway.harness import PATIENCE_S, ScriptedBackend, running
from tests.gateway.test_cli import COMMAND


@asynccontextmanager
async def talking(
    *arguments: str, stdin: str = "", **settings: object
) -> AsyncIterator[tuple[ScriptedBackend, asyncio.Task[Result]]]:
    """Run a command with the address of a node whose worker the test controls."""
    backend = ScriptedBackend()
    async with running(backends=[backend], **settings) as gateway:
        words = [*arguments, "--url", gateway.url]
        invoked = asyncio.to_thread(CliRunner().invoke, app, words, input=stdin)
        yield backend, asyncio.create_task(invoked)


async def request_of(backend: ScriptedBackend) -> GenerationRequest:
    """Return the next request of a worker."""
    async with asyncio.timeout(PATIENCE_S):
        return await backend.submitted.get()


async def finished(task: asyncio.Task[Result]) -> Result:
    """Return the result of a command."""
    async with asyncio.timeout(PATIENCE_S):
        return await task


def prompt_of(backend: ScriptedBackend, request: GenerationRequest) -> str:
    """Return the prompt of a request, in which the template has put the messages."""
    return backend.tokenizer.decode(list(request.prompt_ids))


async def test_each_line_of_a_pipe_continues_the_conversation() -> None:
    """A request has all messages before it, and `/new` begins again with the system message."""
    lines = "one\n\ntwo\n/new\nthree\n"
    async with talking("chat", "--system", "brief", stdin=lines) as (backend, task):
        prompts = []
        for answer in ("first", "second", "third"):
            request = await request_of(backend)
            prompts.append(prompt_of(backend, request))
            backend.emit(request, answer, last=True)
        done = await finished(task)
    assert (done.exit_code, done.stdout, done.stderr) == (0, "first\nsecond\nthird\n", "")
    assert prompts == ["# brief\none", "# brief\nonefirst\ntwo", "# brief\nthree"]


async def test_sampling_parameters_reach_the_server_only_if_given() -> None:
    """Without options, the defaults of the server apply."""
    given = ("--temperature", "0.5", "--max-tokens", "7", "--seed", "9")
    for options, expected in (((), None), (given, (0.5, 7, 9))):
        async with talking("chat", *options, stdin="x\n") as (backend, task):
            request = await request_of(backend)
            backend.emit(request, "y", last=True)
            await finished(task)
        found = request.sampling.temperature, request.sampling.max_tokens, request.sampling.seed
        assert (found == expected) is (expected is not None)


async def test_a_refused_message_does_not_stay_in_the_conversation() -> None:
    """An error is one line on stderr, and the next request is without its message."""
    lines = f"{'long ' * 3000}\nshort\n"
    async with talking("chat", stdin=lines) as (backend, task):
        request = await request_of(backend)
        assert prompt_of(backend, request) == "short"
        backend.emit(request, "fine", last=True)
        done = await finished(task)
    assert (done.exit_code, done.stdout) == (0, "\nfine\n")
    assert done.stderr.startswith("draftgate: ")
    assert "fit, not" in done.stderr
    assert done.stderr.count("\n") == 1


async def test_a_broken_stream_is_an_error_after_its_text() -> None:
    """A worker that fails in the middle of an answer leaves the text and the reason."""
    async with talking("run", "scripted", "x", max_resumes=0) as (backend, task):
        request = await request_of(backend)
        backend.emit(request, "half")
        backend.crash("out of luck")
        done = await finished(task)
    assert done.exit_code == 1
    assert done.stdout.startswith("half")
    assert done.stderr.startswith("draftgate: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("stdin", [False, True])
async def test_run_prints_one_answer_and_its_speed(*, stdin: bool) -> None:
    """The prompt is an argument or the whole of stdin, and stdout has the answer alone."""
    prompt = "-" if stdin else "two\nlines"
    async with talking("run", "scripted", prompt, stdin="two\nlines") as (backend, task):
        request = await request_of(backend)
        assert prompt_of(backend, request) == "two\nlines"
        backend.emit(request, "an answer", last=True)
        done = await finished(task)
    assert (done.exit_code, done.stdout) == (0, "an answer\n")
    assert done.stderr.startswith("2 tokens, ")
    assert "0 drafted, 0 accepted" in done.stderr


async def test_raw_continues_the_text_without_the_template() -> None:
    """A raw prompt is the text alone, and ends after 128 tokens without another limit."""
    async with talking("run", "scripted", "def f", "--raw") as (backend, task):
        request = await request_of(backend)
        backend.emit(request, "(x):", last=True)
        assert (await finished(task)).stdout == "(x):\n"
    assert (prompt_of(backend, request), request.sampling.max_tokens) == ("def f", 128)
    async with talking("run", "scripted", "x", "--raw", "--system", "y") as (_, task):
        assert "--system needs a model with a chat template" in (await finished(task)).stderr


@pytest.mark.parametrize(
    ("arguments", "settings", "message"),
    [
        (("run", "other", "x"), {}, "does not serve other; its models: scripted\n"),
        (("chat",), {"api_keys": ("k",)}, "requires an API key: pass --api-key or set OPENAI_API"),
        (("chat", "--dtype", "float32"), {}, "--url cannot be combined with --dtype"),
    ],
)
async def test_errors_are_one_line_with_the_remedy(
    arguments: Sequence[str],
    settings: dict[str, object],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A command that cannot talk to a model says why."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    async with talking(*arguments, **settings) as (_, task):
        done = await finished(task)
    assert done.exit_code in {1, 2}
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


class Terminal:
    """A command whose stdin, stdout and stderr are a terminal."""

    def __init__(self, process: asyncio.subprocess.Process, descriptor: int) -> None:
        self.process = process
        self._descriptor = descriptor
        self._arrived = asyncio.Event()
        self.screen = ""
        asyncio.get_running_loop().add_reader(descriptor, self._read)

    def _read(self) -> None:
        try:
            self.screen += os.read(self._descriptor, 4096).decode()
        except OSError:  # the command has ended
            asyncio.get_running_loop().remove_reader(self._descriptor)
        self._arrived.set()

    async def until(self, text: str) -> None:
        """Wait until the screen ends with a text."""
        async with asyncio.timeout(PATIENCE_S):
            while not self.screen.endswith(text):
                self._arrived.clear()
                await self._arrived.wait()

    async def discard_line(self) -> None:
        """Press Ctrl-C until there is a new prompt. One may have no effect (`interrupted`)."""
        async with asyncio.timeout(PATIENCE_S):
            while not self.screen.endswith(">>> "):
                self.type("\x03")
                with suppress(TimeoutError):
                    await asyncio.wait_for(self.until(">>> "), PATIENCE_S / 10)

    def type(self, keys: str) -> None:
        """Press keys."""
        os.write(self._descriptor, keys.encode())


@asynccontextmanager
async def terminal(gateway: Listening, home: Path) -> AsyncIterator[Terminal]:
    """Run `draftgate chat` in a terminal."""
    ours, theirs = pty.openpty()
    process = await asyncio.create_subprocess_exec(
        *(*COMMAND, "chat", "--url", gateway.url),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "HOME": str(home), "TERM": "dumb", "INPUTRC": os.devnull},
        start_new_session=True,
        preexec_fn=lambda: controlling(theirs),
    )
    os.close(theirs)
    try:
        yield Terminal(process, ours)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        asyncio.get_running_loop().remove_reader(ours)
        os.close(ours)


def controlling(descriptor: int) -> None:
    """Make a terminal the one whose keys send signals to this process, which must not ignore them.

    A shell without job control lets commands in its background ignore Ctrl-C.
    """
    import fcntl
    import termios

    signal.signal(signal.SIGINT, signal.SIG_DFL)
    fcntl.ioctl(descriptor, termios.TIOCSCTTY, 0)


async def interrupted(backend: ScriptedBackend, user: Terminal) -> str:
    """Press Ctrl-C until an answer stops, and return the id of its request.

    Python handles a signal that arrives just before a read only after the read, so one press may
    have no effect on a busy machine.
    """
    while True:
        user.type("\x03")
        try:
            return await asyncio.wait_for(backend.abandoned.get(), PATIENCE_S / 10)
        except TimeoutError:
            continue


@pytest.mark.skipif(sys.platform != "linux", reason="needs a pseudo-terminal of Linux")
async def test_keys_of_a_terminal_stop_an_answer_and_leave(tmp_path: Path) -> None:
    """Ctrl-C stops an answer and frees its worker, and at the prompt it discards the line. Ctrl-D
    leaves with status 0. Control characters of a model do not reach the terminal."""
    backend = ScriptedBackend()
    async with running(backends=[backend]) as gateway, terminal(gateway, tmp_path) as user:
        await user.until(">>> ")
        assert "Chat with scripted. Ctrl-C stops an answer" in user.screen
        user.type("hello\r")
        request = await request_of(backend)
        backend.emit(request, "once \x1b[2Jupon")
        await user.until("once [2Jupon")
        async with asyncio.timeout(PATIENCE_S):
            assert await interrupted(backend, user) == request.request_id
        await user.until(">>> ")
        user.type("discarded")
        await user.until("discarded")
        await user.discard_line()
        user.type("more\r")
        request = await request_of(backend)
        assert "discarded" not in prompt_of(backend, request)
        assert prompt_of(backend, request).startswith("helloonce")
        backend.emit(request, "the end", last=True)
        await user.until(">>> ")
        leaving = asyncio.create_task(user.process.wait())
        async with asyncio.timeout(PATIENCE_S):
            while not leaving.done():
                # A key between the prompt and the first read of readline has no effect.
                user.type("\x04")
                await asyncio.wait({leaving}, timeout=1.0)
        assert leaving.result() == 0
    assert "Traceback" not in user.screen
