"""`shardline node --upstream`: its flags, what does not go with them, and that the key stays out of sight."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click.testing
import pytest

from shardline.cli.main import cli
from shardline.errors import ShardlineError
from shardline.options import CompositeOptions
from tests.support.state import put_credential

URL = ("--upstream", "http://127.0.0.1:8000/v1")


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    import shardline.node.composite_run

    got: list[Any] = []

    async def run(options: Any) -> None:
        got.append(options)
        options.announce("ready")

    monkeypatch.setattr(shardline.node.composite_run, "run", run)
    monkeypatch.setattr("shardline.telemetry.logs.configure_logs", lambda **settings: None)
    return got


def invoke(folder: Path, *arguments: str) -> click.testing.Result:
    put_credential(folder / "s")
    flags = ("--state-dir", str(folder / "s"), "node", "--tracker", "http://127.0.0.1:7070")
    return click.testing.CliRunner().invoke(cli, (*flags, *arguments))


def test_everything(ran: list[Any], tmp_path: Path) -> None:
    key, pem = tmp_path / "key", tmp_path / "ca.pem"
    key.write_text("sk-very-secret\n")
    pem.write_text("-----BEGIN")
    done = invoke(
        tmp_path,
        *(*URL, "--model", "org/Some-Model", "--upstream-key-file", str(key), "--upstream-ca", str(pem)),
        *("--upstream-field", "top_k", "--upstream-field", "min_p", "--sessions", "3", "--context-length", "8192"),
        *("--port", "7001", "--advertise", "http://127.0.0.1:7001", "--identity", str(tmp_path / "id")),
    )
    assert done.exit_code == 0, done.output
    (options,) = ran
    assert isinstance(options, CompositeOptions)
    assert (options.upstream, options.model, options.places) == (URL[1], "org/Some-Model", 3)
    assert (options.context_length, options.port, options.upstream_ca) == (8192, 7001, pem)
    assert options.upstream_fields == {"top_k", "min_p"}
    assert options.upstream_key == "sk-very-secret"
    assert "secret" not in repr(options) and "secret" not in done.output


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (URL, "--upstream needs --model NAME"),
        ((*URL, "--model", "m", "--layers", "0:2"), "--layers is of a Node that computes"),
        ((*URL, "--model", "m", "--engine", "llama"), "--engine is of a Node that computes"),
        ((*URL, "--model", "m", "--kv-tokens", "9"), "--kv-tokens is of a Node that computes"),
        (("--sessions", "3"), "--sessions goes with --upstream URL"),
        (("--upstream-field", "top_k"), "--upstream-field goes with --upstream URL"),
        ((*URL, "--model", "m", "--upstream-field", "temperature"), "'temperature' is not"),
        (("--model", "not-there.gguf"), "Path 'not-there.gguf' does not exist."),
    ],
)
def test_flags_that_do_not_go_together(ran: list[Any], tmp_path: Path, arguments: tuple[str, ...], told: str) -> None:
    done = invoke(tmp_path, *arguments)
    assert done.exit_code == 2 and told in done.output
    assert not ran


@pytest.mark.parametrize("content", [b"", b"two words", b"\xff\xfe", b"x" * 10_000])
def test_a_file_that_holds_no_key(ran: list[Any], tmp_path: Path, content: bytes) -> None:
    key = tmp_path / "key"
    key.write_bytes(content)
    done = invoke(tmp_path, *URL, "--model", "m", "--upstream-key-file", str(key))
    assert isinstance(done.exception, ShardlineError) and done.exception.param == "upstream_key_file"
    assert "--upstream-key-file" in done.exception.advice
    assert not ran


@pytest.mark.parametrize(
    "url",
    ["", "ftp://x/v1", "http://", "http://u:p@h/v1", "http://h/v1?model=x", "http://h/v1#x", "h:80/v1", "http://h:0"],
)
def test_urls_that_are_none(url: str) -> None:
    from shardline.node.upstream import check_place

    with pytest.raises(ShardlineError) as refused:
        check_place(url, None)
    assert refused.value.code == "setting_invalid" and refused.value.param == "upstream"
    assert "u:p" not in refused.value.message, "it may hold a password"


def test_urls() -> None:
    from shardline.node.upstream import check_place

    assert check_place("http://127.0.0.1:8000/v1/", "k") == "http://127.0.0.1:8000/v1"
    assert check_place("https://[::1]:1/openai/v1", None) == "https://[::1]:1/openai/v1"
    with pytest.raises(ShardlineError) as refused:
        check_place("http://h/v1", "a\r\nx-evil: 1")
    assert refused.value.param == "upstream_key_file"
