"""Tests of finding checkpoints by directory or hub name, and of the errors for other names."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from draftgate.backends.checkpoints import (
    SHIPPED_MODEL,
    SHIPPED_MODEL_ID,
    checkpoint_id,
    find_checkpoint,
)
from draftgate.backends.errors import CheckpointError
from draftgate.backends.tokenizer import Tokenizer
from tests.gguf.files import split_model, tiny_model
from tests.tokenizer import hub
from tests.tokenizer.hub import COMMIT, MODELS

MODEL = "org/model-0.1"
OFFLINE = {"HF_HUB_OFFLINE": "1"}
LOADABLE = {
    "config.json",
    "tokenizer.json",
    "chat_template.jinja",
    "additional_chat_templates/tool_use.jinja",
    "1_Pooling/config.json",
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
}


def snapshot(home: Path, repo: str = MODEL) -> Path:
    """Return the directory of a model in the cache."""
    return home / "hub" / f"models--{repo.replace('/', '--')}" / "snapshots" / COMMIT


def contents(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


def test_hub_model_is_downloaded_once(tmp_path: Path) -> None:
    """The library downloads the required files once and uses the cache without a hub later."""
    with hub.serving() as online:
        (first, by_tag, by_commit), stderr = hub.find(
            tmp_path, MODEL, f"{MODEL}@v1", f"{MODEL}@{COMMIT}", HF_ENDPOINT=online.url
        )
    assert {first, by_tag, by_commit} == {str(snapshot(tmp_path))}
    expected = {name: body for name, body in MODELS[MODEL].items() if name in LOADABLE}
    assert contents(snapshot(tmp_path)) == expected
    got = [path for method, path, _ in online.requests if method == "GET" and "/resolve/" in path]
    assert len(got) == len(set(got)) == len(LOADABLE)
    assert stderr == ""  # a server's log contains no progress bars

    (unplugged,), _ = hub.find(tmp_path, MODEL, **OFFLINE)
    (unreachable,), _ = hub.find(tmp_path, f"{MODEL}@v1", HF_ENDPOINT=online.url)
    assert unplugged == unreachable == first


def test_download_without_weights_has_only_settings(tmp_path: Path) -> None:
    """A download without weights contains only settings."""
    with hub.serving() as online:
        found, _ = hub.find(tmp_path, (MODEL, False), HF_ENDPOINT=online.url)
    assert found == [str(snapshot(tmp_path))]
    light = {name for name in LOADABLE if not name.endswith(".safetensors")}
    assert contents(Path(found[0])).keys() == light


def test_hf_token_gives_access_to_gated_model(tmp_path: Path) -> None:
    """Every request to the hub has the token of HF_TOKEN, which gives access to a gated model."""
    with hub.serving() as online:
        found, _ = hub.find(tmp_path, "org/gated", HF_ENDPOINT=online.url, HF_TOKEN="hf_good")
    assert found == [str(snapshot(tmp_path, "org/gated"))]
    assert {token for _, _, token in online.requests} == {"Bearer hf_good"}


def test_hub_errors_explain_the_solution(tmp_path: Path) -> None:
    """The error for each hub failure names the problem and its solution."""
    names = ("org/nothing", "org/gated", "org/pickles", f"{MODEL}@v9")
    with hub.serving() as online:
        found, _ = hub.find(tmp_path, *names, HF_ENDPOINT=online.url)
    unknown, gated, other, revision = found
    assert unknown.startswith(
        "error: no checkpoint: org/nothing: the name is neither a local directory nor"
    )
    assert "HF_TOKEN" in unknown
    assert "accept it on the model's page and set HF_TOKEN" in gated
    assert other.endswith("org/pickles has neither safetensors nor GGUF files")
    assert f"{MODEL}@v9: the hub has the model, but not this revision" in revision


GGUF = "org/tiny-GGUF"


def downloaded(online: hub.Hub) -> set[str]:
    """Return the files that were downloaded, without their folders."""
    return {
        path.rpartition("/")[2]
        for method, path, _ in online.requests
        if method == "GET" and "/resolve/" in path
    }


@pytest.mark.parametrize(
    ("name", "files"),
    [
        (f"hf:{GGUF}", {"tiny-Q4_K_M.gguf"}),
        (f"{GGUF}:q8_0", {"tiny-Q8_0.gguf"}),
        (f"hf:{GGUF}@v1:Q8_0", {"tiny-Q8_0.gguf"}),
        (
            f"hf:{GGUF}:BF16",
            {"tiny-BF16-00001-of-00002.gguf", "tiny-BF16-00002-of-00002.gguf"},
        ),
    ],
)
def test_quantisation_selects_the_only_file_to_download(
    name: str, files: set[str], tmp_path: Path
) -> None:
    """Only the file of the named quantisation is downloaded, or that of a usual one."""
    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    with hub.serving() as online:
        (found, light), stderr = hub.find(
            tmp_path, name, (name, False), HF_ENDPOINT=online.url, **cache
        )
        assert downloaded(online) == files
    assert found == light
    assert stderr == ""
    assert Tokenizer(Path(found)).vocab_size == 4
    assert {path.name for path in Path(found).glob("*.gguf")} == {
        file.replace("tiny-BF16", "model") if len(files) > 1 else "model.gguf" for file in files
    }
    (offline,), _ = hub.find(tmp_path, name, **OFFLINE, **cache)
    assert offline == found


def test_quantisation_that_does_not_exist_is_named(tmp_path: Path) -> None:
    """The error lists the files to choose from, before anything is downloaded."""
    with hub.serving() as online:
        (missing, plain), _ = hub.find(
            tmp_path, f"hf:{GGUF}:Q2_K", f"{MODEL}:Q8_0", HF_ENDPOINT=online.url
        )
        assert downloaded(online) == set()
    assert "no GGUF models of that name; name one of: BF16/tiny-BF16" in missing
    assert "tiny-Q8_0.gguf" in missing
    assert "mmproj" not in missing
    assert plain.endswith("has neither safetensors nor GGUF files")


def test_gguf_file_and_its_directory_are_one_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file, a directory with one model, and a directory with several of which one is usual."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    models = tmp_path / "models"
    models.mkdir()
    (models / "tiny-Q8_0.gguf").write_bytes(tiny_model())
    (models / "mmproj-tiny.gguf").write_bytes(b"")
    found = find_checkpoint(str(models / "tiny-Q8_0.gguf"))
    assert Tokenizer(found).encode("ab") == [2]
    assert find_checkpoint(str(models)) == found
    assert checkpoint_id(str(models / "tiny-Q8_0.gguf")) == "tiny-Q8_0"
    for number, data in enumerate(split_model((7, 4)), start=1):
        (models / f"other-Q4_K_M-{number:05}-of-00002.gguf").write_bytes(data)
    assert checkpoint_id(str(models / "other-Q4_K_M-00002-of-00002.gguf")) == "other-Q4_K_M"
    other = find_checkpoint(str(models / "other-Q4_K_M-00002-of-00002.gguf"))
    assert find_checkpoint(str(models)) == other != found
    (models / "third-Q4_K_M.gguf").write_bytes(tiny_model())
    with pytest.raises(CheckpointError, match=r"several GGUF.*other-Q4_K_M.*third-Q4_K_M"):
        find_checkpoint(str(models))
    (models / "model.safetensors").write_bytes(b"")
    assert find_checkpoint(str(models)) == models


def test_file_of_another_format_is_named(tmp_path: Path) -> None:
    """The error for a file that is not GGUF names the file."""
    (tmp_path / "model.safetensors").write_bytes(bytes(64))
    with pytest.raises(CheckpointError, match=r"model\.safetensors is not a GGUF file"):
        find_checkpoint(str(tmp_path / "model.safetensors"))


def test_mistyped_path_has_the_nearest_name(tmp_path: Path) -> None:
    """The error for a path that does not exist names the file that the user may mean."""
    (tmp_path / "smollm2-q4_1.gguf").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"did you mean .*/smollm2-q4_1\.gguf\?"):
        find_checkpoint(str(tmp_path / "smollm2-q41.gguf"))
    with pytest.raises(CheckpointError, match=r"did you mean draftgate-queries\?"):
        find_checkpoint("draftgate-querys")


def test_uncached_model_is_not_found_offline(tmp_path: Path) -> None:
    """The offline error mentions the cache, HF_HUB_OFFLINE and directories."""
    (offline,), _ = hub.find(tmp_path, MODEL, **OFFLINE)
    (unreachable,), _ = hub.find(tmp_path, MODEL, HF_ENDPOINT="http://127.0.0.1:1")
    for message in (offline, unreachable):
        assert message.startswith(
            f"error: no checkpoint: {MODEL}: the name is not a local directory, is not"
        )
        assert "HF_HUB_OFFLINE" in message
        assert "pass a directory" in message


def test_model_cached_by_another_program_is_found_offline(tmp_path: Path) -> None:
    """The loader finds a model in the cache that another program wrote."""
    blobs, refs = snapshot(tmp_path).parents[1] / "blobs", snapshot(tmp_path).parents[1] / "refs"
    for directory in (blobs, refs, snapshot(tmp_path)):
        directory.mkdir(parents=True)
    (refs / "main").write_text(COMMIT)
    for path in SHIPPED_MODEL.glob("*.*"):
        shutil.copy(path, blobs)
        (snapshot(tmp_path) / path.name).symlink_to(Path("../../blobs") / path.name)
    (found,), _ = hub.find(tmp_path, MODEL, **OFFLINE)
    assert found == str(snapshot(tmp_path))
    assert Tokenizer(Path(found)).vocab_size == Tokenizer(SHIPPED_MODEL).vocab_size


def test_directory_takes_precedence_over_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loader prefers a directory to a hub model with the same name."""
    (tmp_path / MODEL).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert find_checkpoint(MODEL) == Path(MODEL)
    assert checkpoint_id(MODEL) == "model-0.1"
    monkeypatch.chdir(tmp_path / MODEL)
    assert checkpoint_id(".") == "model-0.1"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (None, SHIPPED_MODEL_ID),
        ("draftgate-queries", "draftgate-queries"),
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        ("Qwen/Qwen3-0.6B@main", "Qwen/Qwen3-0.6B"),
        ("hf:Qwen/Qwen3-0.6B-GGUF:Q8_0", "Qwen/Qwen3-0.6B-GGUF:Q8_0"),
        ("/models/mine/", "mine"),
        ("models/mine-Q4_K_M.gguf", "mine-Q4_K_M"),
    ],
)
def test_model_id_for_clients(name: str | None, expected: str) -> None:
    """The model id is the hub name without its revision, or the last part of a path."""
    assert checkpoint_id(name) == expected


@pytest.mark.parametrize("name", ["nowhere", "/no/where", "./no/where", "a/b/c", "a/b@", "-a/b"])
def test_name_that_is_neither_directory_nor_hub_name_is_an_error(name: str) -> None:
    """The loader rejects other names without a request to the hub."""
    with pytest.raises(CheckpointError, match="neither a directory nor organisation/model"):
        find_checkpoint(name)


@pytest.mark.hub
def test_published_model_is_downloaded_from_the_hub() -> None:
    """The loader downloads the settings of a published model, and its template renders."""
    directory = find_checkpoint("Qwen/Qwen3-0.6B", weights=False)
    prompt = Tokenizer(directory).render_chat([{"role": "user", "content": "Hello"}])
    assert prompt.endswith("<|im_start|>assistant\n")
