"""The self-test finds a backend that computes wrongly, and leaves one that computes rightly as it was."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from shardline.errors import ShardlineError
from shardline.model.backend import BackendEntry, BackendOutput, ShardDescription
from shardline.model.self_test import choose_prefill_chunk, self_test
from shardline.settings import Settings
from shardline.wire.messages import EngineInfo
from shardline.wire.steps import TOKENS_ONLY, LayoutTensor, SeamLayout

HIDDEN = SeamLayout([LayoutTensor("hidden", "F32", (4,)), LayoutTensor("more", "BF16", (2, 3))])
VOCAB = 11
ENGINE = EngineInfo(
    backend="sums", engine_class="sums", build="", dtype="float32", quantisation="none", device="cpu", threads=1
)


def description(first: int, last: int) -> ShardDescription:
    return ShardDescription(
        model_name="sums",
        content_id="",
        first=first,
        last=last,
        n_layers=3,
        engine=ENGINE,
        layout_in=HIDDEN if first else TOKENS_ONLY,
        layout_out=HIDDEN if last < 3 else TOKENS_ONLY,
        kv_bytes_per_token=8,
        weight_bytes=0,
        context_length=100,
        vocab_size=VOCAB,
        rollback=False,
    )


class Sums:
    """A backend whose outputs are running sums of its inputs: the smallest that has a context."""

    def __init__(self, first: int = 1, last: int = 2, **faults: object) -> None:
        self.description = description(first, last)
        self.slots: dict[int, list[float]] = {}
        self.faults = faults

    def describe(self) -> ShardDescription:
        return self.description

    def open(self, slot: int) -> None:
        if slot in self.slots:
            raise ShardlineError("engine_error", "open already")
        self.slots[slot] = [1.0] if self.faults.get("dirty") else []

    def close(self, slot: int) -> None:
        self.slots.pop(slot, None)

    def kv_tokens(self, slot: int) -> int:
        return len(self.slots[slot]) - bool(self.faults.get("miscounts") and len(self.slots[slot]) > 3)

    def run(self, entries: list[BackendEntry]) -> list[BackendOutput | Exception]:
        return [self._run(e) for e in entries]

    def _run(self, e: BackendEntry) -> BackendOutput | Exception:
        if self.faults.get("fails"):
            return ShardlineError("engine_out_of_memory", "no room")
        values = np.frombuffer(e.tokens, "<i4").astype(np.float32)
        assert len(values) == e.rows
        if self.description.first:
            rows, more = (np.frombuffer(h, dtype) for h, dtype in zip(e.hidden, ("<f4", "<u2"), strict=True))
            assert np.isfinite(rows).all()
            assert np.isfinite((more.astype("<u4") << 16).view("<f4")).all()
            values = rows.reshape(e.rows, 4).sum(axis=1)
        context = self.slots[e.slot]
        if self.faults.get("forgets"):
            context = [0.0] * len(context)
        if self.faults.get("chunks"):
            values = values * (1 + len(context))
        sums = np.cumsum([*context, *values], dtype=np.float32)[-e.rows :]
        if self.faults.get("ignores"):
            sums = np.ones(e.rows, np.float32)
        self.slots[e.slot] += values.tolist()
        sums = sums + np.float32(self.faults.get("value", 0.0))
        if self.description.is_tail:
            return BackendOutput(
                logits=sums[-1] * np.arange(1, VOCAB + (not self.faults.get("short")), dtype=np.float32)
            )
        hidden = np.repeat(sums, 4).astype("<f4").tobytes()
        more = (np.repeat(sums, 6).astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()
        return BackendOutput(hidden=(hidden[4:] if self.faults.get("short") else hidden, more))


@pytest.mark.parametrize("layers", [(0, 1), (1, 2), (2, 3), (0, 3)], ids=str)
def test_a_backend_that_computes(layers):
    backend = Sums(*layers)
    backend.open(0)
    times = self_test(backend)
    assert times.decode_ms >= 0 and times.prefill_ms_per_row >= 0
    assert backend.slots == {0: []}


@pytest.mark.parametrize("layers", [(0, 1), (1, 2), (2, 3), (0, 3)], ids=str)
@pytest.mark.parametrize(
    "faults,code",
    [
        ({"fails": True}, "engine_out_of_memory"),
        ({"value": float("nan")}, "numerical_error"),
        ({"value": float("inf")}, "numerical_error"),
        ({"short": True}, "engine_error"),
        ({"dirty": True}, "engine_error"),
        ({"miscounts": True}, "engine_error"),
        ({"forgets": True}, "engine_error"),
        ({"chunks": True}, "engine_error"),
        ({"ignores": True}, "engine_error"),
    ],
    ids=str,
)
def test_a_backend_that_does_not(layers, faults, code):
    backend = Sums(*layers, **faults)
    with pytest.raises(ShardlineError) as caught:
        self_test(backend)
    assert caught.value.code == code
    assert backend.slots == {}


def test_a_context_of_few_tokens():
    backend = Sums()
    backend.description = replace(backend.description, context_length=4)
    assert self_test(backend).decode_ms >= 0


@pytest.mark.parametrize(
    "ms,chunk",
    [
        (0.0, 512),
        (0.001, 512),
        (0.48, 512),
        (0.49, 256),
        (1.0, 128),
        (3.9, 64),
        (7.8, 64),
        (15.6, 64),
        (15.7, 32),
        (31.2, 32),
        (32.0, 16),
        (5000.0, 16),
    ],
)
def test_the_prefill_chunk(ms, chunk):
    assert choose_prefill_chunk(ms, Settings()) == chunk


def test_the_prefill_chunk_keeps_its_limits():
    settings = Settings(prefill_chunk_min=64, prefill_chunk_max=128, prefill_chunk_target_ms=100)
    assert [choose_prefill_chunk(ms, settings) for ms in (0.1, 0.7, 0.8, 9.0)] == [128, 128, 64, 64]
    assert choose_prefill_chunk(3.0, Settings(prefill_chunk_max=32)) == 32
