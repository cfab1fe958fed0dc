"""The reader of GGUF headers: sound files, split files, and hostile ones."""

from __future__ import annotations

import os
import struct
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from draftgate.backends.errors import CheckpointError
from draftgate.backends.gguf.architectures import config_fields, source_tensors
from draftgate.backends.gguf.folder import settings_folder
from draftgate.backends.gguf.reader import read_gguf
from draftgate.backends.gguf.vocabulary import Vocabulary
from tests.gguf.files import (
    ARRAY,
    BOOL,
    F32,
    NUMBERS,
    SPARE,
    STRING,
    U32,
    WIDTH,
    Pair,
    Tensor,
    header,
    split_model,
    text,
    tiny_model,
    tiny_tensors,
)

HUGE = 1 << 62
Q8_0 = 8


def written(folder: Path, data: bytes, name: str = "model.gguf") -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


def test_headers_of_the_gguf_package_are_read(tmp_path: Path) -> None:
    """Metadata of each type, and the places of tensors, are what the `gguf` package wrote."""
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_custom_alignment(64)
    for name in ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"):
        getattr(writer, f"add_{name}")(name, 7)
    writer.add_float32("float32", 0.5)
    writer.add_float64("float64", 0.1)
    writer.add_bool("bool", True)
    writer.add_string("string", "Grüße")
    writer.add_array("texts", ["a", "", "\u2581"])
    writer.add_array("numbers", [1.5, 2.5])
    weights = np.arange(96, dtype=np.float32).reshape(3, 32)
    writer.add_tensor("first.weight", weights)
    packed = gguf.quants.quantize(weights, gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("second.weight", packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    model = read_gguf(path)
    metadata = model.metadata
    assert {
        metadata.count(f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)
    } == {7}
    assert (metadata.number("float32"), metadata.number("float64")) == (0.5, 0.1)
    assert metadata.count("bool") == 1
    assert metadata.text("string") == "Grüße"
    assert metadata.texts("texts") == ("a", "", "\u2581")
    assert metadata.numbers("numbers") == (1.5, 2.5)
    first, second = model.tensors["first.weight"], model.tensors["second.weight"]
    assert (first.shape, first.kind.name) == ((3, 32), "F32")
    assert (second.shape, second.kind.name, second.num_bytes) == ((3, 32), "Q8_0", 3 * 34)
    data = path.read_bytes()
    assert data[first.offset :][: first.num_bytes] == weights.tobytes()
    assert data[second.offset :][: second.num_bytes] == packed.tobytes()


@pytest.mark.parametrize("count", [1, 3, 4096, 1 << 19])
@pytest.mark.parametrize("stated", [2, 1 << 19])
def test_number_of_experts_is_bounded(tmp_path: Path, stated: int, count: int) -> None:
    """A stack of more or fewer experts than stated, or of too many, is refused in little memory."""
    tensor = Tensor("blk.0.ffn_up_exps.weight", [1, 1, count], 0, tiny_tensors()[1])
    data = tiny_model([Pair("llama.expert_count", U32, stated)], tensors=[tensor])
    path = written(tmp_path, data)
    os.truncate(path, path.stat().st_size + 4 * count)
    model = read_gguf(path)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=rf"ffn_up_exps.weight has {count} experts, not"):
            source_tensors(model)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


def split_files(folder: Path, sizes: tuple[int, ...] = (5, 4, 2)) -> list[Path]:
    """Write the tiny model in parts."""
    return [
        written(folder, data, f"tiny-{number:05}-of-{len(sizes):05}.gguf")
        for number, data in enumerate(split_model(sizes), start=1)
    ]


def test_model_in_parts_is_one_model(tmp_path: Path) -> None:
    """Any part of a model leads to all its tensors, each in its own file."""
    paths = split_files(tmp_path)
    expected, _ = tiny_tensors()
    for path in paths:
        model = read_gguf(path)
        assert model.path == paths[0]
        assert model.tensors.keys() == {one.name for one in expected}
        assert {one.path for one in model.tensors.values()} == set(paths)
    folder = settings_folder(paths[1], tmp_path / "cache")
    assert read_gguf(folder / "model-00001-of-00003.gguf").tensors.keys() == model.tensors.keys()


def test_missing_part_is_named(tmp_path: Path) -> None:
    """The error for an incomplete model names the files to download."""
    paths = split_files(tmp_path)
    paths[2].unlink()
    with pytest.raises(CheckpointError, match=r"1 of the 3 parts.*tiny-00003-of-00003\.gguf"):
        read_gguf(paths[0])


def test_renamed_parts_are_refused(tmp_path: Path) -> None:
    """Parts in the wrong order, and a first part without its number, are errors."""
    first, second, third = split_files(tmp_path)
    swapped = second.read_bytes()
    second.write_bytes(third.read_bytes())
    third.write_bytes(swapped)
    with pytest.raises(CheckpointError, match=r"split\.no is not 1"):
        read_gguf(first)
    with pytest.raises(CheckpointError, match=r"split\.count is 3.*original names"):
        read_gguf(first.rename(tmp_path / "renamed.gguf"))


def metadata(key: str, kind: int, value: object) -> bytes:
    return tiny_model([Pair(key, kind, value)])


def described(name: str, dimensions: list[int], kind: int = Q8_0, offset: int = 0) -> bytes:
    return tiny_model(tensors=[Tensor(name, dimensions, kind, offset)])


EMBEDDING = "token_embd.weight"
NESTED = (ARRAY, [(ARRAY, [(U32, [1])])])
HOSTILE = {
    "empty": (b"", "not a GGUF file"),
    "another-format": (b"\x89PNG" + bytes(64), "not a GGUF file"),
    "cut-after-magic": (b"GGUF", "ends at 4 bytes"),
    "version-1": (header([], [], version=1), "version 1 is not supported"),
    "big-endian": (header([], [], version=3 << 24), "big-endian"),
    "many-pairs": (header([], [], counts=(0, HUGE)), "cannot have .* metadata pairs"),
    "many-tensors": (header([], [], counts=(HUGE, 0)), "cannot have .* tensors"),
    "pairs-beyond-the-end": (header([], [], counts=(0, 3)) + bytes(8), "metadata pairs"),
    "long-text": (
        header([], [], counts=(0, 1), alignment=1) + struct.pack("<Q", HUGE) + bytes(99),
        "is too long",
    ),
    "long-array": (
        header([], [], counts=(0, 1), alignment=1)
        + text("key")
        + struct.pack("<IIQ", ARRAY, U32, HUGE)
        + bytes(99),
        "cannot have .* elements of key",
    ),
    "nested-array": (metadata("key", ARRAY, NESTED), "list of lists"),
    "unknown-value": (
        header([], [], counts=(0, 1), alignment=1) + text("k") + struct.pack("<I", 99) + bytes(99),
        "unknown type 99",
    ),
    "no-text": (
        header([], [], counts=(0, 1), alignment=1) + struct.pack("<Q", 4) + b"\xff" * 64,
        "not UTF-8",
    ),
    "repeated-key": (header([Pair("k", U32, 1), Pair("k", U32, 1)], []), "key k is repeated"),
    "alignment": (metadata("general.alignment", U32, 12), "multiple of 8"),
    "alignment-of-0": (metadata("general.alignment", U32, 0), "multiple of 8"),
    "no-dimensions": (described(EMBEDDING, []), "0 dimensions"),
    "many-dimensions": (described(EMBEDDING, [32, 1, 1, 1, 1]), "5 dimensions"),
    "empty-dimension": (described(EMBEDDING, [32, 0]), "cannot have the shape"),
    "row-not-of-whole-blocks": (described(EMBEDDING, [33, 4]), "cannot have the shape"),
    "huge-dimension": (described(EMBEDDING, [32, HUGE]), "cannot have the shape"),
    "huge-product": (described(EMBEDDING, [1024, 1024, 1024, 1024]), "overlap|ends before"),
    "offset-not-aligned": (described(EMBEDDING, [32, 4], offset=8), "cannot be at 8"),
    "offset-beyond-the-end": (described(EMBEDDING, [32, 4], offset=HUGE), "cannot be at"),
    "overlap": (described(EMBEDDING, [32, 4], offset=160), "overlap"),
    "cut-data": (tiny_model()[: -SPARE - 512], "ends before tensor"),
    "long-name": (described("a" * 65, [32, 4]), "is too long"),
    "withdrawn-type": (described(EMBEDDING, [32, 4], 4), "type number 4, which is not supported"),
    "known-type": (described(EMBEDDING, [256, 4], 16), "type IQ2_XXS, which is not supported"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_damage_is_named_without_large_allocations(case: str, tmp_path: Path) -> None:
    """A hostile header is an error that names the file and the problem, in little memory."""
    data, message = HOSTILE[case]
    path = written(tmp_path, data)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=message) as caught:
            read_gguf(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert str(path) in str(caught.value)
    assert peak < 1 << 20


REFUSED = {
    "architecture": (metadata("general.architecture", STRING, "rwkv7"), "rwkv7 is not supported"),
    "tokenizer": (metadata("tokenizer.ggml.model", STRING, "t5"), "t5 is not supported"),
    "split": (metadata("tokenizer.ggml.pre", STRING, "new-bpe"), "new-bpe is not supported"),
    "no-split": (tiny_model(without=["tokenizer.ggml.pre"]), r"tokenizer\.ggml\.pre is missing"),
    "no-tokenizer": (tiny_model(without=["tokenizer.ggml.model"]), "is missing"),
    "vocabulary": (
        metadata("tokenizer.ggml.tokens", ARRAY, (STRING, ["a", "b", "ab"])),
        "must list 3 types",
    ),
    "embedding": (described(EMBEDDING, [32, 3]), "4 tokens, but token_embd.weight has 3 rows"),
    "no-embedding": (tiny_model(without=[EMBEDDING]), "token_embd.weight is missing"),
    "further-tensor": (
        tiny_model(tensors=[Tensor("blk.0.attn_sinks.weight", [32], 0, tiny_tensors()[1])]),
        r"attn_sinks.weight of shape .* is not supported",
    ),
    "quantised-vector": (
        described("blk.0.attn_q.weight", [WIDTH], Q8_0, tiny_tensors()[1]),
        "attn_q.weight of shape .* in Q8_0 is not supported",
    ),
    "merge": (
        metadata("tokenizer.ggml.merges", ARRAY, (STRING, ["a c"])),
        "'a c', which is not in the vocabulary",
    ),
    "scaling": (metadata("llama.rope.scaling.type", STRING, "new"), "new is not supported"),
    "partial-rotation": (metadata("llama.rope.dimension_count", U32, 8), "must be 16, not 8"),
    "layers": (
        metadata("llama.attention.head_count_kv", ARRAY, (U32, [1, 2])),
        "differs between layers",
    ),
    "heads": (metadata("llama.attention.head_count", U32, 0), "head_count cannot be 0"),
    "wrong-type": (metadata("llama.block_count", STRING, "1"), "must be a whole number"),
    "scale": (metadata("llama.attention.scale", F32, 0.5), r"attention\.scale is not supported"),
    "encoder": (metadata("llama.attention.causal", BOOL, False), "causal must be true"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_features_that_are_not_supported_are_named(case: str, tmp_path: Path) -> None:
    """A sound file that the engine cannot serve is refused, with the key or the tensor."""
    data, message = REFUSED[case]
    path = written(tmp_path, data)
    with pytest.raises(CheckpointError, match=message) as caught:
        settings_folder(path, tmp_path / "cache")
    assert str(path) in str(caught.value)
    assert not list((tmp_path / "cache").glob("*/config.json"))


SOUND = tiny_model()


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(
        st.tuples(st.integers(0, len(SOUND) - 1), st.binary(min_size=1, max_size=9)), max_size=4
    ),
    st.integers(0, len(SOUND)),
)
@example([], len(SOUND))
def test_changed_files_are_read_or_refused(
    tmp_path: Path, changes: list[tuple[int, bytes]], length: int
) -> None:
    """Any change of a file gives a model whose tensors are in the file, or a documented error."""
    data = bytearray(SOUND)
    for at, piece in changes:
        data[at : at + len(piece)] = piece
    path = written(tmp_path, bytes(data[:length] if changes else data))
    try:
        model = read_gguf(path)
        config_fields(model)
        Vocabulary(model).files()
        sources = source_tensors(model)
    except CheckpointError:
        return
    for source in sources.values():
        assert 0 < source.offset <= source.offset + source.rows * source.row_bytes <= len(data)


VALUES = st.one_of(
    *(
        st.tuples(st.just(kind), st.integers(0, (1 << 7 * struct.calcsize(layout)) - 1))
        for kind, layout in NUMBERS.items()
        if kind not in {F32, BOOL, 12}
    ),
    st.tuples(st.just(F32), st.floats(width=32, allow_nan=False)),
    st.tuples(st.just(BOOL), st.booleans()),
    st.tuples(st.just(STRING), st.text(st.characters(exclude_categories=["Cs"]), max_size=9)),
    st.tuples(st.just(ARRAY), st.tuples(st.just(U32), st.lists(st.integers(0, 99), max_size=5))),
)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=9), VALUES))
def test_metadata_survives_writing_and_reading(
    tmp_path: Path, values: dict[str, tuple[int, object]]
) -> None:
    """Each value of each type is read as it was written."""
    pairs = [Pair(f"x.{key}", kind, value) for key, (kind, value) in values.items()]
    found = read_gguf(written(tmp_path, header(pairs, []))).metadata
    assert list(found) == [pair.key for pair in pairs]
    for key, kind, value in pairs:
        if kind == STRING:
            assert found.text(key) == value
        elif kind == ARRAY:
            assert found.integers(key) == tuple(value[1])
        elif kind in {F32, BOOL}:
            assert found.number(key) == value
        else:
            assert found.count(key) == value  # `number` would round those above 2**53
