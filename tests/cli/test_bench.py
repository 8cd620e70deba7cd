"""`shardline bench`: what is refused before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from shardline.cli.main import cli
from shardline.errors import ShardlineError
from tests.support.gguf_models import small_model


@pytest.mark.parametrize(
    ("flag", "value"), [("--nodes", "0"), ("--nodes", "1,x"), ("--streams", ""), ("--streams", "65")]
)
def test_numbers_are_checked(tmp_path: Path, flag: str, value: str) -> None:
    model = str(small_model(tmp_path, "llama", 4, None).paths[0])
    result = CliRunner().invoke(cli, ["bench", model, flag, value])
    assert result.exit_code == 2
    assert flag in result.output


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--prefill", "128"], "context of 128"),
        (["--prefill", "0", "--tokens", "120"], "context of 128"),
        (["--prefill", "0", "--tokens", "8", "--nodes", "1,5"], "cannot be cut into 5 parts"),
        (["--prefill", "0", "--tokens", "8", "--rpc-server", "/no/such/program"], "is no program"),
        (["--prefill", "0", "--tokens", "8", "--apart", "--threads", "256"], "need 257 cores"),
    ],
)
def test_what_cannot_be_measured_is_told_at_once(tmp_path: Path, flags: list[str], words: str) -> None:
    model = str(small_model(tmp_path, "llama", 4, None).paths[0])
    with pytest.raises(ShardlineError, match=words):
        CliRunner().invoke(cli, ["bench", model, *flags], catch_exceptions=False)


def test_a_folder_is_no_model_for_it(tmp_path: Path) -> None:
    with pytest.raises(ShardlineError, match="takes a GGUF file"):
        CliRunner().invoke(cli, ["bench", str(tmp_path)], catch_exceptions=False)
