"""Clients in environments of their own, as they are, against a route of two Nodes in real processes (`make clients`).

The programs that use them lie in programs/; what they need is installed once, and where that fails (no network, no
npm) the tests are skipped with the reason.
"""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.clients.environments import NODE, NotInstalled, environment, version_of
from tests.clients.route import EDITED, GREETING, RESULT, Route

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]
PROGRAMS = Path(__file__).parent / "programs"
PAGE = Path(__file__).resolve().parents[2] / "docs" / "clients.md"
HEADINGS = {NODE: "openai for Node"}
"""On that page; the others are named like their client."""
PROGRAM_S = 300.0
CHECKS = {
    NODE: (
        *("models", "chat", "stream", "stream_runner", "abort", "completions", "responses", "tools_loop", "run_tools"),
        *("structured_output", "embeddings", "errors"),
    ),
    "litellm": (
        *("chat", "stream", "async_stream", "text_completion", "tools_loop", "structured_output", "responses"),
        *("embeddings", "errors"),
    ),
    "langchain-openai": (
        *("invoke", "stream", "async_stream", "batch", "bind_tools", "forced_tool", "with_structured_output"),
        *("completions", "responses", "embeddings"),
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
        arguments = (self.route.url, self.route.model, GREETING, RESULT)
        done = subprocess.run(
            ["node" if client == NODE else str(installed.python), str(program), *arguments],
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


def section(client: str, route: Route) -> list[tuple[str, str]]:
    """The blocks of a client on the page, (language, content), with this route in them."""
    _, _, text = PAGE.read_text(encoding="utf-8").partition(f"\n## {HEADINGS.get(client, client)}\n")
    text = text.partition("\n## ")[0].replace("http://127.0.0.1:8080", route.url)
    text = text.replace("SmolLM2-135M-Instruct.Q4_1", route.model)
    return re.findall(r"^```(\w+)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("client", CHECKS)
def test_the_lines_of_the_page(client: str, route: Route, tmp_path: Path) -> None:
    """They are run as they stand there, one block after another, and the model's words come out."""
    try:
        installed = environment(client)
    except NotInstalled as reason:
        pytest.skip(f"{client} could not be installed: {reason}")
    variables = {**installed.variables(tmp_path, route.url), "LLM_USER_PATH": str(tmp_path)}
    del variables["OPENAI_BASE_URL"], variables["OPENAI_API_BASE"], variables["OPENAI_API_KEY"]
    commands = {"python": ["python"], "javascript": ["node"], "console": ["bash", "-e"]}
    if client == NODE:
        (tmp_path / "node_modules").symlink_to(installed.folder / "node_modules")
    if client == "aider":
        (tmp_path / "greeting.py").write_text('print("hello")\n')
    said = ""
    for number, (language, content) in enumerate(section(client, route)):
        if language == "yaml":
            (tmp_path / content.partition("\n")[0].removeprefix("# ")).write_text(content)
            continue
        program = tmp_path / (f"{number}.mjs" if language == "javascript" else str(number))
        program.write_text(re.sub(r"^\$ ", "", content, flags=re.MULTILINE))
        done = subprocess.run(
            [*commands[language], str(program)],
            cwd=tmp_path,
            env=variables,
            capture_output=True,
            text=True,
            timeout=PROGRAM_S,
            stdin=subprocess.DEVNULL,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        said += done.stdout
    if client == "aider":
        assert (tmp_path / "greeting.py").read_text() == EDITED, said
    else:
        assert GREETING in said
