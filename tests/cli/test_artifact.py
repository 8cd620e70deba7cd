"""`shardline artifact`: what the commands print, and how they fail."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from shardline.artifact.identity import content_id
from shardline.artifact.signing import key_id, read_private_key, read_public_key
from shardline.cli.artifact import artifact
from shardline.cli.main import cli, main
from shardline.errors import ShardlineError
from tests.support.artifacts import big_gguf, safetensors_folder, split_gguf


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["artifact", *map(str, arguments)], catch_exceptions=False)


def answer(*arguments: object) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run(*arguments, "--json").stdout)
    return found


@pytest.fixture
def key(tmp_path: Path) -> Path:
    run("keygen", "-o", tmp_path / "key.pem")
    return tmp_path / "key.pem"


def public(key: Path) -> Path:
    return key.with_name(key.name + ".pub")


def test_keys(tmp_path: Path) -> None:
    found = answer("keygen", "-o", tmp_path / "k.pem")
    private = tmp_path / "k.pem"
    assert found == {
        "private_key": str(private),
        "public_key": str(public(private)),
        "key_id": key_id(read_public_key(public(private).read_bytes())),
    }
    assert key_id(read_private_key(private.read_bytes()).public_key()) == found["key_id"]
    assert stat.S_IMODE(private.stat().st_mode) == 0o600


@pytest.mark.parametrize("there", ["k.pem", "k.pem.pub"])
def test_a_key_is_never_replaced(tmp_path: Path, there: str) -> None:
    (tmp_path / there).write_text("mine")
    with pytest.raises(ShardlineError, match="is there already"):
        run("keygen", "-o", tmp_path / "k.pem")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(there, "mine")]


def test_the_wrong_one_of_two_keys_is_told(tmp_path: Path, key: Path) -> None:
    model = big_gguf(tmp_path)
    with pytest.raises(ShardlineError, match="is a public key") as refused:
        run("create", model, "--sign", public(key))
    assert "without .pub" in refused.value.advice
    run("create", model, "--sign", key)
    with pytest.raises(ShardlineError, match="is a private key") as refused:
        run("verify", model, "--public-key", key)
    assert f"{key}.pub" in refused.value.advice


def test_what_is_not_signed_and_what_another_signed(tmp_path: Path, key: Path) -> None:
    model, other = big_gguf(tmp_path), tmp_path / "other.pem"
    run("keygen", "-o", other)
    run("create", model, "-o", tmp_path / "unsigned")
    run("create", model, "-o", tmp_path / "signed", "--sign", key)
    for name, words in (("unsigned", "is not signed"), ("signed", "by none of the keys")):
        with pytest.raises(ShardlineError, match=words) as refused:
            run("show", tmp_path / name, "--public-key", public(other))
        assert refused.value.code == "artifact_untrusted"
        assert "Without" in refused.value.advice and "--allow-unsigned" not in refused.value.advice


def test_a_folder_made_here_is_named_as_seen_from_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = big_gguf(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert run("create", model.name).stdout.startswith("llama-8.artifact: llama-8.gguf\n")


def test_an_artifact_is_never_replaced(tmp_path: Path) -> None:
    model = big_gguf(tmp_path)
    run("create", model)
    with pytest.raises(ShardlineError, match=r"llama-8\.artifact is there already") as refused:
        run("create", model)
    assert "-o DIR" in refused.value.advice


def test_from_a_model_to_a_check(tmp_path: Path, key: Path) -> None:
    model = big_gguf(tmp_path)
    made = run("create", model, "--sign", key)
    assert made.stdout.startswith(f"{tmp_path / 'llama-8.artifact'}: llama-8.gguf\ncontent_id  {content_id(model)}\n")
    for path in (model, tmp_path / "llama-8.artifact"):
        checked = run("verify", path, "--public-key", public(key))
        assert checked.exit_code == 0
        lines = checked.stdout.splitlines()
        assert lines[1].split() == ["llama-8.gguf", "1.0", "MiB", "ok"]
        assert lines[2:4] == [f"content_id    {content_id(model)}", "tensor table  equal to the headers"]
        assert lines[4].startswith("signature     holds, by the key ")


def test_all_that_is_known_as_json(tmp_path: Path, key: Path) -> None:
    model = big_gguf(tmp_path)
    options = ("--name", "Tiny", "--version", "2", "--license", "MIT", "--source", "hf://x/y")
    made = answer("create", model, "-o", tmp_path / "art", "--sign", key, *options, "--webseed", "https://example.org/")
    checked = answer("verify", tmp_path / "art", "--public-key", public(key))
    assert made["content_id"] == checked["content_id"] == content_id(model)
    assert (made["name"], made["version"], made["license"]) == ("Tiny", "2", "MIT")
    assert made["transport"]["webseeds"] == ["https://example.org/"]
    assert (checked["holds"], checked["signature"], checked["fault"]) == (True, "holds", None)
    assert checked["checked"] == [{"path": "llama-8.gguf", "state": "ok", "bad_pieces": [], "reason": None}]
    assert made["signed_by"] == checked["signed_by"] == key_id(read_public_key(public(key).read_bytes()))


@pytest.mark.parametrize("form", ["split", "safetensors"])
def test_other_forms_are_found_from_either_end(tmp_path: Path, form: str) -> None:
    model = split_gguf(tmp_path)[1] if form == "split" else safetensors_folder(tmp_path / "model")
    folder = Path(answer("create", model)["folder"])
    assert answer("verify", model)["holds"]
    assert answer("verify", folder)["holds"]
    assert answer("show", model)["content_id"] == content_id(model)


def test_an_artifact_elsewhere_is_told_where_the_model_is(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "artifacts").mkdir()
    model = big_gguf(tmp_path / "models")
    run("create", model, "-o", tmp_path / "artifacts" / "tiny")
    assert answer("verify", tmp_path / "artifacts" / "tiny", "--files", tmp_path / "models")["holds"]
    with pytest.raises(ShardlineError, match="is missing"):
        run("verify", tmp_path / "artifacts" / "tiny")


def test_what_is_not_signed_or_not_checked_is_said(tmp_path: Path, key: Path) -> None:
    model = big_gguf(tmp_path)
    run("create", model, "-o", tmp_path / "unsigned")
    run("create", model, "-o", tmp_path / "signed", "--sign", key)
    unsigned = run("verify", tmp_path / "unsigned").stdout
    assert "signature     none: nobody vouches for this artifact" in unsigned
    assert "signature     NOT CHECKED: name the key" in run("verify", tmp_path / "signed").stdout
    assert "signature   NOT CHECKED" in run("show", tmp_path / "signed").stdout
    with pytest.raises(ShardlineError, match="is not signed, so no key can vouch for it"):
        run("verify", tmp_path / "unsigned", "--public-key", public(key))


def test_the_wrong_key(tmp_path: Path, key: Path) -> None:
    model = big_gguf(tmp_path)
    run("create", model, "--sign", key)
    run("keygen", "-o", tmp_path / "other.pem")
    with pytest.raises(ShardlineError) as caught:
        run("verify", model, "--public-key", tmp_path / "other.pem.pub")
    assert caught.value.code == "artifact_untrusted"


def test_a_damaged_model_is_a_failure_that_names_the_piece(
    tmp_path: Path, key: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = big_gguf(tmp_path)
    run("create", model, "--sign", key)
    with model.open("r+b") as file:
        file.seek(300_000)
        file.write(b"\xff\xfe\xfd")
    with pytest.raises(SystemExit) as stopped:
        main(["artifact", "verify", str(model), "--public-key", str(public(key))])
    assert stopped.value.code == 1
    shown = capsys.readouterr()
    assert "damaged  1 of 5 pieces are wrong: 1" in shown.out
    assert "tensor table  not compared" in shown.out
    assert "does not hold the model of this artifact: llama-8.gguf is damaged" in shown.err


def test_layers_that_a_folder_holds(tmp_path: Path) -> None:
    model = big_gguf(tmp_path)
    run("create", model)
    assert answer("show", model, "--files", tmp_path)["servable"] == [[0, 8]]
    size = model.stat().st_size
    os.truncate(model, size // 2)
    os.truncate(model, size)
    found = answer("show", tmp_path / "llama-8.artifact", "--files", tmp_path)
    assert (found["servable"], found["pieces_held"], found["pieces"]) == ([[0, 2], [3, 8]], 2, 5)
    text = run("show", tmp_path / "llama-8.artifact", "--files", tmp_path).stdout
    assert text.endswith("held        2 of 5 pieces; layers 0:2, 3:8\n")


def test_what_is_no_artifact(tmp_path: Path) -> None:
    model = big_gguf(tmp_path)
    for path in (model, tmp_path):
        with pytest.raises(ShardlineError, match="is no artifact") as caught:
            run("verify", path)
        assert "artifact create" in caught.value.advice


def test_a_key_file_that_is_none(tmp_path: Path) -> None:
    model = big_gguf(tmp_path)
    (tmp_path / "key").write_text("no key")
    for path, words in ((tmp_path / "key", "the key cannot be used"), (model, "it is no key")):
        with pytest.raises(ShardlineError, match=words):
            run("create", model, "--sign", path)
    assert not (tmp_path / "llama-8.artifact").exists()


@pytest.mark.parametrize("command", ["create", "verify", "show", "keygen"])
def test_help_says_what_flags_do(command: str) -> None:
    assert f"\n  {command} " in run("--help").stdout
    assert "..." not in run("--help").stdout.partition("Commands:")[2], "a summary is cut off"
    assert run(command, "--help").exit_code == 0
    for parameter in artifact.commands[command].params:
        assert getattr(parameter, "help", None) or parameter.param_type_name == "argument", parameter.name
