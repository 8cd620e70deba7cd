"""`shardline cuts`: what is shown for models of several kinds, for people and as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from shardline.cli.cuts import ranges
from shardline.cli.main import cli
from shardline.errors import ShardlineError
from tests.support.gguf_models import small_model


def run(*arguments: str) -> str:
    result = CliRunner().invoke(cli, ["cuts", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def file_of(folder: Path, architecture: str, layers: int, keys: dict[str, Any] | None = None) -> str:
    return str(small_model(folder, architecture, layers, keys).paths[0])


def test_a_model_that_can_be_cut_anywhere(tmp_path: Path) -> None:
    assert run(file_of(tmp_path, "llama", 8), "--nodes", "2") == (
        "llama-8.gguf: llama, 8 layers\n"
        "Parts compared with the uncut model: equal to the bit\n"
        "Cuts at: 1–7\n"
        "\n"
        "LAYERS  WEIGHTS   KV OF 1,000 TOKENS\n"
        "0:4     12.1 KiB  250.0 KiB\n"
        "4:8     12.2 KiB  250.0 KiB\n"
    )


def test_reasons_are_given_once(tmp_path: Path) -> None:
    path = file_of(tmp_path, "llama4", 24, {"interleave_moe_layer_step": 1})
    assert run(path).splitlines() == [
        "llama4-24.gguf: llama4, 24 layers",
        "Parts compared with the uncut model: equal to the bit",
        "Cuts at: 4, 8 … 20",
        "Not at:  1–3, 5–7, 9–11, 13–15, 17–19, 21–23 (layers come in groups of 4 that are told by their number)",
    ]
    lines = run(file_of(tmp_path, "qwen3next", 8)).splitlines()
    assert lines[2:] == [
        "Cuts at: 4–6",
        "Not at:  1–3 (a part needs a layer with attention)",
        "Not at:  7 (a part needs a recurrent layer)",
    ]


def test_a_model_that_runs_whole(tmp_path: Path) -> None:
    path = file_of(tmp_path, "rwkv7", 8)
    lines = run(path, "--nodes", "1").splitlines()
    assert lines[1].startswith("No cut: llama.cpp runs rwkv only whole: its graph normalises")
    assert lines[-1].startswith("0:8 ")
    assert "Cuts at" not in "\n".join(lines)
    with pytest.raises(ShardlineError, match="only whole") as caught:
        run(path, "--nodes", "2")
    assert caught.value.code == "architecture_unsupported"


def test_warnings_are_shown(tmp_path: Path) -> None:
    assert "Warning: a cut changes the last bits" in run(file_of(tmp_path, "gemma", 4))
    assert "equal but for float rounding" in run(file_of(tmp_path, "gemma", 4))


def test_json_has_all_of_it(tmp_path: Path) -> None:
    answer = json.loads(run(file_of(tmp_path, "smollm3", 8), "--nodes", "2", "--json"))
    assert answer == {
        "architecture": "smollm3",
        "engine": "llama",
        "layers": 8,
        "proof": "exact",
        "reason": None,
        "page": None,
        "warnings": [],
        "positions": [4],
        "illegal": [
            {"from": 1, "to": 4, "reason": "layers come in groups of 4 that are told by their number"},
            {"from": 5, "to": 8, "reason": "layers come in groups of 4 that are told by their number"},
        ],
        "seams": [{"tensors": [["hidden", "F32", [32]]], "row_bytes": 132, "positions": [4]}],
        "parts": [
            {"first": 0, "last": 4, "weight_bytes": 12416, "kv_bytes_per_1000_tokens": 256000},
            {"first": 4, "last": 8, "weight_bytes": 12544, "kv_bytes_per_1000_tokens": 256000},
        ],
    }
    assert json.loads(run(file_of(tmp_path, "rwkv7", 4), "--json"))["proof"] == "refused"


def test_too_many_nodes(tmp_path: Path) -> None:
    with pytest.raises(ShardlineError, match="cannot be cut into 3 parts: 2 is the most") as caught:
        run(file_of(tmp_path, "smollm3", 8), "--nodes", "3")
    assert caught.value.advice == "Give at most 2 Nodes."


def test_a_model_with_its_own_page_says_what_crosses() -> None:
    models = Path(__file__).parents[2] / "docs" / "audits" / "models"
    lines = run(str(models / "glm-5.2.json")).splitlines()
    assert lines[2] == "Cuts at: 1–77"
    assert lines[3].startswith("Crosses: hidden BF16 [6144], selection I32 [2048], and the token id: 20,484 bytes")
    assert lines[4].startswith("Crosses: hidden BF16 [6144], and the token id: 12,292 bytes a token (at 1–2, 6, 10,")
    assert lines[-1] == "What is known of this model: docs/audits/glm-5.2.md"
    lines = run(str(models / "glm-5.2.json"), "--engine", "llama").splitlines()
    assert lines[2].startswith("Cuts at: 1–2, 6, 10, 14")
    assert lines[3].endswith("(the layer behind it uses the indexer of a layer before it)")


def test_what_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ShardlineError, match="there is no model in the folder") as caught:
        run(str(tmp_path))
    assert caught.value.code == "model_file_invalid"
    page = tmp_path / "page.gguf"
    page.write_text("<!DOCTYPE html><html>")
    with pytest.raises(ShardlineError, match=r"page\.gguf: not a GGUF model"):
        run(str(page))
    assert CliRunner().invoke(cli, ["cuts", str(tmp_path / "absent.gguf")]).exit_code == 2
    assert CliRunner().invoke(cli, ["cuts", str(page), "--nodes", "0"]).exit_code == 2


@pytest.mark.smollm2
def test_the_demo_model() -> None:
    from shardline.cli.demo_model import demo_model

    parts = json.loads(run(str(demo_model()), "--nodes", "3", "--json"))["parts"]
    assert parts[0]["first"] == 0
    assert parts[-1]["last"] == 30
    assert sum(part["kv_bytes_per_1000_tokens"] for part in parts) == 30 * 3 * 2 * 64 * 2 * 1000


@pytest.mark.parametrize(
    ("positions", "shown"),
    [
        ([], ""),
        ([3], "3"),
        ([1, 2, 3], "1–3"),
        ([1, 3], "1, 3"),
        ([2, 4, 6, 8], "2, 4, 6, 8"),
        ([2, 4, 6, 8, 10], "2, 4 … 10"),
        ([1, 2, 4, 5, 9], "1–2, 4–5, 9"),
    ],
)
def test_ranges(positions: list[int], shown: str) -> None:
    assert ranges(positions) == shown
