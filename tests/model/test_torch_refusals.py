"""What the PyTorch engine refuses by name, instead of computing something else than the whole model would."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import transformers

from shardline.errors import ShardlineError
from shardline.model.backend import ShardSpec
from shardline.model.torch_backend import load
from tests.support.torch_models import CONFIGS, LAYERS, SIZES, Route, reference_logits, save

pytestmark = pytest.mark.torch
PROMPT = [5, 7, 11, 13, 17]


def refused(folder, first=0, last=LAYERS, **spec):
    with pytest.raises(ShardlineError) as caught:
        load(ShardSpec(str(folder), first, last, threads=1, **spec))
    return caught.value


def test_rows_that_are_scaled_in_front_of_the_first_layer(tmp_path):
    """Every Shard would scale them again. The whole model on one Node is not cut, and runs."""
    model = save(transformers.GraniteConfig(**SIZES, embedding_multiplier=3.0, logits_scaling=2.0), tmp_path)
    for first, last in ((0, 2), (2, LAYERS)):
        error = refused(tmp_path, first, last)
        assert error.code == "architecture_unsupported"
        assert "granite" in error.message and "in front of its first layer" in error.message
    (logits,) = Route(tmp_path).run([PROMPT])
    assert np.array_equal(logits, reference_logits(model, PROMPT))


def test_positions_that_are_added_in_front_of_the_first_layer(tmp_path):
    config = transformers.GPT2Config(
        n_embd=32, n_layer=LAYERS, n_head=4, vocab_size=96, n_positions=64, bos_token_id=1, eos_token_id=2
    )
    model = save(config, tmp_path)
    error = refused(tmp_path, 0, 2)
    assert error.code == "architecture_unsupported" and "wpe" in error.message
    (logits,) = Route(tmp_path).run([PROMPT])
    assert np.array_equal(logits, reference_logits(model, PROMPT))


HYBRID = {
    "qwen3_next": lambda: transformers.Qwen3NextConfig(**SIZES, head_dim=16),
    "mamba": lambda: transformers.MambaConfig(hidden_size=32, num_hidden_layers=LAYERS, vocab_size=96),
    "lfm2": lambda: transformers.Lfm2Config(**SIZES, layer_types=["conv", "full_attention"] * 2),
    "jamba": lambda: transformers.JambaConfig(**SIZES, num_experts=2, attn_layer_period=2, attn_layer_offset=1),
}


@pytest.mark.parametrize("kind", list(HYBRID))
def test_caches_that_are_not_keys_and_values(kind, tmp_path):
    HYBRID[kind]().save_pretrained(tmp_path)
    _write_empty_weights(tmp_path)
    error = refused(tmp_path)
    assert error.code == "architecture_unsupported"
    assert kind.replace("_", "") in error.message
    assert "cache" in error.message or "recurrent" in error.message


def test_layers_that_share_keys_and_values(tmp_path):
    config = transformers.Gemma3nTextConfig(
        **SIZES,
        head_dim=16,
        num_kv_shared_layers=2,
        vocab_size_per_layer_input=96,
        hidden_size_per_layer_input=8,
        layer_types=["sliding_attention", "full_attention"] * 2,
        activation_sparsity_pattern=[0.0] * LAYERS,
    )
    config.save_pretrained(tmp_path)
    _write_empty_weights(tmp_path)
    assert refused(tmp_path, 0, 2).code == "architecture_unsupported"


class OddConfig(transformers.LlamaConfig):
    model_type = "odd_llama"


class OddModel(transformers.LlamaForCausalLM):
    """A llama with a buffer that no file holds and no rule of transformers makes anew."""

    config_class = OddConfig

    def __init__(self, config):
        super().__init__(config)
        self.model.layers[1].register_buffer("table", torch.arange(4.0), persistent=False)


def test_a_buffer_that_nobody_makes(tmp_path):
    transformers.AutoConfig.register("odd_llama", OddConfig, exist_ok=True)
    transformers.AutoModelForCausalLM.register(OddConfig, OddModel, exist_ok=True)
    model = save(OddConfig(**SIZES), tmp_path)
    error = refused(tmp_path, 0, 2)
    assert error.code == "architecture_unsupported" and "model.layers.1.table" in error.message
    assert model.model.layers[1].table.tolist() == [0, 1, 2, 3]
    load(ShardSpec(str(tmp_path), 2, LAYERS, threads=1))  # a Shard without that layer has no use for it


def test_a_quantised_checkpoint(tmp_path):
    save(CONFIGS["llama"](), tmp_path)
    _edit(tmp_path, quantization_config={"quant_method": "fp8"})
    error = refused(tmp_path)
    assert error.code == "architecture_unsupported" and "quantised" in error.message


def test_a_model_type_that_transformers_does_not_have(tmp_path):
    save(CONFIGS["llama"](), tmp_path)
    _edit(tmp_path, model_type="no_such_type")
    error = refused(tmp_path)
    assert error.code == "architecture_unsupported" and "no_such_type" in error.message


def test_code_in_the_folder_is_not_run(tmp_path):
    save(CONFIGS["llama"](), tmp_path)
    (tmp_path / "configuration_evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    _edit(tmp_path, model_type="evil", auto_map={"AutoConfig": "configuration_evil.EvilConfig"})
    assert refused(tmp_path).code == "architecture_unsupported"
    assert not (tmp_path / "ran").exists()


def test_an_encoder(tmp_path):
    transformers.BertConfig(num_hidden_layers=LAYERS, is_decoder=False).save_pretrained(tmp_path)
    _write_empty_weights(tmp_path)
    assert refused(tmp_path).code == "architecture_unsupported"


@pytest.mark.parametrize("first,last", [(2, 2), (3, 1), (-1, 2), (0, LAYERS + 1)])
def test_ranges_outside_of_the_model(first, last, tmp_path):
    save(CONFIGS["llama"](), tmp_path)
    assert refused(tmp_path, first, last).code == "layers_invalid"


@pytest.mark.parametrize(
    "spec", [{"dtype": "int8"}, {"dtype": "Tensor"}, {"context_length": 0}, {"options": {"gpu": 1}}], ids=str
)
def test_settings(spec, tmp_path):
    save(CONFIGS["llama"](), tmp_path)
    assert refused(tmp_path, **spec).code == "setting_invalid"


def _write_empty_weights(folder):
    header = b'{"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))


def _edit(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
