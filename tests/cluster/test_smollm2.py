"""The real small model over 1, 2 and 3 Nodes of the PyTorch engine, against transformers alone on the same weights."""

from __future__ import annotations

import asyncio
import signal
import struct
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.cluster import Cluster, model_cluster, until, worker_pid

pytestmark = [pytest.mark.torch, pytest.mark.smollm2, pytest.mark.timeout(400)]
torch = pytest.importorskip("torch")

CHAT = "<|im_start|>user\nWhat is the capital of France? Answer in one sentence.<|im_end|>\n<|im_start|>assistant\n"
QUESTIONS = [
    f"<|im_start|>user\nName {n} things that are {what}.<|im_end|>\n<|im_start|>assistant\n"
    for n, what in enumerate(["red", "blue", "round", "old", "made of wood", "loud", "found in a kitchen", "cold"], 2)
]
LONG_TOKENS = 1500
TOKENS = 12
ROW = 576 * 4
ENDS = {0, 2}
"""End-of-text and end-of-turn of this model."""


@dataclass
class Reference:
    """`transformers` alone: greedy tokens of a prompt, and how near the second best was at each step."""

    model: Any
    tokenize: Callable[[str], list[int]]
    known: dict[tuple[int, ...], tuple[list[int], list[float]]] = field(default_factory=dict)

    def greedy(self, ids: list[int], count: int) -> tuple[list[int], list[float]]:
        key = (count, *ids)
        if key not in self.known:
            self.known[key] = self._greedy(ids, count)
        return self.known[key]

    def _greedy(self, ids: list[int], count: int) -> tuple[list[int], list[float]]:
        with torch.inference_mode():
            out = self.model.generate(
                torch.tensor([ids]),
                attention_mask=torch.ones(1, len(ids), dtype=torch.long),
                max_new_tokens=count,
                do_sample=False,
                output_scores=True,
                return_dict_in_generate=True,
                eos_token_id=sorted(ENDS),
                pad_token_id=0,
            )
        gaps = [float(top[0] - top[1]) for top in (score[0].topk(2).values for score in out.scores)]
        return out.sequences[0, len(ids) :].tolist(), gaps


@pytest.fixture(scope="module")
def model_file() -> Path:
    from shardline.cli.demo_model import demo_model

    return demo_model()


@pytest.fixture(scope="module")
def reference(model_file: Path) -> Reference:
    from bench.alone import loaded

    model, tokenize = loaded(model_file)
    return Reference(model, tokenize)


def long_prompt(reference: Reference) -> list[int]:
    ids = reference.tokenize("A shard is a piece of something larger; it may be sharp, or old, or both. " * 120)
    assert len(ids) >= LONG_TOKENS
    return ids[:LONG_TOKENS]


async def completed(cluster: Cluster, ids: list[int], count: int, **more: Any) -> dict[str, Any]:
    body = {"model": cluster.model, "prompt": ids, "max_tokens": count, "temperature": 0, "logprobs": 1, **more}
    answer = await cluster.http.post(f"{cluster.gateway.url}/v1/completions", json=body, timeout=300)
    assert answer.status_code == 200, answer.text
    return {**answer.json(), "session": answer.headers["shardline-route-session"]}


def check_same(text: str, reference: Reference, ids: list[int], vocabulary: list[bytes], count: int = TOKENS) -> None:
    """Equal text; or the first difference stands where two tokens were as good as equal in the solo run."""
    expected, gaps = reference.greedy(ids, count)
    shown = [vocabulary[i] for i in expected if i not in ENDS]
    got = text.encode()
    at = 0
    for step, piece in enumerate(shown):
        if got[at : at + len(piece)] != piece:
            assert gaps[step] < 1e-3, f"step {step}: {got[at:]!r} where {piece!r} was expected, gap {gaps[step]}"
            return
        at += len(piece)
    assert got[at:] == b"" or gaps[-1] < 1e-3, got[at:]


async def pieces(cluster: Cluster) -> list[bytes]:
    import msgspec

    from shardline.wire.messages import TextBundle

    digest = (await cluster.node_info(0))["shards"][0]["text_digest"]
    answer = await cluster.control("GET", f"{cluster.nodes[0].url}/v1/text/{digest}")
    return msgspec.msgpack.decode(answer.content, type=TextBundle).pieces


@pytest.fixture(scope="module")
async def two_nodes(tmp_path_factory: pytest.TempPathFactory, model_file: Path) -> AsyncIterator[Cluster]:
    """One cluster for all tests with two Nodes, a proxy in front of Node 1. No session has anything of another."""
    folder, settings = tmp_path_factory.mktemp("two"), {"prefix_sessions": 0}
    async with model_cluster(folder, model_file, layers=["0:15", "15:30"], proxied=(1,), settings=settings) as cluster:
        yield cluster


async def check_answers(cluster: Cluster, reference: Reference, *alone: list[int]) -> None:
    """To `alone` one after the other, then to eight at a time."""
    vocabulary = await pieces(cluster)
    for ids in alone:
        answer = await completed(cluster, ids, TOKENS)
        assert answer["usage"]["prompt_tokens"] == len(ids)
        check_same(answer["choices"][0]["text"], reference, ids, vocabulary)
    prompts = [reference.tokenize(q) for q in QUESTIONS]
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(completed(cluster, ids, TOKENS)) for ids in prompts]
    for ids, task in zip(prompts, running, strict=True):
        check_same(task.result()["choices"][0]["text"], reference, ids, vocabulary)
    assert await cluster.text("What is the capital of France?", max_tokens=8) == "The capital of France is Paris."
    await cluster.until_free()


@pytest.mark.long
@pytest.mark.parametrize("layers", [["0:30"], ["0:10", "10:20", "20:30"]], ids=["1", "3"])
async def test_greedy_answers_are_those_of_transformers(
    tmp_path: Path, model_file: Path, reference: Reference, layers: list[str]
) -> None:
    """In one process, without HTTP: tests/model/test_torch_smollm2.py."""
    async with model_cluster(tmp_path, model_file, layers=layers) as cluster:
        await check_answers(cluster, reference, reference.tokenize(CHAT), long_prompt(reference))


async def test_greedy_answers_of_two_nodes_are_those_of_transformers(two_nodes: Cluster, reference: Reference) -> None:
    await check_answers(two_nodes, reference, reference.tokenize(CHAT), long_prompt(reference))


async def test_what_crosses_the_seam(two_nodes: Cluster, reference: Reference) -> None:
    """Counted by a proxy between the Nodes: one row a decode step, of the same size at position 10 and at 1,500; and
    what crosses is what the answer is made of."""
    cluster = two_nodes
    proxy = cluster.proxies[1]
    short = await completed(cluster, reference.tokenize(CHAT)[:10], 9, ignore_eos=True)
    at_ten = proxy.seen.bodies[-8:]
    first = len(proxy.seen.bodies)
    long = await completed(cluster, long_prompt(reference), 9, ignore_eos=True)
    at_1500 = proxy.seen.bodies[-8:]
    assert at_ten == at_1500
    assert max(at_ten) <= ROW + 512
    counted = sum(proxy.seen.bodies[first:])
    seam = (await cluster.session(long["session"]))["seams"][0]
    assert abs(seam["prefill"]["bytes"] + seam["decode"]["bytes"] - counted) <= 0.01 * counted
    assert (seam["prefill"]["rows"], seam["decode"]["rows"]) == (LONG_TOKENS, 8)

    ids = reference.tokenize(CHAT)
    clean = await completed(cluster, ids, 6, ignore_eos=True)
    for name, spoil in (("bit", _flip), ("zeros", _zero)):
        proxy.rule = spoil
        spoiled = await completed(cluster, ids, 6, ignore_eos=True)
        proxy.rule = _clean
        if name == "bit":
            assert _logprobs(spoiled) != _logprobs(clean)
        else:
            assert spoiled["choices"][0]["text"] != clean["choices"][0]["text"]
    again = await completed(cluster, ids, 6, ignore_eos=True)
    assert (_logprobs(again), again["choices"][0]["text"]) == (_logprobs(clean), clean["choices"][0]["text"])
    assert short["usage"]["completion_tokens"] == 9
    await cluster.until_free()


def _logprobs(answer: dict[str, Any]) -> list[float]:
    return list(answer["choices"][0]["logprobs"]["token_logprobs"])


async def _clean(number: int, body: bytes) -> list[bytes] | None:
    return [body]


async def _flip(number: int, body: bytes) -> list[bytes] | None:
    """The highest bit of the mantissa of one value in the last row."""
    spoiled = bytearray(body)
    spoiled[-2] ^= 0x40
    return [bytes(spoiled)]


async def _zero(number: int, body: bytes) -> list[bytes] | None:
    (header,) = struct.unpack_from("<Q", body)
    rows = struct.unpack_from("<I", body, 8 + header + 24)[0]
    size = rows * ROW
    return [body[:-size] + bytes(size)]


@pytest.mark.parametrize("fault", ["stopped", "worker killed", "gateway killed", "killed"])
async def test_faults_on_the_real_engine(two_nodes: Cluster, fault: str) -> None:
    """The last one is the end of the cluster."""
    cluster = two_nodes
    async with cluster.streamed("Tell me a long story.", max_tokens=400) as stream:
        await stream.read_tokens(2)
        if fault == "worker killed":
            psutil.Process(worker_pid(await cluster.node_info(1))).kill()
        struck = time.monotonic()
        if fault == "killed":
            cluster.nodes[1].signal(signal.SIGKILL)
        elif fault == "stopped":
            cluster.nodes[1].signal(signal.SIGSTOP)
        elif fault == "gateway killed":
            cluster.gateway.signal(signal.SIGKILL)
            await cluster.until_free(within_s=4.0)
            await cluster.start_gateway()
            return
        await stream.read_all()
    assert stream.error is not None and stream.error_at is not None
    assert stream.error["code"] == ("engine_lost" if fault == "worker killed" else "node_lost")
    assert stream.error_at - struck < (4.0 if fault == "stopped" else 2.0)
    await cluster.until_free([0], within_s=2.0)
    if fault != "worker killed":
        error = (await cluster.ask("Hello", max_tokens=1)).json()["error"]
        assert (error["code"], error["missing"]) == ("model_unavailable", [[15, 30]])
    if fault != "killed":
        cluster.nodes[1].signal(signal.SIGCONT)

        async def served() -> bool:
            return (await cluster.ask("Hello", max_tokens=1)).status_code == 200

        await until(served, 60)
        await cluster.until_free()
