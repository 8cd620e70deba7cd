"""`up`, `serve` and `demo` as a person runs them: real processes, the scripted engine."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner

from shardline.cli.client import Endpoint
from shardline.cli.main import cli
from shardline.cli.recognition import part_at
from shardline.cli.running import FOLDER, RunningCluster, entered, running_clusters
from shardline.errors import ShardlineError

pytestmark = pytest.mark.timeout(90)


class Terminal:
    """`shardline` commands with a state folder of their own, and the one that runs in front."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.state = folder / "state" / "shardline"
        self.environ = {**os.environ, "XDG_STATE_HOME": str(folder / "state"), "XDG_CONFIG_HOME": str(folder)}
        self.front: subprocess.Popen[str] | None = None
        self.script = folder / "script.json"
        self.write()

    def write(self, **more: object) -> None:
        script = {"model": "scripted", "n_layers": 6, "answer": [" alpha", " beta", " gamma"], "decode_ms": 1, **more}
        self.script.write_text(json.dumps(script))

    def run(self, *arguments: str, timeout: float = 30) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "shardline", *arguments],
            env=self.environ,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=timeout,
        )

    def start(self, *arguments: str, until: str = "Ctrl-C ends") -> subprocess.Popen[str]:
        with (self.folder / "out").open("w") as out, (self.folder / "err").open("w") as err:
            self.front = subprocess.Popen(
                [sys.executable, "-m", "shardline", *arguments],
                env=self.environ,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                text=True,
            )
        process = self.front
        self.wait_for(lambda: until in self.out or process.poll() is not None)
        assert process.poll() is None, self.out + self.err
        return process

    def up(self, *arguments: str) -> subprocess.Popen[str]:
        return self.start("up", str(self.script), "--engine", "scripted", "--port", "0", *arguments)

    @property
    def out(self) -> str:
        return (self.folder / "out").read_text()

    @property
    def err(self) -> str:
        return (self.folder / "err").read_text()

    @property
    def gateway(self) -> Endpoint:
        (only,) = running_clusters(self.state)
        return Endpoint("Gateway", only.gateway, "")

    def parts(self) -> list[psutil.Process]:
        assert self.front is not None
        return psutil.Process(self.front.pid).children(recursive=True)

    def wait_for(self, condition: Callable[[], bool], within_s: float = 30) -> None:
        deadline = time.monotonic() + within_s
        while not condition():
            assert time.monotonic() < deadline, f"not in time\n{self.out}\n{self.err}"
            time.sleep(0.02)

    def end(self, number: signal.Signals = signal.SIGINT, within_s: float = 12) -> int:
        """Signal the command in front; its exit code. Everything that it started must be gone."""
        assert self.front is not None
        parts = self.parts()
        assert parts
        self.front.send_signal(number)
        code = self.front.wait(within_s)
        self.wait_for(lambda: not any(is_running(part) for part in parts), within_s)
        return code


def nodes_url(terminal: Terminal) -> str:
    return str(json.loads(terminal.run("nodes", "--json").stdout)["nodes"][0]["url"])


def is_running(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    opened = Terminal(tmp_path)
    yield opened
    if opened.front is not None and opened.front.poll() is None:
        opened.front.kill()
        opened.front.wait()


def test_a_cluster_starts_answers_and_ends(terminal: Terminal) -> None:
    terminal.up("--nodes", "3")
    for words in (
        "node-1   0:2",
        "node-3   4:6",
        "ready after",
        "Page, for a browser: http://",
        "curl -N http://127.0.0.1:",
    ):
        assert words in terminal.out
    # Every command finds the cluster without a flag.
    nodes = json.loads(terminal.run("nodes", "--json").stdout)["nodes"]
    assert sorted((s["first"], s["last"], s["state"]) for n in nodes for s in n["shards"]) == [
        *((0, 2, "ready"), (2, 4, "ready"), (4, 6, "ready"))
    ]
    asked = terminal.run("chat", "-m", "hi")
    assert asked.stdout == " alpha beta gamma\n"
    assert re.search(r"route .*0:2 → .*2:4 → .*4:6", asked.stderr) and "completed" in asked.stderr
    assert "completed" in terminal.run("sessions").stdout
    assert "the least cost" in terminal.run("routes", "explain", "scripted").stdout
    # Real parts are told apart.
    (only,) = running_clusters(terminal.state)
    assert [part_at(url) for url in (only.gateway, only.tracker, nodes_url(terminal))] == ["Gateway", "Tracker", "Node"]
    # The line that was printed works as it was printed.
    (curl,) = re.findall(r"^  (curl .*)$", terminal.out, re.MULTILINE)
    assert "gamma" in subprocess.run(["bash", "-c", curl], capture_output=True, text=True, timeout=20).stdout
    assert terminal.end() == 0
    assert "Ended; nothing is left running." in terminal.out
    assert list((terminal.state / FOLDER).iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_ends_within_seconds_with_a_stream_open(terminal: Terminal, number: signal.Signals) -> None:
    terminal.write(eos=False, decode_ms=20)
    terminal.up()
    events = terminal.gateway.stream(
        "/v1/completions", {"model": "scripted", "prompt": "x", "max_tokens": 4000, "stream": True}
    )
    next(events)
    assert terminal.end(number) == 0
    with pytest.raises(Exception, match=r"stopped by its operator"):
        list(events)


def test_nothing_is_left_when_it_is_killed(terminal: Terminal) -> None:
    terminal.up()
    assert terminal.end(signal.SIGKILL) == -9


def test_a_dead_node_is_reported_and_can_be_started_again(terminal: Terminal) -> None:
    terminal.up("--nodes", "2")
    nodes = json.loads(terminal.run("nodes", "--json").stdout)["nodes"]
    (pid,) = [n["pid"] for n in nodes if n["shards"][0]["first"] == 3]
    os.kill(pid, signal.SIGKILL)
    terminal.wait_for(lambda: "Ctrl-C ends everything else" in terminal.err)
    assert "node-2 was killed by SIGKILL" in terminal.err
    assert "answers requests with 503 until a Node has the layers 3:6 again" in terminal.err
    refused = terminal.run("chat", "-m", "hi")
    assert refused.returncode == 1
    (again,) = restarts(terminal.err)
    assert "drain_s" not in again and "--threads" not in again, "flags that nobody gave"
    replacement = subprocess.Popen([sys.executable, "-m", "shardline", *again.split()], env=terminal.environ)
    try:
        terminal.wait_for(lambda: terminal.run("chat", "-m", "hi").stdout == " alpha beta gamma\n")
    finally:
        replacement.terminate()
        assert replacement.wait(10) == 0
    assert terminal.end() == 0


def restarts(said: str) -> list[str]:
    """The commands that start a part again, without the name of the program."""
    return re.findall(r"^  (?!  )\S*shardline (.*)$", said, re.MULTILINE)


def test_without_its_last_node_it_goes_on_and_says_what_that_means(terminal: Terminal) -> None:
    process = terminal.up("--nodes", "1", "--kv-tokens", "5000")
    (node,) = [p for p in terminal.parts() if "node" in p.cmdline()]
    node.kill()
    terminal.wait_for(lambda: "Ctrl-C ends everything else" in terminal.err)
    said = terminal.err
    for words in ("node-1 was killed by SIGKILL", "its log, ", "No Node of this command is left", "503", "0:6 again"):
        assert words in said
    assert process.poll() is None
    refused = terminal.run("chat", "-m", "hi")
    assert refused.returncode == 1 and "shardline nodes" in refused.stderr
    (again,) = restarts(said)
    assert again.endswith("--engine scripted --kv-tokens 5000")
    replacement = subprocess.Popen([sys.executable, "-m", "shardline", *again.split()], env=terminal.environ)
    try:
        terminal.wait_for(lambda: terminal.run("chat", "-m", "hi").stdout == " alpha beta gamma\n")
    finally:
        replacement.terminate()
        assert replacement.wait(10) == 0
    assert terminal.end() == 0


def test_a_dead_tracker_comes_back_where_all_look_for_it(terminal: Terminal) -> None:
    terminal.up("--nodes", "1")
    (tracker,) = [p for p in terminal.parts() if "tracker" in p.cmdline()]
    tracker.kill()
    terminal.wait_for(lambda: "Ctrl-C ends everything else" in terminal.err)
    assert "until the Tracker is back" in terminal.err
    (again,) = restarts(terminal.err)
    replacement = subprocess.Popen([sys.executable, "-m", "shardline", *again.split()], env=terminal.environ)
    try:
        terminal.wait_for(lambda: terminal.run("chat", "-m", "hi").stdout == " alpha beta gamma\n")
    finally:
        replacement.terminate()
        assert replacement.wait(10) == 0
    assert terminal.end() == 0


def test_two_clusters_do_not_hide_each_other(terminal: Terminal, tmp_path: Path) -> None:
    terminal.up("--nodes", "1")
    other = Terminal(tmp_path)
    (tmp_path / "second").mkdir()
    other.folder = tmp_path / "second"
    other.write(answer=[" second"])
    first = terminal.gateway.url
    try:
        other.up("--nodes", "1")
        second = next(c for c in running_clusters(terminal.state) if c.gateway != first)
        for command in (("nodes",), ("sessions",), ("chat", "-m", "hi"), ("routes", "explain", "scripted")):
            asked = terminal.run(*command)
            assert asked.returncode == 2, command
            assert "2 clusters run on this machine" in asked.stderr
            assert (
                first in asked.stderr and second.gateway in asked.stderr and "What to do: Name the one" in asked.stderr
            )
        # What each printed finds its own.
        (line,) = re.findall(r"^  \S*shardline (chat .*)$", other.out, re.MULTILINE)
        assert terminal.run(*line.split(), "-m", "hi").stdout == " second\n"
        assert terminal.run("chat", "-m", "hi", "--gateway", first).stdout == " alpha beta gamma\n"
        assert terminal.end() == 0
        assert terminal.run("chat", "-m", "hi").stdout == " second\n"
        assert other.end() == 0
    finally:
        if other.front is not None and other.front.poll() is None:
            other.front.kill()
            other.front.wait()


def test_the_end_of_the_gateway_is_the_end_of_the_cluster(terminal: Terminal) -> None:
    process = terminal.up()
    parts = terminal.parts()
    (gateway,) = [p for p in parts if "gateway" in p.cmdline()]
    gateway.kill()
    assert process.wait(15) == 1
    assert "gateway was killed by SIGKILL" in terminal.err and "What to do" in terminal.err
    terminal.wait_for(lambda: not any(is_running(part) for part in parts))


def test_a_taken_port_is_said_and_nothing_stays(terminal: Terminal) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = terminal.run("up", str(terminal.script), "--engine", "scripted", "--port", port)
    assert done.returncode == 1
    assert f"port {port} on 127.0.0.1 is taken" in done.stderr and "choose another port: --port" in done.stderr
    assert "starting" not in done.stdout, "it is told before anything starts"


def test_a_second_demo_names_the_first_and_what_to_type(terminal: Terminal) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        one = RunningCluster(pid=7, gateway=f"http://127.0.0.1:{port}", tracker="http://127.0.0.1:9", what="demo x")
        terminal.environ["MAKELEVEL"] = "1"
        with entered(terminal.state, one):
            done = terminal.run("demo", "--model", str(terminal.script), "--engine", "scripted", "--port", port)
    assert done.returncode == 1
    assert "taken by a cluster that runs already" in done.stderr and "demo x, process 7" in done.stderr
    assert "make demo PORT=" in done.stderr


def test_a_shard_that_does_not_load_is_said(terminal: Terminal) -> None:
    terminal.write(faults=[{"kind": "oom", "phase": "load", "layer": 5}])
    done = terminal.run("up", str(terminal.script), "--engine", "scripted", "--port", "0")
    assert done.returncode == 1
    assert "node-2" in done.stderr and "What to do" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words", "advice"),
    [
        (("--nodes", "7"), "7 Nodes cannot share 6 layers", "Give --nodes 1 to 6."),
        (("--layers", "0:2,3:6"), "no Node has the layers 2:3", "cover 0:6, such as 0:3,3:6; or --nodes"),
        (("--layers", "0:2,2:9"), "reaches past the 6 layers", "cover 0:6, such as 0:3,3:6; or --nodes"),
    ],
)
def test_layers_that_do_not_fit_are_refused_before_anything_starts(
    terminal: Terminal, arguments: tuple[str, ...], words: str, advice: str
) -> None:
    done = terminal.run("up", str(terminal.script), "--engine", "scripted", "--port", "0", *arguments)
    assert done.returncode == 1
    assert words in done.stderr and advice in done.stderr


def test_a_gateway_for_others_hears_the_whole_command() -> None:
    done = CliRunner().invoke(cli, ["serve", "--port", "0", "--tracker-port", "0", "--host", "0.0.0.0"])
    assert isinstance(done.exception, ShardlineError) and done.exception.code == "insecure_listener"
    assert "shardline serve --host 0.0.0.0 --tls-cert CERT.pem --tls-key KEY.pem" in done.exception.advice


def test_serve_and_nodes_that_join_it(terminal: Terminal) -> None:
    terminal.start("serve", "--port", "0", "--tracker-port", "0", until="Add Nodes")
    node = subprocess.Popen(
        [sys.executable, "-m", "shardline", "node", "--model", str(terminal.script), "--engine", "scripted"],
        env=terminal.environ,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        terminal.wait_for(lambda: terminal.run("chat", "-m", "hi").stdout == " alpha beta gamma\n")
        listed = json.loads(terminal.run("nodes", "--json").stdout)["nodes"]
        assert [(s["first"], s["last"]) for n in listed for s in n["shards"]] == [(0, 6)]
    finally:
        node.terminate()
        said, _ = node.communicate(timeout=10)
    assert node.returncode == 0
    assert said.splitlines()[0].startswith("node: layers 0:6 of 6 of scripted: ")
    assert said.splitlines()[1].partition(" on ")[0] == "node: listening"
    assert terminal.end() == 0


def test_the_demo_asks_and_ends(terminal: Terminal) -> None:
    done = terminal.run(
        *("demo", "--once", "--model", str(terminal.script), "--engine", "scripted", "--port", "0"),
        *("--question", 'What\'s a "shard"?'),
    )
    assert done.returncode == 0, done.stderr
    assert 'Asking scripted: What\'s a "shard"?' in done.stdout
    assert " alpha beta gamma\n" in done.stdout
    assert "tokens/s" in done.stderr and "prefill" in done.stderr
    assert "nothing is left running" in done.stdout


@pytest.mark.smollm2
@pytest.mark.torch
def test_the_demo_with_the_real_model(terminal: Terminal) -> None:
    done = terminal.run("demo", "--once", "--port", "0", "--nodes", "2", timeout=80)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"route .*0:\d+ → .*\d+:30", done.stderr)
    assert len(done.stdout.partition("Asking")[2].splitlines()) > 4


def test_odd_paths_a_proxy_and_ipv6(tmp_path: Path) -> None:
    """A model and a state folder that are hard to quote, proxy variables that lead nowhere, a Gateway on ::1."""
    folder = tmp_path / "ü 模型 100% 'x'"
    folder.mkdir()
    terminal = Terminal(folder)
    terminal.environ |= {name: "http://127.0.0.1:9" for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy")}
    try:
        terminal.up("--host", "::1")
        assert "http://[::1]:" in terminal.out
        asked = terminal.run("chat", "-m", "hi")
        assert asked.stdout == " alpha beta gamma\n", asked.stderr
        assert terminal.end() == 0
    finally:
        if terminal.front is not None and terminal.front.poll() is None:
            terminal.front.kill()
            terminal.front.wait()


def test_api_keys_are_asked_for_and_not_shown(terminal: Terminal) -> None:
    keys = terminal.folder / "keys"
    keys.write_text("sk-0123456789abcdef\n")
    terminal.up("--api-keys", str(keys))
    assert "sk-0123456789abcdef" not in terminal.out + terminal.err
    refused = terminal.run("chat", "-m", "hi")
    assert refused.returncode == 1 and "key" in refused.stderr
    terminal.environ["SHARDLINE_API_KEY"] = "sk-0123456789abcdef"
    assert terminal.run("chat", "-m", "hi").stdout == " alpha beta gamma\n"
    logs = "".join(path.read_text() for path in (terminal.state / "logs").rglob("*.log"))
    assert "sk-0123456789abcdef" not in logs and (terminal.state / "credential").read_text().strip() not in logs
    assert terminal.end() == 0


def test_keys_that_are_made_hold_at_once_and_the_commands_of_this_machine_have_their_own(terminal: Terminal) -> None:
    terminal.up()
    key = terminal.run("keys", "add", "alice").stdout.strip()
    asking = [sys.executable, "-m", "shardline", "chat", "-m", "hi", "--gateway", terminal.gateway.url]
    elsewhere = {**terminal.environ, "XDG_STATE_HOME": str(terminal.folder / "elsewhere")}

    def asked(**more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(asking, env={**elsewhere, **more}, capture_output=True, text=True, timeout=30)

    terminal.wait_for(lambda: asked().returncode == 1, 10)
    assert asked(SHARDLINE_API_KEY=key).stdout == " alpha beta gamma\n"
    assert terminal.run("chat", "-m", "hi").stdout == " alpha beta gamma\n"
    assert terminal.end() == 0
    used = {
        entry["name"]: entry["usage"] for entry in json.loads(terminal.run("keys", "list", "--json").stdout)["keys"]
    }
    assert used["alice"]["requests"] == used["operator"]["requests"] == 1
    assert used["alice"]["completion_tokens"] >= 3
    assert "asks for keys" not in terminal.out
    terminal.up("--nodes", "1")
    assert " and 1 Node for " in terminal.out
    assert "This Gateway asks for keys" in terminal.out and f"{terminal.state / 'api-keys.json'}\n" in terminal.out
    assert terminal.run("chat", "-m", "hi").stdout == " alpha beta gamma\n"
    assert terminal.end() == 0
