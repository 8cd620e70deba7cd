"""Splits of the PyTorch engine: a Shard of every layer range computes what the whole model computes, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from tests.support.torch_models import (
    CONFIGS,
    LAYERS,
    SIZES,
    VOCAB,
    Route,
    chunked_logits,
    entry,
    equal,
    reference_greedy,
    reference_logits,
    result,
    save,
)

pytestmark = pytest.mark.torch

PROMPT = [int(token) for token in np.random.default_rng(1).integers(3, VOCAB, 20)]
CHUNKS = [PROMPT[:7], PROMPT[7:19], PROMPT[19:], [5], [60], [61]]
"""Prefill in chunks that cross the sliding windows, then decode."""


@pytest.fixture(scope="module", params=list(CONFIGS))
def saved(request, tmp_path_factory):
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp(request.param)
    return save(CONFIGS[request.param](), folder), folder


def test_one_shard_gives_the_logits_of_the_model(saved):
    model, folder = saved
    (logits,) = Route(folder).run([PROMPT])
    assert np.array_equal(logits, reference_logits(model, PROMPT))


def test_one_shard_generates_what_transformers_generates(saved):
    model, folder = saved
    assert Route(folder).greedy(PROMPT, 16) == reference_greedy(model, PROMPT, 16)


def test_chunks_give_the_logits_of_the_model_with_its_own_cache(saved):
    model, folder = saved
    assert equal(Route(folder).run(CHUNKS), chunked_logits(model, CHUNKS))


def test_chunks_agree_with_one_piece(saved):
    model, folder = saved
    tokens: list[int] = []
    for chunk, logits in zip(CHUNKS, Route(folder).run(CHUNKS), strict=True):
        tokens += chunk
        np.testing.assert_allclose(logits, reference_logits(model, tokens), atol=2e-4)


@pytest.mark.parametrize("cuts", [(1,), (2,), (3,), (1, 3), (1, 2, 3)], ids=str)
def test_a_cut_changes_no_bit(saved, cuts):
    _, folder = saved
    whole = Route(folder).run(CHUNKS)
    split = Route(folder, cuts).run(CHUNKS)
    assert equal(whole, split)


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "gpt_oss"])
def test_half_precision_is_that_of_transformers(kind, tmp_path):
    save(CONFIGS[kind](), tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    for cuts in ((), (2,)):
        route = Route(tmp_path, cuts, dtype="bfloat16")
        assert all(t.dtype == "BF16" for s in route.shards[:-1] for t in s.describe().layout_out.tensors)
        (logits,) = route.run([PROMPT])
        assert np.array_equal(logits, reference_logits(model, PROMPT))


MORE = {
    "gemma": lambda: transformers.GemmaConfig(**SIZES, head_dim=8),
    "gemma2": lambda: transformers.Gemma2Config(**SIZES, head_dim=8, sliding_window=8),
    "mixtral": lambda: transformers.MixtralConfig(**SIZES, num_local_experts=4),
    "granitemoe": lambda: transformers.GraniteMoeConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
    "cohere": lambda: transformers.CohereConfig(**SIZES),
    "olmo2": lambda: transformers.Olmo2Config(**SIZES),
    "glm4": lambda: transformers.Glm4Config(**SIZES, head_dim=8),
    "llama4": lambda: transformers.Llama4TextConfig(**SIZES, head_dim=8, num_local_experts=2, intermediate_size_mlp=48),
    "gemma3 with images": lambda: transformers.Gemma3Config(
        text_config=CONFIGS["gemma3_text"]().to_dict(),
        vision_config={"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
        mm_tokens_per_image=4,
        image_token_index=90,
    ),
}


@pytest.mark.parametrize("kind", list(MORE))
def test_others_that_nothing_was_written_for(kind, tmp_path):
    model = save(MORE[kind](), tmp_path)
    whole = Route(tmp_path).run(CHUNKS)
    assert np.array_equal(Route(tmp_path).run([PROMPT])[0], reference_logits(model, PROMPT))
    assert equal(whole, Route(tmp_path, (1, 3)).run(CHUNKS))


def test_one_flipped_bit_in_a_hidden_row_changes_the_logits(tmp_path):
    save(CONFIGS["llama"](), tmp_path)
    head, tail = Route(tmp_path, (2,)).shards
    head.open(0)
    (rows,) = result(head.run([entry(PROMPT, 0)])).hidden
    answers = []
    for flip in (False, True):
        sent = bytearray(rows)
        sent[-2] ^= 0x40 if flip else 0
        tail.open(0)
        answers.append(result(tail.run([entry(PROMPT, 0, [sent])])).logits)
        tail.close(0)
    assert not np.array_equal(*answers)


def test_each_shard_holds_its_own_weights_only(tmp_path):
    model = save(CONFIGS["llama"](), tmp_path)
    whole = sum(t.nbytes for t in model.state_dict().values())
    parts = [shard.describe().weight_bytes for shard in Route(tmp_path, range(1, LAYERS)).shards]
    assert sum(parts) == whole
    matrix = 4 * VOCAB * 32
    assert parts[0] == parts[1] + matrix
    assert parts[3] == parts[1] + matrix + 4 * 32
