"""How a step document gets to the next hop: over HTTP, or in memory for whole clusters in one process.

Owns the one seam between a Node and the network: push one document, get one acknowledgement or one failure. It does
not order, batch or remember steps: their `seq` does. Shown by tests/transport/test_carrier.py (both, same tests).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Protocol

from shardline.errors import ShardlineError
from shardline.settings import Settings
from shardline.transport import answers
from shardline.transport.answers import Response
from shardline.transport.connection import Buffer
from shardline.transport.failures import BrokenResponse, ConnectFailed, HttpFailure, TimedOut
from shardline.transport.http_client import HttpClient, peer_of
from shardline.transport.tracing import untraced
from shardline.wire.messages import StepAck

STEPS_PATH = "/v1/steps"
STEP_TYPE = "application/x-safetensors"
EMPTY_ACK = b'{"rejected":[]}'
"""Body of the usual answer: everything was accepted."""
_ACCEPTED = StepAck()
Done = Callable[[StepAck | HttpFailure | ShardlineError], None]


class Carrier(Protocol):
    """Takes step documents to hops."""

    async def push(
        self, hop_url: str, pieces: Sequence[Buffer], *, timeout_s: float, limit: str, fresh: bool = False
    ) -> StepAck:
        """Deliver one step document, given in pieces, to the hop at `hop_url`, and return what it accepted.

        `fresh`: this is the second and last try, over a connection that was made for it.

        The pieces must not change until this returns. Raises `HttpFailure` if the hop did not answer (`timeout_s`
        bounds it, `limit` names the bound), or the ShardlineError with which it refused the whole document.
        """
        ...

    def push_now(self, hop_url: str, pieces: Sequence[Buffer], *, timeout_s: float, limit: str, done: Done) -> bool:
        """As `push`, but sent before this returns and heard of through `done`; False, and nothing is sent, where it
        cannot be: then use `push`. `done` may be told `BeforeResponse`: `push` the same once more."""
        ...


class HttpCarrier:
    """Steps as POST requests. A connection that broke before the answer is tried once more: `seq` makes that safe."""

    def __init__(self, client: HttpClient) -> None:
        self._client = client

    async def push(
        self, hop_url: str, pieces: Sequence[Buffer], *, timeout_s: float, limit: str, fresh: bool = False
    ) -> StepAck:
        with untraced():  # a document has steps of several sessions
            response = await self._client.request(
                "POST",
                hop_url + STEPS_PATH,
                body=pieces,
                content_type=STEP_TYPE,
                timeout_s=timeout_s,
                limit=limit,
                retry_once=not fresh,
                fresh=fresh,
            )
        return _ack(hop_url, response)

    def push_now(self, hop_url: str, pieces: Sequence[Buffer], *, timeout_s: float, limit: str, done: Done) -> bool:
        return self._client.post_now(
            hop_url + STEPS_PATH,
            pieces,
            content_type=STEP_TYPE,
            timeout_s=timeout_s,
            limit=limit,
            done=partial(_tell, hop_url, done),
        )


class MemoryCarrier:
    """Steps to callables of this process: `hops` maps a URL to what its Node would do with the body of a request.

    Bodies are copied, as the network would. A callable raises ShardlineError to refuse.
    """

    def __init__(self, body_limit: int = Settings().step_body_bytes) -> None:
        self._body_limit = body_limit
        self.hops: dict[str, Callable[[bytes], Awaitable[StepAck]]] = {}

    async def push(
        self, hop_url: str, pieces: Sequence[Buffer], *, timeout_s: float, limit: str, fresh: bool = False
    ) -> StepAck:
        peer = peer_of(hop_url)
        hop = self.hops.get(hop_url)
        if hop is None:
            raise ConnectFailed(peer, "no such hop")
        body = b"".join(pieces)
        if len(body) > self._body_limit:
            raise ShardlineError("body_too_large", f"the body has {len(body)} bytes, the limit is {self._body_limit}")
        # A turn of the loop, as the network would take: nobody comes to rely on being called within push.
        await asyncio.sleep(0)
        try:
            async with asyncio.timeout(timeout_s) as wait:
                return await hop(body)
        except TimeoutError:
            if not wait.expired():
                raise BrokenResponse(peer, "the hop failed") from None
            raise TimedOut(peer, limit, timeout_s) from None

    def push_now(self, hop_url: str, pieces: Sequence[Buffer], *, timeout_s: float, limit: str, done: Done) -> bool:
        return False


def _tell(hop_url: str, done: Done, outcome: Response | HttpFailure) -> None:
    if isinstance(outcome, HttpFailure):
        done(outcome)
        return
    try:
        ack = _ack(hop_url, outcome)
    except (HttpFailure, ShardlineError) as failure:
        done(failure)
        return
    done(ack)


def _ack(hop_url: str, response: Response) -> StepAck:
    if response.status == 202 and response.body == EMPTY_ACK:
        return _ACCEPTED
    return answers.decode(peer_of(hop_url), response, StepAck)
