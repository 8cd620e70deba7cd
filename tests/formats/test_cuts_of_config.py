"""Cuts of models that only a config.json describes, for each engine; and models that no engine runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardline.errors import ShardlineError
from shardline.formats.architectures import of_model_type
from shardline.formats.cuts import Cuts, cuts_for_torch, cuts_of, cuts_of_config
from shardline.formats.gguf import parse_header
from shardline.formats.shape import shape_of_config
from tests.support.gguf_models import metadata
from tests.support.gguf_writer import gguf_bytes

MODELS = Path(__file__).parents[2] / "docs" / "audits" / "models"


def config_of(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((MODELS / f"{name}.json").read_text())
    return found


def llama(config: dict[str, Any]) -> Cuts:
    return cuts_of_config(config, shape_of_config(config))


def torch(config: dict[str, Any]) -> Cuts:
    return cuts_for_torch(of_model_type(config["model_type"]), shape_of_config(config))


def test_glm_is_cut_before_layers_that_select_for_themselves() -> None:
    cuts = llama(config_of("glm-5.2"))
    assert cuts.positions() == (1, 2, *range(6, 78, 4))
    assert cuts.part_reason(39, 78) == "the layer behind it uses the indexer of a layer before it"
    assert torch(config_of("glm-5.2")).positions() == tuple(range(1, 78))
    listed = ["full" if i in (0, 1, 5) else "shared" for i in range(78)]
    assert llama(config_of("glm-5.2") | {"indexer_types": listed}).positions() == (1, 5)


def test_parts_of_a_hybrid_have_layers_of_both_kinds() -> None:
    cuts = llama(config_of("ornith-9b"))
    assert cuts.positions() == tuple(range(4, 31))
    assert cuts.part_reason(4, 7) == "a part needs a layer with attention, and layers 4:7 have none"
    assert cuts.part_reason(4, 8) is None


def test_deepseek_v4_runs_on_llama_only_whole() -> None:
    cuts = llama(config_of("deepseek-v4-flash"))
    assert cuts.positions() == ()
    assert cuts.part_reason(0, 43) is None
    assert cuts.refusal is not None
    assert "docs/audits/deepseek-v4-flash.md" in cuts.refusal.advice


@pytest.mark.parametrize("engine", [llama, torch])
def test_what_no_engine_runs(engine: Any) -> None:
    config = {"model_type": "deepseek_v41", "num_hidden_layers": 40, "hidden_size": 5120}
    with pytest.raises(ShardlineError, match=r"deepseek4\.1 is not supported: no released version") as caught:
        engine(config)
    assert caught.value.code == "architecture_unsupported"
    assert "docs/audits/deepseek-v4-flash.md" in caught.value.advice
    data = gguf_bytes(metadata("deepseek41", 4))
    with pytest.raises(ShardlineError, match="is not supported"):
        cuts_of(parse_header(data, len(data)))


def test_types_without_a_known_file_run_whole() -> None:
    cuts = llama(config_of("ornith-9b") | {"model_type": "mixtral"})
    assert cuts.positions() == ()
    assert cuts.refusal is not None


@pytest.mark.parametrize("name", ["indexer_types", "layer_types"])
@pytest.mark.parametrize("value", [["full"] * 5, "full", [1, 2], [None] * 10_000])
def test_lists_that_cannot_be_true(name: str, value: object) -> None:
    config = config_of("glm-5.2") | {name: value}
    with pytest.raises(ShardlineError, match=name):
        llama(config)
