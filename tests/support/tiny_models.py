"""Metadata of tiny models, one or more for each architecture that llama.cpp runs as a text decoder.

A `TinyModel` is what a converter would have written for a very small checkpoint; its weights are made by
tests/support/tiny_gguf.py. The cuts that a model is tried at stand here and not in the product's table, so that one
checks the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.support.gguf_writer import Typed

LAYERS = 8
WIDTH = 64
HEADS = 4
HEAD = WIDTH // HEADS
WINDOW = 4
Cuts = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class TinyModel:
    """`keys` are without the architecture's prefix; those with a dot in front are taken as they are, without it."""

    name: str
    architecture: str
    keys: Mapping[str, Any] = field(default_factory=dict)
    layers: int = LAYERS
    cuts: Cuts = ((3, 6),)
    """Chains of more than two parts to run, each as the positions between its parts."""
    refused: tuple[int, ...] = ()
    """All positions at which no cut can be. At each other one the model is cut in two, if nothing else is said."""
    at: tuple[int, ...] | None = None
    """The positions at which to cut it in two."""
    tied: bool = False
    """No output matrix of its own."""
    without: tuple[str, ...] = ()
    """Tensors, by the start of the name behind `blk.N.`, that the library would take but this model has not."""
    quantised: bool = False
    """Matrices are Q4_0."""
    sequences: int = 5
    """Room for how many, in the contexts that it runs in."""

    @property
    def chains(self) -> Cuts:
        at = self.at if self.at is not None else (p for p in range(1, self.layers) if p not in self.refused)
        return (*((p,) for p in at), *self.cuts)


def metadata(model: TinyModel) -> dict[str, Any]:
    """All keys of the model's file, ready for `gguf_bytes`."""
    prefix = f"{model.architecture}."
    keys = {
        "general.architecture": model.architecture,
        "general.name": f"tiny {model.name}",
        "general.alignment": 32,
    }
    own = _COMMON | {"block_count": model.layers} | dict(model.keys)
    for key, value in own.items():
        keys[key[1:] if key.startswith(".") else prefix + key] = value
    return keys | _vocabulary()


_COMMON: dict[str, Any] = {
    "context_length": 256,
    "embedding_length": WIDTH,
    "feed_forward_length": 96,
    "attention.head_count": HEADS,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "attention.layer_norm_epsilon": 1e-5,
}


def _vocabulary() -> dict[str, Any]:
    """A SentencePiece vocabulary of 4 special tokens, all bytes, and a few pieces: small, and real to every reader."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["<|endoftext|>", "\u2581", *"abcdefghijklmnopqrstuvwxyz", "\u2581a", "\u2581the"]
    kinds = [2, 3, 3, *[6] * 256, 3, *[1] * (len(pieces) - 260)]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.scores": [-float(index) for index in range(len(pieces))],
        "tokenizer.ggml.token_type": Typed("i32", kinds),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


VOCABULARY = len(_vocabulary()["tokenizer.ggml.tokens"])


def every(period: int, *, true_at_end: bool = True, layers: int = LAYERS) -> Typed:
    """A pattern array: false at the last (or first) layer of each period, true at the others."""
    at = period - 1 if true_at_end else 0
    return Typed("bool", [index % period != at for index in range(layers)])


def alternating(zero: Sequence[int], other: int, layers: int = LAYERS) -> list[int]:
    """A per-layer array with zeros at the layers named."""
    return [0 if index in zero else other for index in range(layers)]


MOE: dict[str, Any] = {
    "expert_count": 4,
    "expert_used_count": 2,
    "expert_feed_forward_length": 32,
    "expert_shared_feed_forward_length": 32,
    "expert_shared_count": 1,
    "expert_gating_func": 2,
    "expert_weights_scale": 1.5,
    "expert_weights_norm": True,
}
DENSE_LEAD = MOE | {"leading_dense_block_count": 2}
WINDOWED: dict[str, Any] = {"attention.sliding_window": WINDOW}
WIDE: dict[str, Any] = {"embedding_length": 96}
"""A width whose square root is not a number that floats hold exactly."""
MLA: dict[str, Any] = {
    "attention.head_count_kv": 1,
    "attention.q_lora_rank": 32,
    "attention.kv_lora_rank": 32,
    "attention.key_length": 48,
    "attention.value_length": 32,
    "attention.key_length_mla": 32,
    "attention.value_length_mla": 16,
    "rope.dimension_count": 16,
}
INDEXER: dict[str, Any] = {
    "attention.indexer.head_count": 4,
    "attention.indexer.key_length": 64,
    "attention.indexer.top_k": 6,
}
MAMBA: dict[str, Any] = {
    "ssm.conv_kernel": 4,
    "ssm.inner_size": 2 * WIDTH,
    "ssm.state_size": 16,
    "ssm.time_step_rank": 4,
    "ssm.group_count": 2,
}
DELTA = MAMBA | {"ssm.state_size": 32, "ssm.inner_size": 128, "full_attention_interval": 4}
PREDICTING: dict[str, Any] = {"block_count": LAYERS + 1, "nextn_predict_layers": 1}
"""One more block, which predicts a second token and takes no part in a route."""
SECTIONS: dict[str, Any] = {"rope.dimension_sections": Typed("i32", [3, 3, 2, 0])}
KDA: dict[str, Any] = {"ssm.conv_kernel": 4, "kda.head_dim": 32, "kda.gate_lower_bound": -5.0, "kda.safe_gate": True}


def _plain(architecture: str, **overrides: Any) -> TinyModel:
    return TinyModel(architecture, architecture, **overrides)


def _keys(architecture: str, keys: Mapping[str, Any], **overrides: Any) -> TinyModel:
    return TinyModel(architecture, architecture, keys, **overrides)


def _variant(of: str, variant: str, keys: Mapping[str, Any], **overrides: Any) -> TinyModel:
    return TinyModel(f"{of} ({variant})", of, keys, **overrides)


ATTENTION: tuple[TinyModel, ...] = (
    _plain("llama"),
    _variant("llama", "tied", {}, tied=True),
    _variant("llama", "experts", MOE),
    _variant("llama", "quantised", {}, quantised=True),
    _keys("deci", {"attention.head_count": [4] * 8, "attention.head_count_kv": [2] * 8,
                   "feed_forward_length": [96] * 8}),
    _keys("falcon", {"attention.head_count_kv": 1}),
    _keys("grok", MOE | {"attention.output_scale": 0.5, "embedding_scale": 8.0}),
    _variant("grok", "scale by default", MOE | {"attention.output_scale": 0.5}),
    _keys("gpt2", {"attention.head_count_kv": 4}),
    _keys("gptneox", {"attention.head_count_kv": 4, "use_parallel_residual": True, "rope.dimension_count": 8}),
    _keys("mpt", {"attention.head_count_kv": 4, "attention.max_alibi_bias": 8.0}),
    _keys("starcoder", {"attention.head_count_kv": 1}),
    _keys("refact", {"attention.head_count_kv": 1}),
    _keys("stablelm", {"rope.dimension_count": 8}),
    _keys("qwen", {"attention.head_count_kv": 4, "feed_forward_length": 192}),
    _plain("qwen2"),
    _keys("qwen2moe", MOE),
    _keys("qwen2vl", SECTIONS),
    _plain("qwen3"),
    _keys("qwen3moe", MOE),
    _keys("qwen3vl", SECTIONS),
    _variant("qwen3vl", "deepstack", SECTIONS | {"n_deepstack_layers": 3}),
    _keys("qwen3vlmoe", SECTIONS | MOE),
    _keys("phi2", {"attention.head_count_kv": 4, "rope.dimension_count": 8}),
    _plain("phi3"),
    _variant("phi3", "window", WINDOWED),
    _keys("phimoe", MOE),
    _keys("plamo", {"attention.head_count_kv": 2}),
    _keys("codeshell", {}),
    _plain("orion"),
    _plain("internlm2"),
    _keys("minicpm", {"embedding_scale": 12.0, "residual_scale": 0.5, "logit_scale": 0.25}),
    _variant("minicpm", "scales by default", {}),
    _keys("gemma", WIDE),
    _keys("gemma2", WIDE | WINDOWED | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}, refused=(7,)),
    _keys("gemma3", WIDE | WINDOWED),
    _variant("gemma3", "62 layers", WIDE | WINDOWED | {"attention.key_length": 32, "attention.value_length": 32},
             layers=62, cuts=((20, 40),), at=(7, 31)),
    _plain("starcoder2"),
    _plain("xverse"),
    _keys("command-r", {"logit_scale": 0.25}),
    _keys("cohere2", WINDOWED | {"logit_scale": 0.25}, refused=(7,)),
    _keys("cohere2moe", WINDOWED | DENSE_LEAD | {"logit_scale": 0.25}, refused=(1,)),
    _keys("dbrx", MOE | {"attention.clamp_kqv": 8.0}),
    _keys("olmo", {"attention.clamp_kqv": 8.0}),
    _plain("olmo2"),
    _variant("olmo2", "window", WINDOWED, refused=(7,)),
    _keys("olmoe", MOE | {"attention.head_count_kv": 4}),
    _keys("openelm", {"attention.head_count": [2, 4, 4, 4, 6, 6, 8, 8],
                      "attention.head_count_kv": [1, 1, 1, 2, 2, 2, 2, 2],
                      "feed_forward_length": [32, 64] * 4,
                      "attention.key_length": 16, "attention.value_length": 16}),
    _keys("arctic", MOE),
    _keys("deepseek", DENSE_LEAD | {"attention.head_count_kv": 4}),
    _keys("deepseek2", DENSE_LEAD | MLA),
    _variant("deepseek2", "27 layers", {k: v for k, v in (DENSE_LEAD | MLA).items()
                                        if k not in ("attention.q_lora_rank", "expert_gating_func")},
             layers=27, at=(9, 20), cuts=((9, 18),)),
    _variant("deepseek2", "predicting", DENSE_LEAD | MLA | PREDICTING),
    _keys("deepseek2-ocr", DENSE_LEAD | {"attention.head_count_kv": 4}),
    _keys("deepseek32", DENSE_LEAD | MLA | INDEXER),
    _keys("chatglm", {}),
    _variant("glm4", "sections", SECTIONS),
    _variant("glm4moe", "predicting", DENSE_LEAD | PREDICTING | {"rope.dimension_count": 8}),
    _keys("glm4moe", DENSE_LEAD | {"rope.dimension_count": 8}),
    _keys("glm-dsa", DENSE_LEAD | MLA | INDEXER | {"attention.indexer.types": [1, 1, 1, 0, 0, 0, 1, 0]},
          cuts=((1, 2, 6),), refused=(3, 4, 5, 7)),
    _plain("bitnet"),
    _keys("jais", {"attention.head_count_kv": 4, "attention.max_alibi_bias": 8.0}),
    _plain("jais2"),
    _keys("nemotron", {"rope.dimension_count": 8}),
    _plain("exaone"),
    _keys("exaone4", WINDOWED),
    _keys("exaone-moe", WINDOWED | DENSE_LEAD, refused=(7,)),
    _keys("granite", {"embedding_scale": 12.0, "residual_scale": 0.22, "logit_scale": 8.0, "attention.scale": 0.1}),
    _keys("granitemoe", MOE | {"embedding_scale": 12.0, "residual_scale": 0.22, "logit_scale": 6.0,
                               "attention.scale": 0.1}),
    _keys("granite_swa", WINDOWED | {"embedding_scale": 12.0, "residual_scale": 0.22, "logit_scale": 6.0,
                                     "attention.scale": 0.1, "attention.sliding_window_pattern": every(4)},
          refused=(7,)),
    _keys("bailingmoe", MOE | {"rope.dimension_count": 16}),
    _keys("bailingmoe2", DENSE_LEAD),
    _keys("dots1", DENSE_LEAD | {"attention.head_count_kv": 4}),
    _plain("arcee"),
    _keys("ernie4_5", {}),
    _keys("hunyuan-moe", MOE),
    _keys("hunyuan-dense", {}),
    _keys("hunyuan_vl", SECTIONS),
    _keys("hy_v3", DENSE_LEAD),
    _keys("gpt-oss", MOE | WINDOWED, refused=(7,)),
    _keys("seed_oss", {}),
    _keys("grovemoe", MOE | {"expert_chunk_feed_forward_length": 16, "expert_group_scale": 0.05,
                             "experts_per_group": 2}),
    _keys("apertus", {".xielu.alpha_n": [0.8] * 4 + [0.5] * 4, ".xielu.alpha_p": [0.7] * 8, ".xielu.beta": [0.5] * 8,
                      ".xielu.eps": [-1e-6] * 8}),
    _keys("minimax-m2", MOE),
    _keys("minimax-m3", DENSE_LEAD | {"attention.indexer.head_count": 2, "attention.indexer.key_length": 16,
                                      "attention.indexer.top_k": 2, "attention.indexer.block_size": 4,
                                      "attention.indexer.local_blocks": 1}, refused=(1, 2),
          sequences=1),
    _plain("pangu-embedded"),
    _keys("mistral3", {"attention.temperature_scale": 0.1, "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0,
                       "rope.scaling.original_context_length": 8, "rope.scaling.yarn_log_multiplier": 1.0}),
    _keys("mistral4", DENSE_LEAD | MLA),
    _keys("paddleocr", SECTIONS | MOE | {"interleave_moe_layer_step": 1}),
    _keys("mimo2", WINDOWED | MOE | {"attention.sliding_window_pattern": [1, 0] * 4}, refused=(7,)),
    _keys("step35", WINDOWED | DENSE_LEAD | {"attention.sliding_window_pattern": [1, 0] * 4,
                                             "attention.head_count": [4] * 8, "attention.head_count_kv": [2] * 8,
                                             "swiglu_clamp_exp": [0.0] * 6 + [7.0] * 2,
                                             "swiglu_clamp_shexp": [0.0] * 6 + [9.0] * 2}, refused=(7,)),
    _plain("maincoder"),
    _keys("mellum", MOE | WINDOWED, refused=(7,)),
    _keys("laguna", DENSE_LEAD | WINDOWED, refused=(1,)),
    _keys("spark2_5", WINDOWED | {"attention.sliding_window_pattern": [1, 0] * 4}, refused=(7,)),
    _keys("plamo3", WINDOWED | {"attention.key_length": 16, "attention.value_length": 16}, refused=(7,)),
    _keys("nanbeige", {}),
    _keys("maple", WINDOWED | MOE | {"attention.sliding_window_pattern": [1, 0] * 4, "swiglu_clamp_exp": [7.0] * 8},
          refused=(7,)),
    _keys("dots3note", DENSE_LEAD | MLA | INDEXER | WINDOWED | {
        "attention.kv_lora_rank_swa": 32, "attention.key_length_swa": 48, "attention.value_length_swa": 32,
        "attention.key_length_mla_swa": 32, "attention.value_length_mla_swa": 16, "rope.freq_base_swa": 10000.0,
        "attention.sliding_window_pattern": [0, 1] * 4, "attention.indexer.types": [1, 0] * 4},
          cuts=((3, 6),), refused=(1, 7)),
)  # fmt: skip

_NOT_4_8 = (1, 2, 3, 5, 6, 7, 9, 10, 11)
PERIODIC: tuple[TinyModel, ...] = (
    _keys("llama4", MOE | {"interleave_moe_layer_step": 2}, cuts=((4, 8),), refused=_NOT_4_8, layers=12),
    _plain("smollm3", cuts=((4, 8),), refused=_NOT_4_8, layers=12),
    _keys("afmoe", WIDE | DENSE_LEAD | WINDOWED, cuts=((4, 8),), refused=_NOT_4_8, layers=12),
    _keys("smallthinker", MOE | WINDOWED, cuts=(), refused=tuple(p for p in range(1, 16) if p != 8), layers=16),
    _variant("smallthinker", "no windows", MOE, at=(1, 2, 3, 5, 6, 7)),
    _keys("ernie4_5-moe", MOE | {"interleave_moe_layer_step": 2, "leading_dense_block_count": 2}, cuts=((2, 6),),
          refused=(1, 3, 5, 7)),
    _keys("gemma4", WINDOWED | {
        "attention.sliding_window_pattern": every(3), "attention.shared_kv_layers": 0,
        "embedding_length_per_layer_input": 0, "attention.key_length": 32, "attention.value_length": 32,
        "attention.key_length_swa": 16, "attention.value_length_swa": 16, "rope.dimension_count_swa": 16,
        "rope.freq_base_swa": 10000.0, "attention.head_count_kv": [2, 2, 1, 2, 2, 1, 2, 2]},
          cuts=((3, 6),), refused=(1, 7)),
)  # fmt: skip

_LINEAR = (0, 1, 2, 4, 5, 6)
RECURRENT: tuple[TinyModel, ...] = (
    _keys("mamba", MAMBA),
    _keys("mamba2", MAMBA),
    _keys("falcon-h1", MAMBA | {"attention.key_length": 16, "attention.value_length": 16}),
    _keys("jamba", MAMBA | MOE | {"attention.head_count_kv": alternating((0, 2, 3, 5, 6), 2)}, cuts=((2, 5),),
          refused=(1, 7)),
    _keys("lfm2", {"shortconv.l_cache": 3, "attention.head_count_kv": alternating((0, 2, 3, 5, 6), 2)},
          cuts=((2, 5),), refused=(1, 7)),
    _keys("lfm2moe", DENSE_LEAD | {"shortconv.l_cache": 3,
                                   "attention.head_count_kv": alternating((0, 2, 3, 5, 6), 2)},
          cuts=((2, 5),), refused=(1, 7)),
    _keys("granitehybrid", MAMBA | {"attention.head_count_kv": alternating((0, 2, 3, 5, 6), 2), "embedding_scale": 12.0,
                                    "residual_scale": 0.22, "logit_scale": 6.0, "attention.scale": 0.1},
          cuts=((2, 5),), refused=(1, 7)),
    _keys("nemotron_h", MAMBA | {"attention.head_count_kv": [0, 2, 0, 0, 2, 0, 0, 2],
                                 "feed_forward_length": [0, 0, 96, 0, 0, 96, 0, 0]},
          cuts=((3, 6), (2, 5)), refused=(1, 7)),
    _keys("nemotron_h_moe", MAMBA | MOE | {"attention.head_count_kv": [0, 2, 0, 0, 2, 0, 0, 2],
                                           "feed_forward_length": [0, 0, 96, 0, 0, 96, 0, 0]},
          cuts=((3, 6), (2, 5)), refused=(1, 7)),
    _keys("plamo2", MAMBA | {"attention.head_count_kv": alternating((0, 2, 4, 6), 2), "ssm.group_count": 0,
                             "attention.key_length": 16, "attention.value_length": 16},
          cuts=((2, 6), (3, 5)), refused=(1, 7), sequences=1),
    _keys("qwen3next", DELTA | MOE, cuts=(), refused=(1, 2, 3, 7)),
    _variant("qwen3next", "three parts", DELTA | MOE, cuts=((4, 8), (5, 9)), refused=(1, 2, 3, 11), layers=12),
    _variant("qwen3next", "predicting", DELTA | MOE | PREDICTING | {"block_count": 12}, layers=11, cuts=(),
             refused=(1, 2, 3, 8, 9, 10)),
    _keys("qwen35", DELTA | SECTIONS, cuts=(), refused=(1, 2, 3, 7)),
    _keys("qwen35moe", DELTA | SECTIONS | MOE, cuts=(), refused=(1, 2, 3, 7)),
    _keys("kimi-linear", DENSE_LEAD | MLA | KDA | {"attention.head_count_kv": alternating((0, 2, 3, 5, 6), 1)},
          cuts=((2, 5),), refused=(1, 7), without=("attn_q_a", "attn_q_b")),
    _keys("bailingmoe3", DENSE_LEAD | MLA | KDA | {"attention.head_count_kv": alternating((0, 2, 3, 5, 6), 1),
                                                   "rope.dimension_sections": Typed("i32", [3, 3, 2, 0])},
          cuts=((2, 5),), refused=(1, 7)),
)  # fmt: skip

RUNNABLE = (*ATTENTION, *PERIODIC, *RECURRENT)
EQUAL_ROWS = frozenset({"minimax-01", *(model.architecture for model in RECURRENT)})
"""Architectures whose rows of several sequences go into one computation only if they are as many of each."""
BY_NAME = {model.name: model for model in RUNNABLE}
REFUSED = (
    "gemma3n", "deepseek4", "rwkv6", "rwkv7", "rwkv6qwen2", "arwkv7", "minimax-01", "kimi-k3", "glm5-next",
    "qwen4exp", "hy_v4", "hrm_text", "cogvlm", "graniteswitch", "talkie", "muse-glimmer", "bloom", "baichuan",
    "minicpm3",
)  # fmt: skip
"""Architectures whose layers cannot be cut apart with the library as it is: refused by name."""
