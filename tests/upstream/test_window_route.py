"""Routes of the llama-window engine over real processes: DeepSeek-V4 on 1, 2 and 3 Nodes says the same, with the same
log-probabilities, in a context beyond its window and beyond what its sparse attention is shown in full.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("llama_cpp")

from tests.support.cluster import model_cluster
from tests.support.tiny_gguf import write_tiny_gguf
from tests.support.tiny_models import VOCABULARY
from tests.support.window import deepseek4, patched_library

pytestmark = [pytest.mark.llama, pytest.mark.timeout(240)]

PROMPT = [int(token) for token in np.random.default_rng(7).integers(3, 259, 150)]
TOKENS = 24
CHUNK = {"prefill_chunk_min": 64, "prefill_chunk_max": 64}
"""Chunks of one size on every route: kernels for other numbers of rows may differ in the last bits."""
ROUTES = (["0:8"], ["0:4", "4:8"], ["0:3", "3:6", "6:8"])


async def said(folder: Path, model: Path, library: Path, layers: list[str]) -> dict[str, Any]:
    settings = {**CHUNK, "llama_window_library": str(library)}
    node = ["--threads", "1", "--kv-tokens", "512"]
    async with model_cluster(
        folder, model, layers=layers, engine="llama-window", settings=settings, node_arguments=node
    ) as cluster:
        body = {"model": cluster.model, "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "logprobs": 5}
        answer = await cluster.http.post(f"{cluster.gateway.url}/v1/completions", json={**body, "ignore_eos": True})
        assert answer.status_code == 200, answer.text
        infos = [await cluster.node_info(number) for number in range(len(layers))]
        assert all(info["engine"]["engine_class"].startswith("llama-window/") for info in infos)
        assert not (folder / "state" / "shards").exists(), "no Shard file is made"
        choice = answer.json()["choices"][0]
        assert answer.json()["usage"]["completion_tokens"] == TOKENS
        return {"text": choice["text"], "logprobs": choice["logprobs"]}


async def test_one_two_and_three_nodes_say_the_same(tmp_path: Path) -> None:
    library = patched_library()
    assert max(PROMPT) < VOCABULARY
    model = write_tiny_gguf(deepseek4(), tmp_path / "deepseek4.gguf")
    one, *others = [
        await said(tmp_path / f"nodes-{len(layers)}", model, library, layers)
        for layers in ROUTES
        if (tmp_path / f"nodes-{len(layers)}").mkdir() is None
    ]
    assert len(one["logprobs"]["token_logprobs"]) == TOKENS
    for other in others:
        assert other == one
