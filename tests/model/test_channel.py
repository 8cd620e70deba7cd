"""Frames and shared rows: what is written is read, and what is garbage is refused."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardline.errors import ShardlineError
from shardline.model.backend import ShardSpec
from shardline.model.channel import (
    FRAME_LIMIT,
    Answer,
    Batch,
    BatchDone,
    Fault,
    FrameReader,
    Load,
    Loaded,
    Open,
    Request,
    Rollback,
    Sampled,
    SharedRows,
    Tokenize,
    frame,
    places,
)
from shardline.model.scripted import load_inline
from shardline.wire.messages import Sampling

REQUESTS: list[Request] = [
    Load("scripted", ShardSpec("x.json", 0, 3, options={"a": 1})),
    Open(3, 10, 20, Sampling(temperature=0.5, logit_bias={7: -100.0}, seed=2**63)),
    Open(4, 10, 20, None),
    Batch(1, [(0, 5, 1, True, True), (1, 0, 16, False, False)], 65536, 0),
    Rollback(1, 7),
]


@given(st.lists(st.integers(1, 40), max_size=30))
def test_frames_survive_any_split(cuts: list[int]) -> None:
    data = b"".join(frame(r) for r in REQUESTS)
    reader = FrameReader(Request)
    found = []
    for cut in cuts:
        found += list(reader.feed(data[:cut]))
        data = data[cut:]
    found += list(reader.feed(data))
    assert found == REQUESTS


def test_a_description_and_outcomes_cross(spec: Callable[..., ShardSpec]) -> None:
    backend = load_inline(spec(3, 6, layout=[["streams", "F32", [4, 8]], ["aux", "F16", [8]]]))
    loaded = Loaded(backend.describe(), backend.text_bundle())
    fault = Fault.of(ShardlineError("deadline", "late", param="p", advice="wait", limit="step", position=3))
    done = BatchDone([None, fault, Sampled(7, -0.5, [(7, -0.5)], "stop"), Sampled(1, None, None, None)], 12.5)
    first, second = FrameReader(Answer).feed(frame(loaded) + frame(done))
    assert (first, second) == (loaded, done)
    error = second.outcomes[1].error()
    assert (error.code, error.message, error.param, error.advice, error.details) == (
        "deadline",
        "late",
        "p",
        "wait",
        {"limit": "step", "position": 3},
    )


def test_an_unknown_code_of_a_fault_is_an_engine_error() -> None:
    assert Fault("no_such_code", "x").error().code == "engine_error"


@pytest.mark.parametrize(
    "data",
    [
        b"\x00\x00\x00\x00",
        b"\x04\x00\x00\x00GET ",
        struct.pack("<I", FRAME_LIMIT + 1),
        b"HTTP/1.1 400 Bad Request",
        struct.pack("<I", 4) + b"\x93\x04\xc0\xc0",
        struct.pack("<I", 2) + b"\x91\x63",
        struct.pack("<I", 3000) + b"\x91" * 3000,
    ],
)
def test_garbage_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="frame"):
        list(FrameReader(Answer).feed(data))


def test_a_frame_over_the_limit_is_not_sent() -> None:
    with pytest.raises(ValueError, match="limit"):
        frame(Tokenize("x" * (FRAME_LIMIT + 1), True, True))


@given(
    rows=st.lists(st.integers(1, 20), min_size=1, max_size=8).map(tuple),
    sizes=st.lists(st.integers(1, 200), max_size=4).map(tuple),
    with_tokens=st.booleans(),
)
def test_places_are_aligned_and_do_not_overlap(
    rows: tuple[int, ...], sizes: tuple[int, ...], with_tokens: bool
) -> None:
    found, total = places(rows, sizes, with_tokens)
    spans = [span for p in found for span in ([p.tokens] if with_tokens else []) + list(p.hidden)]
    end = 0
    for offset, size in spans:
        assert offset % 64 == 0
        assert offset >= end
        end = offset + size
    assert end <= total
    assert [p.hidden[i][1] for p in found for i in range(len(sizes))] == [n * s for n in rows for s in sizes]


def test_rows_written_by_one_side_are_read_by_the_other_and_survive_growth() -> None:
    ours = SharedRows.make()
    theirs = SharedRows(os.dup(ours.fd))
    try:
        for size in (100, 70_000, 300_000):
            ours.grow(size, size // 2)
            theirs.follow(ours.in_bytes, ours.out_bytes)
            ours.rows_in(size - 4, 4)[:] = b"ping"
            assert bytes(theirs.rows_in(size - 4, 4)) == b"ping"
            theirs.rows_out(8, 4)[:] = b"pong"
            assert bytes(ours.rows_out(8, 4)) == b"pong"
            assert bytes(ours.rows_in(8, 4)) != b"pong"
        theirs.tick()
        theirs.tick()
        theirs.kv_tokens = 2**40
        assert (ours.ticks, ours.kv_tokens) == (2, 2**40)
    finally:
        ours.close()
        theirs.close()


def test_areas_are_checked_against_the_file_and_against_memory() -> None:
    rows = SharedRows.make()
    try:
        with pytest.raises(ValueError, match="do not fit"):
            rows.follow(1 << 30, 0)
        with pytest.raises(ValueError, match="do not fit"):
            rows.follow(-1, 0)
        with pytest.raises(ShardlineError) as caught:
            rows.grow(1 << 60, 0)
        assert caught.value.code == "engine_out_of_memory"
        rows.grow(10, 10)
        rows.rows_in(0, 2)[:] = b"ok"
    finally:
        rows.close()


def test_closing_with_a_view_still_held_frees_the_rest() -> None:
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    rows = SharedRows.make()
    rows.grow(10, 10)
    view = rows.rows_in(0, 4)
    rows.grow(1 << 20, 10)
    rows.close()
    view[:] = b"fine"
    del view
    if before:
        assert len(os.listdir("/proc/self/fd")) == before
