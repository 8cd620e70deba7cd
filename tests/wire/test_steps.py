"""The step document: golden vectors, byte budget, and everything that must be refused."""

from __future__ import annotations

import json
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardline.errors import ShardlineError
from shardline.wire.steps import (
    FLAG_OUTPUT,
    LANE_DECODE,
    LANE_PREFILL,
    TOKENS_ONLY,
    Entry,
    LayoutTensor,
    SeamLayout,
    Step,
    decode,
    encode,
)

HIDDEN = SeamLayout([LayoutTensor("hidden", "F32", (2,))])
STREAMS = SeamLayout([LayoutTensor("streams", "F32", (4, 2)), LayoutTensor("aux", "F16", (3,))])
KEY = bytes(range(16))


def a_step(rows: int = 1, seq: int = 7, layout: SeamLayout = HIDDEN, fill: int = 1) -> Step:
    entry = Entry(KEY, seq, 41, rows, 1, LANE_DECODE if rows == 1 else LANE_PREFILL, FLAG_OUTPUT)
    return Step(
        entry, struct.pack(f"<{rows}i", *range(rows)), tuple(bytes([fill]) * t.row_bytes * rows for t in layout.tensors)
    )


def document(steps: list[Step], layout: SeamLayout = HIDDEN) -> bytes:
    return b"".join(encode(steps, layout))


def same(a: Step, b: Step) -> bool:
    return (
        a.entry == b.entry
        and bytes(a.tokens) == bytes(b.tokens)
        and [bytes(x) for x in a.hidden] == [bytes(x) for x in b.hidden]
    )


def test_golden_bytes_of_a_decode_step() -> None:
    """The layout of an entry, byte by byte; a change here is a change of the protocol."""
    body = document([a_step()])
    (header_len,) = struct.unpack_from("<Q", body)
    header = json.loads(body[8 : 8 + header_len])
    data = body[8 + header_len :]
    assert header == {
        "__metadata__": {"layout": HIDDEN.digest},
        "entries": {"dtype": "U8", "shape": [1, 40], "data_offsets": [0, 40]},
        "tokens": {"dtype": "I32", "shape": [1], "data_offsets": [40, 44]},
        "hidden": {"dtype": "F32", "shape": [1, 2], "data_offsets": [44, 52]},
    }
    assert data[:40] == KEY + bytes.fromhex("07000000 29000000 01000000 01 00 0100 0000000000000000")
    assert data[40:44] == bytes(4)
    assert data[44:] == b"\x01" * 8
    assert header_len % 8 == 0


def test_the_safetensors_library_reads_it() -> None:
    safetensors = pytest.importorskip("safetensors.numpy")
    tensors = safetensors.load(document([a_step(3, layout=STREAMS), a_step(1, layout=STREAMS)], STREAMS))
    assert tensors["entries"].shape == (2, 40)
    assert tensors["tokens"].tolist() == [0, 1, 2, 0]
    assert tensors["streams"].shape == (4, 4, 2)
    assert tensors["aux"].shape == (4, 3)


@pytest.mark.parametrize("layout", [TOKENS_ONLY, HIDDEN, STREAMS], ids=["tokens", "hidden", "streams"])
def test_what_goes_in_comes_out(layout: SeamLayout) -> None:
    steps = [a_step(3, 1, layout, 2), a_step(1, 2, layout, 3), a_step(2, 3, layout, 4)]
    back = decode(document(steps, layout), layout)
    assert all(same(a, b) for a, b in zip(steps, back, strict=True))


def test_the_byte_budget_of_a_decode_request() -> None:
    """Row bytes plus at most 512, and at most 64 for each further entry, at any position."""
    layout = SeamLayout([LayoutTensor("hidden", "F32", (576,))])
    row = layout.row_bytes
    for position in (10, 1_500, 2**31):
        entry = Entry(KEY, position, position, 1, 1, LANE_DECODE, FLAG_OUTPUT)
        step = Step(entry, bytes(4), (bytes(row),))
        one = len(document([step], layout))
        assert one <= row + 512
        for n in (2, 9, 64):
            assert len(document([step] * n, layout)) <= n * row + 512 + 64 * (n - 1)
    assert len(document([step], layout)) == one


Header = dict[str, dict[str, Any]]


def parts_of(body: bytes) -> tuple[Header, bytes]:
    (header_len,) = struct.unpack_from("<Q", body)
    return json.loads(body[8 : 8 + header_len]), body[8 + header_len :]


def with_header(header: Header, data: bytes) -> bytes:
    raw = json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + data


def field_changed(name: str, field: str, value: Any) -> bytes:
    header, data = parts_of(document([a_step()]))
    header.setdefault(name, {})[field] = value
    return with_header(header, data)


def tensor_dropped(name: str) -> bytes:
    header, data = parts_of(document([a_step()]))
    del header[name]
    return with_header(header, data)


def entry_changed(at: int, value: bytes) -> bytes:
    header, data = parts_of(document([a_step()]))
    return with_header(header, data[:at] + value + data[at + len(value) :])


BROKEN = {
    "cut": document([a_step()])[:-1],
    "longer": document([a_step()]) + b"x",
    "huge header": struct.pack("<Q", 2**63) + document([a_step()])[8:],
    "header over the limit": struct.pack("<Q", 20_000) + b" " * 20_000,
    "width": field_changed("hidden", "shape", [1, 3]),
    "dtype": field_changed("hidden", "dtype", "F16"),
    "unknown dtype": field_changed("hidden", "dtype", "object"),
    "five dimensions": field_changed("hidden", "shape", [1, 1, 1, 1, 2]),
    "overflowing shape": field_changed("entries", "shape", [2**31, 2**31]),
    "negative": field_changed("tokens", "shape", [-1]),
    "offsets": field_changed("hidden", "data_offsets", [0, 8]),
    "other layout": field_changed("__metadata__", "layout", "0" * 16),
    "no layout": tensor_dropped("__metadata__"),
    "extra tensor": with_header(
        {**parts_of(document([a_step()]))[0], "extra": {"dtype": "U8", "shape": [0], "data_offsets": [52, 52]}},
        parts_of(document([a_step()]))[1],
    ),
    "missing tensor": tensor_dropped("hidden"),
    "more rows than there are": entry_changed(24, struct.pack("<I", 2)),
    "no rows": entry_changed(24, struct.pack("<I", 0)),
    "lane": entry_changed(29, b"\x07"),
    "flag": entry_changed(30, b"\x00\x80"),
    "reserved": entry_changed(39, b"\x01"),
}


@pytest.mark.parametrize("change", BROKEN)
def test_a_document_that_does_not_fit_is_refused(change: str) -> None:
    with pytest.raises(ShardlineError) as caught:
        decode(BROKEN[change], HIDDEN)
    assert caught.value.code == "frame_invalid"


@pytest.mark.parametrize("body", [b"", b"1234567", b"\x80\x04K\x01.", b"PK\x03\x04" + bytes(40), b"[" * 100])
def test_what_is_no_document_at_all(body: bytes) -> None:
    with pytest.raises(ShardlineError, match="step document refused"):
        decode(body, HIDDEN)


@given(st.binary(max_size=400))
def test_random_bytes_raise_nothing_else(body: bytes) -> None:
    with pytest.raises(ShardlineError):
        decode(body, HIDDEN)


@given(st.data())
def test_a_changed_byte_is_refused_or_stays_inside_its_field(data: st.DataObject) -> None:
    body = bytearray(document([a_step(2), a_step(1)]))
    body[data.draw(st.integers(0, len(body) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        steps = decode(bytes(body), HIDDEN)
    except ShardlineError:
        return
    assert sum(step.entry.rows for step in steps) == 3


def test_layouts_are_checked_when_made() -> None:
    for bad in (
        [LayoutTensor("tokens", "F32", (1,))],
        [LayoutTensor("a", "F32", (1,)), LayoutTensor("a", "F32", (1,))],
        [LayoutTensor("a", "F8", (1,))],
        [LayoutTensor("a", "F32", ())],
        [LayoutTensor("a", "F32", (0,))],
    ):
        with pytest.raises(ValueError, match="Seam layout"):
            SeamLayout(bad)
    assert SeamLayout.from_json(STREAMS.to_json()) == STREAMS
