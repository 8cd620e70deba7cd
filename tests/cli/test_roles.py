"""What a command line becomes: the options that a role is run with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click.testing
import pytest

from shardline.cli.main import cli
from shardline.errors import ShardlineError
from shardline.options import GatewayOptions, NodeOptions, TrackerOptions
from tests.support.state import put_credential


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The options that `run` of any role got; the roles themselves do not start."""
    import shardline.gateway.run
    import shardline.node.run
    import shardline.tracker.run

    got: list[Any] = []

    async def run(options: Any) -> None:
        got.append(options)
        options.announce("ready")

    for role in (shardline.gateway.run, shardline.node.run, shardline.tracker.run):
        monkeypatch.setattr(role, "run", run)
    monkeypatch.setattr("shardline.telemetry.logs.configure_logs", lambda **settings: None)
    return got


def invoke(*arguments: str) -> click.testing.Result:
    done = click.testing.CliRunner().invoke(cli, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done


def test_a_node_with_everything(ran: list[Any], tmp_path: Path) -> None:
    model = tmp_path / "ü 模型.gguf"
    model.write_bytes(b"GGUF")
    put_credential(tmp_path / "s")
    invoke(
        *("--set", "push_s=9", "--state-dir", str(tmp_path / "s"), "node", "--model", str(model)),
        *("--tracker", "http://[::1]:7070", "--layers", "0:15", "--memory", "4GiB", "--engine", "scripted"),
        *(
            "--kv-tokens",
            "4096",
            "--threads",
            "2",
            "--host",
            "::1",
            "--port",
            "7001",
            "--advertise",
            "http://[::1]:7001",
        ),
        *(
            "--identity",
            str(tmp_path / "key"),
            "--dtype",
            "bfloat16",
            "--context-length",
            "2048",
            "--content-id",
            "mac1-x",
        ),
    )
    (options,) = ran
    assert isinstance(options, NodeOptions)
    assert (options.first, options.last, options.memory_bytes) == (0, 15, 4 << 30)
    assert (options.model, options.engine, options.tracker_url) == (str(model), "scripted", "http://[::1]:7070")
    assert (options.host, options.port, options.advertise_url) == ("::1", 7001, "http://[::1]:7001")
    assert (options.kv_tokens, options.threads, options.context_length) == (4096, 2, 2048)
    assert (options.dtype, options.content_id, options.identity_path) == ("bfloat16", "mac1-x", tmp_path / "key")
    assert options.settings.push_s == 9
    assert options.state_dir == tmp_path / "s"
    assert "PATH" in options.environment


def test_a_node_with_nothing_is_placed_by_the_tracker(ran: list[Any], tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    invoke("node", "--model", str(model))
    (options,) = ran
    assert (options.first, options.last, options.memory_bytes, options.kv_tokens) == (None, None, None, None)
    assert (options.host, options.port, options.engine, options.inline) == ("127.0.0.1", 0, "torch", False)


def test_all_roles_of_a_machine_share_one_credential(ran: list[Any], tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sk-one-0123456789\nsk-two-0123456789\n")
    state = ("--state-dir", str(tmp_path / "state"))
    invoke(*state, "tracker", "--port", "0")
    invoke(*state, "gateway", "--api-keys", str(keys))
    tracker, gateway = ran
    assert isinstance(tracker, TrackerOptions) and isinstance(gateway, GatewayOptions)
    assert tracker.credential == gateway.credential and len(tracker.credential) >= 32
    assert gateway.api_keys == ("sk-one-0123456789", "sk-two-0123456789")
    assert gateway.tracker_url == "http://127.0.0.1:7070"
    assert (tmp_path / "state" / "credential").stat().st_mode & 0o077 == 0


def test_a_credential_file_that_is_named_must_be_there(ran: list[Any], tmp_path: Path) -> None:
    done = click.testing.CliRunner().invoke(cli, ["--credential-file", str(tmp_path / "absent"), "tracker"])
    assert done.exception is not None and "absent" in str(done.exception)
    assert ran == []


def test_advice_of_a_credential_and_of_a_refusal_is_for_a_person(
    monkeypatch: pytest.MonkeyPatch, ran: list[Any], tmp_path: Path
) -> None:
    file = tmp_path / "credential"
    file.write_text("x" * 32)
    file.chmod(0o644)
    done = click.testing.CliRunner().invoke(cli, ["--credential-file", str(file), "tracker"])
    assert isinstance(done.exception, ShardlineError)
    assert f"Copy {file} anew" in done.exception.advice and "--credential-file" in done.exception.advice

    async def refused(options: Any) -> None:
        raise ShardlineError("unauthorized", "the cluster credential is missing or wrong")

    monkeypatch.setattr("shardline.node.run.run", refused)
    done = click.testing.CliRunner().invoke(cli, ["node", "--model", str(tmp_path)])
    assert isinstance(done.exception, ShardlineError)
    assert "`credential` in its state folder" in done.exception.advice and "mode 600" in done.exception.advice


def test_a_role_in_front_of_a_person_announces_in_words(ran: list[Any]) -> None:
    assert invoke("tracker").stdout == "tracker: ready\ntracker: ended\n"


@pytest.mark.parametrize("role", ["node", "gateway"])
def test_only_who_starts_a_cluster_makes_a_credential(ran: list[Any], tmp_path: Path, role: str) -> None:
    state = tmp_path / "state"
    refused = click.testing.CliRunner().invoke(cli, ["--state-dir", str(state), role]).exception
    assert isinstance(refused, ShardlineError) and refused.param == "credential_file" and not ran
    assert f"{state / 'credential'} (mode 600)" in refused.advice
    assert not (state / "credential").exists()
