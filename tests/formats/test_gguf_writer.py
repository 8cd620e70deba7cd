"""The encoder against our own reader and against the official one."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardline.formats.ggml_types import TYPE_IDS
from shardline.formats.gguf import Array, parse_header
from shardline.formats.gguf_writer import (
    Stored,
    TensorRow,
    array_of,
    encode_header,
    f32,
    padding,
    stored_keys,
    text,
    u32,
    u64,
)

INTEGERS = {"u8": 8, "u16": 16, "u32": 32, "u64": 64}
SIGNED = {"i8": 8, "i16": 16, "i32": 32, "i64": 64}

integers = st.one_of(
    *(st.builds(Stored, st.just(k), st.integers(0, 2**bits - 1)) for k, bits in INTEGERS.items()),
    *(
        st.builds(Stored, st.just(k), st.integers(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1))
        for k, bits in SIGNED.items()
    ),
)
floats = st.one_of(
    st.builds(f32, st.floats(width=32, allow_nan=False)),
    st.builds(Stored, st.just("f64"), st.floats(allow_nan=False)),
)
others = st.one_of(
    st.builds(Stored, st.just("bool"), st.booleans()),
    st.builds(Stored, st.just("string"), st.binary(max_size=40)),
    st.builds(array_of, st.just("i32"), st.lists(st.integers(-(2**31), 2**31 - 1), max_size=9)),
    st.builds(array_of, st.just("bool"), st.lists(st.booleans(), max_size=9)),
)
keys = st.dictionaries(st.from_regex(r"[a-z][a-z0-9_.]{0,30}", fullmatch=True), integers | floats | others, max_size=12)
rows = st.lists(
    st.tuples(st.sampled_from(["F32", "F16", "Q8_0", "Q4_K"]), st.integers(1, 3), st.integers(1, 4)), max_size=6
)


@given(keys.filter(lambda found: "general.alignment" not in found), rows)
def test_what_is_written_is_read(stored: dict[str, Stored], shapes: list[tuple[str, int, int]]) -> None:
    table = [TensorRow(f"t{i}", TYPE_IDS[name], (256 * a, b)) for i, (name, a, b) in enumerate(shapes)]
    header = encode_header(stored, table)
    data = sum(row.nbytes + padding(row.nbytes) for row in table)
    read = parse_header(header, len(header) + data)
    assert stored_keys(read) == stored
    assert list(read.kv) == list(stored)
    assert [(t.name, t.type_id, t.shape) for t in read.tensors.values()] == [tuple(row) for row in table]
    assert not table or read.data_offset == len(header)
    offset = len(header)
    for row, info in zip(table, read.tensors.values(), strict=True):
        # Stock readers refuse gaps.
        assert info.offset == offset
        assert info.nbytes == row.nbytes
        offset += row.nbytes + padding(row.nbytes)
    assert encode_header(stored, table) == header


def test_the_official_reader_agrees(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    stored = {
        "general.architecture": text("llama"),
        "llama.block_count": u32(3),
        "a.u64": u64(1 << 40),
        "a.f32": f32(0.5),
        "a.flags": array_of("bool", (True, False, True)),
        "a.words": Stored("array", Array("string", 2, b"\1\0\0\0\0\0\0\0x\2\0\0\0\0\0\0\0yz")),
    }
    table = [TensorRow("one.weight", TYPE_IDS["F32"], (5, 3)), TensorRow("two.weight", TYPE_IDS["Q8_0"], (32, 2))]
    path = tmp_path / "model.gguf"
    header = encode_header(stored, table)
    path.write_bytes(header + bytes(sum(row.nbytes + padding(row.nbytes) for row in table)))
    read = gguf.GGUFReader(path)
    found = {name: field.contents() for name, field in read.fields.items() if not name.startswith("GGUF.")}
    assert found == {
        "general.architecture": "llama",
        "llama.block_count": 3,
        "a.u64": 1 << 40,
        "a.f32": 0.5,
        "a.flags": [True, False, True],
        "a.words": ["x", "yz"],
    }
    assert [(t.name, t.tensor_type.name, [int(n) for n in t.shape]) for t in read.tensors] == [
        ("one.weight", "F32", [5, 3]),
        ("two.weight", "Q8_0", [32, 2]),
    ]
    assert int(read.tensors[0].data_offset) == len(header)


@pytest.mark.parametrize(("position", "expected"), [(0, 0), (1, 31), (31, 1), (32, 0), (4095, 1)])
def test_padding(position: int, expected: int) -> None:
    assert padding(position) == expected
    assert (position + padding(position, 4096)) % 4096 == 0


def test_sizes_of_rows_are_those_of_whole_blocks() -> None:
    assert TensorRow("a", TYPE_IDS["Q4_0"], (64, 3)).nbytes == math.prod((2, 3)) * 18
