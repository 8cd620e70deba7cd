"""The Gateway's HTTP surface: which path does what, who asks, and when the client has gone.

A thin shell: it reads a body, asks, and writes what comes back. Every rule is in a file beside it. It opens nothing
and owns nothing that lives longer than a request. Shown by tests/gateway/test_app_*.py; described in docs/api.md.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, Protocol

from starlette.datastructures import QueryParams
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from shardline.errors import ShardlineError
from shardline.gateway import anthropic_requests, openapi, responses_requests, sse
from shardline.gateway.anthropic_answers import MessageWords, with_its_errors
from shardline.gateway.anthropic_requests import messages_request
from shardline.gateway.choices import Choice
from shardline.gateway.clients import Clients
from shardline.gateway.completions import Completions, Prepared
from shardline.gateway.cross_origin import CrossOrigin, origins_of
from shardline.gateway.dialects import Dialect
from shardline.gateway.embeddings import EmbeddingRequests
from shardline.gateway.generate_api import Generations, SessionRecords
from shardline.gateway.keys import ApiKey
from shardline.gateway.keys import Scope as KeyScope
from shardline.gateway.live import Live
from shardline.gateway.llama_server_text import LlamaServerText
from shardline.gateway.openai_answers import Json, lack_of, missing_layers, model_entry
from shardline.gateway.page import Page
from shardline.gateway.replies import SESSION_HEADER, Reply, usage_of
from shardline.gateway.responses_answers import ResponseWords
from shardline.gateway.responses_requests import responses_request
from shardline.gateway.spans import tell_embedding, tell_spans
from shardline.settings import Settings
from shardline.transport.addresses import is_loopback, parse_address
from shardline.transport.bodies import ClientLeft, body_of, header, send_body, send_json
from shardline.transport.boundary import ErrorBoundary

Call = Callable[[Scope, Receive, Send], Awaitable[None]]
Ask = Callable[[bytes], Awaitable[Json]]
Prepare = Callable[[bytes, str], Awaitable[Prepared]]


class Sending(Protocol):
    """An answer that can be sent, once."""

    async def send(self, send: Send) -> None: ...


MakeReply = Callable[[Prepared, Sequence[Choice], Settings], Sending]
_ROOT = (
    b"This is a Shardline Gateway.\n\n"
    b"Its API is OpenAI's, below /v1: name that as base URL. GET /v1/models lists what is served, GET /readyz says\n"
    b"whether a model can be used now. The documentation is the folder docs of the project: api.md describes the API.\n"
)
_COPIES = 4
"""How often a large request lies in memory: its bytes, what they mean, the messages for the template, the prompt."""


class Endpoint:
    """One path as an application of its own: it needs the raw `receive`, to see a client leave."""

    def __init__(self, call: Call) -> None:
        self._call = call

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._call(scope, receive, send)


class GatewayApp:
    """The application. `metrics` gives the Prometheus text of the process. `live`: what its page shows; without it
    there is no page."""

    def __init__(
        self,
        *,
        completions: Completions,
        generations: Generations,
        records: SessionRecords,
        clients: Clients,
        settings: Settings,
        metrics: Callable[[], bytes],
        live: Live | None = None,
    ) -> None:
        self._completions = completions
        self._generations = generations
        self._records = records
        self._clients = clients
        self._settings = settings
        self._metrics = metrics
        self._live = live
        self._created = int(time.time())
        self._llama_server = LlamaServerText(completions, generations, settings)
        self._embedding_requests = EmbeddingRequests(completions, generations, settings)
        self._origins = origins_of(settings.cors_origins)

    def asgi(self) -> ASGIApp:
        """With the error boundary around it."""
        session = "/v1/route-sessions/{id}"
        routes = [
            ("POST", "/v1/chat/completions", self._chat),
            ("POST", "/v1/completions", self._text),
            ("POST", "/v1/responses", self._responses),
            ("POST", "/v1/messages", self._messages),
            ("POST", "/v1/embeddings", self._embeddings),
            ("POST", "/tokenize", self._tokenize),
            ("POST", "/detokenize", self._detokenize),
            ("GET", "/props", self._props),
            ("GET", "/health", self._health),
            ("GET", "/v1/models", self._models),
            ("GET", "/v1/models/{id:path}", self._model),
            ("GET", "/v1/route-sessions", self._sessions),
            ("GET", f"{session}/telemetry", self._telemetry),
            ("GET", session, self._session),
            ("DELETE", session, self._cancel),
            ("GET", "/", self._root),
            ("GET", "/healthz", self._healthz),
            ("GET", "/readyz", self._readyz),
            ("GET", "/metrics", self._show_metrics),
            ("GET", "/openapi.json", self._openapi),
        ]
        if self._live is not None:
            page = Page()
            routes += [("GET", "/", page), ("GET", "/page/{name:path}", page), ("GET", "/v1/live", self._follow)]
        table: dict[str, dict[str, Call]] = {}
        for method, path, call in routes:
            table.setdefault(path, {})[method] = call
        whole = ErrorBoundary(
            Router(
                [Route(path, Endpoint(_by_method(calls)), methods=list(calls)) for path, calls in table.items()],
                redirect_slashes=False,
            )
        )
        return CrossOrigin(whole, self._origins, lambda: self._clients.ask_for_keys) if self._origins else whole

    async def _chat(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._complete(scope, receive, send, self._completions.chat)

    async def _text(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._complete(scope, receive, send, self._completions.text)

    async def _responses(self, scope: Scope, receive: Receive, send: Send) -> None:
        asked = Dialect(self._completions, _response_of, responses_requests.NAMES)
        await self._complete(scope, receive, send, asked.prepare, asked.reply)

    async def _messages(self, scope: Scope, receive: Receive, send: Send) -> None:
        asked = Dialect(self._completions, _message_of, anthropic_requests.NAMES)
        call = partial(self._complete, prepare=asked.prepare, make=asked.reply)
        await with_its_errors(call, scope, receive, send)

    async def _embeddings(self, scope: Scope, receive: Receive, send: Send) -> None:
        key = self._client(scope, "generate")
        _check_json(scope)
        with self._clients.admitted(key):
            async with body_of(receive, scope, self._settings.api_body_bytes, copies=_COPIES) as body:

                async def answer() -> None:
                    embedding = await self._embedding_requests.prepare(body.data, key.name)
                    body.free()
                    try:
                        await self._embedding_requests.run(embedding)
                    finally:
                        if embedding.tokens:
                            self._clients.used(key, prompt_tokens=embedding.tokens, completion_tokens=0)
                        tell_embedding(embedding.request.model, embedding.tokens)
                    sessions = ",".join(embedding.told_sessions).encode()
                    await send_json(send, embedding.answer(), headers=[(SESSION_HEADER, sessions)])

                await while_connected(receive, answer())

    async def _tokenize(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._asked(scope, receive, send, self._llama_server.tokenize)

    async def _detokenize(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._asked(scope, receive, send, self._llama_server.detokenize)

    async def _asked(self, scope: Scope, receive: Receive, send: Send, ask: Ask) -> None:
        self._client(scope, "generate")
        _check_json(scope)
        async with body_of(receive, scope, self._settings.api_body_bytes, copies=_COPIES) as body:

            async def answer() -> None:
                await send_json(send, await ask(body.data))

            await while_connected(receive, answer())

    async def _props(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._principal(scope)
        name = QueryParams(scope["query_string"]).get("model")
        await send_json(send, await self._llama_server.props(name))

    async def _health(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As llama-server says that a model can be used, else as `/readyz` says why not."""
        await self._ready()
        await send_json(send, {"status": "ok"})

    async def _complete(
        self, scope: Scope, receive: Receive, send: Send, prepare: Prepare, make: MakeReply = Reply
    ) -> None:
        key = self._client(scope, "generate")
        _check_json(scope)
        with self._clients.admitted(key):
            async with body_of(receive, scope, self._settings.api_body_bytes, copies=_COPIES) as body:

                async def answer() -> None:
                    prepared = await prepare(body.data, key.name)
                    body.free()
                    await self._reply(key, prepared, send, make)

                await while_connected(receive, answer())

    async def _reply(self, key: ApiKey, prepared: Prepared, send: Send, make: MakeReply) -> None:
        """The answer, and in the books of its key what it has cost, however it ends."""
        choices = prepared.start(self._generations)
        try:
            await make(prepared, choices, self._settings).send(send)
        finally:
            cost = usage_of(prepared, choices)
            if cost.completion_tokens:  # else no Node has done anything worth a line
                self._clients.used(key, prompt_tokens=cost.prompt_tokens, completion_tokens=cost.completion_tokens)
            tell_spans(prepared, choices, cost, lambda session: self._records.get(session, key.name))

    async def _models(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._principal(scope)
        models = await self._generations.models()
        # A model that several engine classes serve is listed once, as it would be used.
        listed = {model.model: model for model in sorted(models, key=lambda model: model.ready)}
        entries = [model_entry(listed[name], self._settings, self._created) for name in sorted(listed)]
        await send_json(send, {"object": "list", "data": entries})

    async def _model(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._principal(scope)
        name = scope["path_params"]["id"]
        models = sorted(await self._generations.models(), key=lambda model: not model.ready)
        for model in models:
            if model.model == name:
                await send_json(send, model_entry(model, self._settings, self._created))
                return
        raise ShardlineError("model_not_found", f"the model '{name[:100]}' is not served here", param="model")

    async def _sessions(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_json(send, {"sessions": self._records.list(self._principal(scope))})

    async def _session(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_json(send, self._records.get(scope["path_params"]["id"], self._principal(scope)))

    async def _cancel(self, scope: Scope, receive: Receive, send: Send) -> None:
        session, key_id = scope["path_params"]["id"], self._principal(scope, "generate")
        await self._records.cancel(session, key_id)
        await send_json(send, self._records.get(session, key_id))

    async def _telemetry(self, scope: Scope, receive: Receive, send: Send) -> None:
        session, key_id = scope["path_params"]["id"], self._principal(scope)
        self._records.get(session, key_id)
        after = _last_event_id(scope)
        response = sse.EventResponse(send, stall_s=self._settings.client_stall_s)

        async def follow() -> None:
            await response.start()
            events = self._records.subscribe(session, key_id, after)
            async with aclosing(sse.or_silence(events, self._settings.keep_alive_comment_s)) as heard:
                async for event in heard:
                    await response.write(sse.comment("shardline") if event is None else sse.numbered(*event))
            await response.end()

        await while_connected(receive, follow())

    async def _follow(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._client(scope, None)
        if self._live is not None:
            response = sse.EventResponse(send, stall_s=self._settings.client_stall_s)
            # The key is looked at again and again: it may be revoked while its stream is open.
            await while_connected(receive, self._live.follow(lambda: self._client(scope, None), response))

    async def _root(self, scope: Scope, receive: Receive, send: Send) -> None:
        """For whoever opens the address itself: what this is, and where to go on."""
        await send_body(send, 200, _ROOT, b"text/plain; charset=utf-8")

    async def _healthz(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Live: this process answers."""
        await send_json(send, {"status": "live"})

    async def _readyz(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Ready: at least one model has a whole route."""
        await send_json(send, {"status": "ready", "models": await self._ready()})

    async def _ready(self) -> list[str]:
        models = await self._generations.models()
        ready = sorted({model.model for model in models if model.ready})
        if not ready:
            gaps = {model.model: missing_layers(model) for model in models}
            words = "; ".join(f"{model.model}: {lack_of(model)}" for model in models)
            raise ShardlineError(
                "model_unavailable",
                f"no model is whole: {words}" if words else "no model is served yet",
                missing=gaps,
                retry_after=1,
            )
        return ready

    async def _show_metrics(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_body(send, 200, self._metrics(), b"text/plain; version=0.0.4; charset=utf-8")

    async def _openapi(self, scope: Scope, receive: Receive, send: Send) -> None:
        """It tells nothing of this Gateway, and is for whoever comes. Made once, which takes longer than a step."""
        await send_body(send, 200, await asyncio.to_thread(openapi.document))

    def _principal(self, scope: Scope, needs: KeyScope | None = None) -> str:
        return self._client(scope, needs).name

    def _client(self, scope: Scope, needs: KeyScope | None) -> ApiKey:
        if not self._clients.ask_for_keys:
            _check_host(scope)
        return self._clients.client(_credential(scope), needs)


async def while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Do `work`; cancel it, and wait until it has cleaned up, when the client leaves (`ClientLeft`)."""
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_gone(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        # Both have this owner: neither outlives the request.
        watching.cancel()
        if not working.done():
            working.cancel()
        await asyncio.wait({working, watching})
    if working.cancelled():
        raise ClientLeft
    try:
        working.result()
    finally:
        del working  # else what was raised, and this frame with all that the request held, would keep each other


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _by_method(calls: dict[str, Call]) -> Call:
    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        await calls["GET" if scope["method"] == "HEAD" else scope["method"]](scope, receive, send)

    return call


def _check_json(scope: Scope) -> None:
    """Only what says that it is JSON: a page of another site can send other types without being asked first."""
    sent = header(scope, b"content-type") or "none"
    kind, _, parameters = sent.partition(";")
    charset = parameters.strip().lower().removeprefix("charset=").strip('"')
    if kind.strip().lower() != "application/json" or charset not in ("", "utf-8", "utf8", "us-ascii"):
        raise ShardlineError("unsupported_media_type", f"Content-Type {sent[:80]} is not application/json in UTF-8")


def _check_host(scope: Scope) -> None:
    """Without keys, only this machine may ask: not a web page that made its own name lead to a loopback address."""
    field = header(scope, b"host") or ""
    name = field[1:].partition("]")[0] if field.startswith("[") else field.partition(":")[0]
    if name and parse_address(name) is None and not is_loopback(name.lower()):
        raise ShardlineError(
            "forbidden", f"the Host '{name[:80]}' is not this machine: a Gateway with a name needs keys"
        )


def _response_of(body: bytes) -> tuple[Json, Callable[[], ResponseWords]]:
    chat, asked = responses_request(body)
    return chat, partial(ResponseWords, asked)


def _message_of(body: bytes) -> tuple[Json, Callable[[], MessageWords]]:
    chat, model = messages_request(body)
    return chat, partial(MessageWords, model)


def _credential(scope: Scope) -> str | None:
    """The Authorization field, or what Anthropic's clients send instead of one."""
    key = header(scope, b"x-api-key")
    authorization = header(scope, b"authorization")
    return f"Bearer {key}" if authorization is None and key is not None else authorization


def _last_event_id(scope: Scope) -> int:
    sent = header(scope, b"last-event-id") or ""
    if not sse.LAST_EVENT_ID.fullmatch(sent):
        raise ShardlineError("invalid_value", "Last-Event-ID must be the id of an event", param="Last-Event-ID")
    return int(sent or "0")
