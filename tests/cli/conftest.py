"""A small HTTP server that answers as told, for commands that talk to a Gateway or a Tracker."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tests.support.state import put_credential


@dataclass
class Stage:
    """What is answered, by `METHOD path`, and what was asked."""

    url: str = ""
    answers: dict[str, tuple[int, str, bytes]] = field(default_factory=dict)
    """`GET /x` -> status, content type, body."""
    asked: list[tuple[str, dict[str, str], bytes]] = field(default_factory=list)

    def json(self, what: str, body: Any, status: int = 200) -> None:
        self.answers[what] = (status, "application/json", json.dumps(body).encode())

    def events(self, what: str, *lines: str) -> None:
        self.answers[what] = (200, "text/event-stream", "".join(line + "\n\n" for line in lines).encode())


@pytest.fixture
def stage() -> Iterator[Stage]:
    staged = Stage()

    class Answering(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            what = f"{self.command} {self.path}"
            staged.asked.append((what, dict(self.headers), body))
            status, kind, payload = staged.answers.get(what, (404, "application/json", b"{}"))
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("x-request-id", "r-1")
            self.end_headers()
            self.wfile.write(payload)

        do_GET = do_POST = do_DELETE = _answer

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answering)
    server.daemon_threads = True
    staged.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield staged
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture(autouse=True)
def own_state(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """No test reads or writes the state and configuration of the person who runs it. A cluster was started before."""
    folder = tmp_path_factory.mktemp("xdg")
    put_credential(folder / "state" / "shardline")
    monkeypatch.setenv("XDG_STATE_HOME", str(folder / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder / "config"))


@pytest.fixture
def event() -> dict[str, Any]:
    """A telemetry event in decode on two hops, as JSON."""
    hops = [
        {
            "node": f"n-{i}",
            "layers": [15 * i, 15 * i + 15],
            "engine_class": "torch-f32",
            "content_id": "c",
            "health": "ok",
        }
        for i in range(2)
    ]
    hops[0] |= {"compute_ms": 12.34, "queue_ms": 0.1, "send_ms": 0.3}
    return {
        "id": "rs-1",
        "seq": 9,
        "time": 1000.0,
        "phase": "decode",
        "model": "smol",
        "queue": {"position": None, "waited_ms": 1.0},
        "route": {"id": "r-1", "content_id": "c", "engine_class": "torch-f32", "n_layers": 30, "hops": hops},
        "prefill": {"done": 41, "total": 41, "chunk": 64},
        "decode": {"tokens": 17, "tokens_per_s": 12.5, "ttft_ms": 410.2},
        "seams": [],
        "failure": None,
    }
