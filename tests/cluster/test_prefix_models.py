"""Prefix reuse of real models over 2 and 3 Nodes: the answers are those of a route that reuses nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from shardline.gateway.reuse import OFF
from tests.support.cluster import Cluster, Json, model_cluster
from tests.support.greedy import F16_CACHE
from tests.support.reuse import check_reuse, completed

pytestmark = [pytest.mark.smollm2, pytest.mark.timeout(400)]
TWO, THREE = ("0:15", "15:30"), ("0:10", "10:20", "20:30")
ROUTES = [
    pytest.param(
        (engine, layers),
        id=f"{engine}-{len(layers)}",
        marks=[getattr(pytest.mark, engine), *([] if (engine, layers) == ("llama", TWO) else [pytest.mark.long])],
    )
    for engine in ("torch", "llama")
    for layers in (TWO, THREE)
]
TEXT = (
    "<|im_start|>user\nA shard is a piece of something larger. It may be sharp, or old, or both. Tell me about three "
    "kinds of shards, where they are found, and what people do with them.<|im_end|>\n<|im_start|>assistant\n"
)
QUESTION = "<|im_end|>\n<|im_start|>user\nWhich is the oldest? Answer briefly.<|im_end|>\n<|im_start|>assistant\n"
PENALTIES = {"repeat_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2, "logit_bias": {"260": 2}}
TIES = {"torch": 1e-3, "llama": F16_CACHE}
"""What reuse computes in other batch shapes, and in other cells, moves logits by less than this."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """llama.cpp gets weights of float32: with those of 4 bits its own roundings are larger than what a wrong cache
    would do to a text."""
    pytest.importorskip("torch")
    pytest.importorskip("llama_cpp")
    from shardline.cli.demo_model import demo_model
    from tests.support.decoded_model import write_decoded

    decoded = write_decoded(demo_model(), tmp_path_factory.mktemp("decoded") / "decoded.gguf")
    return {"torch": demo_model(), "llama": decoded}


@dataclass(frozen=True)
class Routed:
    """A cluster, and a second Gateway of it that reuses nothing: the same Nodes compute the whole prompt."""

    cluster: Cluster
    plain_url: str
    engine: str


@pytest.fixture(scope="module")
async def routed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, models: dict[str, Path]
) -> AsyncIterator[Routed]:
    """One for all tests of a route."""
    engine, layers = request.param
    folder, arguments = tmp_path_factory.mktemp(engine), ("--threads", "1", "--kv-tokens", "4096")
    async with model_cluster(folder, models[engine], layers=layers, engine=engine, node_arguments=arguments) as cluster:
        reusing = cluster.gateway
        cluster.settings = {"prefix_sessions": 0}
        plain = (await cluster.start_gateway()).url
        cluster.gateway = reusing
        yield Routed(cluster, plain, engine)


async def ids_of(cluster: Cluster, text: str) -> list[int]:
    answer = await cluster.control("POST", f"{cluster.nodes[0].url}/v1/tokenize", json={"text": text})
    assert answer.status_code == 200, answer.text
    return list(answer.json()["tokens"])


def check_same(answer: Json, plain: Json, tie: float) -> None:
    """Equal tokens and numbers as near as batch shapes let them be; or the first difference is where two tokens were as
    good as equal."""
    found, wanted = (a["choices"][0]["logprobs"] for a in (answer, plain))
    for step, (token, right) in enumerate(zip(found["tokens"], wanted["tokens"], strict=False)):
        best, second = sorted(wanted["top_logprobs"][step].values(), reverse=True)[:2]
        if token != right:
            assert best - second < tie, f"step {step}: {token!r} where {right!r} was expected"
            print(f"near-tie at step {step}: {token!r} for {right!r}, {best - second:.6f}")
            return
        assert abs(found["token_logprobs"][step] - wanted["token_logprobs"][step]) < max(0.05, 2 * tie), (step, token)
    assert len(found["tokens"]) == len(wanted["tokens"])


@pytest.mark.parametrize("routed", ROUTES, indirect=True)
async def test_second_turns_compute_the_rest_and_say_the_same(routed: Routed) -> None:
    cluster = routed.cluster
    first = await ids_of(cluster, TEXT)

    async def both(prompt: list[int], cached: int, reason: str | None = None, **more: Any) -> Json:
        plain = await completed(cluster, prompt, 24, logprobs=2, url=routed.plain_url, **more)
        check_reuse(plain, 0, OFF)
        answer = await completed(cluster, prompt, 24, logprobs=2, **more)
        check_reuse(answer, cached, reason)
        check_same(answer, plain, TIES[routed.engine])
        await cluster.until_free()
        return answer

    one = await both(first, 0, "nothing kept of this prompt")
    said = await ids_of(cluster, one["text"])
    second = [*first, *said, *await ids_of(cluster, QUESTION)]
    # What the engine computed of the first turn: its prompt, and all of its answer but the last token.
    computed = [*first, *said[:23]]
    whole = 32 * (len(computed) // 32)
    assert whole > 32
    await both(second, whole)
    again = 32 * ((len(second) - 1) // 32)
    await both(second, again)
    await both(second, again, **PENALTIES)
    diverging = [*second[:45], *await ids_of(cluster, " pottery, and nothing else. Why?" + QUESTION)]
    await both(diverging, 32)
    for number in range(len(cluster.nodes)):
        kv = await cluster.kv(number)
        assert (kv["used_tokens"], kv["reserved_tokens"]) == (0, 0)
        assert 0 < kv["cached_tokens"] <= 1024


@pytest.mark.parametrize("routed", [route for route in ROUTES if route.id.endswith("-2")], indirect=True)
async def test_a_chat_as_clients_send_it(routed: Routed) -> None:
    """Messages, not ids: the answer comes back as text, and is found again."""
    cluster = routed.cluster
    messages = [{"role": "user", "content": "Name three kinds of shards, each in one short sentence, and say why."}]
    for turn in range(3):
        body = {"model": cluster.model, "messages": messages, "max_tokens": 40, "temperature": 0}
        plain, answer = [
            (await cluster.http.post(f"{url}/v1/chat/completions", json=body)).json()
            for url in (routed.plain_url, cluster.gateway.url)
        ]
        assert answer["choices"][0]["message"]["content"] == plain["choices"][0]["message"]["content"]
        usage = answer["usage"]
        had = usage["prompt_tokens_details"]["cached_tokens"]
        assert (had > 0) == (turn > 0), (turn, usage)
        assert usage["prompt_tokens"] - had < 80
        messages += [answer["choices"][0]["message"], {"role": "user", "content": "Say more about the second one."}]
        messages[-2].pop("refusal", None)
        await cluster.until_free()
