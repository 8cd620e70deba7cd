"""Streams event by event: text, ends, errors, usage, telemetry, keep-alive."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from shardline.errors import ShardlineError
from shardline.gateway.template import Templates
from shardline.settings import Settings
from tests.support.gateway_stand import (
    END,
    Act,
    Fail,
    Json,
    Open,
    Piece,
    Prefilled,
    Refuse,
    Stand,
    Wait,
    chat,
    events_of,
    say,
    standing,
)

SETTINGS = Settings(keep_alive_comment_s=0.15, telemetry_comment_s=0.05, client_stall_s=0.5)
PIECES = [
    b"\xe6\xad",
    b"\xf0\x9f",
    b"alpha",
    b" beta",
    b" gam",
    b"ma delta",
    b"xxENDyy",
    b"Mars?\nBob",
    "Grüße ".encode(),
    b"one",
    b"two",
    b"three",
]
LOST = ShardlineError("node_lost", "n-1 is gone", node="n-1", layers=[0, 4], phase="decode")


@pytest.fixture
async def stand(tmp_path: Path, shared_templates: Templates) -> AsyncIterator[Stand]:
    made = Stand(settings=SETTINGS, pieces=PIECES)
    async with standing(tmp_path, stand=made, templates=shared_templates):
        yield made


def text_of(events: list[Json], index: int = 0) -> str:
    out = ""
    for event in events:
        for choice in event["choices"]:
            if choice["index"] == index:
                out += choice.get("text", "") + (choice.get("delta") or {}).get("content", "")
    return out


def reasons_of(events: list[Json], index: int = 0) -> list[str]:
    """All finish reasons that are not null; null is on every other chunk."""
    return [
        choice["finish_reason"]
        for event in events
        for choice in event["choices"]
        if choice["index"] == index and choice["finish_reason"] is not None
    ]


TEXTS: list[tuple[list[Act], dict[str, Any], str, str, int]] = [
    (say(b"\xe6\xad", b"\xaa"), {}, "歪", "stop", 2),
    (say(b"\xf0\x9f", b"\x98", b"\x80"), {}, "😀", "stop", 3),
    (say(b"\xf0\x9f", b"\x98", b"\x80"), {"logprobs": 2}, "😀", "stop", 3),
    (say(b"\xe6\xad"), {}, "\ufffd", "stop", 1),
    (say(b"a", END, b"b"), {}, "ab", "stop", 3),
    (say(b"alpha", b" beta", b" gam", b"ma delta"), {"stop": ["beta gamma"]}, "alpha ", "stop", 4),
    (say(b"xxENDyy"), {"stop": ["END", "EN"]}, "xx", "stop", 1),
    (say(b"Mars?\nBob"), {"stop": ["?\n"]}, "Mars", "stop", 1),
    (say(b"one", b"two"), {"stop": None}, "onetwo", "stop", 2),
    (say(b"one", b"two"), {"stop": []}, "onetwo", "stop", 2),
    (say(b"one", b"two", b"three"), {"max_tokens": 1}, "one", "length", 1),
    (say(b"one", b"two", b"three"), {"max_tokens": 2, "stop": "two"}, "one", "stop", 2),
    (say(b"one", b"two"), {"max_tokens": 3}, "onetwo", "stop", 2),
    (say(), {}, "", "stop", 0),
]


@pytest.mark.parametrize(("acts", "fields", "text", "reason", "tokens"), TEXTS, ids=lambda v: str(v)[:30])
async def test_streamed_and_whole_are_the_same(
    stand: Stand, acts: Sequence[Act], fields: dict[str, Any], text: str, reason: str, tokens: int
) -> None:
    stand.script = lambda request: acts
    whole = (await stand.complete(**fields)).json()
    assert whole["choices"][0]["text"] == text
    assert whole["choices"][0]["finish_reason"] == reason
    assert whole["usage"]["completion_tokens"] == tokens
    answer = await stand.complete(stream=True, stream_options={"include_usage": True}, **fields)
    events, _, done = events_of(answer.content)
    assert done
    assert text_of(events) == text
    assert reasons_of(events) == [reason]
    assert events[-1]["usage"]["completion_tokens"] == tokens
    if text != "\ufffd":
        assert "\ufffd" not in answer.text
    assert all(generation.stopped == (text != "onetwo" and "stop" in fields) for generation in stand.generations)


async def test_the_frame_of_a_chat_stream(stand: Stand) -> None:
    stand.script = lambda request: say(b"one", b"two")
    answer = await stand.chat(stream=True)
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.headers["x-accel-buffering"] == "no"
    assert "content-length" not in answer.headers and "content-encoding" not in answer.headers
    assert answer.headers["shardline-route-session"] == "rs-0"
    events, _, done = events_of(answer.content)
    assert done
    for name in ("id", "created", "model", "system_fingerprint", "object"):
        assert len({event[name] for event in events}) == 1
    assert events[0]["object"] == "chat.completion.chunk"
    assert [event["choices"][0]["delta"] for event in events] == [
        {"role": "assistant", "content": ""},
        {"content": "one"},
        {"content": "two"},
        {},
    ]
    assert [event["choices"][0]["finish_reason"] for event in events] == [None, None, None, "stop"]


@pytest.mark.parametrize(
    ("options", "asked"),
    [(None, False), ({}, False), ({"include_usage": False}, False), ({"include_usage": True}, True)],
)
async def test_usage_only_when_asked(stand: Stand, options: Any, asked: bool) -> None:
    events, _, done = events_of((await stand.chat(stream=True, stream_options=options)).content)
    assert done
    assert [("usage" in event) for event in events] == [False] * (len(events) - asked) + [True] * asked
    if asked:
        assert events[-1]["choices"] == []
        assert events[-1]["usage"]["total_tokens"] == 21 + 2


async def test_several_choices(stand: Stand) -> None:
    stand.script = lambda request: say(*[b"one", b"two", b"three"][: (request.sampling.seed or 0) - 6])
    answer = await stand.chat(stream=True, n=3, seed=7, stream_options={"include_usage": True})
    assert answer.headers["shardline-route-session"] == "rs-0,rs-1,rs-2"
    events, _, done = events_of(answer.content)
    assert done
    assert [text_of(events, i) for i in range(3)] == ["one", "onetwo", "onetwothree"]
    assert [reasons_of(events, i) for i in range(3)] == [["stop"]] * 3
    assert events[-1]["usage"]["prompt_tokens"] == 21
    assert events[-1]["usage"]["completion_tokens"] == 6
    roles = [event["choices"][0]["delta"].get("role") for event in events if event["choices"]]
    assert roles.count("assistant") == 3
    whole = (await stand.chat(n=3, seed=7)).json()
    assert [choice["message"]["content"] for choice in whole["choices"]] == ["one", "onetwo", "onetwothree"]
    assert whole["usage"]["completion_tokens"] == 6


# ---- errors ------------------------------------------------------------------------------------------------------


def one_error(events: list[Json], done: bool) -> Json:
    assert not done
    assert [("error" in event) for event in events] == [False] * (len(events) - 1) + [True]
    assert not reasons_of(events[:-1])
    error: Json = events[-1]["error"]
    assert {"message", "type", "param", "code", "retryable", "advice"} <= set(error)
    return error


async def test_a_failure_in_the_stream_is_its_only_end(stand: Stand) -> None:
    stand.script = lambda request: [*say(b"one", b"two"), Fail(LOST)]
    answer = await stand.chat(stream=True)
    assert answer.status_code == 200
    events, _, done = events_of(answer.content)
    error = one_error(events, done)
    assert (error["code"], error["node"], error["layers"]) == ("node_lost", "n-1", [0, 4])
    assert (error["tokens_delivered"], error["route_sessions"]) == (2, ["rs-0"])
    assert text_of(events[:-1]) == "onetwo"


async def test_text_in_front_of_a_failure_is_delivered_in_the_same_breath(stand: Stand) -> None:
    stand.script = lambda request: [Piece(b"one"), Piece(b"two"), Fail(LOST)]
    events, _, done = events_of((await stand.complete(stream=True)).content)
    one_error(events, done)
    assert text_of(events[:-1]) == "onetwo"


@pytest.mark.parametrize("failure", [ZeroDivisionError("secret"), ShardlineError("cancelled", "by its owner")])
async def test_whatever_fails_there_is_an_error_event(stand: Stand, failure: Exception) -> None:
    stand.script = lambda request: [*say(b"one"), Fail(failure)]
    answer = await stand.chat(stream=True)
    events, _, done = events_of(answer.content)
    assert one_error(events, done)["code"] in ("internal", "cancelled")
    assert "secret" not in answer.text


async def test_a_token_that_does_not_exist(stand: Stand) -> None:
    tokens = [-1, 275, 2**31]
    stand.script = lambda request: [*say(b"one"), Piece(tokens[-1])]
    while tokens:
        events, _, done = events_of((await stand.chat(stream=True)).content)
        assert one_error(events, done)["code"] == "engine_error"
        assert (await stand.chat()).status_code == 502
        tokens.pop()
    stand.script = lambda request: say(b"one")
    assert (await stand.chat()).status_code == 200


async def test_one_failed_choice_fails_the_answer_and_frees_the_others(stand: Stand) -> None:
    hung = asyncio.Event()
    scripts = iter([[*say(b"one"), Fail(LOST)], [*say(b"two"), Wait(hung)], say(b"three")])
    stand.script = lambda request: next(scripts)
    events, _, done = events_of((await stand.chat(stream=True, n=3)).content)
    assert not done and events[-1]["error"]["code"] == "node_lost"
    assert [generation.over for generation in stand.generations] == [True, True, True]
    assert stand.generations[1].cancelled is not None


# ---- before the route is open ------------------------------------------------------------------------------------


async def test_a_quick_refusal_has_its_status(stand: Stand) -> None:
    stand.script = lambda request: [Refuse(ShardlineError("queue_full", "full", retry_after=7))]
    answer = await stand.chat(stream=True)
    assert answer.status_code == 429
    assert answer.json()["error"]["type"] == "rate_limit_error"
    assert answer.headers["retry-after"] == "7"


async def test_one_of_several_that_is_refused_at_once(stand: Stand) -> None:
    scripts: Iterator[list[Act]] = iter(
        [[Wait(asyncio.Event()), Open()], [Refuse(ShardlineError("queue_full", "full", retry_after=7))]]
    )
    stand.script = lambda request: next(scripts)
    assert (await stand.chat(stream=True, n=2)).status_code == 429
    assert stand.generations[0].cancelled is not None


async def test_a_late_refusal_comes_as_an_event(stand: Stand) -> None:
    gate = asyncio.Event()
    stand.script = lambda request: [Wait(gate), Refuse(ShardlineError("capacity", "full"))]
    async with stand.http.stream("POST", f"{stand.url}/v1/chat/completions", json=chat(stream=True)) as answer:
        assert answer.status_code == 200
        lines = answer.aiter_lines()
        comments = 0
        async for line in lines:
            comments += line.startswith(": shardline")
            if comments == 3:
                gate.set()
                break
        rest = [line async for line in lines if line.startswith("data: ")]
    assert json.loads(rest[-1][6:])["error"]["code"] == "capacity"
    assert "data: [DONE]" not in rest


# ---- telemetry and keep-alive ------------------------------------------------------------------------------------


async def test_a_silent_prefill_is_kept_alive_by_comments(stand: Stand) -> None:
    gate = asyncio.Event()
    stand.script = lambda request: [Open(), Wait(gate), *say(b"one")]
    loop = asyncio.get_running_loop()
    gaps, last = [], loop.time()
    async with stand.http.stream("POST", f"{stand.url}/v1/chat/completions", json=chat(stream=True)) as answer:
        async for line in answer.aiter_lines():
            if line.startswith(":"):
                account = json.loads(line.removeprefix(": shardline "))
                assert account["id"] == "rs-0"
                gaps.append(loop.time() - last)
                last = loop.time()
                if len(gaps) == 5:
                    gate.set()
            elif line.startswith("data: {"):
                assert "telemetry" not in json.loads(line[6:])
    assert len(gaps) >= 5


async def test_comments_are_not_more_frequent_than_set(tmp_path: Path, shared_templates: Templates) -> None:
    settings = Settings(telemetry_comment_s=30.0, keep_alive_comment_s=60.0)
    async with standing(tmp_path, stand=Stand(settings=settings), templates=shared_templates) as stand:
        stand.script = lambda request: [Open(), *[Prefilled(i) for i in range(20)], *say(*[b"x"] * 50)]
        for count in (1, 4):
            _, comments, done = events_of((await stand.chat(stream=True, n=count)).content)
            assert done and len(comments) == 1


async def test_telemetry_as_a_field_for_those_who_ask(stand: Stand) -> None:
    gate = asyncio.Event()
    stand.script = lambda request: [Open(), Prefilled(7), Wait(gate), *say(b"one")]
    asyncio.get_running_loop().call_later(0.2, gate.set)
    answer = await stand.chat(stream=True, stream_options={"include_telemetry": True})
    events, comments, done = events_of(answer.content)
    assert done and comments
    views = [event["telemetry"] for event in events if "telemetry" in event]
    assert views[0]["phase"] in ("queued", "prefill")
    assert any(view["prefill"]["done"] == 7 for view in views)
    assert views[-1]["phase"] == "completed"
    assert all(event["choices"] for event in events)
    assert reasons_of(events) == ["stop"] and events[-1]["telemetry"] == views[-1]


async def test_prompt_progress(stand: Stand) -> None:
    stand.script = lambda request: [Open(), Prefilled(7), *say(), Prefilled(14), *say(b"one", b"two")]
    events, _, _ = events_of((await stand.chat(stream=True, return_progress=True)).content)
    progress = [event["prompt_progress"] for event in events if "prompt_progress" in event]
    assert progress[-1]["processed"] == progress[-1]["total"] == 21
    assert all(set(item) == {"total", "cache", "processed", "time_ms"} for item in progress)
    processed = [item["processed"] for item in progress]
    assert processed == sorted(set(processed))
    first_text = next(i for i, event in enumerate(events) if event["choices"][0]["delta"].get("content"))
    assert all("prompt_progress" not in event for event in events[first_text:])


async def test_timings_per_token(stand: Stand) -> None:
    stand.script = lambda request: say(b"one", b"two")
    events, _, _ = events_of((await stand.chat(stream=True, timings_per_token=True)).content)
    assert all(("timings" in event) == (not event["choices"][0]["delta"].get("role")) for event in events)
    assert events[-1]["timings"]["predicted_n"] == 2
    assert (await stand.chat(timings_per_token=True)).json()["timings"]["prompt_n"] == 21
    assert "timings" not in (await stand.chat()).json()


async def test_events_leave_one_by_one(stand: Stand) -> None:
    """Also for a client that would take them compressed: a compressor would hold them back."""
    gates = [asyncio.Event() for _ in range(3)]
    acts: list[Act] = []
    for piece, gate in zip((b"one", b"two", b"three"), gates, strict=True):
        acts += [Piece(piece), Wait(gate)]
    stand.script = lambda request: acts
    seen = []
    async with stand.http.stream(
        "POST",
        f"{stand.url}/v1/completions",
        json={"model": "tiny", "prompt": "a", "stream": True},
        headers={"accept-encoding": "gzip, br, zstd"},
    ) as answer:
        assert "content-encoding" not in answer.headers
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                text = json.loads(line[6:])["choices"][0]["text"]
                if text:
                    seen.append(text)
                    # Only now may the next one be made.
                    gates[len(seen) - 1].set()
    assert seen == ["one", "two", "three"]


# ---- records -----------------------------------------------------------------------------------------------------


async def test_the_telemetry_stream_of_a_session(stand: Stand) -> None:
    events = [(1, b'{"a":1}'), (2, b"silence"), (3, b'{"a":3}')]
    stand.sessions["rs-9"] = ("anybody", [*events[:1], *[(2, b"silence")] * 8, *events[2:]])
    answer = await stand.get("/v1/route-sessions/rs-9/telemetry")
    assert answer.headers["content-type"].startswith("text/event-stream")
    blocks = [block for block in answer.text.split("\n\n") if block]
    assert blocks[0] == 'id: 1\ndata: {"a":1}'
    assert blocks[-1] == 'id: 3\ndata: {"a":3}'
    assert ": shardline" in blocks[1:-1]
    again = await stand.get("/v1/route-sessions/rs-9/telemetry", **{"last-event-id": "1"})
    assert [block for block in again.text.split("\n\n") if block.startswith("id")] == ['id: 3\ndata: {"a":3}']


@pytest.mark.parametrize("sent", ["x", "-1", "1.5", "9" * 30])
async def test_a_last_event_id_that_is_none(stand: Stand, sent: str) -> None:
    stand.sessions["rs-9"] = ("anybody", [])
    answer = await stand.get("/v1/route-sessions/rs-9/telemetry", **{"last-event-id": sent})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "Last-Event-ID"


async def test_sessions_that_are_unknown(stand: Stand) -> None:
    for path in ("/v1/route-sessions/nope", "/v1/route-sessions/nope/telemetry", "/v1/route-sessions/..%2f..%2fetc"):
        answer = await stand.get(path)
        assert answer.status_code == 404
    answer = await stand.http.delete(f"{stand.url}/v1/route-sessions/nope")
    assert answer.json()["error"]["code"] == "session_not_found"


async def test_a_session_cancelled_by_request_ends_its_stream(stand: Stand) -> None:
    stand.script = lambda request: [*say(b"one"), Wait(asyncio.Event()), Fail(ShardlineError("cancelled", "ended"))]
    stand.sessions["rs-0"] = ("anybody", [])
    async with stand.http.stream("POST", f"{stand.url}/v1/chat/completions", json=chat(stream=True)) as answer:
        lines = answer.aiter_lines()
        async for line in lines:
            if "one" in line:
                break
        deleted = await stand.http.delete(f"{stand.url}/v1/route-sessions/rs-0")
        assert deleted.status_code == 200
        rest = [line async for line in lines if line.startswith("data: ")]
    assert "error" in json.loads(rest[-1][6:])
