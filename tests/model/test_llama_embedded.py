"""Rows behind the final norm in the llama.cpp engine: those of unsplit llama.cpp. Generation knows nothing of them."""

from __future__ import annotations

import struct
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("llama_cpp")

import llama_cpp

from shardline.errors import ShardlineError
from tests.support.embedded import vector
from tests.support.llama_plain import Plain
from tests.support.llama_route import SMOLLM2, WIDTH, Route, entry, through

pytestmark = [pytest.mark.llama, pytest.mark.smollm2, pytest.mark.timeout(180)]

RNG = np.random.default_rng(17)
SHORT = [int(t) for t in RNG.integers(3, 49152, 30)]
"""In one call, also behind the norm: the same shape as in the unsplit model."""
LONG = [int(t) for t in RNG.integers(3, 49152, 150)]
CHUNKS = [LONG[:128], LONG[128:]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("shards")


@pytest.fixture(scope="module")
def unsplit():
    """Rows behind the final norm, by llama-cpp-python's own class."""
    model = llama_cpp.Llama(
        str(SMOLLM2),
        n_ctx=1024,
        n_batch=512,
        n_ubatch=512,
        n_threads=1,
        n_threads_batch=1,
        embedding=True,
        pooling_type=llama_cpp.LLAMA_POOLING_TYPE_NONE,
        flash_attn=True,
        verbose=False,
    )

    def rows(tokens: list[int]) -> np.ndarray:
        batch = llama_cpp.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, i, 1, 1
            batch.seq_id[i][0] = 0
        context = model._ctx.ctx
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), False)
        assert llama_cpp.llama_decode(context, batch) == 0
        pointer = llama_cpp.llama_get_embeddings(context)
        found = np.ctypeslib.as_array(pointer, (len(tokens) * WIDTH,)).reshape(-1, WIDTH).copy()
        llama_cpp.llama_batch_free(batch)
        return found

    yield rows
    model.close()


@pytest.mark.parametrize(
    "cuts",
    [
        pytest.param((), marks=pytest.mark.long, id="1 part"),
        pytest.param((15,), marks=pytest.mark.long, id="2 parts"),
        pytest.param((10, 20), id="3 parts"),
    ],
)
def test_vectors_are_those_of_the_unsplit_model(folder, unsplit, cuts):
    route = Route(folder, cuts)
    try:
        wanted = unsplit(SHORT).astype(np.float64).mean(0).astype(np.float32)
        assert np.abs(vector(route.shards, [SHORT], "mean") - wanted).max() == 0.0
        # The last row is in a call of its own: kernels round differently by the number of rows.
        np.testing.assert_allclose(vector(route.shards, [SHORT], "last"), unsplit(SHORT)[-1], atol=2e-2)
        for pooling, long in (("mean", unsplit(LONG).mean(0)), ("last", unsplit(LONG)[-1])):
            found = vector(route.shards, CHUNKS, pooling)
            cosine = found @ long / np.linalg.norm(found) / np.linalg.norm(long)
            assert cosine > 1 - 1e-4
            assert np.array_equal(vector(route.shards, CHUNKS, pooling), found)
    finally:
        route.close()


def test_generation_beside_it_is_the_same_to_the_bit(folder):
    """Logits of a session are unsplit llama.cpp's, with vectors of another made in between."""
    plain, route = Plain(SMOLLM2), Route(folder, (15,))
    try:
        steps = [(0, SHORT), (len(SHORT), [5]), (len(SHORT) + 1, [9])]
        for position, tokens in steps:
            if position == 0:
                route.open(0)
            vector(route.shards, [SHORT], "mean")
            (wanted,) = plain.run([(0, position, tokens, True)])
            (output,) = through(route.shards, [entry(tokens, position)])
            assert np.abs(output.logits - wanted).max() == 0.0
    finally:
        plain.close()
        route.close()


def test_rows_that_cannot_be_had_are_refused(folder):
    route = Route(folder, (15,))
    try:
        head, tail = route.shards
        assert head.describe().embeddings is None
        assert tail.describe().embeddings.width == WIDTH
        route.open(0)
        given = replace(entry([1, 2], 0), embed_rows=1, want_output=False)
        (refused,) = head.run([given])
        assert isinstance(refused, ShardlineError)
        rows = RNG.standard_normal((2, WIDTH)).astype(np.float32).tobytes()
        (refused,) = tail.run([replace(given, embed_rows=3, hidden=(rows,))])
        assert isinstance(refused, ShardlineError)
        assert tail.kv_tokens(0) == 0
        # Beside an entry of another session, in one batch.
        route.open(1)
        other = replace(entry([1, 2], 0, [rows], slot=1), want_output=True)
        embedded, logits = tail.run([replace(given, embed_rows=2, hidden=(rows,)), other])
        assert embedded.embedded.shape == (2, WIDTH)
        assert logits.logits is not None
        assert (tail.kv_tokens(0), tail.kv_tokens(1)) == (2, 2)
    finally:
        route.close()


def test_ids_are_read_at_any_address(folder):
    """Parts of an entry begin in the middle of its buffers."""
    route = Route(folder, ())
    try:
        route.open(0)
        data = bytearray(1) + struct.pack("<3i", *SHORT[:3])
        given = replace(entry(SHORT[:3], 0, want_output=False), tokens=memoryview(data)[1:], embed_rows=1)
        (output,) = route.shards[0].run([given])
        assert output.embedded.shape == (1, WIDTH)
        assert route.shards[0].kv_tokens(0) == 3
    finally:
        route.close()
