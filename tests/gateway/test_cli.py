"""Tests of the command line as a user's shell runs it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Annotated

import pytest
import typer
from msgspec import Meta
from typer.testing import CliRunner

from draftgate.gateway.cli import app
from draftgate.gateway.cli.options import COMMON, SettingsCommand, config_from
from draftgate.gateway.config import Setting, settings
from draftgate.gateway.config.schema import PANELS

COMMAND = [sys.executable, "-m", "draftgate"]
SIM = ("run", "--backend", "sim", "draftgate-demo")


def draftgate(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess:
    """Run the command and return the completed process."""
    import os

    environ = {**os.environ, "COLUMNS": "200", **(env or {})}
    return subprocess.run(
        [*COMMAND, *arguments], capture_output=True, text=True, timeout=60, env=environ, check=False
    )


def help_page(*arguments: str, columns: int = 200, flag: str = "--help") -> str:
    """Return the help page of a command. No process starts for it."""
    done = CliRunner().invoke(app, [*arguments, flag], env={"COLUMNS": str(columns)})
    assert done.exit_code == 0
    return done.stdout


def flags_of(page: str) -> set[str]:
    """Return the flags that a help page lists."""
    return set(re.findall(r"^ +(--[a-z-]+)", page, re.MULTILINE))


@pytest.mark.parametrize("command", [("serve",), ("run",), ("config", "show")])
def test_help_shows_common_settings_and_help_all_shows_every_setting(
    command: tuple[str, ...],
) -> None:
    """`--help` lists the settings that people change first, and `--help-all` lists all."""
    short, full = (flags_of(help_page(*command, flag=flag)) for flag in ("--help", "--help-all"))
    expected = {one.flag for one in settings() if one.name != "model"}
    if command == ("run",):
        expected = {one.flag for one in settings() if one.name != "model" and not one.server}
    assert short < full
    assert expected <= full
    assert expected & short == {one.flag for one in settings() if one.name in COMMON} & expected


def test_common_settings_exist() -> None:
    """Each name in `COMMON` is a setting, or the file of settings."""
    assert {*(one.name for one in settings()), "config"} >= COMMON


def test_completion_knows_settings_and_benchmarks() -> None:
    """A shell completes commands, options and names of benchmarks."""
    for words, place, expected in (
        ("draftgate col", 1, "collect-env"),
        ("draftgate serve --max-num-s", 2, "--max-num-seqs"),
        ("draftgate bench edg", 2, "edge"),
    ):
        env = {
            "_DRAFTGATE_COMPLETE": "complete_bash",
            "COMP_WORDS": words,
            "COMP_CWORD": str(place),
        }
        done = CliRunner().invoke(app, [], env=env, prog_name="draftgate")
        assert done.stdout.split() == [expected]


def test_help_lists_the_commands_without_slow_imports() -> None:
    """The command `--help` lists all commands and imports no slow library."""
    script = (
        "import sys\nfrom draftgate.gateway.cli import app\n"
        "app(['--help'], standalone_mode=False)\n"
        "slow = {'torch', 'numpy', 'aiohttp', 'httpx', 'opentelemetry', 'redis', 'tokenizers'}\n"
        "print(sorted((slow | {'jinja2', 'rich', 'yaml'}) & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    for command in (
        "serve",
        "pull",
        "list",
        "rm",
        "chat",
        "run",
        "bench",
        "config",
        "simulate",
        "--version",
    ):
        assert command in done.stdout
    assert done.stdout.strip().endswith("[]")


def test_production_imports_no_laboratory() -> None:
    """Neither the server nor a command that runs a worker imports `draftgate.lab`."""
    script = (
        "import sys, draftgate.gateway.cli.server\nfrom draftgate.gateway.cli import app\n"
        "app(['run', 'draftgate-demo', 'x', '--backend', 'sim'], standalone_mode=False)\n"
        "assert 'draftgate.backends.sim.backend' in sys.modules\n"
        "print([name for name in sys.modules if name.startswith('draftgate.lab')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.endswith("\n[]\n")


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("serve",),
        ("run",),
        ("chat",),
        ("pull",),
        ("load",),
        ("bench",),
        ("ray", "start"),
        ("config", "show"),
    ],
    ids=" ".join,
)
def test_help_fits_80_columns_of_ascii(arguments: tuple[str, ...]) -> None:
    """Each help page fits 80 columns and contains only ASCII characters."""
    page = help_page(*arguments, columns=80)
    assert page.isascii()
    assert max(map(len, page.splitlines())) <= 80


def test_serve_help_groups_settings_in_panels() -> None:
    """The help of `serve` groups the settings under headings, without double negatives."""
    shown = help_page("serve", flag="--help-all")
    for panel in PANELS:
        assert f"\n{panel}:\n" in shown
    assert "--no-worker / --worker" in shown
    assert "--no-no-" not in shown


@pytest.mark.parametrize(
    ("arguments", "flags"),
    [
        (("load",), ("--rate", "--verify-lossless", "--html", "compare")),
        (("load", "search"), ("--share", "--slo-ttft-ms")),
        (("bench",), ("engine", "policies")),
        (("bench", "edge"), ("--json",)),
    ],
    ids=" ".join,
)
def test_help_of_a_nested_command_lists_its_flags(
    arguments: tuple[str, ...], flags: tuple[str, ...]
) -> None:
    """The help of a nested command lists the nested command's own flags."""
    page = help_page(*arguments)
    assert all(flag in page for flag in flags)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--help",),
        ("serve", "--help"),
        ("collect-env",),
        ("config", "show"),
        (*SIM, "caf\u00e9 \u2192", "--raw", "--max-tokens", "9", "--seed", "1"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_commands_work_in_a_locale_without_unicode(arguments: tuple[str, ...]) -> None:
    """Each command escapes non-ASCII output in an ASCII locale and reads arguments as UTF-8."""
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"}
    done = draftgate(*arguments, env=ascii_only)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False)
    assert done.stdout.isascii()
    if arguments[0] == "run":
        plain = draftgate(*arguments).stdout
        assert done.stdout == plain.encode("ascii", "backslashreplace").decode()


@pytest.mark.parametrize(
    ("arguments", "env", "message"),
    [
        (
            ["serve", "--port", "many"],
            {},
            "draftgate: --port: expected a whole number (given",
        ),
        (["serve"], {"DRAFTGATE_DTYPE": "x"}, "draftgate: DRAFTGATE_DTYPE: expected one of"),
        (["run", "m", "x", "--backend", "y"], {}, "draftgate: --backend: expected one of"),
        (["config", "show", "--config", "/nowhere"], {}, "draftgate: /nowhere: No such file"),
        (
            ["load", "report", "/nowhere"],
            {},
            "cannot report: /nowhere: No such file or directory\n",
        ),
        (["simulate", "--trace", "/nowhere"], {}, "draftgate: /nowhere: No such file"),
        (["bench", "luck"], {}, "draftgate: unknown benchmark 'luck'; known: engine, kernels"),
    ],
)
def test_user_error_is_one_line_and_status_2(
    arguments: list[str], env: dict[str, str], message: str
) -> None:
    """The command reports a user error in one line on stderr and exits with status 2."""
    done = draftgate(*arguments, env=env)
    assert done.returncode == 2
    assert done.stderr.startswith(message)
    assert done.stderr.count("\n") == 1


def test_missing_model_is_one_line_and_status_1() -> None:
    """The command `serve` names a missing model path on stderr and exits with status 1."""
    done = draftgate("serve", "/nowhere/model", "--backend", "sim", "--port", "0")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("draftgate: ")
    assert "/nowhere/model" in done.stderr.splitlines()[-1]


def test_missing_package_is_one_line_with_the_install_command() -> None:
    """The engine without torch exits with one line that contains the install command."""
    script = (
        "import sys; sys.modules['torch'] = None\nfrom draftgate.gateway.cli import main\n"
        "sys.argv = ['draftgate', 'run', 'draftgate-demo', 'x']\nmain()"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert done.stderr == (
        "draftgate: the backend 'engine' needs torch, which is not installed: "
        "pip install 'draftgate[engine]', "
        "or forward to other servers: draftgate serve --upstream URL\n"
    )


def test_config_show_prints_value_and_origin_of_each_setting() -> None:
    """The command `config show` prints the origin of each effective value as text and as JSON."""
    given = ("--port", "9", "--devices", "0,1", "--exact")
    done = draftgate("config", "show", *given, env={"DRAFTGATE_THREADS": "2"})
    lines = {line.split(" = ")[0].strip(): line for line in done.stdout.splitlines()}
    assert lines["port"].endswith("(--port)")
    assert lines["threads"].endswith("(DRAFTGATE_THREADS)")
    assert lines["host"].endswith("(default)")
    assert lines["devices"].split()[2:] == ["0,1", "(--devices)"]
    assert lines["exact"].split()[2:] == ["True", "(--exact)"]
    listed = json.loads(draftgate("config", "show", *given, "--json").stdout)
    assert listed["devices"] == {"value": [0, 1], "origin": "--devices"}
    assert listed.keys() == lines.keys()


def test_mistyped_flag_or_command_gets_a_suggestion() -> None:
    """The error for a mistyped flag or command suggests the nearest name."""
    for arguments, meant in (
        (("serve", "--max-num-seq", "3"), "--max-num-seqs"),
        (("serv",), "serve"),
    ):
        done = draftgate(*arguments)
        assert done.returncode == 2
        assert meant in done.stderr.partition("Error")[2]


def test_list_flag_can_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each occurrence of a list flag adds an entry, and an absent flag is None."""
    peers = Setting("peers", Annotated[tuple[str, ...], Meta()], (), "x", kind="list")
    monkeypatch.setattr("draftgate.gateway.cli.options.settings", lambda: (peers,))
    seen: list[object] = []
    monkeypatch.setattr(
        "draftgate.gateway.cli.options.effective_config",
        lambda flags, _environ, _file: seen.append(flags),
    )
    app = typer.Typer()

    @app.command(cls=SettingsCommand)
    def read_config(context: typer.Context) -> None:
        config_from(context)

    for arguments in (["--peers", "a,b", "--peers", "c"], []):
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, result.output
    assert seen == [{"peers": ["a,b", "c"]}, {"peers": None}]


def test_run_writes_text_to_stdout_and_summary_to_stderr() -> None:
    """The command `run` writes only the text to stdout, and a seed fixes the text."""
    arguments = (*SIM, "def f(x):", "--raw", "--max-tokens", "20", "--seed", "5")
    done = draftgate(*arguments)
    assert done.returncode == 0
    assert done.stdout == draftgate(*arguments, "--speculation", "off").stdout
    assert done.stdout == draftgate(*arguments, "--devices", "0,1", "--exact").stdout
    assert done.stderr.startswith("20 tokens, ")
    assert "accepted per step" in done.stderr


def test_invalid_seed_or_prompt_is_rejected_without_a_traceback() -> None:
    """A 65-bit seed and a prompt that is not UTF-8 are errors of `run` without a traceback."""
    for arguments, status in (
        (("x", "--temperature", "1", "--seed", str(1 << 64)), 2),
        (("x\udcff",), 1),
    ):
        done = draftgate(*SIM, *arguments)
        assert (done.returncode, done.stdout) == (status, "")
        assert "Traceback" not in done.stderr


def test_collect_env_prints_json_or_text() -> None:
    """The command `collect-env` describes the machine as text or JSON."""
    done = draftgate("collect-env", "--json")
    found = json.loads(done.stdout)
    assert found["python"] == sys.version.split()[0]
    assert found["cpu"]["cores"] >= 1
    assert "aiohttp" in found["packages"]
    assert "aiohttp" in draftgate("collect-env").stdout


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["m", "--served-model-name", "a", "b", "--port", "1"], ("a", "b")),
        (["m", "--served-model-name", "a", "--served-model-name", "b"], ("a", "b")),
        (["m", "--served-model-name", "a,b"], ("a", "b")),
        (["--served-model-name", "a", "m"], ("a",)),
        (["--served-model-name", "a", "b", "m"], None),
    ],
)
def test_served_names_have_vllms_syntax(
    arguments: list[str], expected: tuple[str, ...] | None
) -> None:
    """After MODEL, the option takes several names. Before MODEL, it takes one."""
    shown = CliRunner().invoke(app, ["config", "show", *arguments, "--json"])
    assert (shown.exit_code == 0) == (expected is not None), shown.output
    if expected is not None:
        settings = json.loads(shown.stdout)
        assert settings["model"]["value"] == "m"
        assert tuple(settings["served_model_name"]["value"]) == expected
