"""The PyTorch engine on a real GGUF file: exact against transformers on the same weights, whole and cut."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch
import transformers
from transformers.initialization import no_init_weights
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from shardline.cli.demo_model import demo_model
from shardline.formats.gguf import read_header
from shardline.formats.gguf_files import read_model
from shardline.model.backend import ShardSpec
from shardline.model.self_test import self_test
from shardline.model.torch_backend import load
from shardline.model.torch_gguf import config_of
from shardline.wire.messages import TextBundle
from tests.model.test_torch_weights import peak_memory
from tests.support.torch_models import Route, entry, equal, reference_greedy, reference_logits, result

pytestmark = [pytest.mark.torch, pytest.mark.smollm2, pytest.mark.timeout(180)]
"""transformers takes 10 s of CPU time to read the file, and more where others use the machine too."""

FILE = demo_model()
LAYERS = 30
CHAT = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def reference():
    """transformers' own reading of the file, weights and configuration: slow, and it takes the whole model."""
    torch.set_num_threads(1)
    with torch.device("meta"):  # for its parameter names; what it is built from is compared below
        empty = transformers.AutoModelForCausalLM.from_config(config_of(read_model(FILE)))
    found = load_gguf_checkpoint(FILE, return_tensors=True, model_to_load=empty)
    config = transformers.AutoConfig.for_model(found["config"].pop("model_type"), **found["config"])
    with no_init_weights():
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
    lost = model.load_state_dict(found["tensors"], strict=False)
    assert lost.missing_keys == ["lm_head.weight"] and not lost.unexpected_keys
    model.tie_weights()
    return model


@pytest.fixture(scope="module")
def whole():
    return Route(FILE, layers=LAYERS)


@pytest.fixture(scope="module")
def split():
    return Route(FILE, (10, 20), layers=LAYERS)


@pytest.mark.long
def test_weights_and_configuration_are_those_of_transformers(reference, whole):
    (shard,) = whole.shards
    ours = dict(shard._shard._model.state_dict())
    for name, values in reference.state_dict().items():
        assert torch.equal(ours.pop(name), values), name
    assert not ours
    theirs, config = reference.config.to_dict(), shard._shard._model.config.to_dict()
    differing = {key for key in theirs if theirs[key] != config.get(key)}
    assert differing <= {"_model_name_or_path", "dtype"}


def test_one_two_and_three_shards_give_the_bits_of_transformers(reference, whole, split):
    prompt = whole.shards[0].tokenize(CHAT, add_special=True, parse_special=True)
    chunks = [prompt[:9], prompt[9:], [260], [1909]]
    expected = whole.run(chunks)
    assert np.array_equal(whole.run([prompt])[0], reference_logits(reference, prompt))
    assert equal(split.run(chunks), expected)
    two = Route(FILE, (15,), layers=LAYERS)
    assert equal(two.run(chunks), expected)


def test_greedy_text_is_that_of_generate(reference, whole, split):
    (shard,) = whole.shards
    prompt = shard.tokenize(CHAT, add_special=True, parse_special=True)
    expected = reference_greedy(reference, prompt, 12)
    assert whole.greedy(prompt, 12) == expected
    assert split.greedy(prompt, 12) == expected
    bundle = msgspec.msgpack.decode(shard.text_bundle(), type=TextBundle)
    assert b"Paris" in b"".join(bundle.pieces[token] for token in expected)


def test_zeroed_rows_give_another_text(whole, split):
    head, middle, tail = split.shards
    prompt = head.tokenize(CHAT, add_special=True, parse_special=True)
    split.open()
    (rows,) = result(head.run([entry(prompt, 0)])).hidden
    (rows,) = result(middle.run([entry(prompt, 0, [bytes(len(rows))])])).hidden
    logits = result(tail.run([entry(prompt, 0, [rows])])).logits
    split.close()
    assert int(logits.argmax()) != whole.greedy(prompt, 1)[0]


def test_a_shard_reads_nothing_of_other_layers(split, tmp_path):
    """Every other byte of weights is 0xFF, which is NaN in all scales of the blocks."""
    header = read_header(FILE)
    data = bytearray(FILE.read_bytes())
    for name, info in header.tensors.items():
        if name.startswith("blk.") and 10 <= int(name.split(".")[1]) < 20:
            continue
        data[info.offset : info.offset + info.nbytes] = b"\xff" * info.nbytes
    (tmp_path / "other.gguf").write_bytes(data)
    rows = np.random.default_rng(0).standard_normal((4, 576)).astype(np.float32).tobytes()
    answers = []
    for shard in (split.shards[1], load(ShardSpec(str(tmp_path / "other.gguf"), 10, 20, threads=1))):
        shard.open(7)
        answers.append(bytes(result(shard.run([entry([1, 2, 3, 4], 0, [rows], slot=7)])).hidden[0]))
        shard.close(7)
    assert answers[0] == answers[1]
    spoilt = load(ShardSpec(str(tmp_path / "other.gguf"), 9, 20, threads=1))
    spoilt.open(0)
    broken = result(spoilt.run([entry([1, 2, 3, 4], 0, [rows])])).hidden[0]
    assert not np.isfinite(np.frombuffer(broken, np.float32)).all()


def test_what_is_told_about_the_shards(whole, split):
    told = whole.shards[0].describe()
    matrix, layer = 49152 * 576 * 4, (576 * 576 * 2 + 576 * 192 * 2 + 3 * 576 * 1536 + 2 * 576) * 4
    assert told.weight_bytes == matrix + 30 * layer + 576 * 4
    assert [s.describe().weight_bytes for s in split.shards] == [
        matrix + 10 * layer,
        10 * layer,
        matrix + 10 * layer + 576 * 4,
    ]
    assert told.kv_bytes_per_token == 30 * 2 * 3 * 64 * 4
    assert (told.n_layers, told.context_length, told.vocab_size) == (LAYERS, 8192, 49152)
    assert (told.engine.quantisation, told.engine.dtype) == ("Q4_1", "float32")
    assert [t.row_bytes for t in split.shards[0].describe().layout_out.tensors] == [576 * 4]
    digests = {s.describe().text_digest for s in (*whole.shards, split.shards[0], split.shards[2])}
    assert len(digests) == 1 and None not in digests
    assert split.shards[1].describe().text_digest is None and split.shards[1].text_bundle() is None


def test_the_self_test_passes_on_every_shard(whole, split):
    for shard in (*whole.shards, *split.shards):
        times = self_test(shard)
        assert times.decode_ms > 0 and times.prefill_ms_per_row > 0


def test_memory_while_loading():
    """Bound: 1.3 times the Shard and 300 MB."""
    peak, weights = peak_memory(FILE, 0, 15, "float32")
    assert weights > 300_000
    assert peak < 1.3 * weights + 300_000
    assert peak < 1.1 * weights + 100_000, "more than it took when this was written"
