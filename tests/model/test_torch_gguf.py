"""GGUF files for the PyTorch engine: the model that was written is the model that computes, or a fault is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers

from shardline.errors import ShardlineError
from shardline.model.backend import ShardSpec
from shardline.model.torch_backend import load
from tests.support.gguf_writer import Tensor, Typed, gguf_bytes
from tests.support.torch_models import CONTEXT, LAYERS, SIZES, VOCAB, Route, make, reference_greedy, reference_logits

pytestmark = pytest.mark.torch
PROMPT = [5, 7, 11, 13, 17, 19, 23, 29]

KINDS: dict[str, tuple[str, Any]] = {
    "llama": ("llama", lambda: transformers.LlamaConfig(**SIZES)),
    "qwen2": ("qwen2", lambda: transformers.Qwen2Config(**SIZES, tie_word_embeddings=True)),
    "qwen3": ("qwen3", lambda: transformers.Qwen3Config(**SIZES, head_dim=16)),
    "qwen3moe": (
        "qwen3moe",
        lambda: transformers.Qwen3MoeConfig(
            **SIZES, head_dim=16, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=24, norm_topk_prob=True
        ),
    ),
    "phi3": ("phi3", lambda: transformers.Phi3Config(**SIZES, sliding_window=16)),
    "gemma3": ("gemma3", lambda: transformers.Gemma3TextConfig(**SIZES, head_dim=16, sliding_window=8)),
}


def keys_of(arch: str, config: Any) -> dict[str, Any]:
    """Metadata as llama.cpp's converter writes them."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters
    keys = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": float(rope.get("full_attention", rope)["rope_theta"]),
        "vocab_size": config.vocab_size,
    }
    if arch in ("llama", "phi3"):
        keys["rope.dimension_count"] = head_dim
    if arch == "phi3":
        keys |= {"attention.sliding_window": 16, "rope.scaling.original_context_length": CONTEXT}
    if arch not in ("llama", "qwen2", "phi3"):
        keys |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    if arch == "qwen3moe":
        keys |= {"expert_count": 6, "expert_used_count": 2, "expert_feed_forward_length": 24}
    if arch == "gemma3":
        keys["attention.sliding_window"] = config.sliding_window
    return {"general.architecture": arch, "general.name": "Tiny", **{f"{arch}.{k}": v for k, v in keys.items()}}


def tensors_of(arch: str, model: Any) -> dict[str, torch.Tensor]:
    """Tensors as llama.cpp's converter writes them: its names, its order of rotated rows, its norms around one."""
    names = gguf.get_tensor_name_map(next(a for a, n in gguf.MODEL_ARCH_NAMES.items() if n == arch), LAYERS)
    result = {}
    for name, tensor in model.state_dict().items():
        if model.config.tie_word_embeddings and name == "lm_head.weight":
            continue
        if name.endswith("experts.gate_up_proj"):
            layer = name.split(".")[2]
            gate, up = tensor.chunk(2, dim=1)
            result |= {f"blk.{layer}.ffn_gate_exps.weight": gate, f"blk.{layer}.ffn_up_exps.weight": up}
        elif name.endswith("experts.down_proj"):
            result[f"blk.{name.split('.')[2]}.ffn_down_exps.weight"] = tensor
        else:
            stem, _, suffix = name.rpartition(".")
            found = f"{names.get_name(stem)}.{suffix}"
            if arch == "llama" and (".attn_q." in found or ".attn_k." in found):
                heads = model.config.num_attention_heads if ".attn_q." in found else model.config.num_key_value_heads
                rows = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
                tensor = rows.swapaxes(1, 2).reshape(tensor.shape)
            result[found] = tensor + 1 if arch == "gemma3" and found.endswith("norm.weight") else tensor
    return result


def write(path: Path, keys: dict[str, Any], tensors: dict[str, torch.Tensor], type_id: int = 0) -> Path:
    rows = []
    for name, tensor in tensors.items():
        array = np.ascontiguousarray(tensor.detach().numpy())
        quantised = type_id != 0 and array.ndim > 1
        data = gguf.quantize(array, gguf.GGMLQuantizationType(type_id)).tobytes() if quantised else array.tobytes()
        rows.append(Tensor(name, array.shape[::-1], type_id if quantised else 0, data))
    path.write_bytes(gguf_bytes(keys, rows))
    return path


@pytest.fixture(params=list(KINDS))
def written(request, tmp_path):
    arch, config = KINDS[request.param]
    model = make(config())
    keys, tensors = keys_of(arch, model.config), tensors_of(arch, model)
    return model, write(tmp_path / "tiny.gguf", keys, tensors), keys, tensors


def refused(path, first=0, last=LAYERS):
    with pytest.raises(ShardlineError) as caught:
        load(ShardSpec(str(path), first, last, threads=1))
    return caught.value


def test_what_was_written_computes(written):
    """Gemma's norms lose a bit on their way around one; everything else is exact."""
    model, path, keys, _ = written
    expected = reference_logits(model, PROMPT)
    for cuts in ((), (1, 3)):
        (logits,) = Route(path, cuts).run([PROMPT])
        if keys["general.architecture"] == "gemma3":
            np.testing.assert_allclose(logits, expected, atol=1e-4)
        else:
            assert np.array_equal(logits, expected)
    assert Route(path, (2,)).greedy(PROMPT, 8) == reference_greedy(model, PROMPT, 8)


def test_what_is_told_about_it(written):
    model, path, _, _ = written
    (shard,) = Route(path).shards
    told = shard.describe()
    assert (told.model_name, told.vocab_size, told.context_length) == ("Tiny", VOCAB, CONTEXT)
    assert (told.engine.dtype, told.engine.quantisation) == ("float32", "F32")
    assert told.text_digest is None  # the file has no tokenizer
    matrices = {id(t): t.nbytes for t in model.state_dict(keep_vars=True).values()}
    assert told.weight_bytes == sum(matrices.values())


def test_tensors_of_other_layers_are_not_read(written):
    _, path, keys, tensors = written
    expected = Route(path, (1, 3)).shards[1]
    damaged = {
        name: t if name.startswith(("blk.1.", "blk.2.")) else torch.full_like(t, float("nan"))
        for name, t in tensors.items()
    }
    other = load(ShardSpec(str(write(path.with_name("nan.gguf"), keys, damaged)), 1, 3, threads=1))
    absent = {name: t for name, t in tensors.items() if name.startswith(("blk.1.", "blk.2."))}
    if "output.weight" in tensors:  # what says whether the output matrix is the embedding
        absent["output.weight"] = tensors["output.weight"]
    few = load(ShardSpec(str(write(path.with_name("few.gguf"), keys, absent)), 1, 3, threads=1))
    states = [dict(shard._shard._decoder.state_dict()) for shard in (expected, other, few)]
    assert states[0].keys() == states[1].keys() == states[2].keys()
    for name, values in states[0].items():
        assert torch.equal(values, states[1][name]) and torch.equal(values, states[2][name])


@pytest.mark.parametrize("lost", ["ffn_up", "attn_q", "ffn_up_exps", "attn_norm"])
def test_a_missing_tensor_is_named(lost, written):
    _, path, keys, tensors = written
    name = f"blk.2.{lost}.weight"
    if name not in tensors:
        return
    write(path, keys, {n: t for n, t in tensors.items() if n != name})
    error = refused(path, 1, 3)
    assert error.code == "model_file_invalid" and f"blk.2.{lost}" in error.message
    load(ShardSpec(str(path), 3, 4, threads=1))


def test_a_strange_tensor_is_named(written):
    _, path, keys, tensors = written
    write(path, keys, {**tensors, "blk.2.strange.weight": torch.ones(4)})
    error = refused(path, 2, 4)
    assert error.code == "model_file_invalid" and "blk.2.strange.weight" in error.message
    load(ShardSpec(str(path), 0, 2, threads=1))
    write(path, keys, {**tensors, "strange.weight": torch.ones(4)})
    assert "strange.weight" in refused(path, 0, 2).message


def test_a_tensor_of_another_shape_is_named(written):
    _, path, keys, tensors = written
    name = "blk.2.ffn_gate_exps.weight" if "blk.2.ffn_gate_exps.weight" in tensors else "blk.2.attn_output.weight"
    write(path, keys, {**tensors, name: tensors[name][..., :16].contiguous()})
    error = refused(path, 1, 3)
    assert error.code == "model_file_invalid"
    assert "layers.2." in error.message or "blk.2." in error.message


def test_a_key_that_says_more_than_the_engine_knows(written):
    _, path, keys, tensors = written
    arch = keys["general.architecture"]
    for key, value in (("rope.scaling.type", "yarn"), ("attention.new_idea", 1), ("attention.value_length", 99)):
        error = refused(write(path, {**keys, f"{arch}.{key}": value}, tensors))
        assert error.code == "architecture_unsupported"
        assert key in error.message and "safetensors" in error.message
    load(ShardSpec(str(write(path, {**keys, f"{arch}.rope.scaling.type": "none"}, tensors)), 0, 1, threads=1))


def test_a_model_in_two_parts(written):
    _, path, keys, tensors = written
    expected = Route(path, (1, 3)).run([PROMPT])
    names = list(tensors)
    for number, part in enumerate((names[::2], names[1::2])):
        split = {"split.no": Typed("u16", number), "split.count": Typed("u16", 2), "split.tensors.count": len(names)}
        target = path.with_name(f"parts-{number + 1:05d}-of-00002.gguf")
        write(target, {**(keys if number == 0 else {}), **split}, {name: tensors[name] for name in part})
    for number in (1, 2):
        parts = path.with_name(f"parts-{number:05d}-of-00002.gguf")
        assert np.array_equal(Route(parts, (1, 3)).run([PROMPT]), expected)


def test_a_value_for_each_layer(tmp_path):
    model = make(transformers.LlamaConfig(**SIZES))
    keys = {**keys_of("llama", model.config), "llama.attention.head_count_kv": Typed("u32", [2] * LAYERS)}
    error = refused(write(tmp_path / "tiny.gguf", keys, tensors_of("llama", model)))
    assert error.code == "architecture_unsupported" and "attention.head_count_kv" in error.message


@pytest.mark.parametrize("arch", ["deepseek2", "nothing", "mamba"])
def test_architectures_without_a_way(arch, tmp_path):
    model = make(transformers.LlamaConfig(**SIZES))
    keys = {"general.architecture": arch, f"{arch}.block_count": LAYERS}
    error = refused(write(tmp_path / "tiny.gguf", keys, tensors_of("llama", model)))
    assert error.code == "architecture_unsupported" and arch in error.message


@pytest.mark.parametrize("type_id", [2, 3, 6, 7, 8, 30], ids=["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "BF16"])
def test_quantised_blocks(type_id, tmp_path):
    """The model computes with the values that the gguf package makes of the blocks."""
    model = make(transformers.LlamaConfig(**{**SIZES, "intermediate_size": 64}))
    keys, tensors = keys_of("llama", model.config), tensors_of("llama", model)
    kind = gguf.GGMLQuantizationType(type_id)
    exact = {
        name: torch.from_numpy(gguf.dequantize(gguf.quantize(t.numpy(), kind), kind)) if t.dim() > 1 else t
        for name, t in tensors.items()
    }
    one, two = (write(tmp_path / f"{i}.gguf", keys, t, k) for i, (t, k) in enumerate(((tensors, type_id), (exact, 0))))
    assert np.array_equal(Route(one).run([PROMPT]), Route(two).run([PROMPT]))
    assert Route(one).shards[0].describe().engine.quantisation == kind.name
    assert np.array_equal(*(Route(p, dtype="bfloat16").run([PROMPT]) for p in (one, two)))


def test_rotary_factors_of_the_file(tmp_path):
    """Llama 3 files carry the slowed rotation as a tensor instead of keys."""
    rope = {
        "rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    }  # fmt: skip
    model = make(transformers.LlamaConfig(**SIZES, rope_parameters=rope))
    plain = transformers.LlamaConfig(**SIZES)
    base, slowed = (make(c).model.rotary_emb.inv_freq for c in (plain, model.config))
    tensors = {**tensors_of("llama", model), "rope_freqs.weight": base / slowed}
    assert not torch.equal(base, slowed)
    path = write(tmp_path / "tiny.gguf", keys_of("llama", plain), tensors)
    for cuts in ((), (2,)):
        np.testing.assert_allclose(Route(path, cuts).run([PROMPT])[0], reference_logits(model, PROMPT), atol=1e-4)
    tensors["rope_freqs.weight"] = torch.ones(3)
    assert refused(write(path, keys_of("llama", plain), tensors)).code == "architecture_unsupported"
