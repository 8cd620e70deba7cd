"""The commands' own small HTTP client: one request a connection, no proxies, errors as the catalogue has them.

Owns how a command talks to a Gateway or a Tracker: blocking, with limits, with `http.client` alone, so that
`shardline nodes` starts at once. The cluster's own traffic is transport's. Shown by tests/cli/test_client.py.
"""

from __future__ import annotations

import http.client
import json
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from shardline.cli.recognition import MISTAKABLE, mistaken, speaks_tls
from shardline.errors import A_KEY, ShardlineError, from_body
from shardline.settings import PROTOCOL
from shardline.transport.addresses import Url, split_url

_BODY_LIMIT = 16 << 20
_LINE_LIMIT = 4 << 20
CONNECT_S = 5.0
ANSWER_S = 30.0
STREAM_SILENCE_S = 60.0
"""A Gateway writes at least a comment line every few seconds; a stream that is silent for so long is dead."""


ADVICE = {
    ("Gateway", "unauthorized"): "Set SHARDLINE_API_KEY to a key of this Gateway: one of its "
    "--api-keys FILE, or a new one, made on its machine: shardline keys add NAME",
    ("Gateway", "rate_limit_exceeded"): "The key may make so many requests a minute. Ask again in {pause}.",
    ("Gateway", "concurrency_limit_exceeded"): "The key may have so many requests at a time. Ask again in {pause}.",
    (
        "Tracker",
        "unauthorized",
    ): "Copy the credential from the Tracker's machine (the file `credential` in its state folder) into the state "
    "folder of this one, with mode 600; or name it: shardline --credential-file FILE …",
    ("Gateway", "session_not_found"): "`shardline sessions` lists those that this key may see; records expire.",
    ("Gateway", "queue_full"): "Many requests wait already. Ask again in {pause}, or add Nodes.",
    ("Gateway", "capacity"): "All routes are full. Ask again in {pause}, or add Nodes.",
    ("Gateway", "kv_exhausted"): "Ask again in {pause}, or for fewer tokens (--max-tokens).",
    (
        "Gateway",
        "shard_unready",
    ): "A Node loads its layers. Ask again in {pause}; `shardline nodes` shows how far it is.",
    ("Gateway", "context_length_exceeded"): "Shorten the message (in a conversation: /new), or lower --max-tokens.",
    ("Gateway", "model_unavailable"): "`shardline nodes` shows which layers there are; start Nodes for the others.",
    ("Gateway", "text_unavailable"): "No Node with the first layers answers: `shardline nodes` shows which there are.",
    (
        "Gateway",
        "node_lost",
    ): "Ask again: it takes another route, if there is one. `shardline nodes` shows what is left.",
    ("Gateway", "tracker_unreachable"): "The Gateway does not reach its Tracker: start that one again.",
    ("Tracker", "forbidden"): "Run it where the Tracker runs, with the state folder that the Tracker has: {url}",
    ("Gateway", "not_found"): "This Gateway is of another version of Shardline: run the same on both sides.",
    ("Tracker", "not_found"): "This Tracker is of another version of Shardline: run the same on both sides.",
}
"""(who answered, code) -> what to do at a terminal; `{pause}` is what the answer names, `{url}` who was asked."""


class Endpoint:
    """One process that answers HTTP: the Gateway or the Tracker, as `who` says in messages."""

    def __init__(
        self, who: str, url: str, secret: str, tls: ssl.SSLContext | None = None, *, absent: str | None = None
    ) -> None:
        """`tls`: of a cluster with keys, where whoever answers must be that cluster's Tracker. `absent`: what to do
        where nobody answers, if more is known than what the URL says."""
        self._tls = tls
        self._absent = absent
        self.who = who
        self.url = url
        self._parts: Url = split_url(url)
        self._secret = secret

    def post(self, path: str) -> Any:
        return self._json("POST", path, None)

    def get(self, path: str) -> Any:
        return self._json("GET", path, None)

    def delete(self, path: str) -> Any:
        return self._json("DELETE", path, None)

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The JSON objects of a server-sent event stream, up to `[DONE]`; an error event is raised."""
        with self._exchange("POST", path, body, STREAM_SILENCE_S) as response:
            while True:
                line = response.readline(_LINE_LIMIT)
                if not line:
                    raise self._broken("the stream broke off before its end")
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                event = self._decoded(data)
                if "error" in event:
                    raise for_a_person(from_body(event["error"]), self.who, self.url)
                yield event

    def _json(self, method: str, path: str, body: dict[str, Any] | None) -> Any:
        with self._exchange(method, path, body, ANSWER_S) as response:
            return self._decoded(response.read(_BODY_LIMIT))

    @contextmanager
    def _exchange(
        self, method: str, path: str, body: dict[str, Any] | None, silence_s: float
    ) -> Iterator[http.client.HTTPResponse]:
        """Send one request; yields the response if its status is below 400, raises the error object otherwise."""
        connection = self._connection()
        headers = {"Shardline-Protocol": str(PROTOCOL)}
        if self._secret:
            headers["Authorization"] = f"Bearer {self._secret}"
        if body is not None:
            headers["Content-Type"] = "application/json"
        payload = None if body is None else json.dumps(body).encode()
        response = None
        try:
            try:
                connection.connect()
            except OSError as error:
                raise self._unreachable(error) from None
            self._check_party(connection.sock)
            connection.sock.settimeout(silence_s)
            connection.request(method, self._parts.target.rstrip("/") + path, payload, headers)
            response = connection.getresponse()
            if response.status >= 400:
                raise self._refused(response)
            yield response
        except TimeoutError:
            raise ShardlineError(
                "deadline",
                f"the {self.who} at {self.url} was silent for {silence_s:.0f} s",
                advice=f"Look whether it hangs: the log of the {self.who} says what it does. Then try again.",
                limit="answer",
            ) from None
        except (http.client.HTTPException, OSError) as error:
            if response is None and self._parts.scheme == "http" and speaks_tls(self.url):
                raise self._other_scheme("https") from None
            raise self._broken(str(error) or type(error).__name__) from None
        finally:
            # The response owns the socket once the other side has said that it will close.
            if response is not None:
                response.close()
            connection.close()

    def _connection(self) -> http.client.HTTPConnection:
        host, port = self._parts.host, self._parts.port
        if self._parts.scheme == "https":
            return http.client.HTTPSConnection(host, port, timeout=CONNECT_S, context=self._tls)
        return http.client.HTTPConnection(host, port, timeout=CONNECT_S)

    def _check_party(self, sock: socket.socket) -> None:
        if self._tls is None or not isinstance(sock, ssl.SSLSocket):
            return
        from shardline.transport.tls import is_party, parties

        if not is_party(parties(sock.getpeercert()), "tracker"):
            raise self._foreign("another party of the cluster")

    @property
    def _code(self) -> str:
        return "tracker_unreachable" if self.who == "Tracker" else "gateway_unreachable"

    def _unreachable(self, error: OSError) -> ShardlineError:
        flag = self.who.lower()
        if isinstance(error, ssl.SSLCertVerificationError):
            return mistaken(self.who, self.url) or self._unproved(error.verify_message)
        if isinstance(error, ssl.SSLError) and not speaks_tls(self.url):
            return self._other_scheme("http")
        return ShardlineError(
            self._code,
            f"no {self.who} answers at {self.url}: {error.strerror or error}",
            advice=self._absent
            or f"Start a cluster here (shardline up MODEL), or name the {self.who} that you mean: --{flag} URL",
        )

    def _other_scheme(self, scheme: str) -> ShardlineError:
        """It was asked over the other kind of HTTP than it speaks."""
        url = f"{scheme}://{self.url.partition('://')[2]}"
        why = f"what answers at {self.url} speaks {'HTTPS' if scheme == 'https' else 'plain HTTP'}"
        return ShardlineError(self._code, why, advice=f"Ask it so: --{self.who.lower()} {url}")

    def _unproved(self, why: str) -> ShardlineError:
        return ShardlineError(
            self._code,
            f"the certificate of what answers at {self.url} is not believed here: {why}",
            advice="Name the certificate of its authority (PEM) in SSL_CERT_FILE, and a host that it is made out to.",
        )

    def _broken(self, why: str) -> ShardlineError:
        return ShardlineError(
            self._code,
            f"the connection to the {self.who} at {self.url} failed: {why}",
            advice=f"Look whether the {self.who} still runs and what its log says, then try again.",
        )

    def _refused(self, response: http.client.HTTPResponse) -> ShardlineError:
        raw = response.read(_BODY_LIMIT)
        try:
            return for_a_person(from_body(json.loads(raw)["error"]), self.who, self.url)
        except (ValueError, KeyError, TypeError):
            return self._foreign(f"status {response.status} without an error object")

    def _decoded(self, raw: bytes) -> Any:
        try:
            return json.loads(raw)
        except ValueError:
            raise self._foreign("an answer that is not JSON") from None

    def _foreign(self, what: str) -> ShardlineError:
        return ShardlineError(
            self._code,
            f"what answers at {self.url} is no Shardline {self.who}: {what}",
            advice=f"Another program listens there. Name the {self.who} that you mean: --{self.who.lower()} URL",
        )


def for_a_person(error: ShardlineError, who: str, url: str | None = None) -> ShardlineError:
    """The same error, its advice for somebody at a terminal where the catalogue speaks to a program.

    `url`: where `who` was looked for; where another part of a cluster answers there, that is the error.
    """
    other = mistaken(who, url) if url is not None and error.code in MISTAKABLE else None
    if other is not None:
        return other
    advice = ADVICE.get((who, error.code))
    if advice is None or error.advice not in (error.fault.advice, A_KEY):
        return error
    pause = error.details.get("retry_after")
    waited = f"{pause:g} s" if isinstance(pause, int | float) else "a little"
    return ShardlineError(
        error.code, error.message, param=error.param, advice=advice.format(pause=waited, url=url), **error.details
    )
