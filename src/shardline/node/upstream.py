"""The server behind a composite Node, as a client of it: which model it has, a completion, and how it can fail.

Owns the URL, the key, and what each status and broken connection means. The URL is the operator's and nobody else's: no
request names one, and no redirect is followed. How an answer reads is upstream_answer.py's, what follows from a failure
composite.py's. Shown by tests/cluster/test_composite.py.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import Callable, Collection
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import msgspec
import structlog

from shardline.errors import ShardlineError, first_of
from shardline.node.upstream_answer import Event, UpstreamAnswer, words_of
from shardline.settings import Settings
from shardline.telemetry.log_tail import printable
from shardline.transport.addresses import split_url
from shardline.transport.failures import ConnectFailed, HttpFailure, NotOurPeer, OwnLack, TimedOut
from shardline.transport.http_client import HttpClient
from shardline.transport.tracing import untraced
from shardline.wire.composite import EXTRA, PASSED_CHAT, PASSED_TEXT, Answered, UpstreamCall

log = structlog.get_logger(__name__)
_PATHS = {"chat": "/chat/completions", "text": "/completions"}
_KEY = re.compile(r"[!-~]{1,4096}")
_MODELS_BYTES = 4 << 20
_NAMES_TOLD = 5
_TEST_TOKENS = 8
_NO_STREAM = frozenset({"application/json", "text/html"})
"""What comes with a status of success from servers that do not stream, or fail without saying so."""
_TOO_LONG = (b'"context_length_exceeded"', b'"exceed_context_size_error"', b"maximum context length")
"""By what servers (OpenAI's own, llama-server, vLLM and SGLang) tell that from other faults of a request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamPlace:
    """Where the upstream is, and what its operator says of it."""

    url: str
    """Base of its API, as `http://127.0.0.1:8000/v1`."""
    model: str
    extra_fields: frozenset[str] = frozenset()
    """Of `EXTRA`: what it does beside OpenAI's own fields."""


class _Entry(msgspec.Struct):
    id: str
    max_model_len: int | None = None
    context_length: int | None = None
    meta: dict[str, Any] | None = None


class _Models(msgspec.Struct):
    data: list[_Entry]


def check_place(url: str, key: str | None) -> str:
    """The base URL without a slash at its end. Raises `setting_invalid` for what is no URL of an API, or no key."""
    try:
        parts = split_url(url)
    except ShardlineError:
        parts = None
    if parts is None or "?" in url or parts.party is not None:
        # Not quoted: where it is wrong because it holds a password or a key, that would stand in a log.
        why = "this is no URL of an API, such as http://127.0.0.1:8000/v1: scheme, host, port and path alone"
        raise ShardlineError("setting_invalid", why, param="upstream")
    if key is not None and not _KEY.fullmatch(key):
        raise ShardlineError("setting_invalid", "the key is one line of visible characters", param="upstream_key_file")
    return url.rstrip("/")


class Upstream:
    """One server. `client` carries its key, and nothing of the cluster."""

    def __init__(
        self, place: UpstreamPlace, client: HttpClient, settings: Settings, *, secret: str | None = None
    ) -> None:
        """`secret`: the key that `client` carries, which is kept out of what the upstream says in errors."""
        self.place = place
        self._secret = secret
        self._client = client
        self._settings = settings

    async def context_length(self) -> int | None:
        """Look whether it serves the model; what it says of the context, None: nothing. Raises `engine_lost` where it
        does not answer, `model_not_found` where it does not have the model, and what `_refusal` makes of a status."""
        settings = self._settings
        try:
            answer = await self._client.request(
                "GET",
                f"{self.place.url}/models",
                timeout_s=settings.control_s,
                limit="control",
                max_body=_MODELS_BYTES,
            )
        except HttpFailure as failure:
            raise _lost(failure) from None
        if answer.status != 200:
            raise _refusal(answer.status, answer.body, self._secret)
        try:
            listed = msgspec.json.decode(answer.body, type=_Models).data
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            raise ShardlineError("engine_error", "the upstream's list of models is none") from None
        found = next((entry for entry in listed if entry.id == self.place.model), None)
        if found is None:
            names = ", ".join(printable(entry.id, 100) for entry in listed[:_NAMES_TOLD]) or "none"
            raise ShardlineError(
                "model_not_found",
                f"the upstream does not serve {self.place.model!r}; it names {names}",
                advice="Give --model the name that the upstream has for it.",
                param="model",
            )
        told = found.max_model_len or found.context_length or (found.meta or {}).get("n_ctx")
        return told if isinstance(told, int) and 0 < told < 1 << 31 else None

    def check(self, call: UpstreamCall) -> None:
        """Raises `unsupported_parameter` for the first field that the upstream is not known to do."""
        known: Collection[str] = PASSED_CHAT if call.kind == "chat" else PASSED_TEXT
        for name in call.fields:
            if name in known or name in self.place.extra_fields:
                continue
            advice = f"Its operator can say that it is: --upstream-field {name}." if name in EXTRA else None
            what = f"'{printable(name, 60)}': the server behind this model is not known to do it"
            raise ShardlineError("unsupported_parameter", what, param=printable(name, 60), advice=advice)

    async def answer(self, call: UpstreamCall, max_tokens: int, heard: Callable[[Event], None]) -> None:
        """Have `call` answered; `heard` is called with each event, `Answered` last. Whoever cancels this closes the
        connection, which frees the upstream.

        Raises `engine_lost` where the upstream dies, `deadline` where it is silent for too long (limit `prefill_chunk`
        before its first word, `step` after it), `engine_error` where it fails, and what it refuses.
        """
        watch = _Silence(self._settings)
        stops = call.fields.get("stop")
        reader = UpstreamAnswer(max_tokens, (stops,) if isinstance(stops, str) else tuple(stops or ()), self._secret)

        def on_line(line: bytes) -> None:
            if line.startswith(b"data:"):
                watch.heard()
            for event in reader.push(line):
                heard(event)

        try:
            async with asyncio.TaskGroup() as tasks:
                watching = tasks.create_task(watch.run())
                await self._stream(call, reader, on_line)
                watching.cancel()
        except* ShardlineError as group:
            raise first_of(group) from None
        if not reader.done:
            heard(reader.end())

    async def _stream(self, call: UpstreamCall, reader: UpstreamAnswer, on_line: Callable[[bytes], None]) -> None:
        body = {
            **call.fields,
            "model": self.place.model,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        settings = self._settings
        try:
            async with AsyncExitStack() as stack:
                with untraced():  # ids of our requests are our own: some servers refuse those of another form
                    stream = await stack.enter_async_context(
                        self._client.stream(
                            "POST",
                            self.place.url + _PATHS[call.kind],
                            body=msgspec.json.encode(body),
                            content_type="application/json",
                            headers={"accept": "text/event-stream"},
                            timeout_s=settings.prefill_chunk_s,
                            limit="prefill_chunk",
                            on_line=on_line,
                        )
                    )
                if stream.status >= 400:
                    raise _refusal(stream.status, await stream.error_body(), self._secret)
                if stream.status != 200:
                    raise _refusal(stream.status, b"", None)
                kind = stream.headers.get("content-type", "").partition(";")[0].strip().lower()
                if kind in _NO_STREAM:
                    why = f"the upstream answered with {kind}, where a stream of events was asked for"
                    raise ShardlineError("engine_error", why)
                failure = await stream.ended()
        except HttpFailure as failed:
            raise _lost(failed) from None
        if isinstance(failure, ShardlineError):
            raise failure
        if failure is not None and not reader.complete:
            log.warning("upstream_broke_off", reason=str(failure))
            raise ShardlineError("engine_lost", "the upstream's answer broke off: its connection was lost")

    async def test(self) -> None:
        """One small answer, so that a model counts only once it has said something. Raises what `answer` raises, and
        `deadline` where it goes on without an end."""
        question = {"role": "user", "content": "Say hello."}
        limit = {"max_tokens": _TEST_TOKENS}
        seconds = self._settings.prefill_chunk_s + _TEST_TOKENS * self._settings.step_s
        try:
            async with asyncio.timeout(seconds):
                try:
                    await self._said_something(UpstreamCall(kind="chat", fields={"messages": [question], **limit}))
                except ShardlineError as error:
                    if error.code != "invalid_value":
                        raise
                    # A model without a chat template: what it can do is go on with a text.
                    await self._said_something(UpstreamCall(kind="text", fields={"prompt": "Hello", **limit}))
        except TimeoutError:
            why = f"the upstream has not ended the answer to the self-test within {seconds:g} s"
            raise ShardlineError("deadline", why, limit="step") from None

    async def _said_something(self, call: UpstreamCall) -> None:
        ends: list[Answered] = []
        await self.answer(call, _TEST_TOKENS, lambda event: ends.append(event) if isinstance(event, Answered) else None)
        if not ends:
            raise ShardlineError("engine_error", "the upstream's answer to the self-test has no end")


class _Silence:
    """Judges how long nothing has come: keep-alives are not the answer. A time in which this process itself stood still
    is held against nobody."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        self._last = self._loop.time()
        self._begun = False

    def heard(self) -> None:
        self._last = self._loop.time()
        self._begun = True

    async def run(self) -> None:
        settings = self._settings
        while True:
            limit, seconds = ("step", settings.step_s) if self._begun else ("prefill_chunk", settings.prefill_chunk_s)
            now = self._loop.time()
            left = self._last + seconds - now
            if left <= 0:
                message = f"the upstream has said nothing for {seconds:g} s"
                raise ShardlineError("deadline", message, limit=limit)
            pause = min(left, settings.beat_interval_s)
            await asyncio.sleep(pause)
            if self._loop.time() - now - pause > settings.late_timer_s:
                self._last = self._loop.time()


def upstream_client(settings: Settings, key: str | None, ca_file: str | None) -> HttpClient:
    """A client that knows the upstream's key, and none of the cluster's. Raises `setting_invalid`."""
    try:
        tls = None if ca_file is None else ssl.create_default_context(cafile=ca_file)
    except (OSError, ssl.SSLError) as error:
        why = f"no certificates can be read of it: {error}"
        raise ShardlineError("setting_invalid", why, param="upstream_ca") from None
    return HttpClient(settings, credential=key, tls=tls, part="the Node", foreign=True)


def _lost(failure: HttpFailure) -> ShardlineError:
    if isinstance(failure, OwnLack):
        return failure.error()
    log.warning("upstream_not_reached", reason=str(failure))
    if isinstance(failure, TimedOut):
        return ShardlineError("deadline", "the upstream did not answer in time", limit=failure.limit)
    if isinstance(failure, NotOurPeer):
        return ShardlineError("engine_lost", f"what the upstream answers cannot be read: {failure.what}")
    why = "takes no connection" if isinstance(failure, ConnectFailed) else f"was lost: {failure.brief}"
    return ShardlineError("engine_lost", f"the upstream {why}")


def _refusal(status: int, body: bytes, secret: str | None) -> ShardlineError:
    """What a status that is no success means, and for whom."""
    words = words_of(body, secret)
    log.info("upstream_refused", status=status)  # its words may quote the request, and are for who sent that
    if status in (400, 413, 422):
        code = "context_length_exceeded" if any(sign in body for sign in _TOO_LONG) else "invalid_value"
        return ShardlineError(code, f"the upstream refused the request: {words}")
    if status in (401, 403):
        why = f"the upstream refuses the key of this Node (status {status})"
        return ShardlineError("setting_invalid", why, param="upstream_key_file")
    if status in (429, 503):
        return ShardlineError("capacity", f"the upstream is full (status {status}): {words}", retry_after=2)
    if status == 404:
        return ShardlineError("engine_error", f"the upstream does not know the model, or this API: {words}")
    if 300 <= status < 400:
        return ShardlineError("engine_error", f"the upstream answers with a redirect ({status}), which nobody follows")
    return ShardlineError("engine_error", f"the upstream failed (status {status}): {words}")
