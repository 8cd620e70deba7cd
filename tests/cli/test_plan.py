"""`shardline plan`: every description of a model, what is shown for people and as JSON, and wrong flags."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from shardline.cli.main import cli
from shardline.cli.plan import seconds
from shardline.errors import ShardlineError
from tests.support.gguf_models import metadata, small_model
from tests.support.gguf_writer import Tensor, gguf_bytes

MODELS = Path(__file__).parents[2] / "docs" / "audits" / "models"


def run(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(cli, ["plan", *arguments], catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result.output


def answer(*arguments: str, code: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run(*arguments, "--json", code=code))
    return found


def test_a_model_for_people() -> None:
    lines = run(
        str(MODELS / "glm-5.2.json"), *["--node", "128GB"] * 3, "--engine", "llama", "--size", "239GB"
    ).splitlines()
    assert lines[0] == "glm-5.2.json: glm_moe_dsa, 78 layers, 222.6 GiB of weights (config.json; engine llama)"
    assert lines[2].split() == ["NODE", "LAYERS", "WEIGHTS", "KV", "BUFFERS", "RESERVE", "FREE", "OF"]
    assert [line.split()[:2] for line in lines[3:6]] == [["1", "0:30"], ["2", "30:54"], ["3", "54:78"]]
    assert lines[7] == (
        "Seam at 30: 24,580 bytes a token (hidden F32 [6144], and the token id); 192.0 MiB for a prompt of 8,192 tokens"
    )
    assert lines[9].startswith("Estimate: at most 3.8 tokens/s for one session (reads 12.1 GiB of weights a token, at")
    assert "about half" in lines[9]
    assert lines[10] == "What is known of this model: docs/audits/glm-5.2.md"


def test_one_machine_is_enough() -> None:
    text = run(
        str(MODELS / "ornith-9b.json"), "--node", "16GB", "--node", "64GB", "--size", "9.5GB", "--engine", "llama"
    )
    assert "One machine is enough: Node 2 holds the whole model, and more Nodes would not make it faster." in text
    assert "Seam" not in text


def test_what_does_not_fit() -> None:
    small = (str(MODELS / "ornith-9b.json"), "--node", "4GB", "--size", "9.5GB", "--engine", "llama")
    text = run(*small, code=1)
    assert text.splitlines()[-1].startswith("It does not fit: about 6.")
    found = answer(*small, code=1)
    assert (found["fits"], found["nodes"], found["estimate"]["tokens_per_s_at_most"]) == (False, [], None)
    assert found["lacking_bytes"] > 6e9
    wide = (str(MODELS / "glm-5.2.json"), *["--node", "24GB"] * 40, "--size", "475GB", "--engine", "llama")
    groups = run(*wide, code=1)
    assert "no legal cut fits into the memory of each" in groups


def test_a_whole_gguf_file_and_its_beginning_say_the_same(tmp_path: Path) -> None:
    model = small_model(tmp_path, "llama", 8, extra=[Tensor("blk.3.ffn_gate_exps.weight", (32, 4, 512))])
    whole = model.paths[0]
    beginning = tmp_path / "beginning.gguf"
    beginning.write_bytes(whole.read_bytes()[: model.header.data_offset])
    one, other = (answer(str(path), "--node", "1GB", "--node", "1GB") for path in (whole, beginning))
    assert one.pop("model") == "llama-8.gguf"
    assert other.pop("model") == "beginning.gguf"
    assert one == other
    assert one["weight_bytes"] == sum(info.nbytes for info in model.tensors.values())
    beginning.write_bytes(whole.read_bytes()[: model.header.data_offset // 2])
    with pytest.raises(ShardlineError, match=r"beginning\.gguf: .* end inside the header") as caught:
        run(str(beginning), "--node", "1GB")
    assert caught.value.code == "model_file_invalid"


def test_a_beginning_is_as_hostile_as_a_file(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_bytes(metadata("llama", 2), [Tensor("a.weight", (32,)), Tensor("b.weight", (32,), offset=0)]))
    with pytest.raises(ShardlineError) as caught:
        run(str(path), "--node", "1GB")
    assert caught.value.code == "model_file_invalid"


@pytest.mark.torch
def test_a_folder_with_and_without_weights(tmp_path: Path) -> None:
    from tests.support.torch_models import CONFIGS, save

    with_weights, without = tmp_path / "with", tmp_path / "without"
    with_weights.mkdir()
    without.mkdir()
    save(CONFIGS["qwen3_moe"](), with_weights)
    (without / "config.json").write_bytes((with_weights / "config.json").read_bytes())
    one, other = (answer(str(folder), "--node", "2GB") for folder in (with_weights, without))
    assert (one["source"], other["source"]) == ("safetensors headers", "config.json")
    assert one["weight_bytes"] == other["weight_bytes"]
    assert one["nodes"] == other["nodes"]
    assert answer(str(without), "--node", "2GB", "--dtype", "float16")["weight_bytes"] * 2 == one["weight_bytes"]
    (with_weights / "config.json").unlink()
    with pytest.raises(ShardlineError, match="cannot be read"):
        run(str(with_weights), "--node", "2GB")


def test_a_manifest_and_the_folder_of_an_artifact(tmp_path: Path) -> None:
    from tests.support.artifacts import signed_bundle

    bundle = signed_bundle(small_model(tmp_path, "llama", 8).paths[0], tmp_path / "bundle").folder
    for path in (bundle, bundle / "manifest.json"):
        found = answer(str(path), "--node", "1GB")
        assert (found["source"], found["layers"]) == ("manifest", 8)
        assert found["weight_bytes"] == answer(str(tmp_path / "llama-8.gguf"), "--node", "1GB")["weight_bytes"]


def test_bandwidths_and_times() -> None:
    model = str(MODELS / "ornith-9b.json")
    common = [model, "--node", "8GB", "--node", "8GB", "--size", "9.5GB", "--engine", "llama"]
    fast = answer(*common, "--bandwidth", "100", "--rtt", "0s")
    slow = answer(*common, "--bandwidth", "100", "--bandwidth", "50", "--rtt", "2ms")
    assert fast["assumptions"]["bandwidth_bytes_per_s"] == [1e11, 1e11]
    assert slow["estimate"]["tokens_per_s_at_most"] < fast["estimate"]["tokens_per_s_at_most"]
    reads = [node["read_bytes_per_token"] for node in slow["nodes"]]
    assert slow["estimate"]["step_s"] == pytest.approx(reads[0] / 1e11 + reads[1] / 5e10 + 0.002)
    assert "at 50–100 GB/s" in run(*common, "--bandwidth", "100", "--bandwidth", "50")
    with pytest.raises(ShardlineError, match="2 Nodes and 3 bandwidths"):
        run(*common, *["--bandwidth", "5"] * 3)


@pytest.mark.parametrize(("text", "value"), [("2ms", 0.002), ("500us", 0.0005), ("1s", 1.0), ("0s", 0.0)])
def test_times(text: str, value: float) -> None:
    assert seconds(text) == pytest.approx(value)


@pytest.mark.parametrize("text", ["", "2", "ms", "-1ms", "nanms", "infs", "2 minutes", "61s"])
def test_what_is_no_time(text: str) -> None:
    with pytest.raises(ShardlineError, match="is no time"):
        seconds(text)


def test_what_is_said_beside_the_numbers() -> None:
    found = answer(str(MODELS / "ornith-9b.json"), "--node", "64GB", "--kv-tokens", "1000000", "--engine", "llama")
    assert any("at most 262144 tokens" in warning for warning in found["warnings"])
    whole = run(str(MODELS / "deepseek-v4-flash.json"), "--engine", "llama", "--node", "128GB", "--size", "91.3GB")
    assert "Warning: llama.cpp runs deepseek4 only whole" in whole
    assert "docs/audits/deepseek-v4-flash.md" in whole


def test_a_model_that_no_engine_runs(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "deepseek_v41", "num_hidden_layers": 40, "hidden_size": 5120}))
    with pytest.raises(ShardlineError, match="is not supported") as caught:
        run(str(path), "--node", "64GB")
    assert caught.value.advice == "Choose another model: see docs/audits/deepseek-v4-flash.md."


def test_sizes_are_not_asked_of_what_has_tensors(tmp_path: Path) -> None:
    path = str(small_model(tmp_path).paths[0])
    with pytest.raises(ShardlineError, match="has its tensors with it") as caught:
        run(path, "--node", "1GB", "--size", "1GB")
    assert caught.value.code == "setting_invalid"
    assert CliRunner().invoke(cli, ["plan", path]).exit_code == 2
    assert CliRunner().invoke(cli, ["plan", str(tmp_path / "absent"), "--node", "1GB"]).exit_code == 2
