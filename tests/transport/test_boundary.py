from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
import structlog.testing
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from shardline.errors import ShardlineError
from shardline.transport import http_client
from shardline.transport.http_client import BrokenResponse
from shardline.transport.http_server import ControlGate, ErrorBoundary, read_body, send_json
from tests.transport.loopback import client_of, serving

CREDENTIAL = "the-cluster-credential"


async def ask(app: ASGIApp, path: str = "/", method: str = "POST", **options: Any) -> http_client.Response:
    async with serving(app) as server, client_of(credential=options.pop("credential", None)) as client:
        return await client.request(method, server.url + path, timeout_s=5, limit="x", **options)


def error_in(response: http_client.Response) -> dict[str, Any]:
    """The error object, after checking that the answer has the one shape of all errors."""
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    body = msgspec.json.decode(response.body)
    assert set(body) == {"error"}
    error: dict[str, Any] = body["error"]
    assert isinstance(error["message"], str) and isinstance(error["type"], str) and isinstance(error["code"], str)
    assert "param" in error and (error["param"] is None or isinstance(error["param"], str))
    assert "Traceback" not in error["message"]
    return error


def raising(exception: BaseException) -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise exception

    return ErrorBoundary(app)


async def test_a_catalogue_error_becomes_its_body() -> None:
    response = await ask(raising(ShardlineError("invalid_value", "n must be 1", param="n", limit=1)))
    error = error_in(response)
    assert response.status == 400
    assert error["message"] == "n must be 1" and error["param"] == "n" and error["limit"] == 1
    assert error["retryable"] is False


@pytest.mark.parametrize(
    ("exception", "status", "name", "value"),
    [
        (ShardlineError("queue_full", "full", retry_after=2.4), 429, "retry-after", "2"),
        (ShardlineError("capacity", "full", retry_after=0), 503, "retry-after", "1"),
        (ShardlineError("node_lost", "gone"), 502, "x-should-retry", "false"),
        (ShardlineError("unauthorized", "no key"), 401, "www-authenticate", "Bearer"),
    ],
)
async def test_headers_of_errors(exception: ShardlineError, status: int, name: str, value: str) -> None:
    response = await ask(raising(exception))
    error_in(response)
    assert response.status == status and response.headers[name] == value


@pytest.mark.parametrize("failing", [1, 3])
async def test_errors_of_a_task_group_are_unwrapped(failing: int) -> None:
    """Of several that fail in one moment, the first is told."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        async with asyncio.TaskGroup() as outer, asyncio.TaskGroup() as group:
            for _ in range(failing):
                group.create_task(fail())
            outer.create_task(fail())

    async def fail() -> None:
        raise ShardlineError("draining", "stopping")

    response = await ask(ErrorBoundary(app))
    assert response.status == 503 and error_in(response)["code"] == "draining"


async def test_a_group_with_anything_else_in_it_is_an_internal_error() -> None:
    response = await ask(raising(ExceptionGroup("both", [ShardlineError("draining", "stopping"), KeyError("secret")])))
    assert response.status == 500 and error_in(response)["code"] == "internal"


async def test_an_unknown_exception_is_logged_and_not_shown() -> None:
    with structlog.testing.capture_logs() as logs:
        response = await ask(raising(KeyError("secret")), headers={"x-request-id": "mine-1"})
    error = error_in(response)
    assert response.status == 500 and error["code"] == "internal"
    assert error["request_id"] == "mine-1" and "mine-1" in error["message"]
    assert b"secret" not in response.body and b"KeyError" not in response.body
    (event,) = [entry for entry in logs if entry["event"] == "request_failed"]
    assert event["request_id"] == "mine-1" and event["log_level"] == "error" and event["exc_info"]


async def echo_id(scope: Scope, receive: Receive, send: Send) -> None:
    await send_json(send, {"id": scope["state"]["request_id"]})


async def test_request_ids() -> None:
    async with serving(ErrorBoundary(echo_id)) as server, client_of() as client:
        seen = set()
        for given in (None, None, "abc-1.2:3_4", "a b", "x" * 129, 'a"b', ""):
            headers = {} if given is None else {"x-request-id": given}
            response = await client.request("GET", server.url, headers=headers, timeout_s=5, limit="x")
            used = msgspec.json.decode(response.body)["id"]
            assert response.headers["x-request-id"] == used
            assert (used == given) == (given == "abc-1.2:3_4")
            seen.add(used)
        assert len(seen) == 7


async def test_after_the_response_began_the_connection_is_closed() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"half", "more_body": True})
        raise ShardlineError("node_lost", "gone")

    with pytest.raises(BrokenResponse):
        await ask(ErrorBoundary(app))


async def get_thing(request: Request) -> Response:
    if request.query_params:
        raise ShardlineError("model_not_found", "no such model")
    return PlainTextResponse("thing")


async def crash(request: Request) -> Response:
    raise RuntimeError("secret")


ROUTES = [Route("/thing", get_thing, methods=["GET"]), Route("/crash", crash)]


@pytest.mark.parametrize("router", [Router(ROUTES), Starlette(routes=ROUTES)], ids=["router", "starlette"])
async def test_a_routers_own_answers_have_the_same_shape(router: ASGIApp) -> None:
    app = ErrorBoundary(router)
    response = await ask(app, "/thing", "GET")
    assert response.status == 200 and response.body == b"thing"
    response = await ask(app, "/nothing", "GET")
    assert response.status == 404 and error_in(response)["code"] == "not_found"
    response = await ask(app, "/thing", "DELETE")
    error = error_in(response)
    assert response.status == 405 and error["code"] == "method_not_allowed"
    assert response.headers["allow"] == error["allow"] == "GET, HEAD"
    assert error["message"].endswith("it has GET, HEAD") and "GET, HEAD" in error["advice"]
    response = await ask(app, "/thing?x=1", "GET")
    assert response.status == 404 and error_in(response)["code"] == "model_not_found"
    response = await ask(app, "/crash", "GET")
    assert response.status == 500 and error_in(response)["code"] == "internal" and b"secret" not in response.body


async def test_streams_pass_unchanged_and_at_once_whatever_encoding_a_client_accepts() -> None:
    step = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        for i in range(3):
            await step.wait()
            step.clear()
            await send({"type": "http.response.body", "body": b"%d\n" % i, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async with (
        serving(ErrorBoundary(app)) as server,
        client_of() as client,
        client.stream("GET", server.url, headers={"accept-encoding": "gzip"}, timeout_s=5, limit="x") as stream,
    ):
        assert "content-encoding" not in stream.headers and "content-length" not in stream.headers
        for i in range(3):
            step.set()
            assert await anext(stream) == b"%d" % i


# The gate of the control plane.


async def inner(scope: Scope, receive: Receive, send: Send) -> None:
    await read_body(receive, scope, 10)
    await send_json(send, {})


GATED = ErrorBoundary(ControlGate(inner, credential=CREDENTIAL, names=["node-1.lan"]))


async def test_the_credential_opens_the_gate() -> None:
    assert (await ask(GATED, credential=CREDENTIAL)).status == 200


@pytest.mark.parametrize(
    "field",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        f"Bearer {CREDENTIAL}x",
        f"Bearer {CREDENTIAL[:-1]}",
        f"Basic {CREDENTIAL}",
        CREDENTIAL,
        f"Bearer {CREDENTIAL} {CREDENTIAL}",
        "Bearer sk-an-api-key-of-a-client",
        "Bearer \xff\xfe",
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
async def test_nothing_else_does(field: str | None, method: str) -> None:
    headers = {} if field is None else {"authorization": field}
    response = await ask(GATED, "/v1/steps", method, headers=headers)
    assert response.status == 401
    error = error_in(response)
    assert error["code"] == "unauthorized" and CREDENTIAL not in error["message"]


async def test_health_is_open_to_all_but_web_pages() -> None:
    assert (await ask(GATED, "/healthz", "GET")).status == 200
    assert (await ask(GATED, "/healthz", "GET", headers={"origin": "http://evil.test"})).status == 403


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.test"},
        {"origin": "null"},
        {"origin": "http://127.0.0.1"},
        {"sec-fetch-site": "same-origin"},
    ],
)
async def test_a_web_page_is_refused_even_with_the_credential(headers: dict[str, str]) -> None:
    response = await ask(GATED, headers=headers, credential=CREDENTIAL)
    assert response.status == 403 and error_in(response)["code"] == "forbidden"
    assert not any(name.startswith("access-control") for name in response.headers)


@pytest.mark.parametrize(
    ("host", "status"),
    [("node-1.lan:1", 200), ("NODE-1.LAN", 200), ("localhost:5", 200), ("[::1]:5", 200), ("evil.test", 403), ("", 403)],
)
async def test_a_host_that_is_not_ours_is_refused(host: str, status: int) -> None:
    raw = (
        f"POST / HTTP/1.1\r\nhost: {host}\r\nshardline-protocol: 1\r\nauthorization: Bearer {CREDENTIAL}\r\n"
        "content-length: 0\r\nconnection: close\r\n\r\n"
    )
    async with serving(GATED) as server:
        reader, writer = await asyncio.open_connection(server.host, server.port)
        writer.write(raw.encode())
        assert (await reader.read()).startswith(b"HTTP/1.1 %d " % status)
        writer.close()


@pytest.mark.parametrize("version", [None, "2", "", "x", "1.0"])
async def test_another_protocol_is_refused_by_name(version: str | None) -> None:
    field = b"" if version is None else b"shardline-protocol: %s\r\n" % version.encode()
    raw = b"POST / HTTP/1.0\r\nhost: 127.0.0.1\r\n%sauthorization: Bearer %s\r\ncontent-length: 0\r\n\r\n"
    async with serving(GATED) as server:
        reader, writer = await asyncio.open_connection(server.host, server.port)
        writer.write(raw % (field, CREDENTIAL.encode()))
        answer = await reader.read()
        writer.close()
    assert answer.startswith(b"HTTP/1.1 426 ") and b"protocol_mismatch" in answer and b"protocol 1" in answer
    if version:
        assert f"protocol {version}".encode() in answer


@pytest.mark.parametrize(("credential", "status"), [(CREDENTIAL, 200), ("wrong-wrong-wrong", 401)])
async def test_what_collects_metrics_speaks_no_protocol_and_shows_the_credential(credential: str, status: int) -> None:
    raw = f"GET /metrics HTTP/1.0\r\nhost: 127.0.0.1\r\nauthorization: Bearer {credential}\r\n\r\n"
    async with serving(GATED) as server:
        reader, writer = await asyncio.open_connection(server.host, server.port)
        writer.write(raw.encode())
        assert (await reader.read()).startswith(b"HTTP/1.1 %d " % status)
        writer.close()


def test_a_gate_without_credential_cannot_be_built() -> None:
    with pytest.raises(ValueError):
        ControlGate(inner, credential="")
