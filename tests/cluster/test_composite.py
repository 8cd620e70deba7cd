"""Composite Nodes over real HTTP: what goes to the server behind them, what comes back, and how that can end."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from structlog.testing import capture_logs

from shardline.errors import ShardlineError
from shardline.settings import Settings
from shardline.transport.tracker_client import TrackerClient
from shardline.wire.spans import Span
from tests.support.api_cluster import until
from tests.support.cluster import Stream
from tests.support.upstreams import (
    MODEL,
    CompositeCluster,
    Reply,
    StubUpstream,
    composite_cluster,
    delta,
    said,
    sse,
    stub_cluster,
    usage,
)

PIECES = [
    {"index": 0, "id": "call_1", "type": "function", "function": {"name": "weather", "arguments": ""}},
    {"index": 0, "function": {"arguments": '{"city":'}},
    {"index": 0, "function": {"arguments": '"Oslo"}'}},
]
CALLING = sse(
    delta(role="assistant", reasoning_content="Where is it? "),
    delta(reasoning_content="Oslo."),
    *(delta(tool_calls=[piece]) for piece in PIECES),
    delta("tool_calls"),
    usage(20, 11),
    "[DONE]",
)
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


async def streamed_chat(cluster: CompositeCluster, **fields: Any) -> Stream:
    body = {"model": cluster.model, "messages": [{"role": "user", "content": "Hi"}], "stream": True, **fields}
    async with cluster.http.stream("POST", f"{cluster.url}/v1/chat/completions", json=body) as response:
        stream = Stream(response)
        if response.status_code != 200:
            stream.error = json.loads(await response.aread())["error"]
        await stream.read_all()
    return stream


async def test_what_goes_there_and_what_comes_back(tmp_path: Path) -> None:
    async with stub_cluster(tmp_path, upstream_key="secret-of-the-upstream") as (cluster, stub):
        answer = (await cluster.chat(temperature=0.5, stop=["END"], seed=7, max_tokens=30)).json()
        assert "choices" in answer, answer
        assert answer["choices"][0]["message"]["content"] == "Hello"
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["usage"]["prompt_tokens"] == 7 and answer["usage"]["completion_tokens"] == 2
        assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}
        (asked,) = stub.asked
        assert asked.path == "/v1/chat/completions"
        assert asked.headers["authorization"] == "Bearer secret-of-the-upstream"
        assert not {"x-request-id", "traceparent"} & set(asked.headers), "ids of ours are no business of its"
        assert asked.body == {
            "model": MODEL,
            "messages": [{"role": "user", "content": "Hi"}],
            "temperature": 0.5,
            "stop": ["END"],
            "seed": 7,
            "max_tokens": 30,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        text = (await cluster.ask("Once", max_tokens=5, n=2, seed=1)).json()
        stub.usual = Reply(sse({"choices": [{"index": 0, "text": " upon", "finish_reason": "length"}]}, "[DONE]"))
        text = (await cluster.ask("Once", max_tokens=5, n=2, seed=1, echo=True)).json()
        assert [choice["text"] for choice in text["choices"]] == ["Once upon"] * 2
        assert text["usage"] is None, "the upstream has not told it"
        assert [asked.body["seed"] for asked in stub.asked[-2:]] == [1, 2]
        assert stub.asked[-1].path == "/v1/completions" and stub.asked[-1].body["prompt"] == "Once"
        await cluster.until_free()


async def test_telemetry_is_null_where_the_upstream_shows_nothing(tmp_path: Path) -> None:
    async with stub_cluster(tmp_path) as (cluster, stub):
        stub.replies.append(Reply(sse(delta(content="a")), then="hang"))
        body = cluster.body(max_tokens=8, stream=True)
        async with cluster.http.stream("POST", f"{cluster.url}/v1/completions", json=body) as response:
            stream = Stream(response)
            await stream.next()
            running = await cluster.record(stream.session_id)
        assert running["prefill"] == {"done": None, "total": None, "chunk": None, "cached": None, "reuse": None}
        assert (running["decode"]["tokens"], running["decode"]["tokens_per_s"]) == (None, None)
        stream = await streamed_chat(
            cluster,
            stream_options={"include_usage": True, "include_telemetry": True},
            max_tokens=8,
            timings_per_token=True,
        )
        assert (stream.text, stream.done, stream.finish_reason) == ("Hello", True, "stop")
        told = [chunk["telemetry"] for chunk in stream.chunks if "telemetry" in chunk]
        assert {chunk["timings"]["predicted_per_second"] for chunk in stream.chunks if "timings" in chunk} == {None}
        assert told[-1]["prefill"]["total"] == 7 and told[-1]["prefill"]["cached"] == 3
        assert told[-1]["decode"]["tokens"] == 2 and told[-1]["decode"]["tokens_per_s"] is None
        assert stream.chunks[-1]["usage"]["completion_tokens"] == 2
        record = await cluster.record(stream.session_id)
        assert record["phase"] == "completed"
        (hop,) = record["route"]["hops"]
        assert (hop["node"], hop["compute_ms"], hop["position"]) == (cluster.nodes[0].node, None, None)
        assert [phase for phase, _ in record["phases"]][-4:] == ["opening", "prefill", "decode", "completed"]
        (entry,) = (await cluster.get("/v1/models"))[1]["data"]
        assert entry["composite"] and entry["n_layers"] is None and entry["vocab_size"] is None
        assert (entry["id"], entry["ready"], entry["context_length"]) == (MODEL, True, 4096)


async def test_calls_and_reasoning_pass_as_they_come(tmp_path: Path) -> None:
    async with stub_cluster(tmp_path) as (cluster, stub):
        stub.usual = Reply(CALLING)
        stream = await streamed_chat(cluster, tools=TOOLS)
        deltas = [chunk["choices"][0]["delta"] for chunk in stream.chunks if chunk["choices"]]
        assert "".join(d.get("reasoning_content", "") for d in deltas) == "Where is it? Oslo."
        assert [d["tool_calls"] for d in deltas if "tool_calls" in d] == [[piece] for piece in PIECES]
        assert stream.finish_reason == "tool_calls"
        message = (await cluster.chat(tools=TOOLS)).json()["choices"][0]["message"]
        assert message["reasoning_content"] == "Where is it? Oslo."
        call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Oslo"}'}}
        assert message["tool_calls"] == [call] and message["content"] is None
        assert stub.asked[-1].body["tools"] == TOOLS
        # What was called comes back as the API has it, whatever form templates would want.
        result = {"role": "tool", "tool_call_id": "call_1", "content": "rain"}
        stub.usual = Reply(said("It rains."))
        again = await cluster.chat({"role": "user", "content": "Weather?"}, {**message}, result, tools=TOOLS)
        assert again.json()["choices"][0]["message"]["content"] == "It rains."
        assert stub.asked[-1].body["messages"][1]["tool_calls"] == [call]


async def test_other_dialects_over_it(tmp_path: Path) -> None:
    async with stub_cluster(tmp_path) as (cluster, stub):
        claude = anthropic.AsyncAnthropic(base_url=cluster.url, api_key="none", max_retries=0)
        gpt = openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0)
        async with claude, gpt:
            asked: Any = {"model": MODEL, "max_tokens": 20, "messages": [{"role": "user", "content": "Hi"}]}
            message = await claude.messages.create(**asked)
            assert message.content[0].text == "Hello"  # type: ignore[union-attr]
            assert (message.usage.input_tokens, message.usage.output_tokens) == (4, 2)
            response = await gpt.responses.create(model=MODEL, input="Hi", max_output_tokens=20)
            assert response.output_text == "Hello"
            stub.usual = Reply(CALLING)
            schema: Any = [{"name": "weather", "input_schema": {"type": "object"}}]
            called = await claude.messages.create(**asked, tools=schema)
            assert called.stop_reason == "tool_use"
            assert called.content[-1].input == {"city": "Oslo"}  # type: ignore[union-attr]


def calling(arguments: str, finish: str, **first: Any) -> bytes:
    piece = {"index": 0, **first, "function": {"name": "weather", "arguments": arguments}}
    return sse(delta(tool_calls=[piece]), delta(finish), "[DONE]")


async def test_calls_that_are_cut_or_bare(tmp_path: Path) -> None:
    """An answer can end within a call, some servers give calls no id, and some write no arguments as no text."""
    async with stub_cluster(tmp_path) as (cluster, stub):
        claude = anthropic.AsyncAnthropic(base_url=cluster.url, api_key="none", max_retries=0)
        gpt = openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0)
        schema: Any = [{"name": "weather", "input_schema": {"type": "object"}}]
        function: Any = [{"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": False}]
        asked: Any = {"model": MODEL, "max_tokens": 20, "messages": [{"role": "user", "content": "Hi"}]}
        half = '{"city":"Os'
        async with claude, gpt:
            for finish, reason, status in (
                ("length", "max_tokens", "incomplete"),
                ("tool_calls", "end_turn", "completed"),
            ):
                stub.usual = Reply(calling(half, finish, id="c1"))
                message = await claude.messages.create(**asked, tools=schema)
                assert message.stop_reason == reason
                assert message.content[-1].text == half  # type: ignore[union-attr]
                response = await gpt.responses.create(model=MODEL, input="Hi", tools=function)
                assert (response.status, response.output_text) == (status, half)
                choice = (await cluster.chat(tools=TOOLS)).json()["choices"][0]
                assert choice["message"]["tool_calls"][0]["function"]["arguments"] == half, "as the upstream has it"
                assert choice["finish_reason"] == finish
            stub.usual = Reply(calling("", "tool_calls"))
            message = await claude.messages.create(**asked, tools=schema)
            assert message.stop_reason == "tool_use"
            assert message.content[-1].input == {} and message.content[-1].id  # type: ignore[union-attr]
            assert (await cluster.chat(tools=TOOLS)).json()["choices"][0]["message"]["tool_calls"][0]["id"]
            stream = await streamed_chat(cluster, tools=TOOLS)
            deltas = [chunk["choices"][0]["delta"] for chunk in stream.chunks]
            (piece,) = [d["tool_calls"][0] for d in deltas if "tool_calls" in d]
            assert piece["id"]


async def test_an_answer_that_a_filter_has_cut_does_not_look_whole(tmp_path: Path) -> None:
    async with stub_cluster(tmp_path) as (cluster, stub):
        stub.usual = Reply(sse(delta(content="a"), delta("content_filter"), "[DONE]"))
        claude = anthropic.AsyncAnthropic(base_url=cluster.url, api_key="none", max_retries=0)
        gpt = openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0)
        async with claude, gpt:
            asked: Any = {"model": MODEL, "max_tokens": 20, "messages": [{"role": "user", "content": "Hi"}]}
            assert (await claude.messages.create(**asked)).stop_reason == "refusal"
            response = await gpt.responses.create(model=MODEL, input="Hi")
            assert response.status == "incomplete" and response.incomplete_details is not None
            assert response.incomplete_details.reason == "content_filter"
            assert (await gpt.chat.completions.create(**asked)).choices[0].finish_reason == "content_filter"


async def test_what_is_not_told_of_a_cache_is_null(tmp_path: Path) -> None:
    async with stub_cluster(tmp_path) as (cluster, stub):
        stub.usual = Reply(sse(delta(content="a"), delta("stop"), usage(5, 1), "[DONE]"))
        assert (await cluster.chat()).json()["usage"]["prompt_tokens_details"] == {"cached_tokens": None}


async def test_a_server_of_http_1_0(tmp_path: Path) -> None:
    """Its answers end with their connection: whether one is whole, its last chunks say."""
    stub = StubUpstream()
    stub.old = True
    await stub.start()
    async with composite_cluster(tmp_path, [stub.url]) as cluster:
        assert (await cluster.chat()).json()["choices"][0]["message"]["content"] == "Hello"
        stub.replies.append(Reply(b'{"error": {"message": "no"}}', 400, "application/json"))
        refused = await cluster.chat()
        assert refused.status_code == 400 and refused.json()["error"]["message"].endswith(": no")
        stub.replies.append(Reply(sse(delta(content="half"))))
        stream = await streamed_chat(cluster)
        assert stream.error is not None and stream.error["code"] == "engine_lost"
        await cluster.until_free()
    await stub.die()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"top_k": 5}, "top_k"),
        ({"chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
        ({"logprobs": True}, "logprobs"),
        ({"cache_prompt": False}, "cache_prompt"),
        ({"max_tokens": 4096}, "max_tokens"),
    ],
)
async def test_what_cannot_be_promised_is_refused_by_name(tmp_path: Path, fields: dict[str, Any], param: str) -> None:
    async with stub_cluster(tmp_path) as (cluster, stub):
        for stream in (False, True):
            answer = await cluster.chat(**fields, stream=stream)
            assert answer.status_code == 400, answer.text
            assert answer.json()["error"]["param"] == param
        assert not stub.asked, "nothing has gone there"
        await cluster.until_free()


async def test_fields_that_the_operator_vouches_for(tmp_path: Path) -> None:
    async with stub_cluster(tmp_path, upstream_fields=frozenset({"top_k"})) as (cluster, stub):
        assert (await cluster.chat(top_k=5)).status_code == 200
        assert stub.asked[-1].body["top_k"] == 5
        assert (await cluster.chat(min_p=0.1)).json()["error"]["param"] == "min_p"


async def test_a_span_of_a_session_says_where_it_was(tmp_path: Path) -> None:
    given: list[Span] = []
    async with stub_cluster(tmp_path, spans=given.append) as (cluster, _):
        session = (await cluster.chat()).headers["shardline-route-session"]
        await cluster.until_free()
        (hop,) = (await cluster.record(session))["route"]["hops"]

        async def told() -> bool:
            return bool(given)

        await until(told)
    assert (given[0].name, given[0].attributes["shardline.node"]) == ("session", hop["node"])
    assert given[0].attributes["shardline.route"]


async def test_what_the_upstream_refuses_keeps_its_status(tmp_path: Path) -> None:
    refused = {"error": {"message": "max_tokens is too large", "code": 400}}
    too_long = {"error": {"message": "too long", "code": "context_length_exceeded"}}
    async with stub_cluster(tmp_path) as (cluster, stub):
        for status, body, found in (
            (400, refused, (400, "invalid_value")),
            (400, too_long, (400, "context_length_exceeded")),
            (429, {"error": {"message": "full"}}, (503, "capacity")),
            (500, {"detail": "boom"}, (502, "engine_error")),
            (307, {}, (502, "engine_error")),
        ):
            reply = Reply(json.dumps(body).encode(), status, "application/json", headers="location: http://x/\r\n")
            for stream in (False, True):
                stub.replies.append(reply)
                with capture_logs() as lines:
                    answer = await cluster.chat(stream=stream)
                assert (answer.status_code, answer.json()["error"]["code"]) == found, answer.text
                (told,) = [line for line in lines if line["event"] == "upstream_refused"]
                assert told.keys() == {"event", "log_level", "status"}, "its words may quote the request"
        assert len(stub.asked) == 10, "no redirect was followed, and nothing repeated"
        assert (await cluster.chat()).status_code == 200
        await cluster.until_free()


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"<html>no stream</html>\n", "engine_error"),
        (b"data: {not json}\n\n", "engine_error"),
        (sse({"choices": [{"index": 3, "delta": {"content": "x"}}]}), "engine_error"),
        (sse(delta(content="x" * 200_000)), "engine_error"),
        (sse(delta(content="a"), {"error": {"message": "CUDA out of memory"}}), "engine_error"),
        (sse(delta(content="a"), delta("abort")), "engine_error"),
        (sse(delta(content="a")), "engine_lost"),
        (b"", "engine_lost"),
        (b"x" * (2 << 20), "engine_lost"),
    ],
)
async def test_garbage_fails_one_request_and_frees_it(tmp_path: Path, body: bytes, code: str) -> None:
    async with stub_cluster(tmp_path) as (cluster, stub):
        stub.replies.append(Reply(body))
        stream = await streamed_chat(cluster, max_tokens=16)
        assert stream.error is not None and stream.error["code"] == code
        assert stream.response.status_code == (200 if stream.chunks else 502), "an answer that began is a stream"
        await until(lambda: answers(cluster))
        await cluster.until_free()


async def test_an_answer_that_is_no_stream_says_so(tmp_path: Path) -> None:
    """A server that does not stream, or fails with a success; one that redirects, with an answer behind it; one whose
    errors quote what it was sent."""
    echo = {"error": {"message": "you sent Authorization: Bearer secret-of-the-upstream"}}
    json_kind = "application/json; charset=utf-8"
    replies = [
        (Reply(b'{"error": {"message": "no"}}', kind=json_kind), 502, "application/json"),
        (Reply(b'{"choices": []}', kind=json_kind), 502, "application/json"),
        (Reply(said("not", "this"), 302), 502, "a redirect"),
        (Reply(said("not", "this"), 206), 502, "status 206"),
        *((Reply(json.dumps(echo).encode(), status, json_kind), told, "[key]") for status, told in (
            (400, 400), (404, 502), (429, 503), (500, 502),
        )),
        (Reply(sse(echo)), 502, "[key]"),
    ]  # fmt: skip
    async with stub_cluster(tmp_path, upstream_key="secret-of-the-upstream") as (cluster, stub):
        with capture_logs() as logs:
            for reply, status, words in replies:
                for stream in (False, True):
                    stub.replies.append(reply)
                    answer = await cluster.chat(stream=stream)
                    assert (answer.status_code, words in answer.text) == (status, True), answer.text
                    assert "secret-of-the-upstream" not in answer.text
        assert "secret-of-the-upstream" not in str(logs)
        await cluster.until_free()


async def test_an_answer_that_drips_for_ever_has_an_end(tmp_path: Path) -> None:
    """Chunks without a text are signs of life; a session has a limit all the same."""
    settings = Settings(drain_s=0.5, session_s=0.5)
    async with stub_cluster(tmp_path, settings=settings) as (cluster, stub):
        stub.replies.append(Reply(sse(delta(content="a")), then="drip"))
        stream = await streamed_chat(cluster)
        assert stream.error is not None
        assert (stream.error["code"], stream.error["limit"]) == ("deadline", "session")
        assert stream.error["tokens_delivered"] is None, "in tokens, nobody knows"
        await asyncio.wait_for(stub.asked[-1].left.wait(), 1)
        await cluster.until_free()


async def test_numbers_of_any_size_in_a_schema(tmp_path: Path) -> None:
    """They are the upstream's to judge."""
    async with stub_cluster(tmp_path) as (cluster, stub):
        schema = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 10**30}}}
        tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
        answer = await cluster.chat(tools=[tool])
        assert answer.status_code == 200, answer.text
        assert stub.asked[-1].body["tools"][0]["function"]["parameters"]["properties"]["n"]["maximum"] == 10**30


async def answers(cluster: CompositeCluster) -> bool:
    return bool((await cluster.chat()).status_code == 200)


async def test_its_death_in_mid_stream_is_told_at_once_and_its_return_found_out(tmp_path: Path) -> None:
    async with stub_cluster(tmp_path) as (cluster, stub):
        stub.replies.append(Reply(sse(delta(content="one"), delta(content=" two")), then="hang"))
        body = cluster.body(max_tokens=50, stream=True)
        async with cluster.http.stream("POST", f"{cluster.url}/v1/completions", json=body) as response:
            stream = Stream(response)
            await stream.next()
            killed = time.monotonic()
            await stub.die()
            await stream.read_all()
        assert stream.error is not None and stream.error_at is not None
        assert stream.error_at - killed < 1
        assert (stream.error["code"], stream.error["node"]) == ("engine_lost", cluster.nodes[0].node)
        assert stream.error["retryable"] and stream.error["tokens_delivered"] is None
        await cluster.until_free()
        refused = await cluster.chat()
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "model_unavailable"
        await stub.start()
        await until(lambda: answers(cluster))
        info = await cluster.info(0)
        assert info.health.restarts == 1 and info.shards[0].state == "ready"


async def test_silence_has_a_limit_before_the_first_word_and_after_it(tmp_path: Path) -> None:
    settings = Settings(drain_s=0.5, prefill_chunk_s=0.6, step_s=0.3, beat_interval_s=0.1, beat_timeout_s=1.0)
    async with stub_cluster(tmp_path, settings=settings) as (cluster, stub):
        # Keep-alives are no answer.
        stub.replies.append(Reply(b": still here\n\n", then="hang"))
        answer = await cluster.chat()
        assert (answer.status_code, answer.json()["error"]["limit"]) == (504, "prefill_chunk")
        await until(lambda: answers(cluster))
        stub.replies.append(Reply(sse(delta(content="a")), then="hang"))
        hung = len(stub.asked)
        stream = await streamed_chat(cluster)
        assert stream.error is not None
        assert (stream.error["code"], stream.error["limit"]) == ("deadline", "step")
        await asyncio.wait_for(stub.asked[hung].left.wait(), 1)
        await cluster.until_free()


async def test_whoever_leaves_frees_the_upstream(tmp_path: Path) -> None:
    async with stub_cluster(tmp_path) as (cluster, stub):
        for way in ("leave", "delete"):
            stub.replies.append(Reply(sse(delta(content="a")), then="hang"))
            body = cluster.body(max_tokens=50, stream=True)
            async with cluster.http.stream("POST", f"{cluster.url}/v1/completions", json=body) as response:
                stream = Stream(response)
                await stream.next()
                if way == "delete":
                    await cluster.http.delete(f"{cluster.url}/v1/route-sessions/{stream.session_id}")
            await asyncio.wait_for(stub.asked[-1].left.wait(), 1)
            await cluster.until_free()
        assert [session["phase"] for session in await cluster.sessions()] == ["cancelled", "cancelled"]


async def test_places_are_counted(tmp_path: Path) -> None:
    settings = Settings(drain_s=0.5, queue_wait_s=0.3)
    async with stub_cluster(tmp_path, settings=settings, places=1) as (cluster, stub):
        stub.replies.append(Reply(sse(delta(content="a")), then="hang"))
        async with cluster.http.stream(
            "POST", f"{cluster.url}/v1/completions", json=cluster.body(stream=True)
        ) as response:
            stream = Stream(response)
            await stream.next()
            kv = (await cluster.info(0)).kv
            assert (kv.capacity_tokens, kv.reserved_tokens, kv.sessions) == (4096, 4096, 1)
            full = await cluster.chat()
            assert (full.status_code, full.json()["error"]["code"]) == (503, "capacity")
        await until(lambda: answers(cluster))


async def test_a_slow_start_is_waited_for(tmp_path: Path) -> None:
    stub = StubUpstream()
    await stub.start()
    await stub.die()
    async with composite_cluster(tmp_path) as cluster:
        node = await cluster.start_composite(stub.url)
        await node.until("waiting")

        async def is_known() -> bool:
            return bool((await cluster.chat()).status_code == 503)

        await until(is_known)
        stub.replies.append(Reply(b'{"error": {"message": "loading model"}}', 503, "application/json"))
        await stub.start()
        await node.until("ready")
        assert await answers(cluster)
    await stub.die()


@pytest.mark.parametrize(
    ("models", "status", "more", "param"),
    [
        ({"data": [{"id": "another", "max_model_len": 9}]}, 200, {}, "model"),
        ({"data": [{"id": MODEL}]}, 200, {}, "context_length"),
        ({"error": {"message": "no"}}, 401, {}, "upstream_key_file"),
        ({"data": [{"id": MODEL, "max_model_len": 9}]}, 200, {"upstream_ca": Path("ca.pem")}, "upstream_ca"),
    ],
)
async def test_what_its_operator_must_correct_ends_the_start(
    tmp_path: Path, models: Any, status: int, more: Any, param: str
) -> None:
    stub = StubUpstream()
    stub.models, stub.models_status = models, status
    await stub.start()
    async with composite_cluster(tmp_path) as cluster:
        node = await cluster.start_composite(stub.url, **more)
        assert node.task is not None
        with pytest.raises(ShardlineError) as refused:
            await asyncio.wait_for(asyncio.shield(node.task), 10)
        assert refused.value.param == param
        assert (await cluster.get("/v1/models"))[1]["data"] == [], "what never served leaves no model behind"
        assert (await TrackerClient(cluster.client, cluster.tracker.url).nodes())["nodes"] == [], "nobody heard of it"
    await stub.die()


async def test_a_start_that_fails_late_leaves_no_model(tmp_path: Path) -> None:
    """Its server was not there at first, so that the Node was known; then it came, without the model."""
    stub = StubUpstream()
    await stub.start()
    await stub.die()
    async with composite_cluster(tmp_path) as cluster:
        node = await cluster.start_composite(stub.url)

        async def listed() -> list[tuple[bool, list[Any]]]:
            return [(m["ready"], m["missing"]) for m in (await cluster.get("/v1/models"))[1]["data"]]

        async def is_known() -> bool:
            return await listed() == [(False, [])]

        await until(is_known)
        error = (await cluster.chat()).json()["error"]
        assert error["code"] == "model_unavailable" and "layer" not in error["message"] + error["advice"]
        stub.models = {"data": [{"id": "another", "max_model_len": 9}]}
        await stub.start()
        assert node.task is not None
        await asyncio.wait({node.task}, timeout=10)
        assert isinstance(node.task.exception(), ShardlineError)

        async def is_gone() -> bool:
            return await listed() == []

        await until(is_gone)
        assert (await cluster.chat()).json()["error"]["code"] == "model_not_found"
    await stub.die()


async def test_what_is_told_of_it_makes_up_no_layers(tmp_path: Path) -> None:
    async with stub_cluster(tmp_path) as (cluster, _):
        telemetry = (await cluster.chat()).json()["telemetry"]
        assert telemetry["route"]["n_layers"] is None
        assert [hop["layers"] for hop in telemetry["route"]["hops"]] == [None]
        (group,) = (await TrackerClient(cluster.client, cluster.tracker.url).explain(cluster.model))["groups"]
        assert group["composite"] and group["missing"] == []
        body = {"model": cluster.model, "input": ["some text"]}
        refused = await cluster.http.post(f"{cluster.url}/v1/embeddings", json=body)
        error = refused.json()["error"]
        assert (refused.status_code, error["code"], error["param"]) == (400, "invalid_value", "model")
        assert error["message"].startswith(f"no embeddings for the model '{cluster.model}'")


async def test_two_of_one_model_and_a_hung_one_is_left_out(tmp_path: Path) -> None:
    stubs = [StubUpstream(), StubUpstream()]
    for stub in stubs:
        await stub.start()
    settings = Settings(drain_s=0.5, control_s=1.0)
    async with composite_cluster(tmp_path, [stub.url for stub in stubs], settings=settings) as cluster:
        (model,) = (await cluster.get("/v1/models"))[1]["data"]
        assert model["ready"]
        stubs[0].models_hang = True

        async def one_is_out() -> bool:
            return [(await cluster.info(i)).shards[0].state for i in range(2)] == ["loading", "ready"]

        await until(one_is_out)
        stubs[0].asked.clear()
        for _ in range(3):
            assert await answers(cluster)
        assert not stubs[0].asked
    for stub in stubs:
        await stub.die()


async def test_a_gateway_as_the_upstream(tmp_path: Path) -> None:
    """A real server of the API: a whole cluster of our own, two Nodes, behind a composite one."""
    from tests.support.fronted import fronted_cluster

    async with fronted_cluster(tmp_path, answer=[f" t{i}" for i in range(40)], decode_ms=5) as (front, behind):
        answer = (await front.chat(max_tokens=6, temperature=0)).json()
        assert answer["choices"][0]["message"]["content"] == " t0 t1 t2 t3 t4 t5"
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == 6 and answer["usage"]["prompt_tokens"] > 0
        text = (await front.ask("Hi", max_tokens=3)).json()
        assert text["choices"][0]["text"] == " t0 t1 t2"
        body = front.body(max_tokens=30, stream=True)
        async with front.http.stream("POST", f"{front.url}/v1/completions", json=body) as response:
            await Stream(response).read_tokens(2)
        left = time.monotonic()
        await until(lambda: is_over(behind))
        assert time.monotonic() - left < 1
        await front.until_free()
        await behind.until_free()


async def is_over(cluster: Any) -> bool:
    return (await cluster.sessions())[0]["phase"] == "cancelled"
