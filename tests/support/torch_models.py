"""Tiny models of many architectures with random weights, saved as transformers saves them, and ways to drive them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedConfig, PreTrainedModel

from shardline.model.backend import BackendEntry, BackendOutput, ShardSpec
from shardline.model.torch_backend import TorchBackend, load

LAYERS = 4
VOCAB = 96
CONTEXT = 64
WINDOW = 8

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MIXED = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]

CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "qwen2": lambda: transformers.Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, head_dim=16),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **SIZES, head_dim=16, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=24, mlp_only_layers=[1]
    ),
    "gemma3_text": lambda: transformers.Gemma3TextConfig(
        **SIZES, head_dim=16, sliding_window=WINDOW, query_pre_attn_scalar=16, layer_types=_MIXED
    ),
    "mistral": lambda: transformers.MistralConfig(**SIZES, sliding_window=WINDOW),
    "phi3": lambda: transformers.Phi3Config(**SIZES),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **SIZES, head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=WINDOW, layer_types=_MIXED
    ),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(
        **{**SIZES, "num_key_value_heads": 4},
        moe_intermediate_size=24,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_shared_experts=1,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
    ),
}


_NO_SIZES: dict[str, Any] = {
    key: value
    for key, value in SIZES.items()
    if key not in ("num_hidden_layers", "num_key_value_heads", "max_position_embeddings", "intermediate_size")
}
_FEW_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
AUDITED_LAYERS = 8
AUDITED: dict[str, Callable[[], PreTrainedConfig]] = {
    # Windows of 8, rows for 4 and for 128 tokens of which 4 are chosen, three layers that route by token id.
    "deepseek_v4": lambda: transformers.DeepseekV4Config(
        **{**_NO_SIZES, **_FEW_EXPERTS},
        num_hidden_layers=AUDITED_LAYERS,
        max_position_embeddings=1024,
        head_dim=16,
        q_lora_rank=16,
        o_groups=2,
        o_lora_rank=8,
        index_n_heads=2,
        index_head_dim=8,
        index_topk=4,
        sliding_window=WINDOW,
        hc_mult=4,
        n_routed_experts=6,
        num_hash_layers=3,
        compress_ratios=[0, 0, 4, 128, 4, 128, 4, 128, 0],
    ),
    # The best 8 tokens, selected in half of the layers.
    "glm_moe_dsa": lambda: transformers.GlmMoeDsaConfig(
        **{**_NO_SIZES, **_FEW_EXPERTS},
        intermediate_size=48,
        num_hidden_layers=AUDITED_LAYERS,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        n_routed_experts=6,
        n_shared_experts=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
        index_topk=8,
        index_head_dim=16,
        index_n_heads=2,
        first_k_dense_replace=2,
        indexer_types=["full", "full", "full", "shared", "shared", "shared", "full", "shared"],
    ),
    "qwen3_5_text": lambda: transformers.Qwen3_5TextConfig(**_mixed(), intermediate_size=48),
    "qwen3_5_moe_text": lambda: transformers.Qwen3_5MoeTextConfig(
        **_mixed(), **_FEW_EXPERTS, num_experts=6, shared_expert_intermediate_size=24
    ),
}
"""Tiny models of the architectures of docs/audits, larger than the others: contexts go beyond what is selected."""


def _mixed() -> dict[str, Any]:
    """Three delta nets and a layer with attention, twice."""
    return {
        **_NO_SIZES,
        "num_hidden_layers": AUDITED_LAYERS,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 1024,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    }


def save_audited(kind: str, folder: Path, **changes: Any) -> PreTrainedModel:
    """A model of AUDITED; experts that are chosen by token id differ from id to id, as they do in a real one."""
    config = AUDITED[kind]()
    for name, value in changes.items():
        setattr(config, name, value)
    model = make(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, table in model.named_buffers():
            if name.endswith("tid2eid"):
                chosen = [torch.randperm(config.n_routed_experts, generator=generator) for _ in range(len(table))]
                table.copy_(torch.stack(chosen)[:, : table.shape[1]])
    model.save_pretrained(folder)
    return model


def make(config: PreTrainedConfig, seed: int = 0) -> PreTrainedModel:
    """A model with random weights, in which no norm, bias or sink is left at its neutral value."""
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point() and tensor.dim() == 1:
                tensor.add_(torch.randn(tensor.shape, generator=generator) * 0.1)
    return model.eval()


def save(config: PreTrainedConfig, folder: Path, seed: int = 0, **options: Any) -> PreTrainedModel:
    model = make(config, seed)
    model.save_pretrained(folder, **options)
    return model


def entry(
    tokens: Sequence[int], position: int, hidden: Any = None, *, slot: int = 0, want: bool = True
) -> BackendEntry:
    packed = np.asarray(tokens, dtype="<i4").tobytes()
    return BackendEntry(slot, position, len(tokens), packed, () if hidden is None else tuple(hidden), want)


def result(outputs: Sequence[BackendOutput | Exception]) -> BackendOutput:
    (output,) = outputs
    if isinstance(output, Exception):
        raise output
    return output


class Route:
    """Shards in a row, in this process, that cover [0, n): what a route of Nodes computes, without Nodes."""

    def __init__(self, model: Path | str, cuts: Sequence[int] = (), *, layers: int = LAYERS, **spec: Any) -> None:
        edges = [0, *cuts, layers]
        spec = {"threads": 1, **spec}
        self.shards: list[TorchBackend] = [
            load(ShardSpec(str(model), first, last, **spec)) for first, last in pairwise(edges)
        ]
        self.position = 0

    def open(self) -> None:
        for shard in self.shards:
            shard.open(0)
        self.position = 0

    def close(self) -> None:
        for shard in self.shards:
            shard.close(0)

    def feed(self, tokens: Sequence[int]) -> Any:
        """Logits behind the last of `tokens`, float32."""
        hidden = None
        for shard in self.shards:
            output = result(shard.run([entry(tokens, self.position, hidden)]))
            hidden = output.hidden
        self.position += len(tokens)
        return output.logits

    def run(self, chunks: Sequence[Sequence[int]]) -> list[Any]:
        """Logits behind each chunk, from an empty cache."""
        self.open()
        try:
            return [self.feed(chunk) for chunk in chunks]
        finally:
            self.close()

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        self.open()
        try:
            tokens = [int(self.feed(prompt).argmax())]
            while len(tokens) < count:
                tokens.append(int(self.feed(tokens[-1:]).argmax()))
            return tokens
        finally:
            self.close()


def reference_logits(model: PreTrainedModel, tokens: Sequence[int]) -> Any:
    """What transformers computes behind the last of `tokens`, in one piece, with the same batch shapes."""
    with torch.inference_mode():
        return model(torch.tensor([list(tokens)]), logits_to_keep=1).logits[0, -1].float().numpy()


def reference_greedy(model: PreTrainedModel, prompt: Sequence[int], count: int) -> list[int]:
    ids = torch.tensor([list(prompt)])
    made = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, eos_token_id=None, do_sample=False
    )
    tokens: list[int] = made[0, len(prompt) :].tolist()
    return tokens


def chunked_logits(model: PreTrainedModel, chunks: Sequence[Sequence[int]]) -> list[Any]:
    """What transformers computes behind each of `chunks`, over its own cache, as `Route.run` does."""
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        return [
            model(torch.tensor([list(chunk)]), cache=cache, logits_to_keep=1).logits[0, -1].numpy() for chunk in chunks
        ]


def equal(one: Sequence[Any], two: Sequence[Any]) -> bool:
    """Whether all arrays are the same, to the bit."""
    return all(np.array_equal(a, b) for a, b in zip(one, two, strict=True))
