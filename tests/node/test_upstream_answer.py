"""Lines of an upstream's stream into events: what counts as an answer, and what is none."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardline.errors import ShardlineError
from shardline.node.upstream_answer import UpstreamAnswer, words_of
from shardline.wire.composite import Answered, CallPiece, Taken, Text, UpstreamUsage


def line(**chunk: Any) -> bytes:
    return b"data: " + json.dumps(chunk).encode()


def chat(finish: str | None = None, /, **delta: Any) -> bytes:
    return line(choices=[{"index": 0, "delta": delta, "finish_reason": finish}])


def read(*lines: bytes, stops: tuple[str, ...] = ()) -> list[Any]:
    answer = UpstreamAnswer(16, stops)
    return [event for each in lines for event in answer.push(each)]


def test_a_whole_answer() -> None:
    usage = {"prompt_tokens": 5, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}
    events = read(
        b": ping\r", b"", b"event: message", chat(role="assistant", content=""), chat(reasoning="Hm. "),
        chat(content="Hi"), chat("stop"), line(choices=[], usage=usage), b"data: [DONE]\r", b"data: whatever",
    )  # fmt: skip
    told = UpstreamUsage(prompt_tokens=5, completion_tokens=2, cached_tokens=4)
    assert events == [Taken(), Text(reasoning="Hm. "), Text(text="Hi"), Answered(reason="stop", usage=told)]


def test_usage_is_null_where_none_is_told() -> None:
    assert read(chat("length", content="a"), b"data: [DONE]")[-1] == Answered(reason="length")


def test_calls_make_the_end_one_of_calls() -> None:
    call = {"index": 1, "id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    events = read(chat(tool_calls=[call]), chat("stop"), b"data: [DONE]")
    assert events[1] == Text(calls=[CallPiece(index=1, id="c", name="f", arguments="{}")])
    assert events[-1].reason == "tool_calls"


def test_an_empty_reason_is_none() -> None:
    """Some servers have one in every chunk."""
    assert read(chat("", content="a"), chat("", content="b"), chat("length"), b"data: [DONE]")[1:] == [
        Text(text="a"),
        Text(text="b"),
        Answered(reason="length"),
    ]


def test_its_errors_do_not_quote_what_is_secret() -> None:
    said = {"message": "wrong key: sk-1", "code": 500}
    for bad in (line(error=said), line(object="error", **said)):
        with pytest.raises(ShardlineError) as failed:
            UpstreamAnswer(16, secret="sk-1").push(bad)
        assert (failed.value.code, failed.value.message) == ("engine_error", "the upstream failed: wrong key: [key]")
    long = json.dumps({"error": "x" * 498 + "sk-1" + "y"}).encode()
    assert "s" not in words_of(long, "sk-1"), "nor its beginning, where the words are cut"


def test_the_stop_string_only_where_it_was_asked_for() -> None:
    ending = line(choices=[{"index": 0, "text": "", "finish_reason": "stop", "stop_reason": "END"}])
    assert read(ending, b"data: [DONE]", stops=("END",))[-1].stop == "END"
    assert read(ending, b"data: [DONE]", stops=("other",))[-1].stop is None


@pytest.mark.parametrize(
    "bad",
    [
        b"{}",
        b"data: null",
        b"data: {",
        b"data: \xff",
        b"data: " + b"[" * 100_000,
        line(choices=[{"index": 0, "delta": {"content": 7}}]),
        line(choices=[{"index": 1, "delta": {}}]),
        line(choices=[{"delta": {}}, {"delta": {}}]),
        line(choices=[{"delta": {"tool_calls": [{"index": -1}]}}]),
        line(choices=[{"delta": {"tool_calls": [{"index": 10**9}]}}]),
        line(choices=[], usage={"prompt_tokens": -1, "completion_tokens": 1}),
        line(choices=[], usage={"prompt_tokens": 1, "completion_tokens": 10**15}),
        line(usage={"prompt_tokens": 1, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 2}}),
        line(error={"message": "out of memory"}),
        line(object="error", message="out of memory"),
        line(choices=[{"delta": {"tool_calls": [{"id": "x" * 200_000}]}}]),
        b"data: NaN",
        b'data: {"choices": [], "usage": {"prompt_tokens": NaN, "completion_tokens": 1}}',
        b'data: {"choices": [], "usage": {"prompt_tokens": 1e400, "completion_tokens": 1}}',
        b'data: {"choices": [{"delta": {"content": "\\ud800"}}]}',
        chat("abort"),
        chat(content="x" * 200_000),
    ],
)  # fmt: skip
def test_what_is_no_answer(bad: bytes) -> None:
    with pytest.raises(ShardlineError) as refused:
        read(bad)
    assert refused.value.code == "engine_error"


@pytest.mark.parametrize(
    "small", [{"content": "x"}, {"reasoning": "x"}, {"tool_calls": [{"function": {"arguments": "x"}}]}]
)
def test_an_answer_in_endlessly_many_pieces(small: dict[str, Any]) -> None:
    """Each takes memory on its way, however small it is."""
    with pytest.raises(ShardlineError, match="more than the tokens"):
        read(*[chat(**small)] * 5_000)


def test_text_behind_the_end_and_no_end() -> None:
    with pytest.raises(ShardlineError, match="behind the end"):
        read(chat("stop"), chat(content="more"))
    with pytest.raises(ShardlineError) as lost:
        read(chat(content="half"), b"data: [DONE]")
    assert lost.value.code == "engine_lost"


@given(st.lists(st.binary(max_size=60) | st.builds(lambda raw: b"data: " + raw, st.binary(max_size=60)), max_size=8))
def test_whatever_comes_is_read_or_refused(lines: list[bytes]) -> None:
    try:
        for event in read(*lines):
            assert isinstance(event, Taken | Text | Answered)
    except ShardlineError as error:
        assert error.code in ("engine_error", "engine_lost")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"error": {"message": "no\\nroom"}}', "no room"),
        (b'{"error": "plain"}', "plain"),
        (b'{"detail": "other"}', "other"),
        (b'{"message": "bare"}', "bare"),
        (b"<html>", "no reason given"),
        (b'{"error": {"message": ["x"]}}', "no reason given"),
        (b"[" * 100_000, "no reason given"),
    ],
)
def test_words_of_an_error(body: bytes, words: str) -> None:
    assert words_of(body) == words
    assert len(words_of(json.dumps({"error": "x" * 10_000}).encode())) == 500
