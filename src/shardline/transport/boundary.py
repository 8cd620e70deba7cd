"""What stands around every application: one shape for every error, and the gate of the control plane.

Owns the error boundary (the only place that turns an exception into a body), request ids, and the checks of
credential, protocol version, Origin and Host. Pure ASGI. Shown by tests/transport/test_boundary.py.
"""

from __future__ import annotations

import hmac
import itertools
import re
import secrets
from collections.abc import Callable, Iterable

import msgspec
import structlog
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shardline.errors import ShardlineError, first_of
from shardline.settings import PROTOCOL
from shardline.transport.addresses import parse_address
from shardline.transport.bodies import ClientLeft, header, send_body
from shardline.transport.tracing import trace_of, tracing

_BY_STATUS = {
    404: ("not_found", "nothing is served at this path"),
    405: ("method_not_allowed", "this path does not have the method"),
}

_METHODS = re.compile("[A-Z]+(, [A-Z]+)*")

log = structlog.get_logger(__name__)


def error_headers(error: ShardlineError) -> list[tuple[bytes, bytes]]:
    """Header fields that go with an error: when to come again, and when a client must not repeat by itself."""
    fields = []
    after = error.details.get("retry_after")
    if isinstance(after, (int, float)):
        fields.append((b"retry-after", b"%d" % max(1, round(after))))
    if error.fault.status == 502:
        fields.append((b"x-should-retry", b"false"))
    if error.code == "unauthorized":
        fields.append((b"www-authenticate", b"Bearer"))
    allowed = error.details.get("allow")
    if error.code == "method_not_allowed" and isinstance(allowed, str) and _METHODS.fullmatch(allowed):
        fields.append((b"allow", allowed.encode("latin-1")))
    return fields


def error_bytes(error: ShardlineError) -> bytes:
    """The JSON body of an error: `{"error": {…}}`."""
    return msgspec.json.encode({"error": error.body()}, enc_hook=str)


class ErrorBoundary:
    """Outermost application: whatever goes wrong inside leaves as one error object, or as a closed connection.

    The request id is in `scope["state"]["request_id"]`, in the answer's `x-request-id`, in every log line, and in what
    is asked of other parts meanwhile (tracing.py).
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._prefix = secrets.token_hex(6)
        self._numbers = itertools.count(1)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        trace = trace_of(scope["headers"], f"req-{self._prefix}-{next(self._numbers):x}")
        scope.setdefault("state", {})["request_id"] = trace.request_id
        with tracing(trace):
            await self._answer(scope, receive, _Answer(send, trace.request_id))

    async def _answer(self, scope: Scope, receive: Receive, answer: _Answer) -> None:
        try:
            await self._app(scope, receive, answer.send)
            await answer.finish()
        except Exception as exception:
            # The boundary: nothing above could do anything with it but print a traceback to a stranger.
            cause = _single(exception)
            if isinstance(cause, ClientLeft):
                await answer.left()
            elif isinstance(cause, ShardlineError):
                await answer.fail(cause)
            elif isinstance(cause, HTTPException):
                headers = {name.lower(): value for name, value in (cause.headers or {}).items()}
                await answer.fail(_error_of_status(cause.status_code, headers.get("allow")))
            else:
                log.exception("request_failed", request_id=answer.request_id, path=scope["path"])
                await answer.fail(_internal(answer.request_id))
            # The exception knows this frame, and by it everything that the request held: not before the next collection
            # of garbage would it be free.
            del cause


def _single(exception: Exception) -> Exception:
    """What a task group raised for its one failed task, or the first of several that are all told to clients; a group
    with anything else in it stays what it is."""
    if isinstance(exception, ExceptionGroup):
        told, others = exception.split(ShardlineError)
        if told is not None and others is None:
            return first_of(told)
    while isinstance(exception, ExceptionGroup) and len(exception.exceptions) == 1:
        exception = exception.exceptions[0]
    return exception


def no_such_method(allowed: str) -> ShardlineError:
    """405 with what the path has; `allowed` as in the field Allow: `GET, POST`."""
    named = ", ".join(sorted(word.strip() for word in allowed.split(",")))
    message, advice = f"this path does not have the method; it has {named}", f"Use what this path has: {named}."
    return ShardlineError("method_not_allowed", message, advice=advice, allow=named)


def _error_of_status(status: int, allowed: str | None = None) -> ShardlineError:
    """A router's own refusal, in our words. `allowed`: its field Allow."""
    if status == 405 and allowed:
        return no_such_method(allowed)
    if status in _BY_STATUS:
        return ShardlineError(*_BY_STATUS[status])
    code = "invalid_value" if status < 500 else "internal"
    return ShardlineError(code, f"the request was refused with status {status}")


def _internal(request_id: str) -> ShardlineError:
    return ShardlineError("internal", f"internal error, request id {request_id}", request_id=request_id)


class _Answer:
    """The sending half of one request: adds the request id, and knows whether an error can still be a body."""

    def __init__(self, send: Send, request_id: str) -> None:
        self._send = send
        self.request_id = request_id
        self._started = False
        self._replaced: ShardlineError | None = None

    async def send(self, message: Message) -> None:
        if self._replaced is not None:
            return
        if message["type"] == "http.response.start":
            headers = list(message.get("headers", ()))
            if message["status"] >= 400 and not _is_json(headers):
                # A router's own plain text. Held back, because it may be followed by the exception that it is about.
                allow = next((value for name, value in headers if name.lower() == b"allow"), None)
                self._replaced = _error_of_status(message["status"], None if allow is None else allow.decode("latin-1"))
                return
            self._started = True
            headers.append((b"x-request-id", self.request_id.encode("latin-1")))
            message = {**message, "headers": headers}
        await self._send(message)

    async def finish(self) -> None:
        """The application has returned: send what stands in for its plain-text error, if it sent one."""
        if self._replaced is not None:
            await self._whole(self._replaced)

    async def left(self) -> None:
        """The client is gone, or says no more and listens still: then it hears why there is no answer."""
        if not self._started:
            message = "the client ended its side of the connection before the answer was there"
            await self._whole(ShardlineError("cancelled", message))

    async def fail(self, error: ShardlineError) -> None:
        if self._started:
            # Too late for a status. Returning without a last body message makes the server close the connection,
            # which is the one thing that a reader of the stream cannot take for a clean end.
            log.info("response_broken", request_id=self.request_id, code=error.code, message=error.message)
            return
        await self._whole(error)

    async def _whole(self, error: ShardlineError) -> None:
        self._started = True
        fields = [*error_headers(error), (b"x-request-id", self.request_id.encode("latin-1"))]
        await send_body(self._send, error.fault.status, error_bytes(error), headers=fields)


def has_credential(scope: Scope, credential: str) -> bool:
    """Whether the request carries `credential` as its bearer token; takes the same time for every wrong one."""
    given = header(scope, b"authorization") or ""
    scheme, _, token = given.partition(" ")
    same = hmac.compare_digest(token.strip().encode("latin-1"), credential.encode("latin-1"))
    return same and scheme.lower() == "bearer"


def check_protocol(scope: Scope) -> None:
    """Raise `protocol_mismatch` unless the request speaks our major version of the protocol."""
    given = header(scope, b"shardline-protocol")
    if given != str(PROTOCOL):
        theirs = "no protocol version" if given is None else f"protocol {given[:20]}"
        raise ShardlineError("protocol_mismatch", f"the request names {theirs}, this side speaks protocol {PROTOCOL}")


class ControlGate:
    """Gate in front of the Node plane and the Tracker: cluster credential, protocol version, and no browsers.

    `is_open(scope)` tells requests that need neither credential nor protocol (health, proof of identity). `names`:
    host names, beside IP addresses and localhost, that a Host field may have; None: any.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        credential: str,
        is_open: Callable[[Scope], bool] = lambda scope: scope["path"] == "/healthz",
        names: Iterable[str] | None = None,
    ) -> None:
        if not credential:
            raise ValueError("a control plane needs a credential")
        self._app = app
        self._credential = credential
        self._is_open = is_open
        self._names = None if names is None else frozenset(name.lower() for name in names) | {"localhost"}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            self._check(scope)
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        if header(scope, b"origin") is not None or header(scope, b"sec-fetch-site") is not None:
            raise ShardlineError("forbidden", "web pages may not call the control plane")
        if self._names is not None:
            name = _host_of(header(scope, b"host") or "")
            if parse_address(name) is None and name not in self._names:
                raise ShardlineError("forbidden", "the Host of the request is not one of this process")
        if self._is_open(scope):
            return
        if not has_credential(scope, self._credential):
            raise ShardlineError("unauthorized", "the cluster credential is missing or wrong")
        if scope["path"] != "/metrics":  # what collects numbers speaks no protocol of ours
            check_protocol(scope)


def _host_of(field: str) -> str:
    """The host of a Host field, without port."""
    if field.startswith("["):
        return field[1:].partition("]")[0].lower()
    return field.partition(":")[0].lower()


def _is_json(headers: list[tuple[bytes, bytes]]) -> bool:
    return any(name.lower() == b"content-type" and value.startswith(b"application/json") for name, value in headers)
