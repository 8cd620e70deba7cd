"""The flags by which a Tracker is told what to offer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click.testing
import pytest

from shardline.artifact.signing import new_key, private_pem, public_pem
from shardline.cli.main import cli
from shardline.cli.offering import check_offers, trusted_keys
from shardline.errors import ShardlineError
from tests.support.artifacts import big_gguf, publisher, signed_bundle
from tests.support.stores import described


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The options that the Tracker got; it does not start."""
    import shardline.tracker.run

    got: list[Any] = []

    async def run(options: Any) -> None:
        got.append(options)

    monkeypatch.setattr(shardline.tracker.run, "run", run)
    monkeypatch.setattr("shardline.telemetry.logs.configure_logs", lambda **settings: None)
    return got


def test_a_tracker_that_offers(ran: list[Any], tmp_path: Path) -> None:
    key = tmp_path / "pub.pem"
    key.write_bytes(public_pem(publisher().public_key()))
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
    arguments = ["--state-dir", str(tmp_path / "s"), "tracker", "--trust", str(key)]
    for folder in folders:
        arguments += ["--artifact", str(folder)]
    done = click.testing.CliRunner().invoke(cli, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    (options,) = ran
    assert options.artifacts == tuple(folders)
    assert (options.trusted_keys, options.allow_unsigned) == ((key.read_bytes(),), False)


def test_by_itself_it_offers_nothing(ran: list[Any], tmp_path: Path) -> None:
    arguments = ["--state-dir", str(tmp_path / "s"), "tracker"]
    assert click.testing.CliRunner().invoke(cli, arguments, catch_exceptions=False).exit_code == 0
    assert (ran[0].artifacts, ran[0].trusted_keys, ran[0].allow_unsigned) == ((), (), False)


def test_a_file_that_is_no_key_is_named(tmp_path: Path) -> None:
    key = tmp_path / "key.pem"
    key.write_text("nonsense")
    with pytest.raises(ShardlineError) as caught:
        trusted_keys([key])
    assert (caught.value.code, caught.value.param) == ("setting_invalid", "trust")
    assert str(key) in caught.value.message


def test_a_private_key_is_told_from_a_public_one(tmp_path: Path) -> None:
    key = tmp_path / "key.pem"
    key.write_bytes(private_pem(publisher()))
    with pytest.raises(ShardlineError, match="is a private key") as caught:
        trusted_keys([key])
    assert caught.value.param == "trust" and f"{key}.pub" in caught.value.advice


def test_what_is_not_believed_is_told_before_anything_starts(tmp_path: Path) -> None:
    model, other = big_gguf(tmp_path), tmp_path / "other.pub"
    other.write_bytes(public_pem(new_key().public_key()))
    signed, unsigned = signed_bundle(model, tmp_path / "signed"), described(model, tmp_path / "unsigned")
    state = tmp_path / "state"
    for folder, words in ((signed.folder, "signed by somebody else"), (unsigned.folder, "is not signed")):
        arguments = ["--state-dir", str(state), "serve", "--artifact", str(folder), "--trust", str(other)]
        refused = click.testing.CliRunner().invoke(cli, arguments).exception
        assert isinstance(refused, ShardlineError) and refused.code == "artifact_untrusted"
        assert words in refused.message and "unsigned" not in refused.advice
    assert not state.exists()
    check_offers([unsigned.folder], [], allow_unsigned=True)


def test_a_model_is_no_artifact_folder(tmp_path: Path) -> None:
    model = big_gguf(tmp_path)
    done = click.testing.CliRunner().invoke(cli, ["serve", "--artifact", str(model)])
    assert done.exit_code == 2 and "shardline artifact create" in done.output
    with pytest.raises(ShardlineError, match="is no artifact") as caught:
        check_offers([tmp_path], [], allow_unsigned=True)
    assert "artifact create" in caught.value.advice
