"""Shapes of answers: the objects that other people's clients read."""

from __future__ import annotations

import math
from typing import Any

import pytest

from shardline.gateway.detokenize import ShownToken, Vocabulary
from shardline.gateway.openai_answers import (
    UNLIKELY,
    Envelope,
    Usage,
    WholeChoice,
    fingerprint,
    layers_text,
    model_entry,
    prompt_progress,
    timings,
)
from shardline.settings import Settings
from shardline.wire.messages import Token, TokenLogprob
from shardline.wire.telemetry import PrefillView
from tests.support.gateway_stand import bundle, model

VOCABULARY = Vocabulary(bundle())


def envelope(*, chat: bool = True, logprobs: int | None = None) -> Envelope:
    return Envelope(
        id="x-1", created=7, model="m", fingerprint="fp_1", chat=chat, vocabulary=VOCABULARY, logprobs=logprobs
    )


def shown(token: int, start: int, logprob: float | None = -0.5, *top: tuple[int, float]) -> ShownToken:
    others = [TokenLogprob(id=i, logprob=p) for i, p in top]
    return ShownToken(Token(id=token, index=0, logprob=logprob, top=others), start)


SHARED = {"id": "x-1", "created": 7, "model": "m", "system_fingerprint": "fp_1"}


def test_chat_chunks() -> None:
    made = envelope()
    head = {**SHARED, "object": "chat.completion.chunk"}
    rest = {"logprobs": None, "finish_reason": None}
    assert made.opening(1) == {
        **head,
        "choices": [{"index": 1, "delta": {"role": "assistant", "content": ""}, **rest}],
    }
    assert made.delta(0, "hi", ()) == {**head, "choices": [{"index": 0, "delta": {"content": "hi"}, **rest}]}
    assert made.finish(0, "length") == {
        **head,
        "choices": [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "length"}],
    }
    assert made.beside(0, telemetry=5)["telemetry"] == 5
    usage = Usage(prompt_tokens=3, completion_tokens=4, cached_tokens=1)
    assert made.usage(usage) == {
        **head,
        "choices": [],
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 4,
            "total_tokens": 7,
            "prompt_tokens_details": {"cached_tokens": 1},
        },
    }


def test_text_chunks() -> None:
    made = envelope(chat=False)
    assert made.delta(0, "hi", ()) == {
        **SHARED,
        "object": "text_completion",
        "choices": [{"index": 0, "text": "hi", "logprobs": None, "finish_reason": None}],
    }
    assert made.finish(0, "stop")["choices"][0] == {
        "index": 0,
        "text": "",
        "logprobs": None,
        "finish_reason": "stop",
    }


def test_whole_answers() -> None:
    choice = WholeChoice(text="hi", tokens=(), finish_reason="stop", telemetry={"phase": "completed"})
    usage = Usage(prompt_tokens=1, completion_tokens=1, cached_tokens=0)
    answer = envelope().whole([choice], usage, offsets=[0])
    assert answer["object"] == "chat.completion"
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "hi", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    assert answer["telemetry"] == {"phase": "completed"}
    both = envelope(chat=False).whole([choice, choice], usage, offsets=[0, 0])
    assert [c["index"] for c in both["choices"]] == [0, 1]
    assert all(c["telemetry"] == {"phase": "completed"} for c in both["choices"])


def test_chat_logprobs() -> None:
    chunk = envelope(logprobs=1).delta(0, "a", [shown(97, 0, -0.25, (97, -0.25), (98, -2.0))])
    assert chunk["choices"][0]["logprobs"] == {
        "content": [
            {
                "token": "a",
                "logprob": -0.25,
                "bytes": [97],
                "top_logprobs": [{"token": "a", "logprob": -0.25, "bytes": [97]}],
            }
        ],
        "refusal": None,
    }
    chosen_only = envelope(logprobs=0).delta(0, "a", [shown(97, 0)])
    assert chosen_only["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


def test_text_logprobs() -> None:
    tokens = [shown(97, 0, -0.25, (98, -0.1), (97, -0.25)), shown(0xE6, 1, -3.0, (98, -0.1))]
    logprobs = envelope(chat=False, logprobs=1).delta(0, "a", tokens, offset=10)["choices"][0]["logprobs"]
    assert logprobs == {
        "tokens": ["a", "bytes:\\xe6"],
        "token_logprobs": [-0.25, -3.0],
        "top_logprobs": [{"b": -0.1, "a": -0.25}, {"b": -0.1, "bytes:\\xe6": -3.0}],
        "text_offset": [10, 11],
    }


@pytest.mark.parametrize(("sent", "expected"), [(-math.inf, UNLIKELY), (math.nan, None), (None, None), (-1.5, -1.5)])
def test_logprobs_are_finite_or_null(sent: float | None, expected: float | None) -> None:
    chunk = envelope(logprobs=0).delta(0, "a", [shown(97, 0, sent)])
    assert chunk["choices"][0]["logprobs"]["content"][0]["logprob"] == expected


def test_timings_have_no_rate_over_no_time() -> None:
    nothing: dict[str, Any] = timings(5, 5, 0, {"prompt_ms": None, "predicted_ms": None})
    assert nothing == {
        "cache_n": 5,
        "prompt_n": 0,
        "prompt_ms": None,
        "prompt_per_token_ms": None,
        "prompt_per_second": None,
        "predicted_n": 0,
        "predicted_ms": None,
        "predicted_per_token_ms": None,
        "predicted_per_second": None,
    }
    one = timings(5, 0, 1, {"prompt_ms": 0.0, "predicted_ms": 0.0})
    assert (one["prompt_per_second"], one["predicted_per_second"], one["predicted_per_token_ms"]) == (None, None, None)
    some = timings(10, 2, 5, {"prompt_ms": 4.0, "predicted_ms": 40.0})
    assert (some["prompt_per_token_ms"], some["prompt_per_second"]) == (0.5, 2000.0)
    assert (some["predicted_per_token_ms"], some["predicted_per_second"]) == (10.0, 100.0)


def test_prompt_progress_counts_cached_tokens_as_processed() -> None:
    assert prompt_progress(PrefillView(done=0, total=8), 4, 1.23456) == {
        "total": 8,
        "cache": 4,
        "processed": 4,
        "time_ms": 1.235,
    }


def test_fingerprint_follows_engine_and_files() -> None:
    one = fingerprint(model(b"", ""))
    assert one == fingerprint(model(b"other", "x"))
    assert len({one, fingerprint(model(b"", "", engine_class="e")), fingerprint(model(b"", "", content_id="d"))}) == 3


def test_model_entries_say_what_is_missing() -> None:
    entry = model_entry(model(b"", "", ready=False, missing=[(1, 3)]), Settings(default_max_tokens=9), 5)
    assert (entry["id"], entry["object"], entry["ready"], entry["missing"]) == ("tiny", "model", False, [[1, 3]])
    assert (entry["default_max_tokens"], entry["context_length"], entry["created"]) == (9, 4096, 5)
    assert layers_text([(10, 20), (24, 30)]) == "10:20, 24:30"
