"""Tiny models of many architectures with random weights, saved as transformers saves them, and ways to drive them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

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
