"""Weights from safetensors folders: only the Shard's tensors are read, each once, and faults are named."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from shardline.errors import ShardlineError
from shardline.model.backend import ShardSpec
from shardline.model.torch_backend import load
from tests.support.torch_models import CONFIGS, LAYERS, Route, entry, result, save

pytestmark = pytest.mark.torch
PROMPT = [5, 7, 11, 13, 17]


def tensors_of(folder):
    return load_file(folder / "model.safetensors")


def write(folder, tensors):
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def refused(folder, first=0, last=LAYERS):
    with pytest.raises(ShardlineError) as caught:
        load(ShardSpec(str(folder), first, last, threads=1))
    assert caught.value.code == "model_file_invalid"
    return caught.value


def middle(folder):
    """Rows behind layers 1 and 2, for rows of a fixed seed."""
    shard = load(ShardSpec(str(folder), 1, 3, threads=1))
    shard.open(0)
    rows = np.random.default_rng(0).standard_normal((5, 32)).astype(np.float32)
    return bytes(result(shard.run([entry(PROMPT, 0, [rows.tobytes()])])).hidden[0])


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("others", ["nan", "absent"])
def test_tensors_of_other_layers_are_not_used(kind, others, tmp_path):
    save(CONFIGS[kind](), tmp_path)
    expected = middle(tmp_path)
    tensors = tensors_of(tmp_path)
    for name in [n for n in tensors if not n.startswith(("model.layers.1.", "model.layers.2."))]:
        if others == "nan":
            tensors[name] = torch.full_like(tensors[name], float("nan"))
        else:
            del tensors[name]
    write(tmp_path, tensors)
    assert middle(tmp_path) == expected
    if others == "absent":
        refused(tmp_path, 0, 2)
    else:
        assert not np.isfinite(Route(tmp_path).run([PROMPT])[0]).any()


def test_a_folder_of_several_files(tmp_path):
    model = save(CONFIGS["qwen3_moe"](), tmp_path / "one")
    model.save_pretrained(tmp_path / "many", max_shard_size="20KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 3
    for one, many in zip(Route(tmp_path / "one", (2,)).shards, Route(tmp_path / "many", (2,)).shards, strict=True):
        assert one.describe().weight_bytes == many.describe().weight_bytes
    assert np.array_equal(*(Route(tmp_path / name, (1, 3)).run([PROMPT])[0] for name in ("one", "many")))


def test_experts_are_stored_one_by_one_and_used_as_one(tmp_path):
    """The checkpoint's form is the one that transformers converts; the test would be empty if it changed."""
    save(CONFIGS["qwen3_moe"](), tmp_path)
    assert "model.layers.2.mlp.experts.5.gate_proj.weight" in tensors_of(tmp_path)


def test_a_missing_tensor_is_named(tmp_path):
    save(CONFIGS["llama"](), tmp_path)
    tensors = tensors_of(tmp_path)
    del tensors["model.layers.2.mlp.up_proj.weight"]
    write(tmp_path, tensors)
    assert "model.layers.2.mlp.up_proj.weight is missing" in refused(tmp_path, 1, 3).message
    load(ShardSpec(str(tmp_path), 0, 2, threads=1))


def test_a_missing_expert_is_named(tmp_path):
    save(CONFIGS["qwen3_moe"](), tmp_path)
    tensors = tensors_of(tmp_path)
    del tensors["model.layers.2.mlp.experts.3.up_proj.weight"]
    write(tmp_path, tensors)
    assert "model.layers.2.mlp.experts.gate_up_proj" in refused(tmp_path).message
    del tensors["model.layers.2.mlp.experts.3.gate_proj.weight"]
    write(tmp_path, tensors)
    assert "model.layers.2.mlp.experts.gate_up_proj" in refused(tmp_path).message


def test_a_strange_tensor_is_named_where_it_concerns_the_shard(tmp_path):
    save(CONFIGS["llama"](), tmp_path)
    tensors = tensors_of(tmp_path)
    write(tmp_path, {**tensors, "model.layers.2.mlp.extra.weight": torch.ones(2)})
    assert "model.layers.2.mlp.extra.weight is not part" in refused(tmp_path, 2, 4).message
    load(ShardSpec(str(tmp_path), 0, 2, threads=1))
    write(tmp_path, {**tensors, "model.layers.9.mlp.extra.weight": torch.ones(2)})
    load(ShardSpec(str(tmp_path), 0, LAYERS, threads=1))
    write(tmp_path, {**tensors, "model.scale.weight": torch.ones(2)})
    assert "model.scale.weight is not part" in refused(tmp_path, 0, 2).message


def test_a_tensor_of_another_shape_is_named(tmp_path):
    save(CONFIGS["llama"](), tmp_path)
    tensors = tensors_of(tmp_path)
    tensors["model.layers.0.self_attn.q_proj.weight"] = torch.ones(16, 32)
    write(tmp_path, tensors)
    message = refused(tmp_path).message
    assert "model.layers.0.self_attn.q_proj.weight" in message and "(16, 32), expected (32, 32)" in message


def test_values_of_another_dtype_are_converted(tmp_path):
    save(CONFIGS["llama"](), tmp_path)
    wide = tensors_of(tmp_path)
    write(tmp_path, {name: tensor.to(torch.bfloat16) for name, tensor in wide.items()})
    narrow = Route(tmp_path, dtype="float32").run([PROMPT])
    write(tmp_path, {name: tensor.to(torch.bfloat16).float() for name, tensor in wide.items()})
    assert np.array_equal(narrow, Route(tmp_path).run([PROMPT]))


def test_the_checkpoint_says_which_dtype_it_runs_in(tmp_path):
    save(CONFIGS["llama"](), tmp_path).to(torch.bfloat16).save_pretrained(tmp_path)
    (shard,) = Route(tmp_path).shards
    assert shard.describe().engine.dtype == "bfloat16"
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "dtype": None}))
    (shard,) = Route(tmp_path).shards
    assert shard.describe().engine.dtype == "bfloat16"


@pytest.mark.parametrize("stored", ["embedding", "output", "both"])
def test_tied_matrices(stored, tmp_path):
    """A tail without the head has the matrix once, the whole model has it once, whichever of its names is stored."""
    save(CONFIGS["qwen2"](), tmp_path)
    expected = Route(tmp_path).run([PROMPT])
    tensors = tensors_of(tmp_path)
    matrix = tensors.pop("model.embed_tokens.weight")
    assert "lm_head.weight" not in tensors
    names = {"embedding": "model.embed_tokens.weight", "output": "lm_head.weight"}
    kept = names.values() if stored == "both" else [names[stored]]
    write(tmp_path, tensors | {name: matrix.clone() for name in kept})
    whole = Route(tmp_path)
    assert np.array_equal(whole.run([PROMPT]), expected)
    split = Route(tmp_path, (2,))
    assert np.array_equal(split.run([PROMPT]), expected)
    sizes = [shard.describe().weight_bytes for shard in split.shards]
    assert sum(sizes) == whole.shards[0].describe().weight_bytes + matrix.nbytes


def test_matrices_that_only_claim_to_be_tied(tmp_path):
    """Where both are stored and differ, transformers takes each as it is."""
    save(CONFIGS["qwen2"](), tmp_path)
    tied = Route(tmp_path).run([PROMPT])
    tensors = tensors_of(tmp_path)
    write(tmp_path, tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] * 2})
    for cuts in ((), (2,)):
        np.testing.assert_array_equal(Route(tmp_path, cuts).run([PROMPT])[0], tied[0] * 2)


def test_progress_counts_to_the_end(tmp_path):
    save(CONFIGS["qwen2"](), tmp_path)
    heard: list[tuple[int, int]] = []
    shard = load(ShardSpec(str(tmp_path), 2, LAYERS, threads=1), progress=lambda *numbers: heard.append(numbers))
    done, total = zip(*heard, strict=True)
    assert sorted(done) == list(done) and len(set(total)) == 1
    assert done[-1] == total[-1] == shard.describe().weight_bytes


MEMORY = """
import resource, sys
from shardline.model.backend import ShardSpec
from shardline.model.torch_backend import load
spec = ShardSpec(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), threads=1, dtype=sys.argv[4])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
shard = load(spec)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, shard.describe().weight_bytes >> 10)
"""


def peak_memory(model: str | Path, first: int, last: int, dtype: str) -> tuple[int, int]:
    """KiB that loading takes at its peak, beyond what the imports took, and KiB of the weights."""
    command = [sys.executable, "-c", MEMORY, str(model), str(first), str(last), dtype]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60, env={"OMP_NUM_THREADS": "1"})
    peak, weights = done.stdout.split()
    return int(peak), int(weights)


def test_memory_while_loading(tmp_path):
    """Bound: 1.3 times the Shard. Of the 300 MB that are allowed beside it, a tenth is granted here."""
    config = CONFIGS["qwen3_moe"]()
    config.hidden_size, config.moe_intermediate_size = 1024, 1024
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model.to_empty(device="cpu").save_pretrained(tmp_path)
    peak, weights = peak_memory(tmp_path, 0, 3, "bfloat16")
    assert weights > 70_000
    assert peak < 1.3 * weights + 30_000
