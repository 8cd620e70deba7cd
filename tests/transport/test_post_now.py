"""Requests without a task: sent over an idle connection at once, heard of by a call."""

from __future__ import annotations

import asyncio

from shardline.transport.failures import BeforeResponse, BrokenResponse, HttpFailure, TimedOut
from shardline.transport.http_client import HttpClient, Response
from tests.transport.loopback import Peer, Wire, client_of, scripted

OK = b"HTTP/1.1 202 Accepted\r\ncontent-length: 2\r\n\r\nok"
Outcome = Response | HttpFailure


async def warm(http: HttpClient, peer: Peer) -> None:
    """Leave one idle connection in the pool."""
    await http.request("POST", peer.url, body=b"x", timeout_s=5, limit="test")


def post(http: HttpClient, peer: Peer, heard: asyncio.Queue[Outcome], timeout_s: float = 5.0) -> bool:
    return http.post_now(
        peer.url, [b"ab", b"c"], content_type="text/plain", timeout_s=timeout_s, limit="push", done=heard.put_nowait
    )


async def answering(wire: Wire) -> None:
    while True:
        await wire.request()
        wire.send(OK)


async def silent(wire: Wire) -> None:
    """Answers the first request of a connection, and no other."""
    await wire.request()
    wire.send(OK)
    await wire.request()
    await asyncio.sleep(30)


async def test_without_an_idle_connection_nothing_is_sent() -> None:
    heard: asyncio.Queue[Outcome] = asyncio.Queue()
    async with scripted(answering) as peer, client_of() as http:
        assert not post(http, peer, heard)
        await warm(http, peer)
        for _ in range(3):
            assert post(http, peer, heard)
            assert not post(http, peer, heard), "the one idle connection is in use"
            outcome = await heard.get()
            assert isinstance(outcome, Response)
            assert (outcome.status, outcome.body) == (202, b"ok")
        assert peer.connections == 1


async def test_a_connection_that_breaks_says_when() -> None:
    heard: asyncio.Queue[Outcome] = asyncio.Queue()

    async def breaking(wire: Wire) -> None:
        await wire.request()
        wire.send(OK)
        await wire.request()
        if wire.number:
            wire.send(OK[:-1])
        wire.reset()

    async with scripted(breaking) as peer, client_of() as http:
        await warm(http, peer)
        assert post(http, peer, heard)
        assert isinstance(await heard.get(), BeforeResponse)
        await warm(http, peer)
        assert post(http, peer, heard)
        assert isinstance(await heard.get(), (BrokenResponse, BeforeResponse))


async def test_a_silent_peer_is_given_up_and_its_connection_too() -> None:
    heard: asyncio.Queue[Outcome] = asyncio.Queue()

    async with scripted(silent) as peer, client_of() as http:
        await warm(http, peer)
        assert post(http, peer, heard, timeout_s=0.1)
        async with asyncio.timeout(5):
            outcome = await heard.get()
        assert isinstance(outcome, TimedOut)
        assert outcome.limit == "push"
        assert http.connections == 0


async def test_closing_the_client_ends_what_is_under_way() -> None:
    heard: asyncio.Queue[Outcome] = asyncio.Queue()

    async with scripted(silent) as peer, client_of() as http:
        await warm(http, peer)
        assert post(http, peer, heard)
        await http.aclose()
        assert isinstance(heard.get_nowait(), BrokenResponse)
