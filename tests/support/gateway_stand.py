"""A Gateway without a cluster: the real HTTP surface on loopback, with scripted generations behind it.

The generations implement the seam of gateway/generate_api.py in memory; the head Node is a small server that gives
out a text bundle and tokenises byte by byte. Everything between the client's socket and these two is the product.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec
from starlette.types import Receive, Scope, Send

from shardline.errors import ShardlineError
from shardline.gateway.app import GatewayApp
from shardline.gateway.clients import Clients
from shardline.gateway.completions import Completions
from shardline.gateway.generate_api import FinishedEvent, GenerationEvent, GenerationRequest, TokensEvent
from shardline.gateway.keys import ApiKeys
from shardline.gateway.template import Templates
from shardline.gateway.text import TextStore
from shardline.settings import Settings
from shardline.transport.bodies import read_json, send_body, send_json
from shardline.transport.http_client import HttpClient
from shardline.transport.http_server import serve
from shardline.wire.messages import ModelInfo, Peer, TextBundle, Token, TokenizeAnswer, TokenizeRequest, TokenLogprob
from shardline.wire.telemetry import DecodeView, PrefillView, TelemetryEvent

Json = dict[str, Any]
MODEL = "tiny"
BOS, EOS, START, END = 256, 257, 258, 259
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def bundle(template: str | None = CHATML, *, add_bos: bool = False, fim: dict[str, int] | None = None) -> TextBundle:
    """Ids 0 to 255 are single bytes, then the control tokens, then three for infilling."""
    special = [b"<s>", b"</s>", b"<|im_start|>", b"<|im_end|>", b"<|pre|>", b"<|suf|>", b"<|mid|>"]
    return TextBundle(
        pieces=[bytes([b]) for b in range(256)] + special,
        special=list(range(256, 256 + len(special))),
        eog=[EOS, END],
        bos=BOS,
        eos=EOS,
        add_bos=add_bos,
        chat_template=template,
        context_length=64,
        fim=fim,
    )


# What a scripted generation does, one after another.
@dataclass(frozen=True)
class Piece:
    """A token whose bytes are these; a number is the token of that id."""

    what: bytes | int


@dataclass(frozen=True)
class Wait:
    event: asyncio.Event


@dataclass(frozen=True)
class Fail:
    error: Exception


@dataclass(frozen=True)
class Refuse:
    """The route does not open."""

    error: ShardlineError


@dataclass(frozen=True)
class Open:
    """The route is open from here on; without one it is from the start."""


@dataclass(frozen=True)
class Prefilled:
    done: int


@dataclass(frozen=True)
class Pause:
    """Let the loop do other things: the tokens before and after do not come in one event."""


Act = Piece | Wait | Fail | Refuse | Open | Prefilled | Pause


def say(*pieces: bytes | str | int) -> list[Act]:
    """One token a piece, each in an event of its own; the end is an end-of-generation id."""
    acts: list[Act] = []
    for piece in pieces:
        acts += [Piece(piece.encode() if isinstance(piece, str) else piece), Pause()]
    return acts


class ScriptedGeneration:
    """Implements `Generation`: the acts of a script until max_tokens, then `length`; at their end `stop`."""

    def __init__(self, stand: Stand, request: GenerationRequest, acts: Sequence[Act], number: int) -> None:
        self.id = f"rs-{number}"
        self.request = request
        self.stopped = False
        self.cancelled: str | None = None
        self.phase = "queued"
        self._stand = stand
        self._acts = acts
        self._opened = asyncio.Event()
        self._refusal: ShardlineError | None = None
        self._done = 0
        self._tokens = 0
        self._seq = 0
        self._over = asyncio.Event()

    @property
    def over(self) -> bool:
        return self._over.is_set()

    async def wait_open(self) -> None:
        await self._opened.wait()
        if self._refusal is not None:
            raise self._refusal

    async def __aiter__(self) -> AsyncIterator[GenerationEvent]:
        yield self.telemetry()
        if not any(isinstance(act, Open | Refuse) for act in self._acts):
            self._open()
        for act in self._acts:
            if self._over.is_set():
                return
            if isinstance(act, Piece):
                self._prefill(len(self.request.prompt))
                yield TokensEvent([self._token(act.what)])
                if self._tokens == self.request.max_tokens:
                    self._end("completed")
                    yield FinishedEvent("length", self._tokens)
                    return
            else:
                await self._do(act)
                if isinstance(act, Open | Prefilled):
                    yield self.telemetry()
        if not self._over.is_set():
            self._end("completed")
            yield FinishedEvent("stop", self._tokens)

    async def _do(self, act: Act) -> None:
        match act:
            case Wait(event):
                await self._until(event)
            case Pause():
                await asyncio.sleep(0)
            case Open():
                self._open()
            case Prefilled(done):
                self._prefill(done)
            case Refuse(error):
                self._refusal = error
                self._opened.set()
                self._end("failed")
                raise error
            case Fail(failure):
                self._end("failed")
                raise failure

    async def stop(self, generated: int) -> None:
        self._tokens = generated
        self.stopped = True
        self._end("completed")

    async def cancel(self, reason: str) -> None:
        if not self._over.is_set():
            self.cancelled = reason
            self._end("cancelled")

    def telemetry(self) -> TelemetryEvent:
        self._seq += 1
        return TelemetryEvent(
            id=self.id,
            seq=self._seq,
            time=0.0,
            phase=self.phase,  # type: ignore[arg-type]
            model=self.request.model,
            prefill=PrefillView(done=self._done, total=len(self.request.prompt), chunk=16),
            decode=DecodeView(tokens=self._tokens),
        )

    def timings(self) -> dict[str, float | None]:
        return {
            "prompt_ms": 10.0 if self._tokens else None,
            "predicted_ms": 5.0 * (self._tokens - 1) if self._tokens > 1 else None,
        }

    def _open(self) -> None:
        self.phase = "prefill"
        self._opened.set()

    def _prefill(self, done: int) -> None:
        self._done = max(self._done, done)

    def _token(self, what: bytes | int) -> Token:
        self.phase = "decode"
        token = what if isinstance(what, int) else self._stand.token_of(what)
        asked = self.request.sampling.logprobs
        self._tokens += 1
        return Token(
            id=token,
            index=self._tokens - 1,
            logprob=None if asked is None else -0.5,
            top=None if asked is None else [TokenLogprob(id=(token + k) % 256, logprob=-0.5 - k) for k in range(asked)],
        )

    async def _until(self, event: asyncio.Event) -> None:
        waits = [asyncio.create_task(event.wait()), asyncio.create_task(self._over.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.wait(waits)

    def _end(self, phase: str) -> None:
        self.phase = phase
        self._over.set()


Script = Callable[[GenerationRequest], Iterable[Act]]


@dataclass
class Stand:
    """What the tests set before they ask, and what they look at afterwards."""

    settings: Settings = field(default_factory=Settings)
    script: Script = lambda request: say(b"h", b"i")
    pieces: Sequence[bytes] = ()
    """Tokens beyond those of the bundle, which scripts say."""
    models: list[ModelInfo] = field(default_factory=list)
    models_error: ShardlineError | None = None
    generations: list[ScriptedGeneration] = field(default_factory=list)
    sessions: dict[str, tuple[str, list[tuple[int, bytes]]]] = field(default_factory=dict)
    """Records: id -> (key id, events)."""
    asked_of_node: list[str] = field(default_factory=list)
    url: str = ""
    http: httpx.AsyncClient = field(default_factory=lambda: httpx.AsyncClient(timeout=20, trust_env=False))

    announced: dict[str, ShardlineError | str | None] = field(default_factory=dict)
    """Announced sessions: "open", or the error (None: none) with which they were withdrawn."""

    # Implements Generations.

    def announce(self, model: str, key_id: str) -> str:
        session = f"rs-announced-{len(self.announced)}"
        self.announced[session] = "open"
        return session

    def withdraw(self, session: str, error: ShardlineError | None) -> None:
        self.announced[session] = error

    def start(self, request: GenerationRequest) -> ScriptedGeneration:
        acts = list(self.script(request))
        generation = ScriptedGeneration(self, request, acts, len(self.generations))
        self.generations.append(generation)
        return generation

    async def list_models(self) -> list[ModelInfo]:
        if self.models_error is not None:
            raise self.models_error
        return self.models

    def token_of(self, piece: bytes) -> int:
        """The id of the token with these bytes; a test names its pieces before the Gateway reads the bundle."""
        if len(piece) == 1:
            return piece[0]
        return 256 + 7 + self.pieces.index(piece)

    # What tests ask.

    async def post(self, path: str, body: Json | bytes, **headers: str) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        fields = {"content-type": "application/json", **{k.replace("_", "-"): v for k, v in headers.items()}}
        return await self.http.post(f"{self.url}{path}", content=content, headers=fields)

    async def chat(self, **fields: Any) -> httpx.Response:
        return await self.post("/v1/chat/completions", chat(**fields))

    async def complete(self, **fields: Any) -> httpx.Response:
        return await self.post("/v1/completions", {"model": MODEL, "prompt": "Hi", **fields})

    async def get(self, path: str, **headers: str) -> httpx.Response:
        return await self.http.get(f"{self.url}{path}", headers=headers)


class _Seam:
    """`Generations` by the names of the seam: the stand has a field that is called `models`."""

    def __init__(self, stand: Stand) -> None:
        self._stand = stand
        self.start = stand.start
        self.announce = stand.announce
        self.withdraw = stand.withdraw
        self.models = stand.list_models


class _Records:
    """Implements `SessionRecords` over `Stand.sessions`."""

    def __init__(self, stand: Stand) -> None:
        self._stand = stand

    def _events(self, record_id: str, key_id: str) -> list[tuple[int, bytes]]:
        owner, events = self._stand.sessions.get(record_id, ("", []))
        if owner != key_id:
            raise ShardlineError("session_not_found", "no such Route Session of this key")
        return events

    def list(self, key_id: str) -> list[Json]:
        return [{"id": name} for name, (owner, _) in self._stand.sessions.items() if owner == key_id]

    def get(self, record_id: str, key_id: str) -> Json:
        return {"id": record_id, "events": len(self._events(record_id, key_id))}

    async def cancel(self, record_id: str, key_id: str) -> None:
        self._events(record_id, key_id)
        for generation in self._stand.generations:
            if generation.id == record_id:
                await generation.cancel("cancelled by request")

    async def subscribe(self, record_id: str, key_id: str, after: int = 0) -> AsyncIterator[tuple[int, bytes]]:
        for number, payload in self._events(record_id, key_id):
            if payload == b"silence":
                await asyncio.sleep(0.05)
            elif number > after:
                yield number, payload


def chat(*messages: Json, **fields: Any) -> Json:
    return {"model": MODEL, "messages": list(messages) or [{"role": "user", "content": "Hi"}], **fields}


def model(text: bytes, url: str, **fields: Any) -> ModelInfo:
    facts: Json = {
        "model": MODEL,
        "content_id": "c" * 64,
        "engine_class": "scripted/1/none/f32",
        "n_layers": 4,
        "context_length": 4096,
        "vocab_size": 300,
        "text_digest": hashlib.sha256(text).hexdigest(),
        "text_nodes": [Peer(node="n-1", url=url)],
        "head_nodes": [Peer(node="n-1", url=url)],
        "ready": True,
        "missing": [],
        "kv_capacity_tokens": 0,
    }
    return ModelInfo(**{**facts, **fields})


class HeadNode:
    """The two answers of a head Node that a Gateway needs before it opens anything."""

    def __init__(self, text: bytes, stand: Stand) -> None:
        self.text = text
        self._bundle = msgspec.msgpack.decode(text, type=TextBundle)
        self._stand = stand

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._stand.asked_of_node.append(scope["path"])
        if scope["path"] == "/v1/tokenize":
            request = await read_json(receive, scope, TokenizeRequest, 64 << 20)
            await send_json(send, TokenizeAnswer(tokens=self.tokens(request.text, request.add_special)))
        elif scope["path"] == f"/v1/text/{hashlib.sha256(self.text).hexdigest()}":
            await send_body(send, 200, self.text, b"application/msgpack")
        else:
            await send_json(send, {"error": {"code": "not_found", "message": "no such path"}}, 404)

    def tokens(self, text: str, add_special: bool) -> list[int]:
        ids = [BOS] if add_special and self._bundle.add_bos else []
        raw = text.encode()
        names = {self._bundle.pieces[token]: token for token in self._bundle.special}
        at = 0
        while at < len(raw):
            name = next((name for name in names if raw.startswith(name, at)), None)
            ids.append(raw[at] if name is None else names[name])
            at += 1 if name is None else len(name)
        return ids


@asynccontextmanager
async def standing(
    cache_dir: Path,
    *,
    stand: Stand | None = None,
    templates: Templates | None = None,
    text: TextBundle | None = None,
    keys: Sequence[str] = (),
    state: Path | None = None,
    **facts: Any,
) -> AsyncIterator[Stand]:
    """A running Gateway; `facts` are those of its one model, `templates` may be shared between stands, `state`
    has the files of its keys."""
    stand = stand or Stand()
    plain = text or bundle()
    raw = msgspec.msgpack.encode(msgspec.structs.replace(plain, pieces=[*plain.pieces, *stand.pieces]))
    settings = stand.settings
    client = HttpClient(settings)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(client.aclose)
        stack.push_async_callback(stand.http.aclose)
        node = await serve(HeadNode(raw, stand), settings=settings, lifespan="off")
        stack.push_async_callback(node.stop, 0.5)
        if not stand.models:
            stand.models.append(model(raw, node.url, **facts))
        texts = await stack.enter_async_context(TextStore(cache_dir, client, settings))
        if templates is None:
            templates = await stack.enter_async_context(Templates(settings))
        clients = Clients(ApiKeys.from_lines(keys), state)
        await stack.enter_async_context(_kept_up_to_date(clients))
        app = GatewayApp(
            completions=Completions(_Seam(stand), texts, templates, settings),
            generations=_Seam(stand),
            records=_Records(stand),
            clients=clients,
            settings=settings,
            metrics=lambda: b"# no metrics\n",
        )
        server = await serve(app.asgi(), settings=settings, lifespan="off")
        stack.push_async_callback(server.stop, 0.5)
        stand.url = server.url
        yield stand


@asynccontextmanager
async def _kept_up_to_date(clients: Clients) -> AsyncIterator[None]:
    running = asyncio.create_task(clients.run())
    try:
        yield
    finally:
        running.cancel()
        await asyncio.wait([running])


def events_of(body: bytes) -> tuple[list[Json], list[str], bool]:
    """A whole SSE body: data events, comments, whether `[DONE]` was the last thing."""
    events, comments, done = [], [], False
    for block in body.decode().split("\n\n"):
        if not block:
            continue
        assert not done, f"something follows [DONE]: {block}"
        if block.startswith(":"):
            comments.append(block)
        elif block == "data: [DONE]":
            done = True
        else:
            assert block.startswith("data: ") and "\n" not in block, block
            events.append(json.loads(block[6:]))
    return events, comments, done
