"""The PyTorch backend as the engine seam wants it: buffers in and out, slots apart, faults of one entry only."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from shardline.errors import ShardlineError
from shardline.model.backend import BackendEntry, ShardSpec
from shardline.model.self_test import choose_prefill_chunk, self_test
from shardline.model.torch_backend import load
from shardline.settings import Settings
from shardline.wire.steps import TOKENS_ONLY
from tests.support.torch_models import CONFIGS, CONTEXT, LAYERS, VOCAB, Route, entry, result, save

pytestmark = pytest.mark.torch
PROMPT = [5, 7, 11, 13, 17]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    save(CONFIGS["llama"](), path)
    return path


@pytest.fixture(scope="module")
def shards(folder):
    return Route(folder, (1, 3), options={"content_id": "mac1-5"}).shards


@pytest.fixture(autouse=True)
def no_slot_is_left(shards):
    yield
    for shard in shards:
        for slot in range(8):
            shard.close(slot)


def fault(outputs):
    (output,) = outputs
    assert isinstance(output, ShardlineError)
    return output


def test_what_is_told_about_a_shard(folder, shards):
    head, middle, tail = (shard.describe() for shard in shards)
    assert (head.is_head, head.is_tail) == (True, False)
    assert (middle.is_head, middle.is_tail) == (False, False)
    assert (tail.is_head, tail.is_tail) == (False, True)
    assert [(d.first, d.last, d.n_layers) for d in (head, middle, tail)] == [
        (0, 1, LAYERS),
        (1, 3, LAYERS),
        (3, 4, LAYERS),
    ]
    assert head.layout_in == TOKENS_ONLY and tail.layout_out == TOKENS_ONLY
    assert head.layout_out == middle.layout_in == middle.layout_out == tail.layout_in
    assert [(t.name, t.dtype, t.shape) for t in middle.layout_in.tensors] == [("hidden", "F32", (32,))]
    assert middle.model_name == folder.name and middle.content_id == "mac1-5"
    assert middle.kv_bytes_per_token == 2 * head.kv_bytes_per_token
    assert (middle.vocab_size, middle.context_length, middle.rollback) == (VOCAB, CONTEXT, True)
    assert middle.engine.engine_class == head.engine.engine_class == tail.engine.engine_class
    assert (middle.engine.backend, middle.engine.device, middle.engine.threads) == ("torch", "cpu", 1)
    assert "transformers" in middle.engine.build


def test_another_dtype_is_another_engine_class(folder, shards):
    (other,) = Route(folder, dtype="float16").shards
    assert other.describe().engine.engine_class != shards[0].describe().engine.engine_class


def test_sessions_of_a_batch_do_not_touch_each_other(shards):
    head, middle, _ = shards
    prompts = [PROMPT, [40, 41], [60]]
    alone = []
    for prompt in prompts:
        head.open(0)
        alone.append(
            [
                bytes(result(head.run([entry(part, at, slot=0)])).hidden[0])
                for part, at in ((prompt, 0), ([9], len(prompt)))
            ]
        )
        head.close(0)
    for slot in range(3):
        head.open(slot)
    first = head.run([entry(p, 0, slot=s) for s, p in enumerate(prompts)])
    second = head.run([entry([9], len(p), slot=s) for s, p in reversed(list(enumerate(prompts)))])
    together = [[bytes(a.hidden[0]), bytes(b.hidden[0])] for a, b in zip(first, reversed(second), strict=True)]
    assert together == alone
    assert [head.kv_tokens(slot) for slot in range(3)] == [6, 3, 2]
    assert middle.run([]) == []


def test_rows_of_any_buffer_give_the_same_bits(shards):
    """Wherever the bytes lie: of a request body they begin at any offset."""
    _, middle, _ = shards
    rows = np.random.default_rng(3).standard_normal((5, 32)).astype(np.float32).tobytes()
    shifted = bytearray(3) + rows
    answers = set()
    for given in (rows, bytearray(rows), memoryview(rows), memoryview(shifted)[3:], np.frombuffer(rows, np.float32)):
        middle.open(0)
        output = result(middle.run([entry(PROMPT, 0, [given])]))
        answers.add(bytes(output.hidden[0]))
        assert len(output.hidden) == 1 and memoryview(output.hidden[0]).nbytes == 5 * 32 * 4
        middle.close(0)
    assert len(answers) == 1


def test_outputs_stay_as_they_are(shards):
    head, _, _ = shards
    head.open(0)
    rows = result(head.run([entry(PROMPT, 0)])).hidden[0]
    before = bytes(rows)
    for position in range(5, 20):
        result(head.run([entry([position], position)]))
    assert bytes(rows) == before


def test_the_tail_gives_logits_only_where_they_are_wanted(folder):
    whole = load(ShardSpec(str(folder), 0, LAYERS, threads=1))
    whole.open(0)
    silent = result(whole.run([entry(PROMPT[:3], 0, want=False)]))
    assert silent.logits is None and silent.hidden == ()
    output = result(whole.run([entry(PROMPT[3:], 3)]))
    logits = np.frombuffer(output.logits, np.float32)
    assert logits.shape == (VOCAB,) and output.hidden == ()
    (expected,) = Route(folder).run([PROMPT])
    np.testing.assert_allclose(logits, expected, atol=1e-4)


def test_a_fault_is_that_of_its_entry(shards):
    head, middle, _ = shards
    for slot in range(5):
        head.open(slot)
    outputs = head.run(
        [
            entry(PROMPT, 0, slot=0),
            entry([VOCAB], 0, slot=1),
            entry([-1], 0, slot=2),
            entry(PROMPT, 3, slot=3),
            BackendEntry(4, 0, 2, bytes(4), (), True),
            entry(PROMPT, 0, slot=7),
            entry([0] * (CONTEXT + 1), 0, slot=4),
        ]
    )
    assert not isinstance(outputs[0], Exception)
    assert [error.code for error in outputs[1:]] == ["engine_error"] * 5 + ["context_length_exceeded"]
    assert str(CONTEXT) in outputs[6].message
    assert [head.kv_tokens(slot) for slot in range(5)] == [5, 0, 0, 0, 0]
    middle.open(0)
    assert fault(middle.run([entry(PROMPT, 0, [bytes(7)])])).code == "engine_error"
    assert fault(middle.run([entry(PROMPT, 0)])).code == "engine_error"


def test_the_context_is_what_was_asked_for(folder):
    shard = load(ShardSpec(str(folder), 0, 1, threads=1, context_length=6))
    assert shard.describe().context_length == 6
    assert load(ShardSpec(str(folder), 0, 1, threads=1, context_length=1 << 20)).describe().context_length == CONTEXT
    shard.open(0)
    result(shard.run([entry(PROMPT, 0)]))
    result(shard.run([entry([1], 5)]))
    assert fault(shard.run([entry([1], 6)])).code == "context_length_exceeded"


def test_slots_open_once_and_close_as_often_as_one_likes(shards):
    head, _, _ = shards
    head.open(0)
    with pytest.raises(ShardlineError) as caught:
        head.open(0)
    assert caught.value.code == "engine_error"
    head.close(0)
    head.close(0)
    with pytest.raises(ShardlineError):
        head.kv_tokens(0)


def test_a_model_without_a_tokenizer(shards):
    head, middle, _ = shards
    assert head.text_bundle() is None and head.describe().text_digest is None
    for shard in (head, middle):
        with pytest.raises(ShardlineError) as caught:
            shard.tokenize("text", add_special=False, parse_special=True)
        assert caught.value.code == "text_unavailable"


@pytest.mark.parametrize("kind", list(CONFIGS))
def test_the_self_test_passes(kind, tmp_path):
    save(CONFIGS[kind](), tmp_path)
    for shard in Route(tmp_path, (1, 3)).shards:
        times = self_test(shard)
        assert times.prefill_ms_per_row > 0 and times.decode_ms > 0
        assert choose_prefill_chunk(times.prefill_ms_per_row, Settings()) >= 16


OUT_OF_MEMORY = """
import resource, sys
from shardline.model.backend import ShardSpec
from shardline.model.torch_backend import load
from tests.support.torch_models import entry
rows = 2_000
shard = load(ShardSpec(sys.argv[1], 0, 1, threads=1))
shard.open(0)
shard.open(1)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (400 << 20),) * 2)
outputs = shard.run([entry([1] * rows, 0, slot=0), entry([1, 2], 0, slot=1)])
print(outputs[0].code, type(outputs[1]).__name__, shard.kv_tokens(1))
"""


def test_memory_that_runs_out_in_one_entry(tmp_path):
    config = CONFIGS["llama"]()
    config.max_position_embeddings, config.intermediate_size = 1 << 20, 1 << 17
    save(config, tmp_path)
    command = [sys.executable, "-c", OUT_OF_MEMORY, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, env={"OMP_NUM_THREADS": "1"})
    assert done.stdout.split() == ["engine_out_of_memory", "BackendOutput", "2"]
