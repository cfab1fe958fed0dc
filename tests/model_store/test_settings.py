"""Tests of pip's settings, of pages of an index, and of the progress of a download."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftgate.backends.model_store import pip_settings
from draftgate.backends.model_store.known_models import CHAT_MODEL, DOCUMENT_TOWER, KNOWN_MODELS
from draftgate.backends.model_store.package_index import FileLink, read_links
from draftgate.backends.model_store.pip_settings import read_pip_settings
from draftgate.backends.model_store.progress import progress_shown

PAGE = "https://mirror.example/simple/tiny/"


@pytest.fixture
def environ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """An environment whose configuration files are below a temporary directory."""
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "venv"))
    monkeypatch.setattr(pip_settings, "_SYSTEM_FILE", tmp_path / "etc" / "pip.conf")
    return {"HOME": str(tmp_path / "home"), "XDG_CONFIG_DIRS": str(tmp_path / "xdg")}


def write(path: Path, *lines: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines))


def test_later_sources_override_earlier_ones(tmp_path: Path, environ: dict[str, str]) -> None:
    """The system's file, the user's, the environment's, and variables take effect in this order."""
    assert read_pip_settings(environ).indexes == ("https://pypi.org/simple",)
    places = (
        tmp_path / "xdg" / "pip" / "pip.conf",
        tmp_path / "home" / ".config" / "pip" / "pip.conf",
        tmp_path / "venv" / "pip.conf",
    )
    for number, place in enumerate(places):
        write(place, "[global]", f"index-url = https://{number}.example/simple/")
        assert read_pip_settings(environ).indexes == (f"https://{number}.example/simple",)
    environ["PIP_INDEX_URL"] = "https://v.example/simple"
    assert read_pip_settings(environ).indexes == ("https://v.example/simple",)


def test_a_named_file_replaces_that_of_the_user(tmp_path: Path, environ: dict[str, str]) -> None:
    """The variable PIP_CONFIG_FILE names a file, and the null device disables all files."""
    write(tmp_path / "home" / ".pip" / "pip.conf", "[global]", "cert = /user.pem")
    assert read_pip_settings(environ).certificate_file == "/user.pem"
    write(tmp_path / "own.conf", "[global]", "proxy = http://proxy:3128")
    named = {**environ, "PIP_CONFIG_FILE": str(tmp_path / "own.conf")}
    assert read_pip_settings(named).certificate_file is None
    assert read_pip_settings(named).proxy == "http://proxy:3128"
    assert read_pip_settings({**environ, "PIP_CONFIG_FILE": os.devnull}).certificate_file is None


def test_lists_sections_and_switches_have_the_meaning_of_pip(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    """The settings of a command override the global ones, and lists are divided at white space."""
    write(
        tmp_path / "venv" / "pip.conf",
        *("[download]", "index-url = https://d.example/100%/simple"),
        *("[global]", "index_url = https://g.example/simple", "extra-index-url ="),
        *("    https://a.example/simple/", "    https://b.example/simple"),
        *("trusted-host = a.example", "    b.example:8443"),
    )
    settings = read_pip_settings(environ)
    assert settings.indexes == (
        *("https://d.example/100%/simple", "https://a.example/simple", "https://b.example/simple"),
    )
    assert settings.trusted_hosts == {"a.example", "b.example"}
    assert read_pip_settings({**environ, "PIP_NO_INDEX": "true"}).indexes == ()
    assert read_pip_settings({**environ, "PIP_NO_INDEX": "0"}).indexes == settings.indexes
    write(tmp_path / "venv" / "pip.conf", "no section")
    assert read_pip_settings(environ).indexes == ("https://pypi.org/simple",)


def test_pip_itself_reads_the_same_settings(tmp_path: Path, environ: dict[str, str]) -> None:
    """The oracle: `pip config list` finds the same values in the same files."""
    write(
        tmp_path / "xdg" / "pip" / "pip.conf",
        *("[global]", "index-url = https://x.example/simple", "cert = /x.pem"),
    )
    write(tmp_path / "home" / ".pip" / "pip.conf", "[global]", "cert = /old.pem", "proxy = p")
    write(tmp_path / "home" / ".config" / "pip" / "pip.conf", "[global]", "cert = /new.pem")
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"],
        env={"PATH": os.defpath, **environ},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    ours = read_pip_settings(environ)
    assert f"global.index-url='{ours.indexes[0]}'" in listed.stdout
    assert f"global.cert='{ours.certificate_file}'" in listed.stdout
    assert f"global.proxy='{ours.proxy}'" in listed.stdout


def test_html_links_are_absolute_without_their_fragment() -> None:
    """Relative links refer to the page or to its base, and the fragment has the checksum."""
    page = (
        '<base href="/files/"><a href="a%2B1.whl#sha256=ABC" data-yanked>a</a>'
        '<a name="x">no link</a><a href="https://o.example/b.whl#md5=1">b</a>'
    )
    assert read_links(page, "text/html", PAGE) == [
        FileLink("a+1.whl", "https://mirror.example/files/a%2B1.whl", "abc"),
        FileLink("b.whl", "https://o.example/b.whl"),
    ]


@pytest.mark.parametrize("body", ["{", "[]", "{}", '{"files": 1}'])
def test_a_json_page_without_files_is_refused(body: str) -> None:
    """A page of another form is an error that names no Python type."""
    with pytest.raises(ValueError, match=r"Expecting|no list of files"):
        read_links(body, "application/vnd.pypi.simple.v1+json", PAGE)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda part: (
            st.lists(part, max_size=3)
            | st.dictionaries(st.sampled_from(["filename", "url", "hashes", "sha256"]), part)
        ),
        max_leaves=9,
    )
)
def test_any_entry_of_a_page_is_a_link_or_nothing(entry: object) -> None:
    """Entries of a wrong type are skipped, whatever an index sends."""
    links = read_links(json.dumps({"files": [entry]}), "application/json", PAGE)
    for link in links:
        assert isinstance(entry, dict)
        assert link.name == entry["filename"]


@given(st.text(alphabet="<>a/ =\"#'&!-hrefbs", max_size=60))
def test_any_text_is_a_page_without_an_error(text: str) -> None:
    """Damaged HTML yields links or none."""
    assert all(isinstance(link.url, str) for link in read_links(text, "text/html", PAGE))


def test_without_a_terminal_a_line_appears_every_ten_seconds() -> None:
    """A log gets a line per interval, with the speed of the interval, also after a resumption."""
    now_s, shown = [0.0], io.StringIO()
    with progress_shown("pulling tiny", 90_000_000, shown, lambda: now_s[0]) as progress:
        for second, done_bytes in ((0, 40_000_000), (9, 41_000_000), (10, 45_000_000), (19, 1)):
            now_s[0] = float(second)
            progress(done_bytes)
        now_s[0] = 20.0
        progress(75_000_000)
    assert shown.getvalue().splitlines() == [
        "pulling tiny: 45.0 of 90.0 MB, 0.5 MB/s",
        "pulling tiny: 75.0 of 90.0 MB, 3.0 MB/s",
    ]


def test_a_terminal_shows_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal shows a bar with the size of the file, which stays at the end."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    shown = Terminal()
    with progress_shown("pulling [tiny]", 90_000_000, shown) as progress:
        progress(90_000_000)
    assert "pulling [tiny]" in shown.getvalue()
    assert "90.0/90.0 MB" in shown.getvalue()


@pytest.mark.parametrize(("name", "file"), [(CHAT_MODEL, ".gguf"), (DOCUMENT_TOWER, "model")])
def test_known_models_are_complete_and_free(name: str, file: str) -> None:
    """Known models have a complete entry and a licence that allows their use."""
    model = KNOWN_MODELS[name]
    assert model.licence == "Apache-2.0"
    assert len(bytes.fromhex(model.sha256)) == 32
    assert model.wheel.endswith(".whl")
    assert model.file.endswith(file)
    assert model.wheel.startswith(model.project.replace("-", "_"))
