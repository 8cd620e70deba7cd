"""Every field: what is taken, what is refused by name, what null means."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardline.errors import ShardlineError
from shardline.gateway.openai_requests import (
    Asked,
    ChatBody,
    ChatRequest,
    TextBody,
    TextRequest,
    chat_request,
    check_vocabulary,
    room,
    text_request,
)
from shardline.settings import Settings
from tests.support.gateway_stand import model

USER = [{"role": "user", "content": "Hi"}]
INT64 = 1 << 63


def chat(**fields: Any) -> ChatRequest:
    return chat_request(json.dumps({"model": "m", "messages": USER, **fields}).encode())


def text(**fields: Any) -> TextRequest:
    return text_request(json.dumps({"model": "m", "prompt": "Hi", **fields}).encode())


def refused(ask: Any, **fields: Any) -> ShardlineError:
    with pytest.raises(ShardlineError) as caught:
        ask(**fields)
    error = caught.value
    assert error.fault.status == 400
    assert error.param is not None
    return error


BAD_VALUES: list[tuple[str, Any]] = [
    *[("max_tokens", value) for value in (0, -1, 1.0, "5", True, 2**64, [])],
    *[("temperature", value) for value in (2.1, -0.1, "1", [])],
    *[("top_p", value) for value in (0, 1.1, -0.1)],
    *[("min_p", value) for value in (2, -0.1)],
    *[("top_k", value) for value in (2**63, -2, 1.5)],
    *[("repetition_penalty", value) for value in (0, -1, 1000)],
    *[("repeat_penalty", value) for value in (0, -1)],
    *[("presence_penalty", value) for value in (2.1, -2.1)],
    *[("frequency_penalty", value) for value in (2.1, -2.1)],
    *[("n", value) for value in (0, -1, 9, 1.5, "2")],
    *[("seed", value) for value in (2**64, 2**63, -(2**63) - 1, 1.5, "7")],
    *[("stop", value) for value in ("", ["a", ""], ["x"] * 17, 5, [5], "y" * 257)],
    *[("min_tokens", value) for value in (-1, 1.5)],
    *[
        ("logit_bias", value)
        for value in ({"-1": 5}, {"abc": 5}, {"10": 101}, {"10": -101}, {"10": "5"}, {"01": 5}, {"1.0": 5}, {"": 5}, [])
    ],
    *[("stream", value) for value in ("true", 1)],
    *[("ignore_eos", value) for value in ("no", 0)],
    *[("cache_prompt", value) for value in ("no", 0)],
    *[("user", value) for value in (5, {})],
    *[("metadata", value) for value in ("a", 1, [])],
]


@pytest.mark.parametrize("ask", [chat, text])
@pytest.mark.parametrize(("name", "value"), BAD_VALUES, ids=lambda value: repr(value)[:30])
def test_bad_values_name_their_field(ask: Any, name: str, value: Any) -> None:
    error = refused(ask, **{name: value})
    assert (error.code, error.param) == ("invalid_value", name)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_completion_tokens", 0),
        ("max_completion_tokens", -1),
        ("max_completion_tokens", 1.0),
        ("max_completion_tokens", "5"),
        ("top_logprobs", 21),
        ("top_logprobs", -1),
        ("top_logprobs", 5),
        ("logprobs", 1),
        ("messages", None),
        ("messages", []),
        ("messages", {}),
    ],
)
def test_bad_values_of_chat(name: str, value: Any) -> None:
    assert refused(chat, **{name: value}).param == name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("logprobs", 6),
        ("logprobs", -1),
        ("logprobs", True),
        ("best_of", 0),
        ("prompt", None),
        ("prompt", []),
        ("prompt", [[]]),
        ("prompt", [1, "a"]),
        ("prompt", [[1, 2], "a"]),
        ("prompt", [[1, 2], 3]),
        ("prompt", [1.5]),
        ("prompt", [[1.5]]),
        ("prompt", {}),
        ("prompt", ["a"] * 65),
    ],
)
def test_bad_values_of_completions(name: str, value: Any) -> None:
    assert refused(text, **{name: value}).param == name


UNSUPPORTED: list[tuple[Any, dict[str, Any], str]] = [
    (chat, {"foo": 1}, "foo"),
    (text, {"foo": None}, "foo"),
    (text, {"messages": USER}, "messages"),
    (text, {"max_completion_tokens": 3}, "max_completion_tokens"),
    (chat, {"prompt": "x"}, "prompt"),
    (chat, {"chat_template": "{{ 1 }}"}, "chat_template"),
    (chat, {"functions": [{"name": "f"}]}, "functions"),
    (chat, {"response_format": {"type": "nope"}}, "response_format"),
    (chat, {"modalities": ["text", "audio"]}, "modalities"),
    (chat, {"audio": {"voice": "x", "format": "wav"}}, "audio"),
    (chat, {"store": True}, "store"),
    (chat, {"service_tier": "flex"}, "service_tier"),
    (chat, {"stream": True, "stream_options": {"foo": True}}, "stream_options.foo"),
    (text, {"best_of": 2}, "best_of"),
    (text, {"echo": True, "logprobs": 1}, "echo"),
    (text, {"echo": True, "suffix": "x"}, "echo"),
]


@pytest.mark.parametrize(
    ("ask", "fields", "param"), UNSUPPORTED, ids=lambda value: value.__name__ if callable(value) else str(value)[:40]
)
def test_what_is_not_supported_is_named(ask: Any, fields: dict[str, Any], param: str) -> None:
    error = refused(ask, **fields)
    assert (error.code, error.param) == ("unsupported_parameter", param)
    assert f"'{param}'" in error.message


def test_null_is_as_if_absent() -> None:
    for ask, body, needed in ((chat, ChatBody, "messages"), (text, TextBody, "prompt")):
        names = set(body.__struct_fields__) - {"model", needed}
        assert len(names) > 25
        assert ask(**dict.fromkeys(names)) == ask()


def test_what_asks_for_nothing_is_taken() -> None:
    plain = chat(
        tools=[],
        functions=[],
        tool_choice="none",
        function_call="none",
        response_format={"type": "text"},
        modalities=["text"],
        store=False,
        service_tier="auto",
        metadata={"a": "b"},
        user="u",
        logit_bias={},
        stop=[],
        logprobs=False,
    )
    assert plain == chat()


def test_defaults() -> None:
    asked = chat().asked
    assert (asked.n, asked.max_tokens, asked.stop, asked.stream) == (1, None, (), False)
    sampling = asked.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed, sampling.logprobs) == (
        1.0,
        1.0,
        0,
        None,
        None,
    )


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"max_tokens": 5}, 5),
        ({"max_completion_tokens": 3}, 3),
        ({"max_completion_tokens": 3, "max_tokens": 9}, 3),
        ({"max_completion_tokens": 9, "max_tokens": 3}, 3),
        ({"max_completion_tokens": None, "max_tokens": 3}, 3),
    ],
)
def test_the_smaller_limit_counts(fields: dict[str, Any], expected: int) -> None:
    assert chat(**fields).asked.max_tokens == expected


@pytest.mark.parametrize("temperature", [0, 1e-8, 1e-4, 1, 2])
def test_temperatures(temperature: float) -> None:
    assert chat(temperature=temperature).asked.sampling.temperature == temperature


@pytest.mark.parametrize(("sent", "expected"), [(None, None), (-1, None), (0, 0), (2**32, 2**32), (-5, -5)])
def test_seeds(sent: int | None, expected: int | None) -> None:
    assert chat(seed=sent).asked.sampling.seed == expected


def test_each_choice_has_its_own_seed_in_range() -> None:
    assert [chat(n=3, seed=7).asked.sampling_of(i).seed for i in range(3)] == [7, 8, 9]
    assert [chat(n=2, seed=INT64 - 1).asked.sampling_of(i).seed for i in range(2)] == [INT64 - 1, -INT64]
    assert chat(n=2).asked.sampling_of(1).seed is None


@pytest.mark.parametrize(
    ("fields", "expected"),
    [({"logprobs": True}, 0), ({"logprobs": True, "top_logprobs": 0}, 0), ({"logprobs": True, "top_logprobs": 20}, 20)],
)
def test_logprobs_of_chat(fields: dict[str, Any], expected: int) -> None:
    assert chat(**fields).asked.sampling.logprobs == expected


def test_top_logprobs_need_logprobs() -> None:
    assert refused(chat, top_logprobs=5, logprobs=False).param == "top_logprobs"


@pytest.mark.parametrize("count", [None, 0, 5])
def test_logprobs_of_completions(count: int | None) -> None:
    assert text(logprobs=count).asked.sampling.logprobs == count


@pytest.mark.parametrize(
    ("sent", "expected"),
    [(None, ()), ([], ()), ("a", ("a",)), (["END", "EN"], ("END", "EN")), (["a", "b", "a"], ("a", "b"))],
)
def test_stops(sent: Any, expected: tuple[str, ...]) -> None:
    assert chat(stop=sent).asked.stop == expected


def test_penalties_by_either_name() -> None:
    assert chat(repetition_penalty=1.2).asked.sampling.repeat_penalty == 1.2
    assert chat(repeat_penalty=1.2, repetition_penalty=1.2).asked.sampling.repeat_penalty == 1.2
    assert refused(chat, repeat_penalty=1.2, repetition_penalty=1.3).param == "repetition_penalty"


def test_min_tokens_above_the_limit() -> None:
    assert refused(chat, min_tokens=5, max_tokens=4).param == "min_tokens"


@pytest.mark.parametrize("options", [{}, {"include_usage": True}, {"include_usage": False}])
def test_stream_options_need_a_stream(options: dict[str, Any]) -> None:
    assert refused(chat, stream_options=options).param == "stream_options"
    assert refused(chat, stream=False, stream_options=options).param == "stream_options"
    assert chat(stream=True, stream_options=options).asked.include_usage == options.get("include_usage", False)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]]), ("", [""])],
)
def test_prompts(prompt: Any, expected: list[Any]) -> None:
    assert text(prompt=prompt).prompts == expected


def test_prompts_times_n_is_bounded() -> None:
    assert len(text(prompt=["a"] * 8, n=8).prompts) == 8
    assert refused(text, prompt=["a"] * 9, n=8).param == "prompt"


@pytest.mark.parametrize("token", [-1, 300, 2**31 - 1, 2**63, 10**30])
def test_token_ids_outside_the_vocabulary(token: int) -> None:
    request = text(prompt=[1, token])
    error = refused(lambda: check_vocabulary(request.asked, request.prompts, 300))
    assert error.param == "prompt"


def test_biases_outside_the_vocabulary() -> None:
    asked = chat(logit_bias={"999999": 5}).asked
    assert refused(lambda: check_vocabulary(asked, [], 300)).param == "logit_bias"
    taken = check_vocabulary(chat(logit_bias={"0": -100, "299": 100}).asked, [], 300)
    assert taken.sampling.logit_bias == {0: -100.0, 299: 100.0}


@pytest.mark.parametrize(("sent", "expected"), [(-1, 0), (0, 0), (5, 5), (299, 299), (300, 0), (301, 0), (2**31, 0)])
def test_top_k_of_all_is_top_k_of_none(sent: int, expected: int) -> None:
    assert check_vocabulary(chat(top_k=sent).asked, [], 300).sampling.top_k == expected


SETTINGS = Settings(default_max_tokens=16)


@pytest.mark.parametrize(
    ("prompt", "asked", "expected"), [(63, None, 1), (40, 1000, 24), (60, None, 4), (10, None, 16), (10, 5, 5)]
)
def test_room(prompt: int, asked: int | None, expected: int) -> None:
    served = model(b"", "", context_length=64)
    assert room(asked, prompt, served, SETTINGS, param="messages") == expected


@pytest.mark.parametrize("prompt", [64, 65, 100_000])
def test_no_room(prompt: int) -> None:
    error = refused(lambda: room(None, prompt, model(b"", "", context_length=64), SETTINGS, param="messages"))
    assert error.code == "context_length_exceeded"
    assert str(prompt) in error.message and "64" in error.message
    assert (error.details["prompt_tokens"], error.details["context_length"]) == (prompt, 64)


def test_a_route_with_less_kv_than_context_is_the_window() -> None:
    served = model(b"", "", context_length=64, kv_capacity_tokens=32)
    assert room(1000, 20, served, SETTINGS, param="prompt") == 12
    assert refused(lambda: room(1, 32, served, SETTINGS, param="prompt")).details["context_length"] == 32


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
FIELDS = st.sampled_from([*sorted(Asked.__dataclass_fields__), "messages", "prompt", "logit_bias", "stream_options"])


@given(fields=st.dictionaries(FIELDS, JSON, max_size=3))
def test_anything_is_taken_or_refused_by_the_catalogue(fields: dict[str, Any]) -> None:
    for ask in (chat, text):
        try:
            ask(**fields)
        except ShardlineError as error:
            assert error.fault.status == 400


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_tokens": 0}, "'max_tokens' must be at least 1, not 0"),
        ({"max_tokens": 1 << 63}, "'max_tokens' must be at most 9223372036854775807, not a larger number"),
        ({"seed": -(10**30)}, "'seed' must be at least -9223372036854775808, not a smaller number"),
        ({"temperature": 3}, "'temperature' must be 0 to 2, not 3"),
        ({"temperature": 1e300}, "'temperature' must be 0 to 2, not a larger number"),
        ({"top_p": 0}, "'top_p' must be above 0 and at most 1, not 0"),
        ({"stop": 5}, "'stop': expected string, array or null, got integer"),
    ],
)
def test_bounds_are_told_as_people_write_numbers(fields: dict[str, Any], words: str) -> None:
    assert refused(chat, **fields).message == words


@pytest.mark.parametrize(("token", "said"), [(300, "300"), (-1, "-1"), (10**30, "a larger number")])
def test_a_token_id_that_is_none_is_told_with_those_that_are(token: int, said: str) -> None:
    request = text(prompt=[1, token])
    error = refused(lambda: check_vocabulary(request.asked, request.prompts, 300))
    assert error.message == f"'prompt': token ids are 0 to 299, not {said}"
