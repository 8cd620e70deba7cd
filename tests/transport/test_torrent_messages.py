"""Frames of the BitTorrent process: split anywhere they mean the same, and nothing else is taken for one."""

from __future__ import annotations

import itertools
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardline.transport.torrent_messages import (
    REPORT_BYTES,
    Add,
    Alive,
    Begin,
    Frames,
    Keys,
    Listening,
    Order,
    PeerFigures,
    Report,
    Seen,
    TorrentFile,
    Want,
    frame,
)

ORDERS: list[Order] = [
    Begin("127.0.0.1", 0, "ca", "certificate", "key", 0, 1, 2, 3),
    Add("mac1-a", 7, b"torrent", "/folder", (TorrentFile(b"r" * 32, "/file", b"\x80"),)),
    Want("mac1-a", 0, b"\x80"),
]


@given(st.lists(st.integers(0, 400), max_size=8))
def test_orders_arrive_whole_however_they_are_cut(cuts: list[int]) -> None:
    raw = b"".join(frame(order) for order in ORDERS)
    frames: Frames[Order] = Frames(Order, 1 << 20)
    edges = [0, *sorted(min(cut, len(raw)) for cut in cuts), len(raw)]
    arrived = [order for a, b in itertools.pairwise(edges) for order in frames.feed(raw[a:b])]
    assert arrived == ORDERS


def test_reports_of_every_kind_are_told_apart() -> None:
    seen = Seen("mac1-a", 1, (b"\xff",), (PeerFigures("127.0.0.1", 6, 0, 1, 2),), 4, 5)
    frames: Frames[Report] = Frames(Report, REPORT_BYTES)
    assert list(frames.feed(frame(Listening(1)) + frame(Alive()) + frame(seen))) == [Listening(1), Alive(), seen]


@pytest.mark.parametrize("raw", [struct.pack("<I", REPORT_BYTES + 1), struct.pack("<I", 1) + b"\xc1", frame(ORDERS[1])])
def test_what_is_no_report_is_refused(raw: bytes) -> None:
    frames: Frames[Report] = Frames(Report, REPORT_BYTES)
    with pytest.raises(ValueError, match=r"."):
        list(frames.feed(raw))


def test_a_key_is_not_shown() -> None:
    assert "secret" not in repr(Begin("127.0.0.1", 0, "ca", "certificate", "secret", 0, 0, 0, 0))
    assert "secret" not in repr(Keys("certificate", "secret"))
