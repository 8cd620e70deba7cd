"""Cuts past the table: what happens where one of its rules is not kept. Each must be seen to go wrong.

A comparison that finds no difference anywhere proves little; one that finds each of these proves that it looks, and
that the rule is needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tests.support.gguf_writer import Typed
from tests.support.tiny_models import BY_NAME, TinyModel


@dataclass(frozen=True)
class Control:
    """A model, cut at `at` only, with fields of its architecture's `LlamaRules` changed."""

    name: str
    model: TinyModel
    rules: Mapping[str, Any]
    what: str
    """What was left undone, for people."""


def _control(of: str, at: int, rules: Mapping[str, Any], what: str, keys: Mapping[str, Any] | None = None) -> Control:
    model = BY_NAME[of]
    name = f"{of}, {what}"
    cut = replace(model, name=name, keys={**model.keys, **(keys or {})}, at=(at,), cuts=())
    return Control(name, cut, rules, what)


_WINDOWS = {"attention.sliding_window_pattern": Typed("bool", [True, False] * 4)}
_UNALIGNED = {"align": 1, "align_key": None}
_ALL = (
    _control("smollm3", 3, _UNALIGNED, "cut inside a group"),
    _control("llama4", 2, _UNALIGNED, "cut inside a group"),
    _control("afmoe", 3, _UNALIGNED, "cut inside a group"),
    _control("ernie4_5-moe", 3, _UNALIGNED, "cut inside a group"),
    _control("smallthinker", 4, {"counts": ()}, "a part of four layers"),
    _control("glm-dsa", 4, {"indexers": False}, "a part that begins without an indexer"),
    _control("minimax-m3 (one session)", 1, {"sparse_layer": False}, "a part without experts"),
    _control("dots3note", 7, {"unwindowed_layer": False}, "a part with nothing but windows"),
    _control("gpt-oss", 7, {"window": None}, "a part without a window", _WINDOWS),
    _control("gemma3", 7, {"window": None}, "a part without a window", _WINDOWS),
    _control("qwen3next", 1, {"recurrent": None}, "a part without attention",
             {"attention.recurrent_layers": Typed("bool", [True, True, True, False] * 2)}),
    _control("jamba", 1, {"recurrent": None}, "a part without attention"),
    _control("lfm2", 1, {"recurrent": None}, "a part without attention"),
    _control("kimi-linear", 1, {"recurrent": None}, "a part without attention"),
    _control("granitehybrid", 1, {"recurrent": None}, "a part without attention"),
    _control("nemotron_h", 1, {"recurrent": None}, "a part without attention"),
    _control("glm4 (sections)", 3, {"sections": None}, "rows without sections",
             {"rope.dimension_sections": Typed("i32", [0, 0, 0, 0])}),
    _control("glm4moe", 3, {"sections": None}, "rows without sections"),
    _control("granite", 3, {"embedding": None}, "embedding_scale left in a part"),
    _control("granitehybrid", 2, {"embedding": None}, "embedding_scale left in a part"),
    _control("minicpm (scales by default)", 3, {"residual_depth": None}, "residual scale left to the library"),
    _control("gemma", 3, {"embedding": None}, "rows not divided"),
    _control("gemma3", 3, {"embedding": None}, "embedding rows not scaled"),
    _control("gemma3 (62 layers)", 31, {"counts": (), "count_cure": None}, "attention scale not folded in"),
    _control("gemma4", 2, {"rope_freqs_full": False}, "rope_freqs in a part that has nothing but windows"),
    _control("qwen2moe", 3, {"output_required": False}, "no output matrix"),
)  # fmt: skip
CONTROLS = {control.name: control for control in _ALL}
