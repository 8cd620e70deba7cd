"""The files of deploy/: commands that exist, metrics that exist, syntax as far as it can be checked here."""

from __future__ import annotations

import configparser
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
from prometheus_client.parser import text_string_to_metric_families

from shardline.cli.main import cli
from shardline.gateway.metrics import EndedSession, GatewayMetrics
from shardline.node.app import NodeMetrics
from shardline.tracker.metrics import TrackerMetrics

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
METRIC = re.compile(r"\b(?:shardline|gen_ai)_\w+")
LABELS = {"gen_ai_request_model"}


def check_command(words: list[str]) -> str:
    """Parse a command line of ours down to its last flag, types and choices too; its name. Nothing runs."""
    at = next(index for index, word in enumerate(words) if word in cli.commands)
    context = cli.make_context("shardline", words[: at + 1])
    cli.commands[words[at]].make_context(words[at], words[at + 1 :], parent=context)
    return words[at]


def existing() -> set[str]:
    """Every series that the three roles show: sums and buckets as they are named on the wire."""

    def nobody() -> NoReturn:
        raise RuntimeError("there is no Node here")

    gateway = GatewayMetrics()
    gateway.ended(
        EndedSession(
            status="completed",
            code=None,
            model="m",
            tokens=2,
            prompt_tokens=1,
            cached_tokens=0,
            lasted_s=1.0,
            first_token_s=0.1,
            decode_s=0.1,
        )
    )
    names = set()
    for metrics in (gateway, TrackerMetrics(), NodeMetrics(nobody)):
        for metric in vars(metrics).values():
            for family in getattr(metric, "describe", list)():
                endings = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}.get(family.type, ("",))
                names |= {family.name + ending for ending in endings}
    return names


def dashboard() -> dict[str, Any]:
    return dict(json.loads((DEPLOY / "grafana.json").read_text(encoding="utf-8")))


def expressions() -> Iterator[tuple[str, str]]:
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]


def test_the_dashboard_uses_only_metrics_that_exist() -> None:
    known = existing()
    assert {"gen_ai_server_request_duration_seconds_bucket", "shardline_node_sessions"} <= known
    used = set()
    for title, expression in expressions():
        names = set(METRIC.findall(expression)) - LABELS
        assert names and names <= known, f"{title}: {sorted(names - known)}"
        assert all(expression.count(a) == expression.count(b) for a, b in ("()", "[]", "{}")), title
        used |= names
    assert len(used) >= 20


def test_labels_of_the_dashboard_are_those_of_the_metrics() -> None:
    labels = {"le", "instance", "gen_ai_request_model", "status", "code", "state", "result"}
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", ()):
            named = {
                word for group in re.findall(r"by \(([^)]*)\)", target["expr"]) for word in re.split(r"\W+", group)
            }
            named |= set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            assert named <= labels, panel["title"]


def test_the_dashboard_is_whole() -> None:
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in panels)
    for panel in panels:
        for target in panel.get("targets", ()):
            assert target["datasource"]["uid"] == "${datasource}"


async def test_what_is_said_to_exist_is_on_the_wire() -> None:
    """Guards the comparison above: names as they are described are names as they are sent."""
    metrics = GatewayMetrics()
    sent = {s.name for f in text_string_to_metric_families(metrics.text(0).decode()) for s in f.samples}
    plain = {name for name in existing() if name.startswith("shardline_gateway") and "ended" not in name}
    assert plain <= sent


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_units(path: Path, tmp_path: Path) -> None:
    unit = configparser.RawConfigParser(strict=True)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string(path.read_text(encoding="utf-8"))
    assert unit.sections() == ["Unit", "Service", "Install"]
    program, *words = shlex.split(unit["Service"]["ExecStart"])
    assert program == "/opt/shardline/bin/shardline"
    line = tmp_path / "join"
    line.write_text("https://192.0.2.10:7070/#TOKEN.PIN\n")
    name = check_command([word.replace("${CREDENTIALS_DIRECTORY}", str(tmp_path)) for word in words])
    assert name in path.name
    assert unit["Service"]["RestartPreventExitStatus"] == "2"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_systemd_knows_every_line_of_a_unit(path: Path, tmp_path: Path) -> None:
    copy = tmp_path / path.name
    copy.write_text(path.read_text(encoding="utf-8").replace("/opt/shardline/bin/shardline", sys.executable))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(copy)], capture_output=True, text=True, timeout=30
    )
    about = [text for text in done.stderr.splitlines() if path.name in text]
    assert not about


def test_the_compose_file() -> None:
    yaml = pytest.importorskip("yaml")
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))
    services = compose["services"]
    assert sum(name.startswith("node-") for name in services) == 3
    ports = []
    for name, service in services.items():
        words = [word.replace("/models/${MODEL:-model.gguf}", __file__) for word in service["command"]]
        assert all(isinstance(word, str) and "$" not in word for word in words), name
        assert check_command(words) == name.partition("-")[0]
        ports += [words[words.index("--port") + 1]]
        assert name == "tracker" or service["network_mode"] == "service:tracker"
    assert len(set(ports)) == len(ports)
    assert services["tracker"]["ports"] == ["127.0.0.1:8080:8080"], "for this machine alone"
    assert (DEPLOY / services["tracker"]["build"]["context"] / services["tracker"]["build"]["dockerfile"]).exists()
    scraped = yaml.safe_load((DEPLOY / "prometheus.yml").read_text(encoding="utf-8"))["scrape_configs"]
    targets = {
        target.rpartition(":")[2] for job in scraped for part in job["static_configs"] for target in part["targets"]
    }
    assert targets == set(ports)


def test_the_containerfile() -> None:
    text = (DEPLOY / "Containerfile").read_text(encoding="utf-8")
    joined = re.sub(r"\\\n", " ", text)
    lines = [line for line in joined.splitlines() if line.strip() and not line.startswith("#")]
    known = {"FROM", "ARG", "RUN", "COPY", "USER", "ENV", "VOLUME", "STOPSIGNAL", "ENTRYPOINT", "CMD"}
    assert {line.split()[0] for line in lines} <= known
    for line in lines:
        if line.startswith("COPY ") and "--from" not in line:
            assert all((ROOT / source).exists() for source in line.split()[1:-1]), line
        if line.startswith(("ENTRYPOINT", "CMD")):
            assert isinstance(json.loads(line.partition(" ")[2]), list)
    assert json.loads(joined.partition("ENTRYPOINT ")[2].splitlines()[0]) == ["shardline"]
    extras = re.findall(r"/source\[([\w,]+)\]", text)
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert extras and all(f"\n{extra} = [" in project for extra in extras[0].split(","))
    assert "USER 10001" in text
