"""The plan of a Shard file: which tensors, under which names, of which bytes; and the embedding matrix behind them."""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any

import pytest

from shardline.errors import ShardlineError
from shardline.formats.gguf import GGUFHeader, parse_header
from shardline.formats.gguf_files import GGUFModel, read_model
from shardline.formats.shard_gguf import PAGE, RECIPE, Copy, ShardPlan, plan_shard, plan_vocabulary
from shardline.formats.shard_keys import TINY_VOCABULARY
from tests.support.gguf_models import CONTENT_ID, VOCABULARY, WIDTH, content, metadata, small_model, tensors
from tests.support.gguf_writer import Tensor, Typed, gguf_bytes, string

F16, F32, Q4_0, Q8_0 = 1, 0, 2, 8


def bytes_of(plan: ShardPlan, model: GGUFModel) -> bytes:
    """The file, made the simplest way."""
    files = [path.read_bytes() for path in model.paths]
    result = bytearray(plan.header)
    for piece in plan.pieces:
        if not isinstance(piece, Copy):
            result += bytes(piece.nbytes)
            continue
        data = files[piece.file][piece.offset : piece.offset + piece.nbytes]
        if piece.factor is not None:
            form = f"<{len(data) // 4}f"
            data = struct.pack(form, *(value * piece.factor for value in struct.unpack(form, data)))
        result += data
    assert len(result) == plan.nbytes
    return bytes(result)


def cut(model: GGUFModel, first: int, last: int) -> tuple[GGUFHeader, bytes]:
    data = bytes_of(plan_shard(model, first, last, content_id=CONTENT_ID), model)
    return parse_header(data, len(data)), data


def tensor(header: GGUFHeader, data: bytes, name: str) -> bytes:
    info = header.tensors[name]
    return data[info.offset : info.offset + info.nbytes]


@pytest.mark.parametrize(("first", "last"), [(0, 3), (3, 6), (6, 8), (0, 1), (7, 8)])
@pytest.mark.parametrize("tied", [True, False])
def test_layers_are_copied_and_numbered_from_0(tmp_path: Path, first: int, last: int, tied: bool) -> None:
    model = small_model(tmp_path, tied=tied)
    header, data = cut(model, first, last)
    layers = {name for name in header.tensors if name.startswith("blk.")}
    assert layers == {f"blk.{i}.{rest}.weight" for i in range(last - first) for rest in ("attn_q", "attn_q_norm")}
    for name in layers:
        number, rest = name.split(".", 2)[1:]
        source = f"blk.{int(number) + first}.{rest}"
        assert tensor(header, data, name) == content(source, model.tensors[source].shape)
    assert tensor(header, data, "output_norm.weight") == content("output_norm.weight", (WIDTH,))
    assert header.integer("llama.block_count") == last - first
    assert header.numbers("shardline.source.layers").tolist() == [first, last, 8]  # type: ignore[attr-defined]
    assert header.text("shardline.source.content_id") == CONTENT_ID
    assert header.integer("shardline.recipe") == RECIPE
    assert header.integer("shardline.source.vocab_size") == VOCABULARY
    assert header.number("shardline.input.divisor") == 1.0


def test_a_part_that_is_no_tail_has_a_tiny_vocabulary_of_zeros(tmp_path: Path) -> None:
    header, data = cut(small_model(tmp_path, tied=False), 2, 5)
    assert header.integer("llama.vocab_size") == TINY_VOCABULARY
    assert header.tensors["token_embd.weight"].shape == (WIDTH, TINY_VOCABULARY)
    assert not any(tensor(header, data, "token_embd.weight"))
    assert "output.weight" not in header.tensors
    assert "shardline.embedding.offset" not in header.kv


def test_where_the_graph_wants_one_every_part_has_an_output_matrix(tmp_path: Path) -> None:
    model = small_model(tmp_path, "qwen2moe", tied=False)
    header, data = cut(model, 2, 5)
    assert header.tensors["output.weight"].shape == (WIDTH, TINY_VOCABULARY)
    assert not any(tensor(header, data, "output.weight"))
    header, data = cut(model, 5, 8)
    assert tensor(header, data, "output.weight") == content("output.weight", (WIDTH, VOCABULARY))
    assert header.tensors["token_embd.weight"].shape == (WIDTH, VOCABULARY)
    assert header.tensors["token_embd.weight"].type_id == Q4_0
    assert not any(tensor(header, data, "token_embd.weight"))


@pytest.mark.parametrize(("width", "type_name"), [(128, "Q1_0"), (32, "Q4_0"), (8, "F16")])
def test_an_embedding_that_nobody_reads_takes_few_bytes(tmp_path: Path, width: int, type_name: str) -> None:
    keys = metadata("qwen2moe", 2, {"embedding_length": width})
    made = [
        Tensor("token_embd.weight", (width, 8)),
        Tensor("output.weight", (width, 8)),
        Tensor("output_norm.weight", (width,)),
        Tensor("blk.0.a.weight", (width,)),
        Tensor("blk.1.a.weight", (width,)),
    ]
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_bytes(keys, made))
    header, _ = cut(read_model(path), 1, 2)
    assert header.tensors["token_embd.weight"].type == type_name


@pytest.mark.parametrize("tied", [True, False])
def test_a_tail_has_its_output_matrix_once(tmp_path: Path, tied: bool) -> None:
    header, data = cut(small_model(tmp_path, tied=tied), 5, 8)
    source = "token_embd.weight" if tied else "output.weight"
    assert tensor(header, data, "token_embd.weight") == content(source, (WIDTH, VOCABULARY))
    assert "output.weight" not in header.tensors
    assert header.integer("llama.vocab_size") == VOCABULARY
    assert header.text("tokenizer.ggml.model") == "none"
    assert not any(key.startswith("tokenizer.") and key != "tokenizer.ggml.model" for key in header.kv)


@pytest.mark.parametrize("tied", [True, False])
def test_the_embedding_of_a_head_lies_behind_its_last_tensor(tmp_path: Path, tied: bool) -> None:
    model = small_model(tmp_path, "granite", keys={"embedding_scale": 12.0}, tied=tied)
    header, data = cut(model, 0, 4)
    offset = header.integer("shardline.embedding.offset")
    assert offset % PAGE == 0
    assert offset >= max(info.offset + info.nbytes for info in header.tensors.values())
    assert data[offset:] == content("token_embd.weight", (WIDTH, VOCABULARY))
    assert header.integer("shardline.embedding.type") == F32
    assert header.integer("shardline.embedding.rows") == VOCABULARY
    assert header.integer("shardline.embedding.width") == WIDTH
    assert header.number("shardline.embedding.scale") == 12.0
    assert header.integer("granite.vocab_size") == TINY_VOCABULARY
    assert len(header.warnings) == 1
    assert "behind the last tensor" in header.warnings[0]


def test_what_divides_rows_is_said_behind_the_head(tmp_path: Path) -> None:
    model = small_model(tmp_path, "gemma")
    assert cut(model, 0, 4)[0].number("shardline.input.divisor") == 1.0
    assert cut(model, 4, 8)[0].number("shardline.input.divisor") == pytest.approx(math.sqrt(WIDTH))


def test_tensors_of_all_layers(tmp_path: Path) -> None:
    frequencies = Tensor("rope_freqs.weight", (4,), data=content("rope_freqs.weight", (4,)))
    image = Tensor("mm.0.weight", (4,))
    model = small_model(tmp_path, extra=[frequencies, image])
    for first, last in ((0, 3), (3, 6), (6, 8)):
        header, data = cut(model, first, last)
        assert tensor(header, data, "rope_freqs.weight") == frequencies.payload
        assert "mm.0.weight" not in header.tensors


def test_frequencies_of_full_layers_go_where_one_is(tmp_path: Path) -> None:
    windows = {"attention.sliding_window_pattern": Typed("bool", [True, True, False, True, True, True])}
    model = small_model(tmp_path, "gemma4", 6, windows, extra=[Tensor("rope_freqs.weight", (4,))])
    assert "rope_freqs.weight" not in cut(model, 0, 2)[0].tensors
    assert "rope_freqs.weight" in cut(model, 1, 3)[0].tensors
    assert "rope_freqs.weight" not in cut(model, 3, 6)[0].tensors


def test_learned_positions_are_added_once(tmp_path: Path) -> None:
    positions = Tensor("position_embd.weight", (WIDTH, 128), data=content("position_embd.weight", (WIDTH, 128)))
    model = small_model(tmp_path, "gpt2", extra=[positions])
    header, data = cut(model, 0, 4)
    assert tensor(header, data, "position_embd.weight") == positions.payload
    header, data = cut(model, 4, 8)
    assert header.tensors["position_embd.weight"].shape == (WIDTH, 128)
    assert not any(tensor(header, data, "position_embd.weight"))


def test_a_bias_of_the_vocabulary_shrinks_with_it(tmp_path: Path) -> None:
    bias = Tensor("output.bias", (VOCABULARY,), data=content("output.bias", (VOCABULARY,)))
    model = small_model(tmp_path, "phi2", tied=False, extra=[bias])
    header, data = cut(model, 0, 4)
    assert header.tensors["output.bias"].shape == (TINY_VOCABULARY,)
    assert not any(tensor(header, data, "output.bias"))
    header, data = cut(model, 4, 8)
    assert tensor(header, data, "output.bias") == bias.payload


def test_the_final_norm_may_have_another_name(tmp_path: Path) -> None:
    norm = Tensor("token_embd_norm.weight", (WIDTH,), data=content("token_embd_norm.weight", (WIDTH,)))
    keys = {"attention.head_count_kv": [0, 2] * 4}
    model = small_model(tmp_path, "lfm2", keys=keys, extra=[norm])
    for first, last in ((0, 4), (4, 6), (6, 8)):
        header, data = cut(model, first, last)
        assert tensor(header, data, "token_embd_norm.weight") == norm.payload


def test_layers_for_prediction_are_in_no_part(tmp_path: Path) -> None:
    model = small_model(tmp_path, "qwen2", 8, {"nextn_predict_layers": 2})
    header, _ = cut(model, 4, 6)
    assert not any(name.startswith("blk.2.") for name in header.tensors)
    assert "qwen2.nextn_predict_layers" not in header.kv
    with pytest.raises(ShardlineError, match="not a range inside a model of 6 layers"):
        plan_shard(model, 4, 8, content_id=CONTENT_ID)


def test_the_scale_of_the_large_gemma_goes_into_its_norms(tmp_path: Path) -> None:
    keys = {"attention.key_length": 6, "attention.value_length": 6}
    model = small_model(tmp_path, "gemma3", 62, keys)
    header, data = cut(model, 10, 20)
    source = struct.unpack("<8f", content("blk.10.attn_q_norm.weight", (8,)))
    found = struct.unpack("<8f", tensor(header, data, "blk.0.attn_q_norm.weight"))
    assert found == pytest.approx([value * math.sqrt(6 / 8) for value in source], rel=1e-6)
    assert tensor(header, data, "blk.0.attn_q.weight") == content("blk.10.attn_q.weight", (WIDTH, 8))
    other, copied = cut(small_model(tmp_path, "gemma3", 34, keys), 10, 20)
    assert tensor(other, copied, "blk.0.attn_q_norm.weight") == content("blk.10.attn_q_norm.weight", (8,))


def test_that_scale_goes_into_f32_alone(tmp_path: Path) -> None:
    made = [
        Tensor(t.name, t.shape, type_id=F16, data=bytes(16)) if str(t.name).endswith("q_norm.weight") else t
        for t in tensors(62)
    ]
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_bytes(metadata("gemma3", 62), made))
    with pytest.raises(ShardlineError, match="only as F32") as caught:
        plan_shard(read_model(path), 0, 10, content_id=CONTENT_ID)
    assert caught.value.code == "architecture_unsupported"


def test_quantised_bytes_are_copied_as_they_are(tmp_path: Path) -> None:
    blocks = bytes(range(34)) * 6
    made = [Tensor("blk.0.w.weight", (64, 3), type_id=Q8_0, data=blocks), *tensors(2)]
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_bytes(metadata("llama", 2), made))
    header, data = cut(read_model(path), 0, 1)
    assert tensor(header, data, "blk.0.w.weight") == blocks
    assert header.tensors["blk.0.w.weight"].type == "Q8_0"


def test_another_alignment_of_the_source_does_not_matter(tmp_path: Path) -> None:
    keys = {**metadata("llama", 4), "general.alignment": 128}
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_bytes(keys, tensors(4), alignment=128))
    header, data = cut(read_model(path), 1, 3)
    assert header.alignment == 32
    assert "general.alignment" not in header.kv
    assert tensor(header, data, "blk.1.attn_q.weight") == content("blk.2.attn_q.weight", (WIDTH, 8))


def test_a_model_of_several_files(tmp_path: Path) -> None:
    made = tensors(6)
    for number, chosen in enumerate((made[:5], made[5:9], made[9:])):
        keys = {"split.no": number, "split.count": 3, "split.tensors.count": len(made)}
        stated = {**metadata("llama", 6), **keys} if number == 0 else keys
        path = tmp_path / f"model-0000{number + 1}-of-00003.gguf"
        path.write_bytes(gguf_bytes(stated, chosen))
    (tmp_path / "one").mkdir()
    one = small_model(tmp_path / "one", "llama", 6)
    several = read_model(tmp_path / "model-00002-of-00003.gguf")
    for first, last in ((0, 2), (2, 5), (5, 6)):
        (header, data), (other, wanted) = cut(several, first, last), cut(one, first, last)
        assert set(header.tensors) == set(other.tensors)
        for name in header.tensors:
            assert tensor(header, data, name) == tensor(other, wanted, name)


def test_the_same_model_gives_the_same_bytes(tmp_path: Path) -> None:
    model = small_model(tmp_path)
    plans = [plan_shard(model, 2, 6, content_id=CONTENT_ID) for _ in range(2)]
    assert plans[0] == plans[1]
    assert plan_shard(model, 2, 6, content_id="mac1-" + "0" * 64).header != plans[0].header


@pytest.mark.parametrize("order", [lambda name: 0, lambda name: name, lambda name: name[::-1]])
def test_runs_of_the_source_are_one_piece_and_the_longest_lies_in_pages_as_there(tmp_path: Path, order: Any) -> None:
    made = sorted(tensors(12), key=lambda t: order(str(t.name)))
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_bytes(metadata("llama", 12), made))
    model = read_model(path)
    for first, last in ((0, 5), (5, 10), (10, 12)):
        header, data = cut(model, first, last)
        for layer in range(first, last):
            name = f"blk.{layer - first}.attn_q.weight"
            assert tensor(header, data, name) == content(f"blk.{layer}.attn_q.weight", (WIDTH, 8))
        plan = plan_shard(model, first, last, content_id=CONTENT_ID)
        longest = plan.pieces[0]
        assert isinstance(longest, Copy)
        assert (longest.offset - len(plan.header)) % PAGE == 0
        copies = [piece for piece in plan.pieces if isinstance(piece, Copy)]
        wanted = [t for t in header.tensors.values() if any(tensor(header, data, t.name))]
        embedding = "shardline.embedding.offset" in header.kv
        assert len(copies) <= len(wanted) + embedding
        assert max(copies[: len(copies) - embedding], key=lambda piece: piece.nbytes) == longest
    if order("b") == 0:
        assert len(plan_shard(model, 5, 10, content_id=CONTENT_ID).pieces) <= 6


def test_a_long_vocabulary_is_not_in_the_header(tmp_path: Path) -> None:
    words = [f"token{i}" for i in range(20_000)]
    keys = {**metadata("llama", 4), "tokenizer.ggml.tokens": words, "tokenizer.ggml.token_type": [1] * len(words)}
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_bytes(keys, tensors(4)))
    for first, last in ((0, 2), (2, 4)):
        assert len(plan_shard(read_model(path), first, last, content_id=CONTENT_ID).header) < 8192


def test_the_whole_model_needs_no_file(tmp_path: Path) -> None:
    with pytest.raises(ShardlineError, match="the model's own file") as caught:
        plan_shard(small_model(tmp_path), 0, 8, content_id=CONTENT_ID)
    assert caught.value.code == "layers_invalid"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"drop": "token_embd.weight"}, "no tensor token_embd.weight"),
        ({"drop": "blk.3."}, "no tensor of layer 3"),
        ({"width": 16}, "embedding_length is 16, the embedding has rows of 32"),
        ({"flat": True}, "tensor token_embd.weight has the shape"),
    ],
)
def test_what_is_missing_is_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    made = [t for t in tensors(8) if "drop" not in change or not str(t.name).startswith(change["drop"])]
    if change.get("flat"):
        made[0] = Tensor("token_embd.weight", (WIDTH,))
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_bytes(metadata("llama", 8, {"embedding_length": change.get("width", WIDTH)}), made))
    with pytest.raises(ShardlineError, match=message) as caught:
        for first, last in ((0, 4), (4, 8)):
            plan_shard(read_model(path), first, last, content_id=CONTENT_ID)
    assert caught.value.code == "model_file_invalid"


def test_odd_strings_do_no_harm(tmp_path: Path) -> None:
    """Bytes that are no UTF-8 in names, and odd tokens, go through, or stay behind, but never fail."""
    keys = metadata("llama", 4) | {"general.name": b"\xff\xfe\x00", "llama.odd": b"\x80\x00\xff"}
    keys["tokenizer.ggml.tokens"] = ["\u00ff", b"\x00", b"", *(f"x{i}" for i in range(61))]
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_bytes(keys, tensors(4)))
    model = read_model(path)
    header, _ = cut(model, 0, 2)
    assert header.kv["general.name"] == b"\xff\xfe\x00"
    assert header.kv["llama.odd"] == b"\x80\x00\xff"
    vocabulary = plan_vocabulary(model)
    assert parse_header(vocabulary.header, vocabulary.nbytes).strings("tokenizer.ggml.tokens")[:3] == [
        "\u00ff".encode(),
        b"\x00",
        b"",
    ]


@pytest.mark.parametrize("value", [Typed("u64", 8), Typed("i32", 8), Typed("u8", 8), Typed("i64", 8)])
def test_counts_of_any_width_are_understood(tmp_path: Path, value: Typed) -> None:
    header, _ = cut(small_model(tmp_path, keys={"block_count": value, "leading_dense_block_count": value}), 2, 5)
    assert header.kinds["llama.block_count"] == "u32"
    assert header.integer("llama.leading_dense_block_count") == 3


def test_a_vocabulary_file_has_all_metadata_and_no_tensor(tmp_path: Path) -> None:
    model = small_model(tmp_path)
    plan = plan_vocabulary(model)
    header = parse_header(plan.header, plan.nbytes)
    assert header.kv == model.header.kv
    assert header.kinds == model.header.kinds
    assert not header.tensors
    assert string("t63") in plan.header


def test_the_official_reader_reads_a_head(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    model = small_model(tmp_path)
    path = tmp_path / "head.gguf"
    path.write_bytes(cut(model, 0, 4)[1])
    read = gguf.GGUFReader(path)
    assert len(read.tensors) == 10
    named = {t.name: t.data.tobytes() for t in read.tensors}
    assert named["blk.3.attn_q.weight"] == content("blk.3.attn_q.weight", (WIDTH, 8))
    assert read.get_field("shardline.source.layers").contents() == [0, 4, 8]
