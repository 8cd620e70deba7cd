"""Rows behind the final norm in the PyTorch engine: those of transformers, whatever the cuts, and pooled by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoModel

from shardline.model.pooling import Embeddings
from tests.support.embedded import vector
from tests.support.torch_models import CONFIGS, LAYERS, VOCAB, Route, save

pytestmark = pytest.mark.torch

PROMPT = [int(token) for token in np.random.default_rng(4).integers(3, VOCAB, 20)]
CHUNKS = [PROMPT[:7], PROMPT[7:19], PROMPT[19:]]
KINDS = ["llama", "qwen3", "qwen3_moe", "gemma3_text", "gpt_oss", "deepseek_v3"]


@pytest.fixture(scope="module", params=KINDS)
def saved(request, tmp_path_factory):
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp(request.param)
    save(CONFIGS[request.param](), folder)
    return folder


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_vectors_are_those_of_transformers_whatever_the_cuts(saved, pooling):
    model = AutoModel.from_pretrained(saved, dtype=torch.float32).eval()
    with torch.inference_mode():
        rows = model(torch.tensor([PROMPT])).last_hidden_state[0].double()
    wanted = (rows.mean(0) if pooling == "mean" else rows[-1]).numpy()
    whole = vector(Route(saved).shards, CHUNKS, pooling)
    np.testing.assert_allclose(whole, wanted, atol=2e-5)
    for cuts in ((2,), (1, 3)):
        assert np.array_equal(vector(Route(saved, cuts).shards, CHUNKS, pooling), whole)


def test_only_a_tail_makes_vectors(saved):
    head, tail = Route(saved, (2,)).shards
    assert head.describe().embeddings is None
    assert tail.describe().embeddings == Embeddings(32)
    assert (head.describe().last, tail.describe().last) == (2, LAYERS)


def test_half_precision_is_pooled_in_full(saved):
    route = Route(saved, dtype="bfloat16")
    found = vector(route.shards, CHUNKS, "mean")
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, vector(Route(saved).shards, CHUNKS, "mean"), atol=0.2)
