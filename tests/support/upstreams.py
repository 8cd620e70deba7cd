"""Servers of OpenAI's API behind a composite Node, for tests: one that does what it is told, real ones elsewhere.

`StubUpstream` answers with exactly the bytes that a test gives it, hangs, breaks off, and remembers what it was asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from shardline.node import composite_run
from shardline.options import CompositeOptions
from shardline.settings import Settings
from shardline.wire.composite import content_id_of
from tests.support.api_cluster import ApiCluster
from tests.support.local_cluster import CREDENTIAL, Role

Json = dict[str, Any]
Then = Literal["end", "hang", "break", "drip"]
"""After the body: a clean end, silence, a connection that breaks, or chunks without a text for ever."""
MODEL = "some-model"


def sse(*events: Json | str) -> bytes:
    return b"".join(
        b"data: " + (event if isinstance(event, str) else json.dumps(event)).encode() + b"\n\n" for event in events
    )


def delta(finish: str | None = None, **fields: Any) -> Json:
    """A chunk of a chat."""
    return {"object": "chat.completion.chunk", "choices": [{"index": 0, "delta": fields, "finish_reason": finish}]}


def usage(prompt: int, completion: int, cached: int | None = None) -> Json:
    told: Json = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    if cached is not None:
        told["prompt_tokens_details"] = {"cached_tokens": cached}
    return {"choices": [], "usage": told}


def said(*words: str) -> bytes:
    """A whole answer of these words."""
    counts = usage(7, len(words), 3)
    return sse(delta(role="assistant", content=""), *(delta(content=w) for w in words), delta("stop"), counts, "[DONE]")


@dataclass
class Reply:
    body: bytes = b""
    status: int = 200
    kind: str = "text/event-stream"
    then: Then = "end"
    headers: str = ""


@dataclass
class Asked:
    path: str
    headers: dict[str, str]
    body: Json
    left: asyncio.Event = field(default_factory=asyncio.Event)
    """The other side has closed the connection."""


class StubUpstream:
    """`replies` are given in order, to completions; where there is none, `usual` is."""

    def __init__(self) -> None:
        self.replies: deque[Reply] = deque()
        self.usual = Reply(said("Hel", "lo"))
        self.asked: list[Asked] = []
        self.models: Any = {"object": "list", "data": [{"id": MODEL, "max_model_len": 4096}]}
        self.models_status = 200
        self.models_hang = False
        self.old = False
        """It speaks HTTP/1.0: an answer ends with its connection."""
        self.looks = 0
        self.port = 0
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def die(self) -> None:
        """As a process that is killed: the port is closed, and every connection broken."""
        assert self._server is not None
        self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()
        await asyncio.sleep(0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                await self._talk(reader, writer)
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:-2])}
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        method, path, _ = head[0].split(" ")
        if method == "GET":
            self.looks += 1
            if self.models_hang:
                await reader.read(1)
                return
            plain = json.dumps(self.models).encode()
            await self._answer(writer, Reply(plain, self.models_status, "application/json"))
            return
        asked = Asked(path, headers, json.loads(body))
        self.asked.append(asked)
        reply = self.replies.popleft() if self.replies else self.usual
        try:
            await self._answer(writer, reply)
            await self._then(reply, asked, reader, writer)
        except OSError:
            asked.left.set()

    async def _then(
        self, reply: Reply, asked: Asked, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if reply.then == "hang":
            await reader.read(1)
            asked.left.set()
        elif reply.then == "break":
            writer.transport.abort()
        elif reply.then == "drip":
            nothing = sse({"choices": []})
            while not (writer.is_closing() or reader.at_eof()):
                writer.write(b"%x\r\n%s\r\n" % (len(nothing), nothing))
                await asyncio.sleep(0.01)
            asked.left.set()

    async def _answer(self, writer: asyncio.StreamWriter, reply: Reply) -> None:
        if self.old:
            writer.write(f"HTTP/1.0 {reply.status} X\r\ncontent-type: {reply.kind}\r\n\r\n".encode() + reply.body)
            await writer.drain()
            return
        # Without a length the end of the connection would be the end of the answer: chunks tell the two apart.
        head = (
            f"HTTP/1.1 {reply.status} X\r\ncontent-type: {reply.kind}\r\n{reply.headers}transfer-encoding: chunked\r\n"
        )
        chunk = b"%x\r\n%s\r\n" % (len(reply.body), reply.body) if reply.body else b""
        last = b"0\r\n\r\n" if reply.then == "end" else b""
        writer.write(head.encode() + b"connection: close\r\n\r\n" + chunk + last)
        await writer.drain()


class CompositeCluster(ApiCluster):
    """A Tracker, a Gateway and composite Nodes, in this process."""

    async def start_composite(self, url: str, model: str = MODEL, **more: Any) -> Role:
        role = Role()
        options = CompositeOptions(
            settings=self.settings,
            tracker_url=self.tracker.url,
            upstream=url,
            model=model,
            host="127.0.0.1",
            port=0,
            credential=CREDENTIAL,
            state_dir=self.folder,
            announce=role,
            **more,
        )
        role.task = asyncio.create_task(composite_run.run(options))
        self.nodes.append(role)
        self.model = model
        self.content_id = content_id_of(model)
        return role

    async def chat(self, *messages: Json, **fields: Any) -> Any:
        body = {"model": self.model, "messages": messages or [{"role": "user", "content": "Hi"}], **fields}
        return await self.http.post(f"{self.url}/v1/chat/completions", json=body)


@asynccontextmanager
async def composite_cluster(
    folder: Path, urls: Sequence[str] = (), *, settings: Settings | None = None, **more: Any
) -> AsyncIterator[CompositeCluster]:
    cluster = CompositeCluster(folder, settings or Settings(drain_s=0.5))
    try:
        await cluster.start_tracker()
        await cluster.start_gateway()
        for url in urls:
            await cluster.start_composite(url, **more)
        for node in cluster.nodes:
            await node.until("ready")
        yield cluster
    finally:
        await cluster.stop()


@asynccontextmanager
async def stub_cluster(
    folder: Path, *, settings: Settings | None = None, **more: Any
) -> AsyncIterator[tuple[CompositeCluster, StubUpstream]]:
    """One composite Node in front of a stub."""
    stub = StubUpstream()
    await stub.start()
    try:
        async with composite_cluster(folder, [stub.url], settings=settings, **more) as cluster:
            stub.asked.clear()
            yield cluster, stub
    finally:
        await stub.die()
