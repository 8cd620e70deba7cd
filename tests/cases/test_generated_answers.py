"""Reported bugs of such servers, tried on a whole cluster: limits, the context, sampling and token ids.

Each test names the case in its first words. The cluster is real but for its engine, which is scripted.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from shardline.settings import Settings
from tests.support.api_cluster import CHAT, COUNTING, ApiCluster, api_cluster
from tests.support.cluster import Stream

NEVER_ENDS = {**COUNTING, "context_length": 64}
VARIED = {**COUNTING, "sharpness": 1.5}
"""Its logits are nearly flat, so that sampling chooses freely."""


def error_of(answer: httpx.Response, status: int, code: str) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert error["code"] == code, error
    return error


async def routes_given(cluster: ApiCluster) -> float:
    """How many routes the Tracker was asked for: 0 where nothing but the tokenizer was touched."""
    text = (await cluster.client.request("GET", cluster.tracker.url + "/metrics", timeout_s=5, limit="test")).body
    return sum(map(float, re.findall(r"^shardline_tracker_routes_total\{.*\} ([0-9.]+)$", text.decode(), re.MULTILINE)))


# ---- where an answer ends ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "text", "reason", "tokens"),
    [
        ({"max_tokens": 1}, " alpha", "length", 1),
        ({"max_tokens": 3}, " alpha beta gamma", "length", 3),
        ({"max_tokens": 2, "stop": "beta"}, " alpha ", "stop", 2),
        ({"max_tokens": 9}, " alpha beta gamma delta epsilon zeta eta theta", "stop", 9),
        ({"max_tokens": 8}, " alpha beta gamma delta epsilon zeta eta theta", "length", 8),
        ({"stop": ["beta gamma"]}, " alpha ", "stop", 3),
        ({"stop": ["1", "2", "3", "4", "a d"]}, " alpha beta gamm", "stop", 4),
    ],
)
async def test_finish_reasons_say_what_ended_the_answer(
    tmp_path: Path, fields: dict[str, Any], text: str, reason: str, tokens: int
) -> None:
    """The limit on a long answer; a stop string, and the end of generation, exactly on the last permitted token; a
    stop string over two tokens; five stop strings. Streamed and whole agree, and every Node is free afterwards."""
    async with api_cluster(tmp_path) as cluster:
        whole = await cluster.answer(**fields)
        (choice,) = whole["choices"]
        assert (choice["text"], choice["finish_reason"]) == (text, reason)
        assert whole["usage"]["completion_tokens"] == tokens
        assert whole["telemetry"]["decode"]["tokens"] == tokens
        assert (await cluster.record(whole["session"]))["decode"]["tokens"] == tokens
        stream = await cluster.read(**fields)
        assert (stream.text, stream.finish_reason, stream.done) == (text, reason, True)
        assert [c["choices"][0]["finish_reason"] for c in stream.chunks if c["choices"]][-1] == reason
        assert sum(c["choices"][0]["finish_reason"] is not None for c in stream.chunks) == 1
        await cluster.until_free()


async def test_max_completion_tokens_alone_and_beside_max_tokens(tmp_path: Path) -> None:
    """The newer name is a limit by itself; of both, the smaller counts."""
    async with api_cluster(tmp_path, script=COUNTING) as cluster:
        body = {"model": cluster.model, "messages": [{"role": "user", "content": "Hi"}]}
        for limits in ({"max_completion_tokens": 3}, {"max_completion_tokens": 3, "max_tokens": 9}):
            answer = (await cluster.http.post(cluster.url + CHAT, json={**body, **limits})).json()
            assert answer["choices"][0]["finish_reason"] == "length"
            assert answer["usage"]["completion_tokens"] == 3
            assert answer["choices"][0]["message"]["content"] == " t0 t1 t2"


@pytest.mark.parametrize("stream", [False, True])
async def test_the_end_of_the_context(tmp_path: Path, stream: bool) -> None:
    """Context 64: after a prompt of 63 tokens there is room for one. 64, 65 and 100,000 are refused with both
    numbers before a route is asked for; nothing is ever cut from a prompt."""
    async with api_cluster(tmp_path, script=NEVER_ENDS) as cluster:
        if stream:
            read = await cluster.read("p" * 63)
            assert (read.text, read.finish_reason) == (" t0", "length")
        else:
            answer = await cluster.answer("p" * 63)
            assert answer["choices"][0] | {"finish_reason": "length", "text": " t0"} == answer["choices"][0]
            assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (63, 1)
        asked = await routes_given(cluster)
        for tokens in (64, 65, 100_000):
            answer = await cluster.ask("p" * tokens, stream=stream, max_tokens=5)
            error = error_of(answer, 400, "context_length_exceeded")
            assert error["context_length"] == 64 and "64" in error["message"]
            # Of a text that cannot fit at all, the count is a lower bound: it was never tokenised.
            assert 64 <= error["prompt_tokens"] <= tokens and str(error["prompt_tokens"]) in error["message"]
        assert await routes_given(cluster) == asked


async def test_a_huge_max_tokens_leaves_the_prompt_whole(tmp_path: Path) -> None:
    """Context 64, prompt 40, max_tokens 1000: 24 tokens, `length`, and all 40 tokens of the prompt were computed."""
    async with api_cluster(tmp_path, script=NEVER_ENDS) as cluster:
        answer = await cluster.answer("p" * 40, max_tokens=1000)
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"] | {"prompt_tokens": 40, "completion_tokens": 24} == answer["usage"]
        (forward, _) = (await cluster.record(answer["session"]))["seams"]
        assert forward["prefill"]["rows"] == 40


async def test_a_generation_that_reaches_the_end_of_the_context(tmp_path: Path) -> None:
    """Context 64, prompt 60, no cap, no end: exactly 4 tokens on two Nodes that agree on what they computed."""
    async with api_cluster(tmp_path, script=NEVER_ENDS) as cluster:
        answer = await cluster.answer("p" * 60)
        assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == (" t0 t1 t2 t3", "length")
        assert answer["usage"]["completion_tokens"] == 4
        forward, back = (await cluster.record(answer["session"]))["seams"]
        # The last token is not fed back: nothing comes after it.
        assert (forward["prefill"]["rows"], forward["decode"]["rows"], back["decode"]["rows"]) == (60, 3, 3)
        await cluster.until_free()


# ---- several choices, log-probabilities --------------------------------------------------------------------------


def texts_by_index(stream: Stream, count: int) -> list[str]:
    texts = [""] * count
    for chunk in stream.chunks:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
    return texts


async def test_n_gives_n_choices(tmp_path: Path) -> None:
    """n 3 with temperature and seed: three choices of their own, streamed as whole; the prompt counts once. n 0 is
    refused, n 2 at temperature 0 gives the same text twice."""
    async with api_cluster(tmp_path, script=VARIED) as cluster:
        fields = {"n": 3, "temperature": 1, "seed": 7, "max_tokens": 6}
        whole = await cluster.answer(**fields)
        assert [c["index"] for c in whole["choices"]] == [0, 1, 2]
        assert [c["finish_reason"] for c in whole["choices"]] == ["length"] * 3
        assert (whole["usage"]["prompt_tokens"], whole["usage"]["completion_tokens"]) == (2, 18)
        texts = [c["text"] for c in whole["choices"]]
        assert len(set(texts)) == 3
        assert len(whole["session"].split(",")) == 3
        stream = await cluster.read(**fields, stream_options={"include_usage": True})
        assert texts_by_index(stream, 3) == texts
        reasons = [c["finish_reason"] for chunk in stream.chunks for c in chunk["choices"]]
        assert [r for r in reasons if r] == ["length"] * 3
        assert stream.chunks[-1]["usage"]["completion_tokens"] == 18
        same = await cluster.answer(n=2, max_tokens=6)
        assert same["choices"][0]["text"] == same["choices"][1]["text"]
        assert error_of(await cluster.ask(n=0), 400, "invalid_value")["param"] == "n"
        await cluster.until_free()


async def test_logprobs_without_alternatives_and_with_many(tmp_path: Path) -> None:
    """`logprobs` 0 and `top_logprobs` 0 are the chosen token alone; 20 gives twenty; 21 and a `top_logprobs` without
    `logprobs` are refused."""
    async with api_cluster(tmp_path, script=VARIED) as cluster:
        text = (await cluster.answer(logprobs=0, max_tokens=2))["choices"][0]["logprobs"]
        assert len(text["token_logprobs"]) == 2 and all(value < 0 for value in text["token_logprobs"])
        body = {"model": cluster.model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}

        async def ask(**fields: Any) -> httpx.Response:
            return await cluster.http.post(cluster.url + CHAT, json={**body, "temperature": 0, **fields})

        for fields, count in (({}, 0), ({"top_logprobs": 0}, 0), ({"top_logprobs": 20}, 20)):
            content = (await ask(logprobs=True, **fields)).json()["choices"][0]["logprobs"]["content"]
            assert [len(token["top_logprobs"]) for token in content] == [count, count]
            for token in content:
                assert all(other["logprob"] <= token["logprob"] for other in token["top_logprobs"])
        assert error_of(await ask(logprobs=True, top_logprobs=21), 400, "invalid_value")["param"] == "top_logprobs"
        assert error_of(await ask(logprobs=False, top_logprobs=5), 400, "invalid_value")["param"] == "top_logprobs"


# ---- sampling ----------------------------------------------------------------------------------------------------


async def sampled(cluster: ApiCluster, **fields: Any) -> str:
    return await cluster.text(**{"temperature": 1, "max_tokens": 12, **fields})


async def test_temperatures_at_the_ends_and_one_body_of_nulls(tmp_path: Path) -> None:
    """0, 1e-4 and 1e-8 are argmax; 2 samples; 2.1 and -0.1 are refused; null is the default, in every field."""
    async with api_cluster(tmp_path, script=VARIED) as cluster:
        greedy = await sampled(cluster, temperature=0)
        assert greedy.startswith(" t0 t1 t2")
        for temperature in (1e-4, 1e-8):
            assert await sampled(cluster, temperature=temperature) == greedy
        assert await sampled(cluster, temperature=2, seed=1) != greedy
        default = await sampled(cluster, temperature=None, seed=1)
        assert default == await sampled(cluster, temperature=1, seed=1) != greedy
        for temperature in (2.1, -0.1):
            answer = await cluster.ask(temperature=temperature)
            assert error_of(answer, 400, "invalid_value")["param"] == "temperature"
        fields = "temperature top_p n stop seed logit_bias tools tool_choice response_format stream_options user "
        fields += "presence_penalty frequency_penalty max_tokens stream"
        body = {"model": cluster.model, "messages": [{"role": "user", "content": "Hi"}], "max_completion_tokens": 2}
        answer = await cluster.http.post(cluster.url + CHAT, json={**body, **dict.fromkeys(fields.split())})
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 2


async def test_out_of_range_penalties_reach_no_node(tmp_path: Path) -> None:
    """A penalty of 0 or out of range, top_p 0 and 1.1, min_p 2: 400 by name, before a route is asked for."""
    bad = [("repetition_penalty", 0), ("repetition_penalty", -1), ("presence_penalty", 2.1)]
    bad += [("frequency_penalty", -2.1), ("top_p", 0), ("top_p", 1.1), ("min_p", 2)]
    async with api_cluster(tmp_path, script=VARIED) as cluster:
        for name, value in bad:
            assert error_of(await cluster.ask(**{name: value}), 400, "invalid_value")["param"] == name
        assert await routes_given(cluster) == 0
        assert await sampled(cluster, top_p=1, seed=3) == await sampled(cluster, seed=3)


async def test_top_k_above_the_vocabulary(tmp_path: Path) -> None:
    """top_k of the vocabulary, of one more and of 2**31 is as good as none; 2**63 is refused; a request in flight is
    not harmed."""
    async with api_cluster(tmp_path, script={**VARIED, "decode_ms": 2}) as cluster:
        size = (await cluster.info(0)).shards[0].vocab_size
        neighbour = asyncio.create_task(cluster.text(max_tokens=40))
        off = await sampled(cluster, seed=5)
        for top_k in (size, size + 1, 2**31):
            assert await sampled(cluster, seed=5, top_k=top_k) == off
        assert error_of(await cluster.ask(top_k=2**63), 400, "invalid_value")["param"] == "top_k"
        assert await neighbour == "".join(f" t{i}" for i in range(40))


BAD_BIASES: list[dict[str, Any]] = [{"999999": 5}, {"-1": 5}, {"abc": 5}, {"10": 101}, {"10": "5"}]


async def test_biases_with_a_neighbour_in_flight(tmp_path: Path) -> None:
    """Ids past the vocabulary, and what is no bias: 400 with `param`, while a neighbour's request goes on. -100 bans
    a token, 100 forces it, none is none."""
    async with api_cluster(tmp_path, script={**COUNTING, "decode_ms": 2, "vocab_size": 400}) as cluster:
        async with cluster.streamed(max_tokens=60) as neighbour:
            await neighbour.read_tokens(2)
            for bias in [*BAD_BIASES, {"400": 1}]:
                assert error_of(await cluster.ask(logit_bias=bias), 400, "invalid_value")["param"] == "logit_bias"
            assert await cluster.text(logit_bias={}, max_tokens=2) == " t0 t1"
            assert await cluster.text(logit_bias={"97": 100}, max_tokens=3) == "aaa"
            ids = (await cluster.answer(logprobs=0, max_tokens=1))["choices"][0]["logprobs"]["tokens"]
            assert ids == [" t0"]
            # 263 is the first of the script's pieces, behind 256 bytes, six control tokens and the mark of wrong rows.
            assert " t0" not in await cluster.text(logit_bias={"263": -100}, max_tokens=1)
            # Padding: rows of the model that no text leads to may be biased, and are not made by that.
            assert await cluster.text(logit_bias={"399": -100}, max_tokens=2) == " t0 t1"
            await neighbour.read_all()
        assert (neighbour.text, neighbour.error) == ("".join(f" t{i}" for i in range(60)), None)


async def test_a_seed_decides_the_text_whatever_else_runs(tmp_path: Path) -> None:
    """Equal bodies with seed 42 give equal texts, alone and beside a request with another seed, whose text differs.
    0, -1 and 2**32 are seeds or none; 2**64 is refused."""
    async with api_cluster(tmp_path, script={**VARIED, "decode_ms": 1}) as cluster:
        alone = [await sampled(cluster, seed=42) for _ in range(2)]
        assert alone[0] == alone[1]
        async with asyncio.TaskGroup() as tasks:
            other = tasks.create_task(sampled(cluster, seed=43))
            beside = [tasks.create_task(sampled(cluster, seed=42)) for _ in range(2)]
        assert [task.result() for task in beside] == alone
        assert other.result() == await sampled(cluster, seed=43) != alone[0]
        assert await sampled(cluster, seed=0) == await sampled(cluster, seed=0) != alone[0]
        assert (
            await sampled(cluster, seed=2**32) == await sampled(cluster, seed=2**32) != await sampled(cluster, seed=0)
        )
        assert await sampled(cluster, seed=-1) != await sampled(cluster, seed=-1), "-1 is none"
        assert error_of(await cluster.ask(seed=2**64), 400, "invalid_value")["param"] == "seed"


async def test_equal_requests_give_equal_greedy_answers(tmp_path: Path) -> None:
    """The same prompt of 200 tokens three times, then four at once."""
    async with api_cluster(tmp_path, script=COUNTING) as cluster:
        prompt = "x y " * 50
        first = await cluster.answer(prompt, max_tokens=20, logprobs=2)
        assert first["usage"]["prompt_tokens"] == 200
        answers = [await cluster.answer(prompt, max_tokens=20, logprobs=2) for _ in range(2)]
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(cluster.answer(prompt, max_tokens=20, logprobs=2)) for _ in range(4)]
        answers += [task.result() for task in running]
        assert all(answer["choices"] == first["choices"] for answer in answers)


# ---- token ids that cannot be ------------------------------------------------------------------------------------


@pytest.fixture
async def lying(tmp_path: Path) -> AsyncIterator[ApiCluster]:
    """A cluster whose tail can be made to say other tokens than it sampled."""
    async with api_cluster(tmp_path, script=COUNTING, relayed=(1,)) as cluster:
        yield cluster


@pytest.mark.parametrize("token", [b"-11", b"999", b"1e9"])
async def test_a_tail_that_says_a_token_that_is_none(lying: ApiCluster, token: bytes) -> None:
    """An id below 0, past the vocabulary, or no whole number ends that session with a structured error; the Gateway
    goes on."""
    lying.relays[1].rewrite = lambda data: re.sub(rb'("event":"token".{0,40}?"id":)\d{3}', rb"\g<1>" + token, data)
    stream = await lying.read(max_tokens=5)
    assert stream.error is not None and not stream.done and stream.text == ""
    assert stream.error["code"] in ("seam_invalid", "node_lost"), stream.error
    assert stream.error["node"] == lying.nodes[1].node
    assert (await lying.ask(max_tokens=5)).status_code in (502, 503)
    lying.relays[1].rewrite = bytes

    async def again() -> str:
        async with asyncio.timeout(5):
            while (answer := await lying.ask(max_tokens=2)).status_code != 200:
                await asyncio.sleep(0.02)
        return str(answer.json()["choices"][0]["text"])

    assert await again() == " t0 t1"
    await lying.until_free()


@pytest.mark.parametrize("kind", ["wrong_width", "bad_token"])
async def test_logits_of_another_width(tmp_path: Path, kind: str) -> None:
    """One logit less or more than the vocabulary has: an error of the session that names the tail, no text from it."""
    fault = {"kind": kind, "phase": "decode", "node": 3, "step": 2, "flag": "once"}
    async with api_cluster(tmp_path, script={**COUNTING, "faults": [fault]}) as cluster:
        (tmp_path / "once").touch()
        stream = await cluster.read(max_tokens=9)
        assert stream.error is not None
        assert (stream.error["code"], stream.error["node"]) == ("engine_error", cluster.nodes[1].node)
        assert stream.text == " t0 t1 t2"
        assert await cluster.text(max_tokens=5) == " t0 t1 t2 t3 t4"


async def test_every_token_banned(tmp_path: Path) -> None:
    """A bias of -100 on the whole vocabulary leaves nothing to choose: refused before a route is asked for."""
    async with api_cluster(tmp_path, script=COUNTING, settings=Settings(drain_s=0.5)) as cluster:
        size = (await cluster.info(0)).shards[0].vocab_size
        async with cluster.streamed(max_tokens=30) as neighbour:
            await neighbour.read_tokens(1)
            answer = await cluster.ask(logit_bias={str(i): -100 for i in range(size)})
            assert error_of(answer, 400, "no_token_left")["param"] == "logit_bias"
            await neighbour.read_all()
        assert (neighbour.error, neighbour.finish_reason) == (None, "length")
        await cluster.until_free()
