"""A cluster that other machines join, from typed commands and printed lines; here all machines are folders."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click.testing
import psutil
import pytest
from cryptography import x509

from shardline.cli.main import cli
from shardline.options import GatewayOptions, NodeOptions, TrackerOptions
from shardline.transport.authority import Authority, key_pem, new_key, pin_of
from tests.support.state import put_credential

pytestmark = pytest.mark.timeout(90)
LINE = r"^\s+shardline node --join '(https://127\.0\.0\.1:\d+/#[\w-]{22}\.[\w-]{43})'$"


class Desk:
    """Commands in state folders of their own, and those that still run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.script = folder / "script.json"
        self.script.write_text(json.dumps({"model": "scripted", "n_layers": 6, "answer": [" alpha", " beta"]}))
        self.running: list[subprocess.Popen[str]] = []

    def environ(self, machine: str) -> dict[str, str]:
        return {**os.environ, "XDG_STATE_HOME": str(self.folder / machine), "XDG_CONFIG_HOME": str(self.folder)}

    def run(self, machine: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "shardline", *arguments],
            env=self.environ(machine),
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=30,
        )

    def start(self, machine: str, *arguments: str) -> Path:
        """A command that goes on running; the file with what it prints, for people."""
        out = self.folder / f"{machine}-{len(self.running)}.out"
        with out.open("w") as file:
            self.running.append(
                subprocess.Popen(
                    [sys.executable, "-m", "shardline", "--log-format", "console", *arguments],
                    env=self.environ(machine),
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=file,
                    text=True,
                )
            )
        return out

    def until(self, out: Path, pattern: str, count: int = 1) -> list[str]:
        deadline = time.monotonic() + 40
        while len(found := re.compile(pattern, re.MULTILINE).findall(out.read_text())) < count:
            assert time.monotonic() < deadline, out.read_text()
            assert self.running[-1].poll() is None, out.read_text()
            time.sleep(0.03)
        return found

    def end(self) -> None:
        for process in reversed(self.running):
            process.send_signal(signal.SIGTERM)
            process.wait(20)


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    desk = Desk(tmp_path)
    yield desk
    desk.end()


def test_serve_prints_a_line_and_after_each_join_another(desk: Desk) -> None:
    ports = ("--port", "0", "--tracker-port", "0")
    served = desk.start("first", "serve", "--listen", "127.0.0.1", *ports)
    (line,) = desk.until(served, LINE)
    node = ("node", "--model", str(desk.script), "--engine", "scripted", "--inline")
    joined = desk.start("second", *node, "--join", line)
    desk.until(joined, "^node: ready$")
    lines = desk.until(served, LINE, 2)
    assert lines[0] == line != lines[1]

    # The Tracker's own machine finds everything without a flag.
    listed = json.loads(desk.run("first", "nodes", "--json").stdout)["nodes"]
    assert [shard["model"] for node in listed for shard in node["shards"]] == ["scripted"]
    invited = desk.run("first", "invite").stdout
    assert re.match(LINE, "  " + invited)
    assert len(shlex.split(invited)) == 4
    assert json.loads(desk.run("first", "invite", "--json").stdout)["seconds"] == 86400

    # A machine that has joined may look, without a flag too, and not invite; one that has not may do neither.
    tracker = line.partition("/#")[0]
    for flags in (("--tracker", tracker), ()):
        assert listed[0]["id"] in desk.run("second", "nodes", *flags).stdout
        refused = desk.run("second", "invite", *flags)
        assert refused.returncode == 1 and "only a command on the machine of the Tracker" in refused.stderr
        assert f"Run it where the Tracker runs, with the state folder that the Tracker has: {tracker}" in refused.stderr
    assert "no Node serves a model" not in desk.run("second", "routes", "explain", "scripted").stderr
    away = desk.run("second", "sessions")
    assert away.returncode == 1 and "has its Gateway elsewhere" in away.stderr
    plain = desk.run("second", "nodes", "--tracker", tracker.replace("https:", "http:"))
    assert plain.returncode == 1 and f"speaks HTTPS\n  What to do: Ask it so: --tracker {tracker}" in plain.stderr
    stranger = desk.run("third", "nodes", "--tracker", tracker)
    assert stranger.returncode == 2 and "has none of it" in stranger.stderr

    # A line is of no use twice, and says so where it is pasted.
    again = desk.run("third", *node, "--join", line)
    assert again.returncode == 1 and "was used before" in again.stderr
    assert "shardline invite" in again.stderr and line.partition("#")[2][:22] not in again.stderr


def test_the_api_over_https_with_the_operators_certificate(desk: Desk) -> None:
    authority = Authority.made(desk.folder / "public.pem", time.time())
    key = new_key()
    chain, private, root, keys = (desk.folder / name for name in ("chain.pem", "key.pem", "root.pem", "keys"))
    chain.write_bytes(
        authority.issue(key.public_key(), "n-0123456789abcdef", ["127.0.0.1"], now=time.time(), seconds=600)
    )
    private.write_bytes(key_pem(key))
    root.write_bytes(authority.certificate_pem)
    keys.write_text("key-of-a-client-0123456789\n")
    flags = ("--tls-cert", str(chain), "--tls-key", str(private), "--api-keys", str(keys))
    out = desk.start("first", "serve", "--port", "0", "--tracker-port", "0", "--host", "0.0.0.0", *flags)
    (url,) = desk.until(out, r"^Gateway: (https://0\.0\.0\.0:\d+)$")
    context = ssl.create_default_context(cafile=str(root))
    asked = urllib.request.Request(
        url.replace("0.0.0.0", "127.0.0.1") + "/v1/models",
        headers={"authorization": "Bearer key-of-a-client-0123456789"},
    )
    with urllib.request.build_opener(urllib.request.HTTPSHandler(context=context)).open(asked, timeout=10) as answer:
        assert json.load(answer)["data"] == []


def test_a_gateway_and_a_node_from_elsewhere_and_how_they_are_thrown_out(desk: Desk) -> None:
    """Lines from files and from stdin, so that the list of processes shows no token."""
    served = desk.start("first", "serve", "--listen", "127.0.0.1", "--port", "0", "--tracker-port", "0")
    (line,) = desk.until(served, LINE)
    (desk.folder / "line").write_text(line)
    node = ("node", "--model", str(desk.script), "--engine", "scripted", "--inline")
    joined = desk.start("second", *node, "--join", f"@{desk.folder / 'line'}")
    desk.until(joined, "^node: ready$")
    shown = psutil.Process(desk.running[-1].pid).cmdline()
    assert not any(line.partition("#")[2][:22] in word for word in shown)

    invited = shlex.split(desk.run("first", "invite", "--gateway").stdout)
    assert invited[:3] == ["shardline", "gateway", "--join"]
    wrong = desk.run("third", *node, "--join", invited[3])
    assert wrong.returncode == 1 and "lets in a Gateway, not a Node" in wrong.stderr
    started = desk.start("third", "gateway", "--port", "0", "--join", invited[3])
    desk.until(started, "^gateway: ready$")
    (url,) = desk.until(started, r"^gateway: listening on (http://\S+)$")
    chat = desk.run("third", "chat", "-m", "x", "--gateway", url)
    assert (chat.returncode, "alpha beta" in chat.stdout) == (0, True), chat.stderr

    answer = json.loads(desk.run("first", "nodes", "--json").stdout)
    (listed,) = answer["nodes"]
    (membership,) = (desk.folder / "third" / "shardline" / "joined").glob("*/membership.json")
    gateway = json.loads(membership.read_text())["node"]
    assert gateway in {known["id"] for known in answer["gateways"]} and len(answer["gateways"]) == 2
    assert gateway in desk.run("first", "nodes").stdout
    assert f"{gateway} is out" in desk.run("first", "expel", gateway[:12]).stdout
    assert desk.running[-1].wait(20) == 1
    tracker = line.partition("/#")[0]
    refused = desk.run("second", "expel", listed["id"], "--tracker", tracker)
    assert refused.returncode == 1 and "only a command on the machine of the Tracker" in refused.stderr
    assert "is named by its id" in desk.run("first", "expel", "node-1").stderr
    assert "is out" in desk.run("first", "expel", listed["id"]).stdout
    assert desk.running[1].wait(20) == 1
    assert f"has expelled {listed['id']}" in joined.read_text()
    assert f"shardline expel --undo {listed['id']}" in joined.read_text()
    assert "may come back" in desk.run("first", "expel", "--undo", listed["id"]).stdout
    again = desk.start("second", *node, "--join", tracker)
    desk.until(again, "^node: ready$")


def test_plain_http_to_another_machine_is_asked_for(desk: Desk) -> None:
    """Without a flag the credential does not leave; where there is none to ask, the command says so."""
    for command in (("gateway", "--port", "0"), ("node", "--model", str(desk.script), "--engine", "scripted")):
        done = desk.run("first", *command, "--tracker", "http://192.0.2.1:7070")
        assert done.returncode == 2 and "plain HTTP shows the credential" in done.stderr
    assert "expel" in desk.run("first", "--help").stdout
    done = desk.run("first", "expel", "n-0123456789abcdef", "--tracker", "http://127.0.0.1:9")
    assert done.returncode == 2 and "serve --listen" in done.stderr
    done = desk.run("first", "nodes", "--tracker", "http://127.0.0.2.nip.invalid:9")
    assert "reads the credential" in done.stderr


def test_a_node_that_waits_for_its_tracker_says_so(desk: Desk) -> None:
    put_credential(desk.folder / "first" / "shardline")
    node = ("node", "--model", str(desk.script), "--engine", "scripted", "--tracker", "http://127.0.0.1:9")
    desk.until(desk.start("first", *node), "^node: waiting: ")


def test_what_is_told_before_anything_starts(desk: Desk, tmp_path: Path) -> None:
    node = ("node", "--model", str(desk.script), "--engine", "scripted")
    pin = "p" * 43
    put_credential(desk.folder / "first" / "shardline")
    for arguments, code, words in (
        (("invite",), 2, "no cluster that other machines can join runs here"),
        (("invite",), 2, "serve --listen 0.0.0.0"),
        ((*node, "--join", "https://10.0.0.1:7070/#short"), 2, "was it copied whole"),
        ((*node, "--join", f"https://127.0.0.1:9/#{'t' * 22}.{pin}", "--tracker", "http://x:1"), 2, "leave --tracker"),
        ((*node, "--join", f"https://127.0.0.1:9/#{'t' * 22}.{pin}"), 1, "did not answer"),
        ((*node, "--join", "https://127.0.0.1:9/"), 1, "needs its token"),
        ((*node, "--tracker", "https://127.0.0.1:9"), 2, "joins by a line"),
        (("gateway", "--tls-cert", str(desk.script)), 2, "go together"),
        (("gateway", "--tls-cert", str(desk.script), "--tls-key", str(desk.script)), 2, "no certificate chain"),
        (("gateway", "--tracker", "https://127.0.0.1:9", "--port", "0"), 2, "as shardline serve does"),
    ):
        done = desk.run("first", *arguments)
        assert (done.returncode, words in done.stderr) == (code, True), (arguments, done.stderr)
        assert "t" * 22 not in done.stderr and "Traceback" not in done.stderr


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The options that `run` of any role got; the roles themselves do not start."""
    import shardline.gateway.run
    import shardline.node.run
    import shardline.tracker.run

    got: list[Any] = []

    async def run(options: Any) -> None:
        got.append(options)

    for role in (shardline.gateway.run, shardline.node.run, shardline.tracker.run):
        monkeypatch.setattr(role, "run", run)
    monkeypatch.setattr("shardline.telemetry.logs.configure_logs", lambda **settings: None)
    return got


def invoke(tmp_path: Path, *arguments: str) -> None:
    done = click.testing.CliRunner().invoke(cli, ("--state-dir", str(tmp_path), *arguments), catch_exceptions=False)
    assert done.exit_code == 0, done.output


def test_options_of_a_cluster_with_keys(ran: list[Any], tmp_path: Path, desk: Desk) -> None:
    line = f"https://127.0.0.1:7070/#{'t' * 22}.{'p' * 43}"
    node = ("node", "--model", str(desk.script), "--engine", "scripted", "--join", line)
    invoke(tmp_path, "tracker")
    invoke(tmp_path, "tracker", "--host", "10.0.0.1")
    invoke(tmp_path, "tracker", "--host", "10.0.0.1", "--insecure-plain-http")
    invoke(tmp_path, "tracker", "--listen", "127.0.0.1", "--advertise", "tracker.lan:1")
    invoke(tmp_path, *node)
    invoke(tmp_path, *node, "--host", "10.0.0.3", "--advertise", "10.0.0.4:1")
    plain, beyond, insecure, listening, joining, elsewhere = ran
    assert all(isinstance(options, TrackerOptions) for options in ran[:4])
    assert [options.keys for options in ran[:4]] == [False, True, False, True]
    assert (plain.host, beyond.host, insecure.host) == ("127.0.0.1", "10.0.0.1", "10.0.0.1")
    assert (listening.host, listening.advertise) == ("127.0.0.1", "tracker.lan:1")
    assert isinstance(joining, NodeOptions) and not isinstance(joining, GatewayOptions)
    assert (joining.tracker_url, joining.host, joining.credential) == ("https://127.0.0.1:7070", "127.0.0.1", "")
    assert "t" * 22 not in repr(joining)
    assert (elsewhere.host, elsewhere.advertise_url) == ("10.0.0.3", "10.0.0.4:1")


def test_the_pin_in_a_line_is_that_of_the_authority(desk: Desk) -> None:
    served = desk.start("first", "tracker", "--listen", "127.0.0.1", "--port", "0")
    (line,) = desk.until(served, LINE)
    raw = (desk.folder / "first" / "shardline" / "authority.pem").read_bytes()
    assert line.endswith(pin_of(x509.load_pem_x509_certificate(raw)))
