"""Cuts past the table: what happens where a rule is not kept, or a refusal. Each must be seen to go wrong.

A comparison that finds no difference anywhere proves little; one that finds each of these proves that it looks, and
that the rule is needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tests.support.gguf_writer import Typed
from tests.support.tiny_models import BY_NAME, DENSE_LEAD, HEADS, LAYERS, MLA, MOE, WIDE, WINDOWED, TinyModel


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
_RULES = (
    _control("smollm3", 3, _UNALIGNED, "cut inside a group"),
    _control("llama4", 2, _UNALIGNED, "cut inside a group"),
    _control("afmoe", 3, _UNALIGNED, "cut inside a group"),
    _control("ernie4_5-moe", 3, _UNALIGNED, "cut inside a group"),
    _control("smallthinker", 4, {"counts": ()}, "a part of four layers"),
    _control("glm-dsa", 4, {"indexers": False}, "a part that begins without an indexer"),
    _control("minimax-m3", 1, {"sparse_layer": False}, "a part without experts"),
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


def _refused(model: TinyModel, what: str, rules: Mapping[str, Any] | None = None) -> Control:
    name = f"{model.architecture}, {what}"
    return Control(name, replace(model, name=name, cuts=()), rules or {}, what)


def _tiny(architecture: str, at: int, keys: Mapping[str, Any], layers: int = LAYERS) -> TinyModel:
    return TinyModel(architecture, architecture, keys, layers=layers, at=(at,))


_MANY_HEADS = {"attention.head_count_kv": HEADS}
_REFUSALS = (
    _refused(_tiny("minicpm3", 4, _MANY_HEADS | {
        "attention.q_lora_rank": 32, "attention.kv_lora_rank": 32, "attention.key_length": 32,
        "attention.value_length": 16, "rope.dimension_count": 16}), "cut"),
    _refused(_tiny("bloom", 4, _MANY_HEADS), "cut"),
    _refused(_tiny("talkie", 4, _MANY_HEADS | {"logit_scale": 1.0}), "cut", {"output_required": True}),
    _refused(_tiny("muse-glimmer", 4, WINDOWED | {"logit_scale": 1.0}), "cut", {"output_required": True}),
    _refused(_tiny("baichuan", 16, _MANY_HEADS, 32), "cut", {"output_required": True}),
    _refused(_tiny("minimax-01", 4, MOE | {"residual_scale": 3.5, "full_attention_interval": 4}), "cut",
             {"recurrent": "interval"}),
    _refused(_tiny("gemma3n", 10, WINDOWED, 30), "cut"),
    _refused(_tiny("cogvlm", 4, _MANY_HEADS), "cut"),
    _refused(_tiny("hrm_text", 3, _MANY_HEADS | {
        "hrm.layers_per_stack": 1, "hrm.h_cycles": 2, "hrm.l_cycles": 2}, 6), "cut"),
    _refused(_tiny("gemma4", 4, {**BY_NAME["gemma4"].keys, "embedding_length_per_layer_input": 16}),
             "cut, with lookups by token id", {"zero_keys": ()}),
    _refused(_tiny("gemma4", 4, {**BY_NAME["gemma4"].keys, "attention.shared_kv_layers": 2}),
             "cut, with shared keys and values", {"zero_keys": ()}),
    _refused(_tiny("exaone4", 32, WINDOWED, 64), "64 layers, cut", {"counts": ()}),
    _refused(_tiny("gemma2", 20, WIDE | WINDOWED | {"attention.key_length": 32, "attention.value_length": 32}, 46),
             "46 layers, cut", {"counts": ()}),
    _refused(_tiny("nanbeige", 4, {"num_loops": 2}), "layers that run twice, cut", {"zero_keys": ()}),
    _refused(_tiny("deepseek2", 27, DENSE_LEAD | MLA, 30), "a part of 27 layers", {"counts": (), "count_cure": None}),
)  # fmt: skip
CONTROLS = {control.name: control for control in (*_RULES, *_REFUSALS)}
