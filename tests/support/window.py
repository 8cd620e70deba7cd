"""The patched library of llama.cpp, where it is built; and DeepSeek-V4 as a tiny model with four residual streams."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardline.model.llama_window_library import ADVICE, built_library
from tests.support.gguf_writer import Typed
from tests.support.tiny_models import LAYERS, MOE, TinyModel

STREAMS = 4
RATIOS = [0, 0, 4, 128, 4, 128, 4, 128]


def patched_library() -> Path:
    """Skips, with the reason, where it is not built. LLAMA_WINDOW_LIBRARY names another one."""
    path = Path(os.environ.get("LLAMA_WINDOW_LIBRARY") or built_library())
    if not path.is_file():
        pytest.skip(f"the patched library of llama.cpp is not built. {ADVICE}")
    return path


def deepseek4(layers: int = LAYERS, *, chosen: int = 4) -> TinyModel:
    """Hash-routed layers, dense windows, both kinds of compressed attention, as in DeepSeek-V4-Flash. `chosen`: rows
    that sparse attention takes, each of 4 tokens, so that the 17th token is the first to which not all are shown."""
    keys: dict[str, Any] = {
        **MOE,
        "expert_gating_func": 4,
        "attention.head_count_kv": 1,
        "attention.key_length": 64,
        "attention.value_length": 64,
        "rope.dimension_count": 16,
        "attention.q_lora_rank": 32,
        "attention.output_lora_rank": 16,
        "attention.output_group_count": 2,
        "attention.compress_ratios": Typed("i32", RATIOS[:layers]),
        "attention.compress_rope_freq_base": 160000.0,
        "attention.sliding_window": 8,
        "attention.indexer.head_count": 4,
        "attention.indexer.key_length": 64,
        "attention.indexer.top_k": chosen,
        "hash_layer_count": min(3, layers),
        "hyper_connection.count": STREAMS,
        "hyper_connection.epsilon": 1e-6,
        "hyper_connection.sinkhorn_iterations": 20,
        "swiglu_clamp_exp": [10.0] * layers,
        "swiglu_clamp_shexp": [10.0] * layers,
    }
    return replace(TinyModel("deepseek4", "deepseek4", keys), layers=layers, sequences=2)
