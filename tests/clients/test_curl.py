"""curl, as people type it, against a route of two Nodes in real processes."""

from __future__ import annotations

import json
import shutil
import subprocess
from typing import Any

import pytest

from tests.clients.route import GREETING, Route

CLIENT = "curl"
pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not on this machine")


def version(client: str) -> str:
    return subprocess.run(["curl", "--version"], capture_output=True, text=True, check=True).stdout.split()[1]


def curl(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["curl", "--silent", "--noproxy", "*", *argv], capture_output=True, text=True, timeout=20)


def body_of(route: Route, **more: Any) -> dict[str, Any]:
    return {"model": route.model, "messages": [{"role": "user", "content": "Hi"}], "temperature": 0, **more}


def chat(route: Route, *flags: str, **more: Any) -> subprocess.CompletedProcess[str]:
    body = json.dumps(body_of(route, **more))
    return curl(f"{route.url}/v1/chat/completions", "-H", "Content-Type: application/json", "-d", body, *flags)


def test_chat(route: Route) -> None:
    answer = json.loads(chat(route).stdout)
    assert answer["choices"][0]["message"]["content"] == GREETING


def test_stream(route: Route) -> None:
    """`-N`: events as they come, comments between them, `[DONE]` at the end."""
    lines = chat(route, "-N", stream=True).stdout.splitlines()
    events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert events.pop() == "[DONE]"
    deltas = [choice["delta"].get("content", "") for event in events for choice in json.loads(event)["choices"]]
    assert "".join(deltas) == GREETING
    assert all(line.startswith(("data: ", ":")) or not line for line in lines)


def test_models(route: Route) -> None:
    listed = json.loads(curl(f"{route.url}/v1/models").stdout)
    assert [model["id"] for model in listed["data"]] == [route.model]


def test_compressed(route: Route) -> None:
    """A client that would take a compressed answer gets one that it can read."""
    assert GREETING in chat(route, "--compressed").stdout


def test_a_body_from_a_pipe_and_http_1_0(route: Route) -> None:
    url = f"{route.url}/v1/chat/completions"
    argv = ["curl", "--silent", "--noproxy", "*", "-0", url, "-H", "Content-Type: application/json", "-d", "@-"]
    body = json.dumps(body_of(route))
    done = subprocess.run(argv, input=body, capture_output=True, text=True, timeout=20)
    assert json.loads(done.stdout)["choices"][0]["message"]["content"] == GREETING


def test_errors(route: Route) -> None:
    """`--fail-with-body`: the exit code tells, and the reason is shown."""
    done = chat(route, "--fail-with-body", temperature=3)
    assert done.returncode == 22 and json.loads(done.stdout)["error"]["param"] == "temperature"
