"""`shardline audit`: the verdict on audited models, on tiny files, and on what is no model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from shardline.cli.main import cli, main
from shardline.errors import ShardlineError
from tests.support.gguf_models import small_model

MODELS = Path(__file__).parents[2] / "docs" / "audits" / "models"
WORKS, LIMITS, BLOCKED = "works", "works with limits", "blocked"


def run(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(cli, ["audit", *arguments], catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result.output


def answer(*arguments: str, code: int = 0) -> dict[str, Any]:
    return dict(json.loads(run(*arguments, "--json", code=code)))


def ways(told: dict[str, Any]) -> dict[str, tuple[str, str]]:
    return {e["engine"]: (e["single"]["verdict"], e["route"]["verdict"]) for e in told["engines"]}


@pytest.mark.parametrize(
    ("name", "verdict", "llama", "torch", "page"),
    [
        ("deepseek-v4-flash", LIMITS, (LIMITS, BLOCKED), (LIMITS, LIMITS), "deepseek-v4-flash"),
        ("glm-5.2", WORKS, (LIMITS, LIMITS), (WORKS, WORKS), "glm-5.2"),
        ("ornith-9b", WORKS, (LIMITS, LIMITS), (WORKS, WORKS), "ornith"),
        ("ornith-35b-a3b", WORKS, (LIMITS, LIMITS), (WORKS, WORKS), "ornith"),
        ("ornith-397b-a17b", WORKS, (LIMITS, LIMITS), (WORKS, WORKS), "ornith"),
    ],
)
def test_audited_models(name: str, verdict: str, llama: tuple[str, str], torch: tuple[str, str], page: str) -> None:
    told = answer(str(MODELS / f"{name}.json"))
    assert told["verdict"] == verdict
    assert ways(told) == {"llama": llama, "torch": torch}
    assert told["page"] == f"docs/audits/{page}.md"
    assert (MODELS.parents[2] / told["page"]).is_file()


def test_it_says_the_same_as_cuts_and_plan() -> None:
    """One description, three commands, one set of numbers."""
    model = str(MODELS / "ornith-35b-a3b.json")
    (torch,) = answer(model, "--engine", "torch")["engines"]
    cuts = json.loads(CliRunner().invoke(cli, ["cuts", model, "--engine", "torch", "--json"]).stdout)
    plan = json.loads(CliRunner().invoke(cli, ["plan", model, "--node", "96GiB", "--json"]).stdout)
    assert (torch["positions"], torch["illegal"]) == (cuts["positions"], cuts["illegal"])
    assert torch["weight_bytes"] == plan["weight_bytes"]
    assert torch["state_bytes"]["8192"] == plan["nodes"][0]["kv_bytes"]
    assert torch["seam_bytes_per_token"] == [cuts["seams"][0]["row_bytes"]]
    assert list(torch["state_bytes"]) == ["8192", "131072"], "its context ends at 262,144"


def test_for_people() -> None:
    lines = run(str(MODELS / "deepseek-v4-flash.json")).splitlines()
    assert lines[0] == "deepseek-v4-flash.json: deepseek_v4, 43 layers: works with limits"
    assert lines[3].split() == ["llama.cpp", "works", "with", "limits", "blocked"]
    assert "llama.cpp, route: llama.cpp runs deepseek4 only whole: its layers exchange more than one row" in "\n".join(
        lines
    )
    assert lines[-2:] == [
        "Going back within a session: never",
        "What is known of it: docs/audits/deepseek-v4-flash.md",
    ]


def test_blocked_on_all_that_were_asked_for_ends_with_1(tmp_path: Path) -> None:
    config = {"model_type": "deepseek_v41", "num_hidden_layers": 4, "hidden_size": 64, "vocab_size": 100}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    told = answer(str(path), code=1)
    assert told["verdict"] == BLOCKED and ways(told) == dict.fromkeys(("llama", "torch"), (BLOCKED, BLOCKED))
    assert told["page"] == "docs/audits/deepseek-v4-flash.md"
    assert "share compressed keys" in told["engines"][0]["single"]["reasons"][0]
    assert told["engines"][0]["weight_bytes"] is None
    assert "blocked" in run(str(path), code=1).splitlines()[0]


def test_tiny_files(tmp_path: Path) -> None:
    def file(architecture: str, layers: int) -> str:
        return str(small_model(tmp_path, architecture, layers).paths[0])

    plain = answer(file("llama", 8))
    assert ways(plain) == {"llama": (WORKS, WORKS), "torch": (WORKS, WORKS)}
    assert plain["engines"][0]["positions"] == [1, 2, 3, 4, 5, 6, 7]
    assert plain["page"] == "docs/architectures.md"
    whole = answer(file("rwkv7", 8))
    assert ways(whole)["llama"] == (WORKS, BLOCKED)
    assert whole["engines"][0]["route"]["reasons"][0].startswith("llama.cpp runs rwkv only whole")
    unknown = answer(file("of-tomorrow", 4))
    assert ways(unknown) == {"llama": (WORKS, BLOCKED), "torch": (LIMITS, LIMITS)}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b'{"model_type": 7}',
        b'{"model_type": "llama"}',
        b'{"model_type": "llama", "num_hidden_layers": 1e99, "hidden_size": 1, "vocab_size": 1}',
        b'{"model_type": "llama", "num_hidden_layers": -1, "hidden_size": 1, "vocab_size": 1}',
        b"[" * 100_000,
    ],
)
def test_what_is_no_model_is_an_error_and_no_verdict(
    tmp_path: Path, content: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("config.json", "model.gguf"):
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(ShardlineError) as refused:
            CliRunner().invoke(cli, ["audit", str(path)], catch_exceptions=False)
        assert refused.value.code == "model_file_invalid" and name in refused.value.message
    with pytest.raises(SystemExit) as ended:
        main(["audit", str(path)])
    assert ended.value.code == 1
    assert "Traceback" not in capsys.readouterr().err


def test_a_header_alone_is_enough(tmp_path: Path) -> None:
    path = small_model(tmp_path, "llama", 8).paths[0]
    beginning = tmp_path / "beginning.gguf"
    raw = path.read_bytes()
    beginning.write_bytes(raw[: len(raw) - 64])
    assert answer(str(beginning))["engines"][0]["single"]["verdict"] == WORKS
