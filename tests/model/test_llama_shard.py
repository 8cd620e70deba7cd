"""A Shard of the llama.cpp engine is loaded as its files say, or refused with the reason."""

from __future__ import annotations

from dataclasses import replace

import gguf
import msgspec
import numpy as np
import pytest

pytest.importorskip("llama_cpp")

from shardline.errors import ShardlineError
from shardline.formats.gguf import read_header
from shardline.model import backends
from shardline.model.backend import ShardSpec
from shardline.model.llama_context import usable_cores
from shardline.model.llama_shard import load
from shardline.model.llama_source import Options
from shardline.wire.messages import TextBundle
from tests.support.llama_route import LAYERS, SMOLLM2, WIDTH, entry, result, spec

pytestmark = [pytest.mark.llama, pytest.mark.smollm2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("shards")


def refused(spec_: ShardSpec) -> ShardlineError:
    with pytest.raises(ShardlineError) as caught:
        load(spec_)
    return caught.value


def with_options(given: ShardSpec, **options) -> ShardSpec:
    return replace(given, options={**given.options, **options})


def test_what_is_told_of_whole_and_parts(folder):
    shards = [load(spec(folder, a, b, threads=1)) for a, b in ((0, LAYERS), (0, 10), (10, 20), (20, LAYERS))]
    whole, head, middle, tail = (shard.describe() for shard in shards)
    assert [(d.first, d.last, d.n_layers) for d in (whole, head, middle, tail)] == [
        (0, 30, 30), (0, 10, 30), (10, 20, 30), (20, 30, 30),
    ]  # fmt: skip
    assert len({d.engine.engine_class for d in (whole, head, middle, tail)}) == 1
    assert whole.engine.engine_class == "llama/0c1e570/Q4_1/kv-f16"
    assert (whole.engine.quantisation, whole.engine.kv_type, whole.engine.threads) == ("Q4_1", "f16", 1)
    assert whole.engine.commit is not None and whole.engine.context_tokens == 4096
    row = 4 * WIDTH
    sizes = [([t.row_bytes for t in d.layout_in.tensors], [t.row_bytes for t in d.layout_out.tensors])
             for d in (whole, head, middle, tail)]  # fmt: skip
    assert sizes == [([], []), ([], [row]), ([row], [row]), ([row], [])]
    assert [d.kv_bytes_per_token for d in (whole, head)] == [30 * 2 * 3 * 64 * 2, 10 * 2 * 3 * 64 * 2]
    matrix = read_header(SMOLLM2).tensors["token_embd.weight"].nbytes
    assert head.weight_bytes + middle.weight_bytes + tail.weight_bytes - matrix == pytest.approx(
        whole.weight_bytes, abs=200_000
    )
    assert [d.vocab_size for d in (whole, head, middle, tail)] == [49152] * 4
    assert [d.context_length for d in (whole, head, middle, tail)] == [8192] * 4
    assert whole.text_digest == head.text_digest == tail.text_digest is not None
    assert middle.text_digest is None and shards[2].text_bundle() is None
    assert all(d.rollback and d.slots == 9 for d in (whole, head, middle, tail))
    bundle = msgspec.msgpack.decode(shards[0].text_bundle(), type=TextBundle)
    ids = shards[1].tokenize("A text of 12 words\N{HORIZONTAL ELLIPSIS}", add_special=True, parse_special=True)
    assert b"".join(bundle.pieces[i] for i in ids).decode() == "A text of 12 words\N{HORIZONTAL ELLIPSIS}"
    with pytest.raises(ShardlineError, match="no tokenizer"):
        shards[2].tokenize("a", add_special=True, parse_special=True)
    for shard in shards:
        shard.unload()


def test_progress_is_heard_and_never_goes_back(folder):
    heard: list[tuple[int, int]] = []
    backends.load("llama", spec(folder, 0, LAYERS), lambda done, total: heard.append((done, total))).unload()
    assert heard[-1][0] == heard[-1][1]
    assert heard == sorted(heard) and len(set(heard)) == len(heard)


def test_a_part_without_its_file_and_a_file_of_another_part(folder):
    part = spec(folder, 10, 12)
    assert "needs a Shard file" in refused(with_options(part, shard_file=None)).message
    assert refused(ShardSpec(str(SMOLLM2), 0, 31)).code == "layers_invalid"
    assert "layers 10:12, not 10:13" in refused(replace(part, last=13)).message
    assert "another Model Artifact" in refused(with_options(part, content_id="mac1-" + "6" * 64)).message
    other = refused(with_options(part, shard_file=str(SMOLLM2)))
    assert other.code == "model_file_invalid" and "not made by a version" in other.message
    missing = refused(with_options(part, shard_file=str(folder / "missing.gguf")))
    assert missing.code == "model_file_invalid" and "missing.gguf" in missing.message


def test_a_file_that_the_library_refuses_is_told_in_its_words(tmp_path, folder):
    """The header is sound, so that it is the library that finds a tensor missing."""
    data = bytearray(SMOLLM2.read_bytes())
    at = data.index(b"blk.3.attn_norm.weight")
    data[at : at + 22] = b"blk.3.attn_nurm.weight"
    (tmp_path / "odd.gguf").write_bytes(data)
    error = refused(ShardSpec(str(tmp_path / "odd.gguf"), 0, LAYERS))
    assert error.code == "model_file_invalid"
    assert "odd.gguf" in error.message and "blk.3.attn_norm.weight" in error.message


@pytest.mark.parametrize(
    "options",
    [
        {"kv_type": "q9"}, {"tap": "ladle"}, {"sessions": 0}, {"sessions": 256}, {"rows": 0}, {"kv_tokens": 0},
        {"nonsense": 1},
    ],
)  # fmt: skip
def test_options_that_cannot_be_are_refused_by_name(options):
    with pytest.raises(ShardlineError) as caught:
        Options.of(options)
    assert caught.value.code == "setting_invalid" and next(iter(options)) in caught.value.message


def test_dtype_and_context_length(folder):
    part = spec(folder, 10, 12)
    assert refused(replace(part, dtype="bfloat16")).param == "dtype"
    for length in (0, 8193):
        assert refused(replace(part, context_length=length)).param == "context_length"
    shard = load(replace(part, context_length=100, dtype="float32"))
    assert shard.describe().context_length == 100
    shard.unload()


def test_threads_are_as_said_or_fit_the_size_of_layers(folder):
    """Two megabytes a layer: nothing that two threads could share."""
    assert usable_cores() >= 1
    for asked, threads in ((0, 1), (2, 2), (3, 3)):
        shard = load(replace(spec(folder, 10, 11), threads=asked))
        assert shard.describe().engine.threads == threads
        shard.unload()


@pytest.mark.parametrize(("kind", "parts"), [("f32", 4), ("bf16", 2), ("q8_0", 34 / 32), ("q4_0", 18 / 32)])
def test_kv_types_hold_what_they_say_and_are_a_class_of_their_own(folder, kind, parts):
    shard = load(spec(folder, 10, 11, kv_type=kind))
    told = shard.describe()
    assert told.kv_bytes_per_token == int(2 * 3 * 64 * parts)
    assert told.engine.engine_class.endswith(f"kv-{kind}")
    shard.open(0)
    rows = np.random.default_rng(0).standard_normal((3, WIDTH)).astype(np.float32).tobytes()
    assert np.isfinite(np.frombuffer(result(shard.run([entry([1, 2, 3], 0, [rows])])).hidden[0], np.float32)).all()
    shard.unload()


def test_a_model_in_several_files_is_loaded_and_a_missing_one_named(tmp_path):
    reader = gguf.GGUFReader(SMOLLM2)
    source = read_header(SMOLLM2)
    writer = gguf.GGUFWriter(
        tmp_path / "split.gguf", "llama", split_max_tensors=100, use_temp_file=False, small_first_shard=False
    )
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        kind = field.types[0]
        if kind == gguf.GGUFValueType.ARRAY:
            if field.types[-1] == gguf.GGUFValueType.STRING:
                writer.add_array(key, [bytes(t) for t in source.strings(key)])
            else:
                writer.add_array(key, list(source.numbers(key)))
        else:
            writer.add_key_value(key, field.contents(), kind)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    parts = sorted(tmp_path.glob("split-*.gguf"))
    assert len(parts) == 3
    tokens = [5, 600, 7]
    answers = []
    for path in (SMOLLM2, parts[0], parts[1]):
        shard = load(ShardSpec(str(path), 0, LAYERS, threads=1, options={"kv_tokens": 256}))
        shard.open(0)
        answers.append(result(shard.run([entry(tokens, 0)])).logits.copy())
        shard.unload()
    assert np.array_equal(answers[0], answers[1]) and np.array_equal(answers[0], answers[2])
    parts[2].unlink()
    error = refused(ShardSpec(str(parts[0]), 0, LAYERS))
    assert error.code == "model_file_invalid" and parts[2].name in error.message
