"""Qwen3.5 (Ornith) from one GGUF file on both engines: PyTorch and llama.cpp compute the same, whole and cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("llama_cpp")

from shardline.errors import ShardlineError
from shardline.formats.gguf_files import read_model
from shardline.model.torch_gguf import config_of
from tests.support.gguf_writer import Typed, gguf_bytes
from tests.support.llama_tiny import TinyRoute
from tests.support.tiny_gguf import tensor_shapes
from tests.support.tiny_models import DELTA, LAYERS, MOE, SECTIONS, VOCABULARY, TinyModel, metadata
from tests.support.torch_models import Route, equal

pytestmark = [pytest.mark.torch, pytest.mark.llama, pytest.mark.timeout(120)]

KEYS: dict[str, Any] = {
    **DELTA,
    **SECTIONS,
    "attention.key_length": 16,
    "attention.value_length": 16,
    "rope.dimension_count": 16,
    "rope.freq_base": 10000.0,
}
EXPERTS = {**MOE, "expert_weights_scale": 1.0, "expert_gating_func": 1}
TOKENS = [int(token) for token in np.random.default_rng(6).integers(3, VOCABULARY, 150)]
CHUNKS = [TOKENS[:60], TOKENS[60:61], TOKENS[61:120], TOKENS[120:], [5]]
CLOSE = 1e-3
"""Of the largest logit: llama.cpp keeps keys and values in half precision, and both round in an order of their own."""


def tiny(architecture: str, **changes: Any) -> TinyModel:
    keys = KEYS | (EXPERTS if architecture.endswith("moe") else {}) | changes
    whole = TinyModel(architecture, architecture, keys)
    # Without what the library would also take, and no converter writes: scales and biases.
    names = {name.split(".", 2)[2] for name in tensor_shapes(gguf_bytes(metadata(whole))) if name.startswith("blk.")}
    left_out = {name for name in names if name.endswith(("scale", ".bias")) and name != "ssm_dt.bias"}
    return TinyModel(architecture, architecture, keys, without=tuple(sorted(left_out)))


@pytest.fixture(scope="module", params=["qwen35", "qwen35moe"])
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """The file, and what llama.cpp computes from it."""
    torch.set_num_threads(1)
    route = TinyRoute(tiny(request.param), tmp_path_factory.mktemp(request.param))
    route.open(0)
    position, logits = 0, []
    for chunk in CHUNKS:
        logits.append(route.run([(0, position, chunk)])[0].copy())
        position += len(chunk)
    route.close()
    return route.path, logits


@pytest.mark.parametrize("cuts", [(), (4,), (3,), (2, 5)], ids=str)
def test_both_engines_compute_the_same_from_one_file(both: tuple[Path, list[Any]], cuts: tuple[int, ...]) -> None:
    path, llama = both
    for one, other in zip(Route(path, cuts, layers=LAYERS).run(CHUNKS), llama, strict=True):
        assert np.abs(one - other).max() <= CLOSE * np.abs(other).max()
        assert one.argmax() == other.argmax()


def test_a_cut_changes_no_bit(both: tuple[Path, list[Any]]) -> None:
    whole = Route(both[0], layers=LAYERS).run(CHUNKS)
    for cuts in ((1,), (4,), (2, 5)):
        split = Route(both[0], cuts, layers=LAYERS).run(CHUNKS)
        assert equal(whole, split)


def written(folder: Path, architecture: str, **changes: Any) -> Path:
    """A header alone, which is all that a configuration is made of."""
    keys = KEYS | (EXPERTS if architecture.endswith("moe") else {}) | changes
    model = TinyModel(architecture, architecture, {k: v for k, v in keys.items() if v is not None})
    path = folder / "model.gguf"
    path.write_bytes(gguf_bytes(metadata(model)))
    return path


@pytest.mark.parametrize(
    ("architecture", "changes", "why"),
    [
        ("qwen35", {"attention.odd_thing": 1}, "does not know the key attention.odd_thing"),
        ("qwen35", {"attention.value_length": 8}, "does not know the key attention.value_length"),
        ("qwen35", {"rope.freq_base": None}, r"its key .*rope\.freq_base.* is missing"),
        ("qwen35", {"attention.recurrent_layers": Typed("bool", [True] * 8)}, "attention.recurrent_layers"),
        ("qwen35", {"ssm.time_step_rank": 0}, "its metadata are refused"),
        ("qwen35moe", {"expert_weights_scale": 1.5}, "expert_weights_scale"),
        ("qwen35moe", {"expert_gating_func": 2}, "expert_gating_func"),
    ],
)
def test_no_key_is_passed_over(tmp_path: Path, architecture: str, changes: dict[str, Any], why: str) -> None:
    model = read_model(written(tmp_path, architecture, **changes))
    with pytest.raises(ShardlineError, match=why) as caught:
        config_of(model)
    assert caught.value.code == "architecture_unsupported"


def test_keys_that_say_what_is_assumed_pass(tmp_path: Path) -> None:
    flags = Typed("bool", [(i + 1) % 4 != 0 for i in range(LAYERS)])
    config = config_of(read_model(written(tmp_path, "qwen35", **{"attention.recurrent_layers": flags})))
    assert config.model_type == "qwen3_5_text"
    assert config.layer_types.count("full_attention") == 2
