"""Wrong GGUF files, one row each: refused with the right reason, naming the field, in little memory."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardline.errors import ShardlineError
from shardline.formats.gguf import KEYS_LIMIT, TENSORS_LIMIT, parse_header, read_header
from tests.support.gguf_writer import (
    LLAMA,
    Raw,
    Tensor,
    Typed,
    encode_array,
    gguf_bytes,
    llama_tensors,
    string,
)

A = Tensor("a", (32,))


def keys_only(n_tensors: int = 0, n_keys: int = 0) -> bytes:
    return struct.pack("<4sIQQ", b"GGUF", 3, n_tensors, n_keys)


def one_key(value: bytes, name: str | bytes = "k") -> bytes:
    return gguf_bytes([(name, Raw(value))])


def string_key(length: int) -> bytes:
    return one_key(struct.pack("<I", 8) + string(b"abc", length))


def with_alignment(value: object) -> bytes:
    return gguf_bytes({"general.alignment": value}, [A])


def nested(depth: int) -> bytes:
    return one_key(struct.pack("<IIQ", 9, 9, 1) + struct.pack("<IQ", 9, 1) * depth)


GOOD = gguf_bytes(LLAMA, llama_tensors())
IMPOSSIBLE = (1, 2**40, 2**60, 2**63, 2**64 - 1)
STACKED = [Tensor(f"t{i}", (8,), offset=0, data=b"") for i in range(30_000)]
BAD_ALIGNMENTS = (0, 1, 3, 4, 48, 2**17, 2**31)

HOSTILE: list[tuple[str, bytes, str, str]] = [
    # Not a model at all.
    ("html", b"<!DOCTYPE html><html>login</html>", "not_a_model", "web page"),
    ("html after blanks", b"\xef\xbb\xbf \n<HTML><body>", "not_a_model", "web page"),
    ("lfs pointer", b"version https://git-lfs.github.com/spec/v1\noid sha256:00", "not_a_model", "git-lfs pointer"),
    ("empty", b"", "not_a_model", "empty file"),
    ("three bytes", b"GGU", "not_a_model", "3 bytes"),
    ("ggml old magic", b"lmgg" + bytes(40), "not_a_model", "old GGML format"),
    ("tjgg", b"tjgg" + bytes(40), "not_a_model", "old GGML format"),
    ("GGML", b"GGML" + bytes(40), "not_a_model", "old GGML format"),
    ("zip", b"PK\x03\x04" + bytes(40), "not_a_model", "zip archive"),
    ("gzip", b"\x1f\x8b\x08" + bytes(40), "not_a_model", "gzip"),
    ("pickle", b"\x80\x02}q\x00" + bytes(40), "not_a_model", "pickle"),
    ("safetensors", struct.pack("<Q", 2) + b"{}" + bytes(40), "not_a_model", "safetensors"),
    ("json error", b'{"error": "gated repository"}', "not_a_model", "JSON"),
    ("zeros", bytes(4096), "not_a_model", "zeros"),
    ("other bytes", b"\x01\x02\x03\x04" + bytes(40), "not_a_model", "01 02 03 04"),
    # Versions and byte order.
    ("version 0", gguf_bytes({}, version=0), "damaged", "version 0"),
    ("version 1", gguf_bytes({}, version=1), "unsupported", "version 1"),
    ("version 4", gguf_bytes({}, version=4), "newer", "version 4"),
    ("version 99", gguf_bytes({}, version=99), "newer", "version 99"),
    ("version 3 swapped", gguf_bytes({}, version=0x03000000), "byte_order", "version 3, big-endian"),
    ("version noise", gguf_bytes({}, version=0xDEADBEEF), "damaged", "version"),
    # Counts that cannot be true.
    ("magic only", b"GGUF", "damaged", "file header"),
    ("8 bytes", b"GGUF" + struct.pack("<I", 3), "damaged", "file header"),
    *[(f"keys {n}", keys_only(0, n), "damaged", f"key count is {n}") for n in IMPOSSIBLE],
    *[(f"tensors {n}", keys_only(n, 0), "damaged", f"tensor count is {n}") for n in IMPOSSIBLE],
    ("4,097 keys", keys_only(0, 4097) + bytes(100_000), "unsupported", "key count is 4097, the limit is 4096"),
    ("tensors above limit", keys_only(TENSORS_LIMIT + 1) + bytes(8_000_000), "unsupported", "tensor count"),
    ("string 2^63", string_key(2**63), "damaged", "the length of key k"),
    ("string 2^64-1", string_key(2**64 - 1), "damaged", "the length of key k"),
    ("string past end", string_key(30), "damaged", "the length of key k"),
    ("string above limit", string_key((16 << 20) + 1) + bytes(17 << 20), "unsupported", "the length of key k"),
    ("u8 array 2^60", one_key(encode_array("u8", [1], 2**60)), "damaged", "array k"),
    ("u64 array 2^61", one_key(encode_array("u64", [1], 2**61)), "damaged", "array k"),
    ("string array 2^40", one_key(encode_array("string", ["a"], 2**40)), "damaged", "array k"),
    ("array above limit", one_key(encode_array("u8", [], 4_000_001)) + bytes(4_000_100), "unsupported", "array k"),
    ("last string too long", one_key(encode_array("string", ["a"])[:-9] + string("", 50)), "damaged", "array k"),
    ("string 2^63 inside", one_key(encode_array("string", [], 2) + string("", 2**63) * 2), "damaged", "string 0"),
    ("array one short", one_key(encode_array("string", ["a"] * 9, 20)), "damaged", "array k"),
    ("nested", nested(1), "unsupported", "array of arrays"),
    ("nested 10,000 deep", nested(10_000), "unsupported", "array of arrays"),
    *[
        (f"n_dims {n}", gguf_bytes({}, [Tensor("a", (1, 1, 1, 1), n_dims=n)]), "damaged", f"a has {n} dimensions")
        for n in (0, 5, 10**6, 2**31, 2**32 - 1)
    ],
    ("dim 0", gguf_bytes({}, [Tensor("a", (32, 0))]), "damaged", "tensor a has the shape"),
    ("dims overflow", gguf_bytes({}, [Tensor("a", (2**32,) * 3, data=b"")]), "damaged", "tensor a has the shape"),
    ("dims wrap to 0", gguf_bytes({}, [Tensor("a", (2**32, 2**32), data=b"")]), "damaged", "tensor a has the shape"),
    ("dims wrap to 32", gguf_bytes({}, [Tensor("a", (32, 2**59 + 1, 32), data=b"")]), "damaged", "a has the shape"),
    ("more than the file", gguf_bytes({}, [Tensor("a", (2**40,), data=b"")]), "damaged", "tensor a takes bytes"),
    # Cut files.
    ("cut by one", GOOD[:-1], "damaged", "tensor blk.1.ffn_down.weight takes bytes"),
    ("cut in half", GOOD[: len(GOOD) // 2], "damaged", "takes bytes"),
    ("cut in the header", GOOD[:700], "damaged", "cut short"),
    # Places of tensors.
    ("offset is file size", gguf_bytes({}, [Tensor("a", (8,), offset=2**20)]), "damaged", "tensor a takes bytes"),
    ("one byte past the end", gguf_bytes({}, [Tensor("a", (9,), data=bytes(32))]), "damaged", "tensor a takes bytes"),
    ("offset 2^63", gguf_bytes({}, [Tensor("a", (8,), offset=2**63)]), "damaged", "tensor a takes bytes"),
    ("offset 2^64-32", gguf_bytes({}, [Tensor("a", (8,), offset=2**64 - 32)]), "damaged", "tensor a takes bytes"),
    ("offset 2^64-64", gguf_bytes({}, [Tensor("a", (8,), offset=2**64 - 64)]), "damaged", "tensor a takes bytes"),
    ("offset 17", gguf_bytes({}, [Tensor("a", (8,), offset=17)]), "damaged", "tensor a has offset 17"),
    ("same bytes", gguf_bytes({}, [A, Tensor("b", (32,), offset=0)]), "damaged", "tensor b begins at byte"),
    ("overlap", gguf_bytes({}, [A, Tensor("b", (8,), offset=96)]), "damaged", "inside tensor a"),
    # Alignment.
    *[(f"alignment {v}", with_alignment(v), "damaged", f"general.alignment is {v}") for v in BAD_ALIGNMENTS],
    ("alignment -32", with_alignment(-32), "damaged", "general.alignment is -32"),
    ("alignment as text", with_alignment("32"), "damaged", "general.alignment is the string '32'"),
    ("alignment as bool", with_alignment(True), "damaged", "general.alignment is the bool"),
    ("alignment as array", with_alignment([32]), "damaged", "general.alignment is an array"),
    (
        "alignment twice",
        gguf_bytes([("general.alignment", 32), ("general.alignment", 64)], [A]),
        "damaged",
        "key general.alignment stands twice",
    ),
    # Names.
    ("key twice", gguf_bytes([("general.architecture", "a")] * 2), "damaged", "general.architecture stands twice"),
    ("tensor twice", gguf_bytes({}, [A, A]), "damaged", "tensor a stands twice"),
    ("empty key", gguf_bytes([("", 1)]), "damaged", "the name of key 0 has 0 bytes"),
    ("long key", gguf_bytes([("k" * 70_000, 1)]), "damaged", "the name of key 0 has 70000 bytes"),
    ("key of 2^63 bytes", keys_only(0, 1) + string("abc", 2**63) + bytes(64), "damaged", "the name of key 0"),
    ("key not UTF-8", gguf_bytes([(b"\xff\xfe", 1)]), "damaged", "not printable ASCII"),
    ("key with newline", gguf_bytes([("a\nb", 1)]), "damaged", "not printable ASCII"),
    ("tensor without name", gguf_bytes({}, [Tensor("")]), "damaged", "the name of tensor 0 has 0 bytes"),
    ("long tensor name", gguf_bytes({}, [Tensor("t" * 256)]), "damaged", "the name of tensor 0 has 256 bytes"),
    ("tensor name not UTF-8", gguf_bytes({}, [Tensor(b"\xc3\x28")]), "damaged", "not printable ASCII"),
    ("tensor name escapes", gguf_bytes({}, [Tensor("../../etc/passwd\n\x1b[31m")]), "damaged", "not printable ASCII"),
    ("name turns right to left", gguf_bytes({}, [Tensor("a\u202eb")]), "damaged", "not printable ASCII"),
    # Types and values.
    ("bool 2", one_key(struct.pack("<IB", 7, 2)), "damaged", "key k is a bool with the value 2"),
    ("bool 7 in array", one_key(struct.pack("<IIQ3B", 9, 7, 3, 0, 7, 1)), "damaged", "array of bools"),
    ("value type 13", one_key(struct.pack("<IQ", 13, 0)), "newer", "key k has value type 13"),
    ("value type 2^31", one_key(struct.pack("<IQ", 2**31, 0)), "damaged", "key k has value type"),
    ("element type 13", one_key(struct.pack("<IIQQ", 9, 13, 1, 0)), "newer", "key k has value type 13"),
    ("tensor type 255", gguf_bytes({}, [Tensor("a", type_id=255)]), "newer", "tensor a has type 255"),
    ("tensor type 2^31", gguf_bytes({}, [Tensor("a", type_id=2**31)]), "damaged", "tensor a has type"),
    ("tensor type removed", gguf_bytes({}, [Tensor("a", type_id=31)]), "unsupported", "Q4_0_4_4"),
    ("row of half blocks", gguf_bytes({}, [Tensor("a", (48,), type_id=3)]), "damaged", "tensor a has rows of 48"),
    ("30,000 tensors on the same bytes", gguf_bytes({}, STACKED, tail=bytes(64)), "damaged", "begins at byte"),
]


@pytest.mark.parametrize(("data", "reason", "words"), [row[1:] for row in HOSTILE], ids=[row[0] for row in HOSTILE])
def test_refused_by_name(data: bytes, reason: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
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
    assert len(caught.value.message) < 700
    assert peak < (60 << 20 if len(data) > 1 << 20 else 4 * len(data) + (1 << 18))


def test_many_small_keys_and_long_arrays_are_fine() -> None:
    keys: list[tuple[str, object]] = [(f"k{i}", i % 2 == 0) for i in range(KEYS_LIMIT - 2)]
    keys.append(("empty", Raw(encode_array("string", [""] * 500_000))))
    keys.append(("flags", Raw(encode_array("bool", [True] * 1_000_000))))
    data = gguf_bytes(keys)
    tracemalloc.start()
    header = parse_header(data, len(data))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(header.kv) == KEYS_LIMIT
    assert peak < 2 * len(data) + (4 << 20)


def test_strings_of_all_arrays_are_counted_together() -> None:
    one = struct.pack("<IIQ", 9, 8, 1_500_000) + bytes(8 * 1_500_000)
    with pytest.raises(ShardlineError, match="more than 4000000 strings in arrays, counted at key c"):
        parse_header(data := gguf_bytes([("a", Raw(one)), ("b", Raw(one)), ("c", Raw(one))]), len(data))


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent.gguf", Path("/dev/null")):
        with pytest.raises(ShardlineError, match="is not a file") as caught:
            read_header(path)
        assert str(tmp_path) not in caught.value.message


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    data = gguf_bytes({"k": ["x" * 100] * 50_000}, [A])
    with pytest.raises(ShardlineError) as caught:
        parse_header(data[: 1 << 20], len(data))
    assert caught.value.details["reason"] == "incomplete"
    assert caught.value.details["needed_bytes"] > 1 << 20


def refuses_or_reads(data: bytes, file_size: int) -> None:
    tracemalloc.start()
    try:
        header = parse_header(data, file_size)
    except ShardlineError as error:
        assert error.code == "model_file_invalid"
    else:
        assert all(t.offset + t.nbytes <= file_size for t in header.tensors.values())
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 4 << 20


@given(st.binary(max_size=400))
@settings(max_examples=150, deadline=None)
def test_random_bytes(data: bytes) -> None:
    refuses_or_reads(data, len(data))
    refuses_or_reads(b"GGUF\x03\x00\x00\x00" + data, len(data) + 8)


@given(
    st.lists(st.tuples(st.integers(0, len(GOOD) - 1), st.binary(min_size=1, max_size=9)), min_size=1, max_size=4),
    st.integers(0, len(GOOD)),
    st.booleans(),
)
@settings(max_examples=400, deadline=None)
def test_mutated_headers(edits: list[tuple[int, bytes]], cut: int, whole: bool) -> None:
    data = bytearray(GOOD)
    for position, patch in edits:
        position %= 2000  # the header, and little behind it
        data[position : position + len(patch)] = patch
    refuses_or_reads(bytes(data if whole else data[:cut]), len(GOOD) if whole else cut)
    refuses_or_reads(bytes(data[:cut]), len(GOOD))


@given(
    st.dictionaries(
        st.from_regex(r"[a-z.]{1,20}", fullmatch=True),
        st.one_of(
            st.booleans(),
            st.integers(-(2**31), 2**64 - 1),
            st.text(max_size=50),
            st.binary(max_size=50),
            st.lists(st.binary(max_size=20), min_size=1, max_size=10),
        ),
        max_size=10,
    )
)
@settings(max_examples=150, deadline=None)
def test_what_is_written_is_read(keys: dict[str, object]) -> None:  # fmt: skip
    keys.pop("general.alignment", None)
    data = gguf_bytes({k: Typed("i64", v) if isinstance(v, int) and v < 0 else v for k, v in keys.items()}, [A])
    header = parse_header(data, len(data))
    for key, value in keys.items():
        if isinstance(value, list):
            assert header.strings(key) == value
        elif isinstance(value, str):
            assert header.kv[key] == value.encode()
        else:
            assert header.kv[key] == value
