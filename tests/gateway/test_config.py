"""Tests of settings: one struct, four sources and clear errors."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import pytest
from msgspec import Meta

from draftgate.backends.worker_config import WorkerConfig
from draftgate.gateway.cli.options import config_as_json, config_as_text
from draftgate.gateway.config import ConfigError, ServeConfig, Setting, effective_config, settings
from draftgate.lab.reference import PAGES
from tests.upstream_settings import at

ROOT = Path(__file__).resolve().parents[2]
PEERS = Setting("peers", Annotated[tuple[str, ...], Meta()], (), "Peers", kind="list")
KEY = Setting("key", Annotated[str, Meta(min_length=9)], "", "Key", secret=True)


def test_flag_overrides_environment_file_and_default(tmp_path: Path) -> None:
    """A flag overrides the environment, the file and the default, and each value has an origin."""
    file = tmp_path / "node.yaml"
    file.write_text("port: 1\nthreads: 3\nkv-bytes: 2MiB\ndtype: float32\n")
    environ = {"DRAFTGATE_PORT": "2", "DRAFTGATE_THREADS": "4"}
    found = effective_config({"port": "3", "threads": None}, environ, str(file))
    config, origins = found.config, found.origins
    assert (config.port, config.threads, config.kv_bytes, config.dtype) == (
        3,
        4,
        2 << 20,
        "float32",
    )
    assert config.max_num_seqs is None
    assert origins["port"] == "--port"
    assert origins["threads"] == "DRAFTGATE_THREADS"
    assert origins["kv_bytes"] == f"{file}: kv_bytes"
    assert origins["max_num_seqs"] == "default"


def test_limits_of_a_step_depend_on_the_device_unless_they_are_set() -> None:
    """A GPU has larger defaults than a CPU, and a set limit holds on both."""
    default, chosen = WorkerConfig(), WorkerConfig(max_num_seqs=3, max_step_tokens=16)
    assert default.step_limits("cpu") == (64, 512)
    assert default.step_limits("cuda") == (256, 2048)
    assert chosen.step_limits("cpu") == chosen.step_limits("cuda") == (3, 16)


def test_environment_can_name_the_file(tmp_path: Path) -> None:
    """The variable `DRAFTGATE_CONFIG` names the settings file."""
    file = tmp_path / "node.yaml"
    file.write_text("port: 17\n")
    assert effective_config({}, {"DRAFTGATE_CONFIG": str(file)}).config.port == 17


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"port": "70000"}, "--port: expected a whole number <= 65535"),
        ({"port": "-1"}, "--port: expected a whole number >= 0"),
        ({"port": "http"}, "--port: expected a whole number"),
        ({"max_num_seqs": "0"}, "--max-num-seqs: expected a whole number >= 1"),
        ({"kv_bytes": "lots"}, "--kv-bytes: expected a size in bytes"),
        ({"kv_bytes": "-5MiB"}, "--kv-bytes: expected a size in bytes"),
        ({"sim_acceptance": "1.5"}, "--sim-acceptance: expected a number <= 1"),
        ({"sim_acceptance": "nan"}, "--sim-acceptance"),
        ({"drain_timeout_s": "inf"}, "--drain-timeout-s: expected a finite number"),
        ({"dtype": "float64"}, "--dtype: expected one of auto, float32, bfloat16, float16"),
        ({"verify": "hope"}, "--verify: expected one of coupled, rejection"),
        ({"device": "tpu"}, "--device: expected one of auto, cpu, cuda"),
        ({"devices": "0,0"}, "--devices: expected distinct indices of 0 or more, such as 0,1"),
        ({"devices": "-1"}, "--devices: expected distinct indices"),
        ({"devices": ""}, "--devices: expected distinct indices"),
        ({"devices": "cpu"}, "--devices: expected distinct indices"),
        (
            {"upstream": "localhost:8001"},
            "--upstream: expected an address such as http://127.0.0.1",
        ),
        ({"upstream": "http://a,http://a/"}, "--upstream: expected distinct addresses"),
        ({"upstream": "http://a,,"}, "--upstream: expected texts separated by commas"),
        ({"upstream_api_key_env": "sk-1"}, "--upstream-api-key-env: expected the name of an env"),
        ({"allowed_hosts": "a.example:80"}, "--allowed-hosts: expected host names such as"),
        ({"cors_origins": "a.example"}, "--cors-origins: expected origins such as https://"),
        ({"cors_origins": "https://a.example/x"}, "--cors-origins: expected origins"),
        ({"cors_origins": "*"}, "--cors-origins: expected origins"),
        ({"upstream_concurrency": "-1"}, "--upstream-concurrency: expected a whole number >= 0"),
        ({"exact": "perhaps"}, "--exact: expected true or false"),
        ({"gpu_memory_utilization": "0"}, "--gpu-memory-utilization: expected a number > 0"),
        ({"gpu_memory_utilization": "1.1"}, "--gpu-memory-utilization: expected a number <= 1"),
        ({"backend": "cloud"}, "--backend: expected one of"),
        ({"speculation": "fixed:0"}, "--speculation: fixed:K needs K from 1 to 64"),
        ({"batching": "fixed:0"}, "--batching: fixed:TOKENS needs 1 token or more"),
        ({"batching": "fair"}, "--batching: unknown batching policy"),
        ({"speculation": "psychic"}, "--speculation: unknown speculation policy"),
        ({"log_level": "loud"}, "--log-level: expected one of"),
        ({"log_format": "xml"}, "--log-format: expected one of line, json"),
        ({"otlp_endpoint": "localhost:4318"}, "--otlp-endpoint: expected an address such as"),
        ({"otlp_endpoint": "grpc://localhost"}, "--otlp-endpoint: expected an address such as"),
        ({"otlp_endpoint": "http://a:b"}, "--otlp-endpoint: expected an address such as"),
    ],
)
def test_bad_value_is_one_line_that_names_its_source(
    flags: dict[str, object], message: str
) -> None:
    """The error for a bad value is one line with the setting, its source and the reason."""
    with pytest.raises(ConfigError) as caught:
        effective_config(flags, {})
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("prot: 1\n", "unknown key 'prot'; did you mean 'port'?"),
        ("max-num-seq: 1\n", "unknown key 'max_num_seq'; did you mean 'max_num_seqs'?"),
        ("zzz: 1\n", "unknown key 'zzz'; known: admission, "),
        ("model: 5\n", "model: expected a string"),
        ("host: true\n", "host: expected a string"),
        ("port: null\n", "port: expected a whole number"),
        ("port: 80.5\n", "port: expected a whole number"),
        ("exact: perhaps\n", "exact: expected true or false"),
        ("sim_acceptance: [1]\n", "sim_acceptance: expected a number"),
        ("- port\n", "expected a mapping of settings"),
        ("port: [1\n", "not YAML, line 2: expected ',' or ']', but got '<stream end>'"),
        ("host: a\nport:\t- 1\n", "not YAML, line 2: found character '\\t' that cannot start"),
        ("host: a\nkey: *sk-secret\n", "not YAML, line 2: found undefined alias '...'"),
        ("host: a\nport: \x07\n", "not YAML, line 2: special characters are not allowed"),
        ("port: many\n", "port: expected a whole number"),
        ("port: true\n", "port: expected a whole number"),
        ("devices: true\n", "devices: expected distinct indices"),
        ("devices: [0, 0]\n", "devices: expected distinct indices"),
    ],
)
def test_bad_file_is_one_line_that_names_the_file(
    tmp_path: Path, content: str, message: str
) -> None:
    """The error for a bad settings file is one line that names the file and the problem."""
    file = tmp_path / "node.yaml"
    file.write_text(content)
    with pytest.raises(ConfigError) as caught:
        effective_config({}, {}, str(file))
    assert str(caught.value).startswith(str(file))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_bare_off_in_yaml_is_the_policy_off(tmp_path: Path) -> None:
    """The file reader turns YAML's false for a bare `off` into the policy `off`."""
    file = tmp_path / "node.yaml"
    file.write_text("speculation: off\n")
    assert effective_config({}, {}, str(file)).config.speculation == "off"


def test_a_missing_file_is_an_error() -> None:
    """A missing settings file raises an error."""
    with pytest.raises(ConfigError, match="No such file"):
        effective_config({}, {}, "/nowhere/node.yaml")


@pytest.mark.parametrize(
    ("text", "size"),
    [("1024", 1024), ("512MiB", 512 << 20), ("1GiB", 1 << 30), ("2 gb", 2 * 10**9), ("1.5k", 1500),
     ("9" * 400, int("9" * 400))],
)  # fmt: skip
def test_sizes_take_units(text: str, size: int) -> None:
    """A size may have a binary or decimal unit in upper or lower case."""
    assert effective_config({"kv_bytes": text}, {}).config.kv_bytes == size


def test_hosts_and_origins_are_lists_in_lower_case() -> None:
    """Names and origins may be repeated flags or one text with commas, in any case."""
    environ = {"DRAFTGATE_CORS_ORIGINS": "https://A.example/, http://b:3000"}
    config = effective_config({"allowed_hosts": ["A.example,b", "[::1]"]}, environ).config
    assert config.allowed_hosts == ("a.example", "b", "[::1]")
    assert config.cors_origins == ("https://a.example", "http://b:3000")
    empty = effective_config({}, {"DRAFTGATE_CORS_ORIGINS": ""}).config
    assert empty.cors_origins == ()


def test_every_setting_has_a_flag_a_variable_and_help() -> None:
    """Every field of the settings struct has a flag, a variable and a help text."""
    found = settings()
    assert sorted(s.name for s in found) == sorted(ServeConfig.__struct_fields__)
    assert all(s.help for s in found)
    assert len({s.flag for s in found}) == len({s.variable for s in found}) == len(found)


def test_worker_config_has_the_values_of_the_settings() -> None:
    """The worker's configuration takes the values of the settings with the same names."""
    config = effective_config({"model": "~/m", "threads": "2", "kv_bytes": "5MiB"}, {}).config
    (worker,) = config.worker_configs()
    assert worker.model == "~/m"
    assert (worker.threads, worker.kv_bytes) == (2, 5 << 20)
    derived = {"device_index", "num_workers", "model_id", "memory_share", "acceptance_cache"}
    own = set(WorkerConfig.__struct_fields__) - derived
    assert own <= set(ServeConfig.__struct_fields__)
    assert ServeConfig().worker_configs() == (WorkerConfig(acceptance_cache=True),)


def test_each_device_gets_a_worker_and_its_share_of_the_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The setting `--devices 2,0` starts two workers in this order, which share the cores."""
    monkeypatch.setattr("draftgate.gateway.config.schema._usable_cores", lambda: 5)
    config = effective_config({"devices": "2, 0"}, {}).config
    assert [w.device_index for w in config.worker_configs()] == [2, 0]
    assert {w.threads for w in config.worker_configs()} == {2}
    many = effective_config({"devices": ",".join(map(str, range(8)))}, {}).config
    assert {w.threads for w in many.worker_configs()} == {1}
    chosen = effective_config({"devices": "0,1", "threads": "3"}, {}).config
    assert {w.threads for w in chosen.worker_configs()} == {3}


@pytest.mark.parametrize(("content", "found"), [("3", (3,)), ("0,1", (0, 1)), ("[1, 0]", (1, 0))])
def test_devices_in_yaml_can_be_a_number_a_text_or_a_list(
    tmp_path: Path, content: str, found: tuple[int, ...]
) -> None:
    """The file reader accepts device indices as a number, a text or a list."""
    file = tmp_path / "node.yaml"
    file.write_text(f"devices: {content}\n")
    assert effective_config({}, {}, str(file)).config.devices == found


def test_flag_can_turn_a_boolean_off() -> None:
    """A flag turns off a setting that the environment turns on."""
    environ = {"DRAFTGATE_EXACT": "true"}
    assert effective_config({}, environ).config.exact is True
    assert effective_config({"exact": False}, environ).config.exact is False


@pytest.mark.parametrize(
    ("variable", "message"),
    [
        ("DRAFTGATE_MAX_NUM_SEQ", "did you mean 'DRAFTGATE_MAX_NUM_SEQS'?"),
        ("DRAFTGATE_XYZ", "known: DRAFTGATE_ADMISSION, "),
    ],
)
def test_unknown_draftgate_variable_is_an_error(variable: str, message: str) -> None:
    """The error for an unknown `DRAFTGATE_` variable suggests the nearest variable."""
    with pytest.raises(ConfigError) as caught:
        effective_config({}, {variable: "1"})
    assert str(caught.value).startswith(f"unknown variable {variable!r}; {message}")


def test_the_variable_of_the_instruction_set_is_known() -> None:
    """The settings accept `DRAFTGATE_CPU_ISA`, which only the engine reads."""
    assert effective_config({}, {"DRAFTGATE_CPU_ISA": "avx2"}).config == ServeConfig()


def test_service_variables_of_kubernetes_are_ignored() -> None:
    """The settings ignore the variables that Kubernetes sets for a service called `draftgate`."""
    environ = {
        "DRAFTGATE_SERVICE_HOST": "10.0.0.1",
        "DRAFTGATE_SERVICE_PORT": "80",
        "DRAFTGATE_SERVICE_PORT_HTTP": "80",
        "DRAFTGATE_PORT": "tcp://10.0.0.1:80",
        "DRAFTGATE_PORT_80_TCP": "tcp://10.0.0.1:80",
        "DRAFTGATE_PORT_80_TCP_PROTO": "tcp",
        "DRAFTGATE_PORT_80_TCP_PORT": "80",
        "DRAFTGATE_PORT_80_TCP_ADDR": "10.0.0.1",
        "DRAFTGATE_WEB_SERVICE_HOST": "10.0.0.1",
        "DRAFTGATE_WEB_PORT": "tcp://10.0.0.1:80",
        "DRAFTGATE_WEB_PORT_80_TCP_PORT": "80",
    }
    assert effective_config({}, environ).config == ServeConfig()
    with pytest.raises(ConfigError, match="DRAFTGATE_PORT: expected a whole number"):
        effective_config({}, {"DRAFTGATE_PORT": "http"})
    with pytest.raises(ConfigError, match="unknown variable 'DRAFTGATE_WEB_PORT'"):
        effective_config({}, {"DRAFTGATE_WEB_PORT": "80"})


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("http://a, http://b", ("http://a", "http://b")),
        ("", ()),
        (["http://a?x=1,2"], ("http://a?x=1", "2")),
        (["a", "b, c"], ("a", "b", "c")),
        ([""], ()),
        (" ", ()),
        ([], ()),
    ],
)
def test_list_is_a_text_with_commas_or_a_list(given: object, found: tuple[str, ...]) -> None:
    """A setting reads a text with commas and a list alike, and a comma always separates."""
    assert PEERS.read(given, "x") == found


@pytest.mark.parametrize("given", ["a,,b", ",", "a,", ["a", ""], [1], 5, [["a"]], {"a": 1}])
def test_value_that_is_not_a_list_of_texts_is_rejected(given: object) -> None:
    """A list setting rejects empty entries and entries that are not texts."""
    with pytest.raises(ConfigError, match=r"^--peers: expected"):
        PEERS.read(given, "--peers")


def test_secret_is_never_shown() -> None:
    """Listings and error messages mask a secret."""
    assert KEY.shown("hush-hush-hush") == KEY.public("hush-hush-hush") == "********"
    assert KEY.shown(None) == "-"
    with pytest.raises(ConfigError) as caught:
        KEY.read("hush", "--key")
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize("name", PAGES)
def test_generated_reference_pages_are_current(name: str) -> None:
    """Each committed reference page equals the generated page."""
    assert (ROOT / "docs" / "reference" / name).read_text(encoding="utf-8") == PAGES[name]()


def test_every_default_is_a_valid_value() -> None:
    """Every default satisfies the bounds, choices and type of its setting."""
    for setting in settings():
        if setting.default is not None:
            given = ",".join(map(str, setting.default)) if setting.kind == "indices" else None
            assert setting.read(given or setting.default, setting.flag) == setting.default


def test_each_upstream_becomes_a_worker(tmp_path: Path) -> None:
    """Each upstream becomes a worker, whether a flag, the file or the environment names it."""
    file = tmp_path / "node.yaml"
    file.write_text("upstream: [http://a:1/v1, https://b]\n")
    expected = ("http://a:1", "https://b")
    for flags, environ, path in (
        ({"upstream": ["http://a:1/v1", "https://b/"]}, {}, None),
        ({}, {"DRAFTGATE_UPSTREAM": "http://a:1/v1, https://b"}, None),
        ({}, {}, str(file)),
    ):
        config = effective_config(flags, environ, path).config
        assert config.upstream == at(*expected)
        assert tuple(worker.upstream.url for worker in config.worker_configs()) == expected
    (single,) = ServeConfig(upstream=at("http://a"), upstream_concurrency=9).upstreams()
    assert (single.url, single.name, single.concurrency) == ("http://a", "upstream-1", 9)


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("redis://h:1/2", "redis://h:1/2"),
        ("redis://user:hush@h/0", "redis://********@h/0"),
        ("rediss+sentinel://:hush@a,b/service", "rediss+sentinel://********@a,b/service"),
        ("redis://h?password=hush&ssl_ca_certs=f", "redis://h?password=********&ssl_ca_certs=f"),
        (
            "redis+sentinel://h/s?sentinel_password=hush",
            "redis+sentinel://h/s?sentinel_password=********",
        ),
    ],
)
def test_password_of_the_store_is_never_shown(address: str, shown: str) -> None:
    """Listings mask the password of the store and show the rest of the address."""
    effective = effective_config({"join": address}, {})
    assert effective.config.join == address
    for listing in (config_as_text(effective), config_as_json(effective)):
        assert shown in listing
        assert "hush" not in listing


@pytest.mark.parametrize(
    "address", ["http://:hush@h", "redis://:hu@sh/hush@h/x", ":hush@h", "redis://:hush@h:port/0"]
)
def test_bad_address_of_the_store_is_masked_in_the_error(address: str) -> None:
    """The error for a bad store address names the setting and masks the password."""
    with pytest.raises(ConfigError, match="--join: expected the address of a Redis") as caught:
        effective_config({"join": address}, {})
    assert "hu" not in str(caught.value).partition("given:")[2]


def test_pool_names_have_only_plain_characters() -> None:
    """The setting rejects pool names with characters that Redis keys cannot contain."""
    assert effective_config({"pool": "eu-1.blue_2"}, {}).config.pool == "eu-1.blue_2"
    for name in ("", "a b", "a{b}", "a:b", "x" * 65):
        with pytest.raises(ConfigError, match="--pool: expected a name of letters"):
            effective_config({"pool": name}, {})
