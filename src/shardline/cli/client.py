"""The commands' own small HTTP client: one request a connection, no proxies, errors as the catalogue has them.

Owns how a command talks to a Gateway or a Tracker: blocking, with limits, with `http.client` alone, so that
`shardline nodes` starts at once. The cluster's own traffic is transport's. Shown by tests/cli/test_client.py.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from shardline.errors import ShardlineError, from_body
from shardline.settings import PROTOCOL
from shardline.transport.addresses import Url, split_url

_BODY_LIMIT = 16 << 20
_LINE_LIMIT = 4 << 20
CONNECT_S = 5.0
ANSWER_S = 30.0
STREAM_SILENCE_S = 60.0
"""A Gateway writes at least a comment line every few seconds; a stream that is silent for so long is dead."""


class Endpoint:
    """One process that answers HTTP: the Gateway or the Tracker, as `who` says in messages."""

    def __init__(self, who: str, url: str, secret: str) -> None:
        self.who = who
        self.url = url
        self._parts: Url = split_url(url)
        self._secret = secret

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
                    raise from_body(event["error"])
                yield event

    def _json(self, method: str, path: str, body: dict[str, Any] | None) -> Any:
        with self._exchange(method, path, body, ANSWER_S) as response:
            return self._decoded(response.read(_BODY_LIMIT))

    @contextmanager
    def _exchange(
        self, method: str, path: str, body: dict[str, Any] | None, silence_s: float
    ) -> Iterator[http.client.HTTPResponse]:
        """Send one request; yields the response if its status is below 400, raises the error object otherwise."""
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(self._parts.host, self._parts.port, timeout=CONNECT_S)
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
            connection.sock.settimeout(silence_s)
            connection.request(method, self._parts.target.rstrip("/") + path, payload, headers)
            response = connection.getresponse()
            if response.status >= 400:
                raise self._refused(response)
            yield response
        except TimeoutError:
            raise ShardlineError(
                "deadline", f"the {self.who} at {self.url} was silent for {silence_s:.0f} s", limit="answer"
            ) from None
        except (http.client.HTTPException, OSError) as error:
            raise self._broken(str(error) or type(error).__name__) from None
        finally:
            # The response owns the socket once the other side has said that it will close.
            if response is not None:
                response.close()
            connection.close()

    def _unreachable(self, error: OSError) -> ShardlineError:
        code = "tracker_unreachable" if self.who == "Tracker" else "gateway_unreachable"
        return ShardlineError(code, f"no {self.who} answers at {self.url}: {error.strerror or error}")

    def _broken(self, why: str) -> ShardlineError:
        code = "tracker_unreachable" if self.who == "Tracker" else "gateway_unreachable"
        return ShardlineError(code, f"the connection to the {self.who} at {self.url} failed: {why}")

    def _refused(self, response: http.client.HTTPResponse) -> ShardlineError:
        raw = response.read(_BODY_LIMIT)
        try:
            return from_body(json.loads(raw)["error"])
        except (ValueError, KeyError, TypeError):
            return self._foreign(f"status {response.status} without an error object")

    def _decoded(self, raw: bytes) -> Any:
        try:
            return json.loads(raw)
        except ValueError:
            raise self._foreign("an answer that is not JSON") from None

    def _foreign(self, what: str) -> ShardlineError:
        code = "tracker_unreachable" if self.who == "Tracker" else "gateway_unreachable"
        return ShardlineError(code, f"what answers at {self.url} is no Shardline {self.who}: {what}")
