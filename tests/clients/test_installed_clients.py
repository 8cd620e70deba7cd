"""Clients in environments of their own, as they are, against a route of two Nodes in real processes (`make clients`).

The programs that use them lie in programs/; what they need is installed once, and where that fails (no network, no
npm) the tests are skipped with the reason.
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.clients.environments import NODE, NotInstalled, environment, version_of
from tests.clients.route import Route

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]
PROGRAMS = Path(__file__).parent / "programs"
PROGRAM_S = 300.0
CHECKS = {
    NODE: (
        *("models", "chat", "stream", "stream_runner", "abort", "completions", "responses", "tools_loop", "run_tools"),
        *("structured_output", "errors"),
    ),
    "litellm": (
        *("chat", "stream", "async_stream", "text_completion", "tools_loop", "structured_output", "responses"),
        "errors",
    ),
    "langchain-openai": (
        *("invoke", "stream", "async_stream", "batch", "bind_tools", "forced_tool", "with_structured_output"),
        *("completions", "responses"),
    ),
    "llm": ("prompt", "no_stream", "conversation", "tools", "schema", "completions", "responses"),
    "aider": ("one_shot", "one_shot_without_stream"),
}


def version(client: str) -> str:
    return version_of(client)


@dataclass
class Reports:
    """What the program of each client said; each runs once."""

    route: Route
    folder: Path
    known: dict[str, dict[str, str | None] | NotInstalled] = field(default_factory=dict)

    def of(self, client: str) -> dict[str, str | None]:
        """Check -> what went wrong, None where nothing did. Skips where the client could not be installed."""
        if client not in self.known:
            try:
                self.known[client] = self._run(client)
            except NotInstalled as reason:
                self.known[client] = reason
        report = self.known[client]
        if isinstance(report, NotInstalled):
            pytest.skip(f"{client} could not be installed: {report}")
        return report

    def _run(self, client: str) -> dict[str, str | None]:
        installed = environment(client)
        home = self.folder / client
        home.mkdir()
        program = PROGRAMS / (client.replace("-", "_") + ("_checks.mjs" if client == NODE else "_checks.py"))
        done = subprocess.run(
            ["node" if client == NODE else str(installed.python), str(program), self.route.url, self.route.model],
            cwd=home,
            env=installed.variables(home, self.route.url),
            capture_output=True,
            text=True,
            timeout=PROGRAM_S,
            stdin=subprocess.DEVNULL,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        said = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"check"')]
        return {line["check"]: line["error"] for line in said}


@pytest.fixture(scope="module")
def reports(route: Route, tmp_path_factory: pytest.TempPathFactory) -> Reports:
    return Reports(route, tmp_path_factory.mktemp("clients"))


@pytest.mark.parametrize(
    ("client", "check"), [(client, check) for client, checks in CHECKS.items() for check in checks]
)
def test_installed_client(client: str, check: str, reports: Reports) -> None:
    report = reports.of(client)
    assert tuple(report) == CHECKS[client], "the program says what CHECKS lists"
    assert report[check] is None, report[check]
