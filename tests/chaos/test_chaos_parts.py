"""The seeded schedules, the check of texts and the sums of `make soak`."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path

import pytest

from draftgate.loadgen.checking.audit import Verdict
from draftgate.loadgen.types import Record
from tests.chaos.authority import Authority
from tests.chaos.checker import Death, Outcome, Truths
from tests.chaos.faults import LANES, faults_of
from tests.chaos.machine import Machine, build_library
from tests.chaos.part import Settings, run_part
from tests.chaos.pool import Size
from tests.chaos.requests import UPSTREAM, distinct_requests, schedule
from tests.chaos.summary import passed, summary_of
from tests.chaos.upgrade import FIRST_VERSION, ROOT, UPGRADED, old_tree, run_upgrade

URL = "http://gateway"
REQUEST = distinct_requests(1)[0]


def record(text: str, verdict: Verdict = Verdict.OK, numerics_class: str = "a") -> Record:
    """Return the record of a response from 10 to 20 s."""
    metrics = {"numerics_class": numerics_class}
    ends = ("length",) if verdict is Verdict.OK else ()
    planned = REQUEST.planned(0)
    return Record(planned, 10.0, 10.0, 20.0, verdict, "", (), (text,), ends, None, metrics)


def test_a_seed_repeats_requests_and_faults() -> None:
    """A seed gives the same requests, times and faults, and another part gives others."""
    assert distinct_requests(3) == distinct_requests(3) != distinct_requests(4)
    requests = distinct_requests(3)
    once, again = (list(islice(schedule(requests, 1.0, "3/0"), 50)) for _ in range(2))
    assert once == again
    for lane in LANES:
        once, again, other = (list(islice(faults_of(lane, 3, n), 30)) for n in (0, 0, 1))
        assert once == again != other


@pytest.mark.parametrize(
    ("found", "deaths", "outcome"),
    [
        (record("abc"), [], Outcome.INTACT),
        (record("abx"), [], Outcome.ALTERED),
        (record("ab"), [], Outcome.ALTERED),
        (record("xyz", numerics_class="b"), [], Outcome.OTHER_CLASS),
        (record("ab", Verdict.CUT), [], Outcome.CUT),
        (record("b", Verdict.CUT), [Death(URL, 15.0)], Outcome.ALTERED),
        (record("ab", Verdict.CUT), [Death(URL, 15.0)], Outcome.LOST_WITH_SERVER),
        (record("ab", Verdict.CUT), [Death(URL, 25.0)], Outcome.CUT),
        (record("ab", Verdict.CUT), [Death("http://other", 15.0)], Outcome.CUT),
        (record("ab", Verdict.ERROR_EVENT), [Death(URL, 15.0)], Outcome.FAILED),
        (record("", Verdict.HTTP_STATUS), [], Outcome.FAILED),
    ],
)
def test_each_fault_of_a_stream_has_an_outcome(
    tmp_path: Path, found: Record, deaths: list[Death], outcome: Outcome
) -> None:
    """A stream is intact only with its whole text, and is excused only by a kill during it."""
    truths = Truths(tmp_path / "truths.json")
    truths.add("k", record("abc"))
    truths.write()
    for known in (truths, Truths(tmp_path / "truths.json")):
        assert known.judge("k", found, URL, UPSTREAM, deaths) is outcome


def test_a_summary_adds_the_parts() -> None:
    """The summary adds outcomes and faults, and a part fails with any bad stream or leftover."""
    none = dict.fromkeys((outcome.value for outcome in Outcome), 0)
    part = {
        "seconds": 60.0,
        "outcomes": none | {"intact": 5},
        "lost_with_server": 1,
        "refusals": 2,
        "resumes": {"failed": 2},
        "faults": [[1.0, "kill", "a"], [2.0, "kill", "b"]],
        "failures": [],
        "remains": {},
        "processes": [{"node": "edge0", "seconds": 60}, {"node": "edge0", "seconds": 90}],
    }
    assert passed(part)
    assert not passed(part | {"outcomes": none | {"cut": 1}})
    assert not passed(part | {"remains": {"a": {"in_flight": 1}}})
    found = summary_of([part, part])
    assert (found["minutes"], found["requests"], found["faults"]) == (2.0, 10, {"kill": 4})
    assert found["longest_lives"]["edge"]["seconds"] == 90


def test_a_process_has_the_clock_and_the_disk_of_its_machine(tmp_path: Path) -> None:
    """A running process sees steps of its clock at once, and its writes to files take longer.
    Monotonic time and pipes stay as they are."""
    machine = Machine(build_library(tmp_path), tmp_path / "state")
    code = f"""if True:
        import time
        while input():
            begun_s = time.monotonic()
            with open({str(tmp_path / "file")!r}, "w") as file:
                file.write("x")
            print(time.time(), time.monotonic() - begun_s, flush=True)
    """
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=machine.environment,
    ) as process:
        assert process.stdin
        assert process.stdout
        for ahead_s, write_s in ((0, 0.0), (-3600, 0.3), (20, 0.0)):
            machine.set_clock(ahead_s)
            machine.slow_writes(write_s)
            process.stdin.write("next\n")
            process.stdin.flush()
            now_s, wrote_s = map(float, process.stdout.readline().split())
            assert abs(now_s - time.time() - ahead_s) < 15.0
            assert wrote_s >= write_s
        process.stdin.write("\n")


def test_an_authority_signs_valid_and_expired_certificates(tmp_path: Path) -> None:
    """A client of the authority refuses a server with an expired certificate only."""
    authority = Authority(tmp_path)
    for expired in (False, True, False):
        certificate = authority.sign(tmp_path / "gateway", expired=expired)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate.cert, certificate.key)
        refusal = _handshake_error(context, authority.client_context)
        assert ("certificate has expired" in str(refusal)) == expired, refusal


def _handshake_error(server: ssl.SSLContext, client: ssl.SSLContext) -> ssl.SSLError | None:
    """Return why a client at 127.0.0.1 refuses a server, or None."""
    inward, outward = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (
        client.wrap_bio(inward, outward, server_hostname="127.0.0.1"),
        server.wrap_bio(outward, inward, server_side=True),
    )
    for _ in range(3):
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLError as error:
                return error
    return None


@pytest.mark.long
def test_an_upgrade_from_the_first_version_fails_no_request(tmp_path: Path) -> None:
    """All nodes of a pool change from 0.1.0 to this version, one after another, under load."""
    if subprocess.run(["git", "cat-file", "-e", FIRST_VERSION], cwd=ROOT, check=False).returncode:
        pytest.skip("the repository has no commit of 0.1.0")
    tree = old_tree(FIRST_VERSION, tmp_path)
    settings = Settings(rate_rps=1.0, size=UPGRADED, old=tree)
    found = asyncio.run(run_upgrade(settings, tmp_path))
    assert passed(found), found["details"]
    assert found["kinds"]


@pytest.mark.long
async def test_a_part_loses_and_changes_no_stream(tmp_path: Path) -> None:
    """Two minutes of `make soak` with fewer nodes lose no stream and leave nothing."""
    settings = Settings(part_s=120.0, rate_rps=0.7, size=Size(2, 2, 2))
    found = await run_part(settings, 0, tmp_path)
    assert passed(found), found["details"]
