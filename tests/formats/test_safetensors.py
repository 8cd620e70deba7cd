"""safetensors headers and folders: right ones against the `safetensors` package, wrong ones refused by name."""

from __future__ import annotations

import json
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardline.errors import ShardlineError
from shardline.formats.safetensors import (
    HEADER_BYTES_LIMIT,
    SafetensorsHeader,
    parse_header,
    read_folder,
    read_header,
)


def document(header: bytes | str | dict[str, Any], data: bytes = b"", length: int | None = None) -> bytes:
    if isinstance(header, dict):
        header = json.dumps(header)
    raw = header.encode() if isinstance(header, str) else header
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def row(dtype: str, shape: list[int], start: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


F4 = row("F32", [2, 2], 0, 16)
F4_TEXT = json.dumps(F4)
NOT_UTF8 = b'{"\xff\xfe": {"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
FIELD_TWICE = '{"a":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
OVERLAP = {"a": F4, "b": row("U8", [4], 12, 16)}
GOOD = document({"__metadata__": {"format": "pt"}, "b": row("BF16", [3], 16, 22), "a": F4}, bytes(22))


def parse(data: bytes) -> SafetensorsHeader:
    return parse_header(data, len(data))


def test_header_of_a_whole_file() -> None:
    header = parse(GOOD)
    assert header.metadata == {"format": "pt"}
    assert list(header.tensors) == ["a", "b"]
    b = header.tensors["b"]
    assert (b.dtype, b.shape, b.offset, b.nbytes, b.file) == ("BF16", (3,), header.data_offset + 16, 6, 0)
    assert header.data_offset + 22 == header.file_size == len(GOOD)


def test_scalars_empty_tensors_and_padding_spaces() -> None:
    header = parse(document(json.dumps({"s": row("I64", [], 0, 8), "e": row("F16", [0, 4], 8, 8)}) + "   ", bytes(8)))
    assert header.tensors["s"].shape == ()
    assert header.tensors["e"].nbytes == 0


def test_sub_byte_types() -> None:
    assert parse(document({"a": row("F4", [4], 0, 2)}, bytes(2))).tensors["a"].nbytes == 2
    with pytest.raises(ShardlineError, match="another size"):
        parse(document({"a": row("F4", [3], 0, 2)}, bytes(2)))


def test_names_that_look_like_keys_are_counted_right() -> None:
    header = {"__metadata__": {'k"ey': 'a": "b', "x": '{"y": 1}'}, 'odd"name: {': row("U8", [1], 0, 1)}
    assert list(parse(document(header, b"x")).tensors) == ['odd"name: {']


def test_prefix_says_how_much_is_needed() -> None:
    for size in range(len(GOOD)):
        try:
            parse_header(GOOD[:size], len(GOOD))
        except ShardlineError as error:
            assert error.details["reason"] == "incomplete"
            assert size < error.details["needed_bytes"] <= parse(GOOD).data_offset
        else:
            assert size >= parse(GOOD).data_offset


def test_files_of_the_safetensors_package(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    save_file = pytest.importorskip("safetensors.numpy").save_file
    source = {
        "x": numpy.arange(12, dtype=numpy.float32).reshape(3, 4),
        "y": numpy.arange(5, dtype=numpy.int64),
        "z": numpy.ones((2, 1, 3), numpy.float16),
    }
    path = tmp_path / "model.safetensors"
    save_file(source, path, metadata={"format": "np"})
    header, data = read_header(path), path.read_bytes()
    assert header.tensors.keys() == source.keys()
    for name, values in source.items():
        info = header.tensors[name]
        assert info.shape == values.shape
        assert data[info.offset : info.offset + info.nbytes] == values.tobytes()


HOSTILE: list[tuple[str, bytes, str, str]] = [
    ("empty", b"", "not_a_model", "empty file"),
    ("8 bytes", bytes(8), "not_a_model", "zeros"),
    ("html", b"<!DOCTYPE html><html></html>", "not_a_model", "web page"),
    ("lfs pointer", b"version https://git-lfs.github.com/spec/v1\n", "not_a_model", "git-lfs"),
    ("gguf", b"GGUF" + struct.pack("<IQQ", 3, 0, 0), "not_a_model", "a GGUF file"),
    ("zip", b"PK\x03\x04" + bytes(30), "not_a_model", "zip"),
    ("length 2^60", document("{}", length=2**60), "damaged", "1152921504606846976 bytes"),
    ("length past the end", document("{}", length=3), "damaged", "cut short"),
    ("not JSON", document("{abc}"), "damaged", "header"),
    ("two objects", document("{}{}"), "damaged", "header"),
    ("not UTF-8", document(NOT_UTF8, b"x"), "damaged", "header"),
    ("deep", document('{"a":' + "[" * 100_000 + "]" * 100_000 + "}"), "damaged", "header"),
    ("deep objects", document('{"a":' * 50_000 + "1" + "}" * 50_000), "damaged", "header"),
    ("row is a list", document({"a": []}), "damaged", "header"),
    ("unknown field", document({"a": F4 | {"x": 1}}, bytes(16)), "damaged", "header"),
    ("no offsets", document({"a": {"dtype": "F32", "shape": [1]}}, bytes(4)), "damaged", "header"),
    ("three offsets", document({"a": F4 | {"data_offsets": [0, 8, 16]}}, bytes(16)), "damaged", "header"),
    ("negative shape", document({"a": row("F32", [-1], 0, 4)}, bytes(4)), "damaged", "header"),
    ("shape of text", document({"a": row("F32", ["1"], 0, 4)}, bytes(4)), "damaged", "header"),  # type: ignore[list-item]
    ("shape of fractions", document({"a": row("F32", [1.5], 0, 6)}, bytes(6)), "damaged", "header"),  # type: ignore[list-item]
    ("shape 2^64", document({"a": row("F32", [2**64], 0, 4)}, bytes(4)), "damaged", "tensor a has the shape"),
    ("4,000 digits", document({"a": row("F32", [1], 10**4000, 0)}, bytes(4)), "damaged", "tensor a"),
    ("10,000 digits", document('{"a":{"dtype":"F32","shape":[' + "9" * 10_000 + ']}}'), "damaged", "header"),
    ("shape overflows", document({"a": row("F32", [2**32, 2**32], 0, 0)}), "damaged", "tensor a has the shape"),
    ("nine dimensions", document({"a": row("U8", [1] * 9, 0, 1)}, b"x"), "damaged", "tensor a has the shape"),
    ("metadata of numbers", document({"__metadata__": {"a": 1}}), "damaged", "header"),
    ("unknown dtype", document({"a": row("Q4", [4], 0, 2)}, bytes(2)), "newer", "tensor a has the unknown dtype"),
    ("wrong size", document({"a": row("F32", [2], 0, 4)}, bytes(4)), "damaged", "tensor a lies at [0, 4]"),
    ("end before start", document({"a": row("F32", [1], 4, 0)}, bytes(4)), "damaged", "tensor a lies at [4, 0]"),
    ("past the end", document({"a": row("F32", [8], 0, 32)}, bytes(16)), "damaged", "cut short"),
    ("bytes too many", document({"a": F4}, bytes(17)), "damaged", "belong to no tensor"),
    ("hole", document({"a": F4, "b": row("U8", [1], 17, 18)}, bytes(18)), "damaged", "a hole in front of tensor b"),
    ("hole at the start", document({"a": row("U8", [1], 1, 2)}, bytes(2)), "damaged", "a hole in front of tensor a"),
    ("overlap", document(OVERLAP, bytes(16)), "damaged", "an overlap in front of tensor b"),
    ("name twice", document(f'{{"a":{F4_TEXT},"a":{F4_TEXT}}}', bytes(16)), "damaged", "stands twice"),
    ("name twice, escaped", document(f'{{"a":{F4_TEXT},"\\u0061":{F4_TEXT}}}', bytes(16)), "damaged", "twice"),
    ("field twice", document(FIELD_TWICE, b"x"), "damaged", "twice"),
    ("metadata twice", document('{"__metadata__":{},"__metadata__":{"a":"b"}}'), "damaged", "twice"),
    ("empty name", document({"": row("U8", [1], 0, 1)}, b"x"), "damaged", "the tensor name ''"),
    ("name with escape codes", document({"a\x1b[31m": row("U8", [1], 0, 1)}, b"x"), "damaged", "printable"),
    ("long name", document({"n" * 513: row("U8", [1], 0, 1)}, b"x"), "damaged", "the tensor name"),
    ("long shape", document({"a": row("U8", [1] * 200_000, 0, 1)}, b"x"), "damaged", "too many dimensions"),
]  # fmt: skip


@pytest.mark.parametrize(("data", "reason", "words"), [row[1:] for row in HOSTILE], ids=[row[0] for row in HOSTILE])
def test_refused_by_name(data: bytes, reason: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    tracemalloc.start()
    try:
        with pytest.raises(ShardlineError) as caught:
            read_header(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert caught.value.code == "model_file_invalid"
    assert caught.value.details["reason"] == reason
    assert words in caught.value.message
    assert len(caught.value.message) < 1000
    assert peak < 16 * len(data) + (1 << 20)


def test_a_header_above_the_limit_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(document("{", length=HEADER_BYTES_LIMIT + 1))
    with path.open("r+b") as file:
        file.truncate(HEADER_BYTES_LIMIT + 100)
    tracemalloc.start()
    with pytest.raises(ShardlineError, match="the limit is"):
        read_header(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20


@given(st.binary(max_size=300))
@settings(max_examples=200, deadline=None)
def test_random_bytes(data: bytes) -> None:
    for candidate in (data, document(data), document(b"{" + data, data)):
        try:
            parse(candidate)
        except ShardlineError as error:
            assert error.code == "model_file_invalid"


@given(st.lists(st.tuples(st.integers(0, len(GOOD) - 1), st.binary(min_size=1, max_size=4)), min_size=1, max_size=4))
@settings(max_examples=400, deadline=None)
def test_mutated_headers(edits: list[tuple[int, bytes]]) -> None:
    data = bytearray(GOOD)
    for position, patch in edits:
        data[position : position + len(patch)] = patch
    for size in (len(data), len(data) + 5, len(data) - 5):
        try:
            header = parse_header(bytes(data), size)
        except ShardlineError as error:
            assert error.code == "model_file_invalid"
        else:
            assert sum(t.nbytes for t in header.tensors.values()) == size - header.data_offset


# Folders.


def write_folder(folder: Path, files: dict[str, list[str]], index: dict[str, str] | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    for file, names in files.items():
        rows = {name: row("U8", [4], 4 * i, 4 * i + 4) for i, name in enumerate(names)}
        (folder / file).write_bytes(document(rows, bytes(4 * len(names))))
    if index is not None:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return folder


ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def test_folder_with_one_file(tmp_path: Path) -> None:
    model = read_folder(write_folder(tmp_path / "m", {"model.safetensors": ["a", "b"]}))
    assert model.files == ("model.safetensors",)
    assert list(model.tensors) == ["a", "b"]
    assert model.config == {"model_type": "llama"}


def test_folder_with_an_index(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", {TWO: ["b"], ONE: ["a", "c"]}, {"b": TWO, "a": ONE, "c": ONE})
    model = read_folder(folder)
    assert model.files == (ONE, TWO)
    assert {name: model.files[info.file] for name, info in model.tensors.items()} == {"a": ONE, "c": ONE, "b": TWO}
    assert model.warnings == []


def test_tensors_beside_the_index_are_kept_with_a_warning(tmp_path: Path) -> None:
    model = read_folder(write_folder(tmp_path / "m", {ONE: ["a", "c"], TWO: ["b"]}, {"a": ONE, "b": TWO}))
    assert "c" in model.tensors
    assert model.warnings == ["1 tensors are in the files but not in model.safetensors.index.json"]


@pytest.mark.parametrize(
    ("files", "index", "words"),
    [
        ({ONE: ["a"], TWO: ["a"]}, {"a": ONE, "b": TWO}, f"tensor a stands in {ONE} and in {TWO}"),
        ({ONE: ["a"]}, {"a": ONE, "b": TWO}, f"1 of the files .* missing: {TWO}"),
        ({ONE: ["a"], TWO: ["b"]}, {"a": TWO, "b": TWO}, f"tensor 'a' is not in {TWO}"),
        ({ONE: ["a"], TWO: ["b"]}, {"a": ONE, "b": TWO, "c": TWO}, f"tensor 'c' is not in {TWO}"),
        ({ONE: ["a"]}, {"a": "../" + ONE}, "no plain safetensors file name"),
        ({ONE: ["a"]}, {"a": "/etc/passwd"}, "no plain safetensors file name"),
        ({ONE: ["a"]}, {"a": "config.json"}, "no plain safetensors file name"),
        ({ONE: ["a"]}, {}, "names no tensor"),
        ({ONE: ["a"], TWO: ["b"]}, None, f"index.json is missing .* found: {ONE}, {TWO}"),
        ({}, None, "there is no model in the folder .m.: no safetensors files"),
    ],
)
def test_folders_that_are_not_whole(
    tmp_path: Path, files: dict[str, list[str]], index: dict[str, str] | None, words: str
) -> None:
    with pytest.raises(ShardlineError, match=words) as caught:
        read_folder(write_folder(tmp_path / "m", files, index))
    assert caught.value.code == "model_file_invalid"
    assert str(tmp_path) not in caught.value.message


@pytest.mark.parametrize("content", [None, "[]", "{", "[" * 100_000, '{"weight_map": []}'])
def test_broken_json_beside_the_files(tmp_path: Path, content: str | None) -> None:
    folder = write_folder(tmp_path / "m", {"model.safetensors": ["a"]})
    target = (
        folder / "config.json"
        if content is None or "weight" not in content
        else folder / "model.safetensors.index.json"
    )
    target.unlink(missing_ok=True)
    if content is not None:
        target.write_text(content)
    with pytest.raises(ShardlineError) as caught:
        read_folder(folder)
    assert caught.value.code == "model_file_invalid"


def test_what_is_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ShardlineError, match="is not a folder"):
        read_folder(tmp_path / "absent")
