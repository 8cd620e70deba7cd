"""Embedding rows that are looked up outside of llama.cpp are those of its own graph, to the bit."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

pytest.importorskip("llama_cpp")


from shardline.errors import ShardlineError
from shardline.model.llama_embedding import EmbeddingMatrix
from shardline.model.llama_library import library
from shardline.model.llama_shard import load
from tests.support.llama_route import entry, result, spec

pytestmark = pytest.mark.llama

ROWS, COLUMNS = 40, 64
RNG = np.random.default_rng(5)


def matrix(path, offset, type_id, **scale):
    return EmbeddingMatrix(library(), path, offset=offset, type_id=type_id, rows=ROWS, width=COLUMNS, **scale)


@pytest.mark.parametrize("name", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
@pytest.mark.parametrize("offset", [4096, 5024])
def test_rows_are_decoded_as_the_format_says(tmp_path, name, offset):
    kind = gguf.GGMLQuantizationType[name]
    values = RNG.standard_normal((ROWS, COLUMNS)).astype(np.float32)
    stored = gguf.quants.quantize(values, kind)
    (tmp_path / "file").write_bytes(bytes(offset) + stored.tobytes())
    expected = gguf.quants.dequantize(stored, kind)
    found = matrix(tmp_path / "file", offset, int(kind))
    assert found.nbytes == stored.nbytes
    ids = np.array([0, 39, 7, 7, 12], np.int32)
    target = np.full((8, COLUMNS), np.nan, np.float32)
    found.look_up(ids, target)
    assert np.array_equal(target[:5], expected[ids])
    assert np.isnan(target[5:]).all()


def test_a_scale_multiplies_in_float32(tmp_path):
    values = RNG.standard_normal((ROWS, COLUMNS)).astype(np.float32)
    (tmp_path / "file").write_bytes(values.tobytes())
    scale = float(np.sqrt(np.float32(COLUMNS * 3)))
    target = np.zeros((2, COLUMNS), np.float32)
    matrix(tmp_path / "file", 0, 0, scale=scale).look_up(np.array([3, 4], np.int32), target)
    assert np.array_equal(target, values[3:5] * np.float32(scale))


def test_a_file_that_is_too_short_or_of_an_unknown_type_is_refused(tmp_path):
    (tmp_path / "file").write_bytes(bytes(4 * ROWS * COLUMNS - 1))
    for type_id in (0, 24, -1, 9999):
        with pytest.raises(ShardlineError) as caught:
            matrix(tmp_path / "file", 0, type_id)
        assert caught.value.code == "model_file_invalid"
    for wrong in ({"offset": -4096}, {"rows": 0}, {"rows": -1}):
        with pytest.raises(ShardlineError) as caught:
            EmbeddingMatrix(
                library(), tmp_path / "file", **{"offset": 0, "type_id": 0, "rows": 1, "width": COLUMNS, **wrong}
            )
        assert caught.value.code == "model_file_invalid"
    with pytest.raises(ShardlineError):
        matrix(tmp_path / "missing", 0, 0)


@pytest.mark.smollm2
def test_a_head_of_one_layer_makes_what_the_graph_makes_of_tokens(tmp_path):
    """The whole model takes token ids itself: its first layer's output is that of a head that looks them up."""
    from shardline.model.llama_context import ContextPlan, LlamaContext, LlamaModel
    from shardline.model.llama_rows import RowArrays
    from shardline.model.llama_tap import CallbackTap
    from tests.support.llama_route import SMOLLM2, WIDTH

    tokens = [int(t) for t in RNG.integers(0, 49152, 9)]
    head = load(spec(tmp_path, 0, 1))
    head.open(0)
    rows = bytes(result(head.run([entry(tokens, 0)])).hidden[0])
    tap = CallbackTap(library(), "l_out-0", 4 * WIDTH)
    model = LlamaModel(library(), SMOLLM2)
    context = LlamaContext(library(), model, ContextPlan(256, 1, 32, 32, 1, "f16", False), tap)
    arrays = RowArrays(rows=32, width=0, sequences=1, multi=False, outputs=True)
    arrays.place(0, 9, 0, 0)
    arrays.tokens[:9] = tokens
    assert library().c.llama_decode(context.pointer, arrays.with_tokens(9)) == 0
    assert bytes(tap.rows(9)) == rows
    context.close()
    model.close()
    head.unload()
