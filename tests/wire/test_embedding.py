"""The first encodings of what a session that embeds is opened with, and of what comes back."""

from __future__ import annotations

import struct

import msgspec

from shardline.wire.embedding import WIDTH_LIMIT
from shardline.wire.messages import Embed, Embedded, Opened, StreamEvent


def test_what_is_asked_for() -> None:
    for encoded, wanted in ((b"{}", Embed()), (b'{"pooling":"mean"}', Embed(pooling="mean"))):
        assert msgspec.json.decode(encoded, type=Embed) == wanted
        assert msgspec.json.encode(wanted) == encoded
    newer = b'{"pooling":"last","field_of_tomorrow":1}'
    assert msgspec.json.decode(newer, type=Embed) == Embed(pooling="last")


def test_what_comes_back() -> None:
    encoded = b'{"event":"embedded","pooling":"last","vector":"AACAPwAAAMA="}'
    event = msgspec.json.decode(encoded, type=StreamEvent)
    assert event == Embedded(pooling="last", vector=struct.pack("<2f", 1.0, -2.0))
    assert msgspec.json.encode(event) == encoded
    opened = b'{"event":"opened","node":"n-1","kv_reserved":5,"pooling":"mean"}'
    assert msgspec.json.decode(opened, type=StreamEvent) == Opened(node="n-1", kv_reserved=5, pooling="mean")
    assert b"pooling" not in msgspec.json.encode(Opened(node="n-1", kv_reserved=5)), "older Gateways see no difference"


def test_the_widest_vector_fits_into_a_line() -> None:
    from shardline.transport.lines import LINE_BYTES

    event = Embedded(pooling="mean", vector=bytes(4 * WIDTH_LIMIT))
    assert len(msgspec.json.encode(event)) < LINE_BYTES
