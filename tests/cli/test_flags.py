"""Errors of roles and libraries name the flag that a person typed."""

from __future__ import annotations

from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from shardline.cli.flags import naming_flags
from shardline.cli.main import cli
from shardline.errors import ShardlineError


def advice_of(*arguments: str) -> str:
    done = CliRunner().invoke(cli, arguments)
    assert isinstance(done.exception, ShardlineError), done.output
    return done.exception.advice


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("serve", "--listen", "127.0.0.300", "--port", "0"), "Correct --listen: an address"),
        (("tracker", "--listen", "192.0.2.77", "--port", "0"), "Correct --listen: an address"),
        (("tracker", "--host", "127.0.0.300", "--insecure-plain-http"), "Correct --host: an address"),
        (("gateway", "--tls-cert", "SCRIPT", "--port", "0"), "Correct --tls-cert."),
        (("gateway", "--api-keys", "/nowhere/keys", "--port", "0"), "Correct --api-keys."),
        (("node", "--model", "SCRIPT", "--tracker", "http://[", "--engine", "scripted"), "Correct --tracker."),
        (("--set", "push_s=fast", "nodes"), "Correct --set push_s=…."),
        (("--set", "beat_timeout_s=0.1", "nodes"), "Correct --set beat_timeout_s=…."),
        (("--set", "push_s", "nodes"), "Write --set NAME=VALUE"),
        (("--set", "nonsense=1", "nodes"), "`shardline config show` lists"),
    ],
)
def test_the_flag_is_named(tmp_path: Path, arguments: tuple[str, ...], words: str) -> None:
    script = tmp_path / "script.json"
    script.write_text('{"model": "scripted", "n_layers": 6, "answer": [" alpha"]}')
    assert words in advice_of(*(str(script) if word == "SCRIPT" else word for word in arguments))


def test_variables_and_files_are_named_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "config.toml"
    file.write_text("push_s = 'x'")
    assert advice_of("--config", str(file), "nodes") == f"Correct push_s in {file}."
    monkeypatch.setenv("SHARDLINE_TRACKER", "ftp://x")
    assert advice_of("nodes") == "Correct SHARDLINE_TRACKER."


@pytest.mark.parametrize("flag", ["--host", "--listen"])
@pytest.mark.parametrize("text", ["http://0.0.0.0", "0.0.0.0:7070", "[::1]:7070", "", "0.0.0.0/24"])
def test_what_is_no_address_to_listen_on_is_refused_by_name(flag: str, text: str) -> None:
    done = CliRunner().invoke(cli, ("serve", flag, text))
    assert done.exit_code == 2 and flag in done.output
    if "7070" in text:
        assert ("--tracker-port" if flag == "--listen" else "the port with --port") in done.output


@pytest.mark.parametrize(
    ("flags", "given", "advice"),
    [
        (("--trust", "--allow-unsigned"), ["--trust", "x"], "Name the key of its publisher: --trust."),
        (("--trust",), [], "Name the key of its publisher: --trust."),
        (("--trust", "--allow-unsigned"), [], "Name the key of its publisher: --trust. Else: --allow-unsigned."),
    ],
)
def test_whom_nobody_believes_is_not_simply_taken(flags: tuple[str, ...], given: list[str], advice: str) -> None:
    @click.command(params=[click.Option([flag], is_flag=flag == "--allow-unsigned") for flag in flags])
    def command(**_: object) -> None:
        raise ShardlineError("artifact_untrusted", "signed by somebody else")

    done = CliRunner().invoke(naming_flags(command), given)
    assert isinstance(done.exception, ShardlineError) and done.exception.advice == advice


def test_what_has_advice_or_is_no_mistake_of_a_flag_stays() -> None:
    errors = {
        "own": ShardlineError("setting_invalid", "x", param="host", advice="Do this."),
        "other": ShardlineError("queue_full", "x"),
        "nameless": ShardlineError("setting_invalid", "/etc/x is damaged"),
        "argument": ShardlineError("invalid_value", "x", param="what"),
    }

    @click.command()
    @click.argument("what")
    @click.option("--host")
    def raising(what: str, host: str | None) -> None:
        raise errors[what]

    naming_flags(raising)

    def advice(what: str) -> str:
        found = CliRunner().invoke(raising, [what]).exception
        assert isinstance(found, ShardlineError) and found.message == errors[what].message
        return found.advice

    assert advice("own") == "Do this."
    assert advice("other") == errors["other"].advice
    assert advice("nameless") == "Correct what the message names."
    assert advice("argument") == "Correct WHAT."
