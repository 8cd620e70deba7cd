from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest
from starlette.types import Message, Receive

from shardline.errors import ShardlineError
from shardline.transport.bodies import ROOM, ClientLeft, body_of, decode_json, read_body, read_json, send_json
from shardline.transport.body_room import SMALL_BYTES, BodyRoom


class Ask(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    temperature: float = 1.0
    parts: list[dict[str, int]] = []


def receiving(*messages: Message) -> Receive:
    left = list(messages)

    async def receive() -> Message:
        if not left:
            await asyncio.Event().wait()
        return left.pop(0)

    return receive


def parts(*chunks: bytes) -> list[Message]:
    return [{"type": "http.request", "body": chunk, "more_body": i + 1 < len(chunks)} for i, chunk in enumerate(chunks)]


def scope(**headers: str) -> dict[str, Any]:
    return {"headers": [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]}


async def code_of(work: Awaitable[object]) -> str:
    with pytest.raises(ShardlineError) as caught:
        await work
    return caught.value.code


@pytest.mark.parametrize("chunks", [(b"",), (b"abc",), (b"a", b"", b"bc"), (b"abc", b"")])
async def test_a_body_is_put_together(chunks: tuple[bytes, ...]) -> None:
    assert await read_body(receiving(*parts(*chunks)), scope(), 3) == b"".join(chunks)


async def test_an_announced_size_is_refused_before_anything_is_read() -> None:
    async def receive() -> Message:
        raise AssertionError("the body was read")

    for length in ("4", "1000000000", "9" * 30):
        assert await code_of(read_body(receive, scope(content_length=length), 3)) == "body_too_large"


async def test_a_streamed_size_is_refused_at_the_first_byte_too_many() -> None:
    endless = receiving(*({"type": "http.request", "body": b"xx", "more_body": True} for _ in range(3)))
    assert await code_of(read_body(endless, scope(), 5)) == "body_too_large"


@pytest.mark.parametrize(
    "headers",
    [{"content_encoding": "gzip"}, {"content_encoding": "identity, br"}, {"transfer_encoding": "gzip, chunked"}],
)
async def test_encoded_bodies_are_refused_unread(headers: dict[str, str]) -> None:
    assert await code_of(read_body(receiving(), scope(**headers), 3)) == "unsupported_media_type"


async def test_a_slow_body_has_a_limit() -> None:
    slow = receiving({"type": "http.request", "body": b"x", "more_body": True})
    assert await code_of(read_body(slow, scope(), 9, grace_s=0.02)) == "slow_body"


async def test_a_client_that_leaves() -> None:
    gone = receiving({"type": "http.request", "body": b"x", "more_body": True}, {"type": "http.disconnect"})
    with pytest.raises(ClientLeft):
        await read_body(gone, scope(), 9)


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        (b"", "invalid_json", None),
        (b"{", "invalid_json", None),
        (b"\xef\xbb\xbf{}", "invalid_json", None),
        (b'{"name":"\xff"}', "invalid_json", None),
        (b'{"name":"a","temperature":NaN}', "invalid_json", None),
        (b'{"name":"a"} {}', "invalid_json", None),
        (b"[" * 100_000, "invalid_value", None),
        (b'{"name":"a","parts":' + b"[" * 100_000, "invalid_value", "parts[0]"),
        (b"[]", "invalid_value", None),
        (b"{}", "invalid_value", None),
        (b'{"name":1}', "invalid_value", "name"),
        (b'{"name":"a","nmae":1}', "invalid_value", None),
        (b'{"name":"a","parts":[{"x":"y"}]}', "invalid_value", "parts[0][...]"),
        (b'{"name":"a","temperature":1e999}', "invalid_value", "temperature"),
    ],
)
def test_what_is_not_the_json_that_is_due(body: bytes, code: str, param: str | None) -> None:
    with pytest.raises(ShardlineError) as caught:
        decode_json(body, Ask)
    assert (caught.value.code, caught.value.param) == (code, param)
    assert not {"str", "int", "float", "dict", "Ask"} & set(re.findall(r"\w+", caught.value.message))
    assert "msgspec" not in caught.value.message and "`$" not in caught.value.message


def test_deep_nesting_where_anything_is_allowed() -> None:
    with pytest.raises(ShardlineError) as caught:
        decode_json(b"[" * 100_000 + b"]" * 100_000, list[Any])
    assert caught.value.code == "invalid_json"


async def test_content_types() -> None:
    body = b'{"name":"a"}'
    for media in ("application/json", "Application/JSON; charset=utf-8"):
        assert await read_json(receiving(*parts(body)), scope(content_type=media), Ask, 99) == Ask("a")
    assert await read_json(receiving(*parts(body)), scope(), Ask, 99) == Ask("a")
    for media in ("text/plain", "application/x-www-form-urlencoded"):
        refused = read_json(receiving(*parts(body)), scope(content_type=media), Ask, 99)
        assert await code_of(refused) == "unsupported_media_type"


async def test_an_answer_is_whole() -> None:
    sent: list[Message] = []
    send: Callable[[Message], Awaitable[None]] = _keeping(sent)
    await send_json(send, Ask("a"), 201, [(b"x", b"y")])
    assert sent[0]["status"] == 201
    assert dict(sent[0]["headers"]) == {
        b"content-type": b"application/json",
        b"content-length": b"%d" % len(sent[1]["body"]),
        b"x": b"y",
    }
    assert msgspec.json.decode(sent[1]["body"], type=Ask) == Ask("a") and not sent[1]["more_body"]


def _keeping(sent: list[Message]) -> Callable[[Message], Awaitable[None]]:
    async def send(message: Message) -> None:
        sent.append(message)

    return send


# Room for large bodies.


def in_room(room: BodyRoom, **headers: str) -> dict[str, Any]:
    return {**scope(**headers), "state": {ROOM: room}}


async def test_a_large_body_holds_room_until_it_is_used_up() -> None:
    room = BodyRoom(1 << 20)
    large = [bytes(SMALL_BYTES), b"x"]
    async with body_of(receiving(*parts(*large)), in_room(room, content_length=str(SMALL_BYTES + 1)), 1 << 20) as body:
        assert len(body.data) == SMALL_BYTES + 1 == room.used
        body.free()
        assert room.used == 0 and body.data == b""
    with pytest.raises(RuntimeError):
        async with body_of(receiving(*parts(*large)), in_room(room), 1 << 19):
            assert room.used == 1 << 19, "of unknown size: as much as it may have"
            raise RuntimeError
    assert room.used == 0


async def test_a_small_body_needs_no_room() -> None:
    room = BodyRoom(1)
    held = room.take_now(1)
    assert await read_body(receiving(*parts(bytes(SMALL_BYTES))), in_room(room), 1 << 20) == bytes(SMALL_BYTES)
    assert held is not None and room.used == 1


async def test_a_large_body_waits_for_room_and_is_not_read_meanwhile() -> None:
    room = BodyRoom(100_000)
    held = await room.take(100_000, 1.0)
    asked = 0
    messages = parts(bytes(70_000), bytes(10_000), bytes(10_000))

    async def receive() -> Message:
        nonlocal asked
        asked += 1
        return messages.pop(0)

    reading = asyncio.create_task(read_body(receive, in_room(room), 100_000))
    await asyncio.sleep(0.03)
    assert asked == 1 and not reading.done()
    room.give(held)
    assert len(await reading) == 90_000 and room.used == 0
    held = await room.take(100_000, 1.0)
    refused = read_body(receiving(*parts(bytes(70_000))), in_room(room), 100_000, grace_s=0.02)
    assert await code_of(refused) == "resources_exhausted"


@pytest.mark.parametrize("end", ["slow", "left", "long"])
async def test_a_body_that_does_not_become_whole_gives_its_room_back(end: str) -> None:
    room = BodyRoom(1 << 20)
    first: Message = {"type": "http.request", "body": bytes(70_000), "more_body": True}
    rest: list[Message] = {"slow": [], "left": [{"type": "http.disconnect"}], "long": [first]}[end]
    with pytest.raises((ShardlineError, ClientLeft)):
        await read_body(receiving(first, *rest), in_room(room), 100_000, grace_s=0.02 if end == "slow" else 5.0)
    assert room.used == 0
