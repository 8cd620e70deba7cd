"""`shardline split`: a part of a model as a file, and what it refuses to do."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from shardline.artifact.identity import content_id
from shardline.cli.listings import size
from shardline.cli.main import cli
from shardline.errors import ShardlineError
from shardline.formats.gguf import read_header
from tests.support.gguf_models import small_model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return small_model(tmp_path).paths[0]


def run(tmp_path: Path, *arguments: object) -> Result:
    command = ["--state-dir", str(tmp_path / "state"), "split", *map(str, arguments)]
    return CliRunner().invoke(cli, command, catch_exceptions=False)


def test_a_part_is_written(tmp_path: Path, model: Path) -> None:
    output = tmp_path / "part.gguf"
    result = run(tmp_path, model, "--layers", "2:5", "-o", output)
    assert result.stdout == f"{output}: layers 2:5 of 8, {size(output.stat().st_size)}\n"
    assert result.stderr == ""
    header = read_header(output)
    assert header.text("shardline.source.content_id") == content_id(model)
    assert list(header.numbers("shardline.source.layers")) == [2, 5, 8]
    assert (tmp_path / "state" / "content-ids").is_dir()


def test_a_rounding_cut_is_said(tmp_path: Path) -> None:
    model = small_model(tmp_path, "gemma").paths[0]
    result = run(tmp_path, model, "--layers", "2:5", "-o", tmp_path / "part.gguf")
    assert result.stderr.startswith("shardline: a cut changes the last bits")


def test_a_file_is_replaced_only_on_demand(tmp_path: Path, model: Path) -> None:
    output = tmp_path / "part.gguf"
    output.write_text("mine")
    with pytest.raises(ShardlineError, match="is there already") as caught:
        run(tmp_path, model, "--layers", "2:5", "-o", output)
    assert caught.value.code == "setting_invalid"
    assert output.read_text() == "mine"
    run(tmp_path, model, "--layers", "2:5", "-o", output, "--force")
    assert read_header(output).integer("llama.block_count") == 3


@pytest.mark.parametrize(
    ("output", "words"), [(".", "Give the part a file name in it: -o "), ("nowhere/part.gguf", "Make that folder")]
)
def test_where_no_file_can_be_is_told_before_anything_is_read(
    tmp_path: Path, model: Path, output: str, words: str
) -> None:
    with pytest.raises(ShardlineError) as refused:
        run(tmp_path, model, "--layers", "2:5", "-o", tmp_path / output)
    assert words in refused.value.advice and not (tmp_path / "state").exists()


def test_what_the_disk_does_not_take_is_told_with_the_flag(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ShardlineError) as refused:
        run(tmp_path, model, "--layers", "2:5", "-o", tmp_path / "part.gguf")
    assert refused.value.code == "disk_full"
    assert refused.value.advice == "Make room there, or give it another place: -o FILE"


@pytest.mark.parametrize(
    "command",
    [
        ("cuts", "PART"),
        ("split", "PART", "--layers", "0:1", "-o", "OTHER"),
        ("up", "PART", "--engine", "llama"),
        ("up", "PART", "--engine", "torch"),
        ("node", "--model", "PART", "--engine", "torch", "--tracker", "http://127.0.0.1:9"),
        ("bench", "PART"),
        ("artifact", "create", "PART"),
    ],
)
def test_a_part_is_no_model_for_any_command(tmp_path: Path, model: Path, command: tuple[str, ...]) -> None:
    part = tmp_path / "part.gguf"
    run(tmp_path, model, "--layers", "2:5", "-o", part)
    (tmp_path / "state/credential").write_text("c" * 43)
    (tmp_path / "state/credential").chmod(0o600)
    words = {"PART": str(part), "OTHER": str(tmp_path / "other.gguf")}
    done = CliRunner().invoke(cli, ["--state-dir", str(tmp_path / "state"), *(words.get(w, w) for w in command)])
    assert isinstance(done.exception, ShardlineError), done.output
    assert "part.gguf is a part of a model, its layers 2:5 of 8" in done.exception.message
    assert "Name the whole model" in done.exception.advice


def test_the_model_itself_is_never_replaced(tmp_path: Path, model: Path) -> None:
    whole = model.read_bytes()
    link = tmp_path / "link.gguf"
    link.symlink_to(model)
    for output in (model, link):
        with pytest.raises(ShardlineError, match="is the model itself"):
            run(tmp_path, model, "--layers", "2:5", "-o", output, "--force")
    assert model.read_bytes() == whole


@pytest.mark.parametrize(
    ("layers", "code", "message"),
    [
        ("2:9", "layers_invalid", "not a range inside a model of 8 layers"),
        ("0:8", "layers_invalid", "the model's own file"),
    ],
)
def test_ranges_that_are_no_part(tmp_path: Path, model: Path, layers: str, code: str, message: str) -> None:
    with pytest.raises(ShardlineError, match=message) as caught:
        run(tmp_path, model, "--layers", layers, "-o", tmp_path / "part.gguf")
    assert caught.value.code == code
    assert not (tmp_path / "part.gguf").exists()


def test_a_cut_that_the_architecture_does_not_allow(tmp_path: Path) -> None:
    output = tmp_path / "part.gguf"
    with pytest.raises(ShardlineError, match="cannot be a part of their own: layers come in groups of 4") as caught:
        run(tmp_path, small_model(tmp_path, "smollm3").paths[0], "--layers", "0:3", "-o", output)
    assert "shardline cuts MODEL" in caught.value.advice
    with pytest.raises(ShardlineError, match="only whole"):
        run(tmp_path, small_model(tmp_path, "never-heard-of").paths[0], "--layers", "0:4", "-o", output)
    assert not output.exists()


def test_wrong_usage(tmp_path: Path, model: Path) -> None:
    assert run(tmp_path, model, "-o", "x").exit_code == 2
    assert run(tmp_path, model, "--layers", "5:5", "-o", "x").exit_code == 2
    assert run(tmp_path, model, "--layers", "0:5").exit_code == 2
