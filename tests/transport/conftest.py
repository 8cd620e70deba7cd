"""Both event loops that the product may run on: every asynchronous test of this room runs on each."""

from __future__ import annotations

import http.server
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.layered import artifact, bundle, model

__all__ = ["artifact", "bundle", "model"]


@pytest.fixture(scope="session", params=["asyncio", "uvloop"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    return "asyncio", {"use_uvloop": request.param == "uvloop"}


@pytest.fixture
def threaded_peer() -> Iterator[str]:
    """A peer that goes on while our loop stands still: it answers after 0.1 s, on /lines with a line."""

    class Request(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200)
            if self.path == "/lines":
                self.send_header("transfer-encoding", "chunked")
                self.end_headers()
                time.sleep(0.1)
                self.wfile.write(b"6\r\nalive\n\r\n0\r\n\r\n")
            else:
                time.sleep(0.1)
                self.send_header("content-length", "2")
                self.end_headers()
                self.wfile.write(b"ok")

        def log_message(self, *args: object) -> None: ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Request)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()
