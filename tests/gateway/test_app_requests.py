"""Requests over HTTP: what is refused, with which status, before anything of the cluster is touched."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from shardline.errors import ShardlineError
from shardline.gateway.template import Templates
from shardline.settings import Settings
from tests.support.gateway_stand import (
    BOS,
    END,
    EOS,
    MODEL,
    Fail,
    Refuse,
    Stand,
    bundle,
    chat,
    events_of,
    model,
    say,
    standing,
)

SETTINGS = Settings(default_max_tokens=16, api_body_bytes=1 << 20)
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@pytest.fixture
async def stand(tmp_path: Path, shared_templates: Templates) -> AsyncIterator[Stand]:
    async with standing(tmp_path, stand=Stand(settings=SETTINGS), templates=shared_templates) as made:
        yield made


def error_of(answer: httpx.Response, status: int, code: str) -> dict[str, Any]:
    """The error object; its shape is that of OpenAI, with our fields behind."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"]
    body = answer.json()
    assert list(body) == ["error"]
    error: dict[str, Any] = body["error"]
    assert isinstance(error["message"], str) and isinstance(error["type"], str)
    assert error["param"] is None or isinstance(error["param"], str)
    assert error["code"] == code
    assert isinstance(error["retryable"], bool) and isinstance(error["advice"], str)
    for word in ("Traceback", "msgspec", "jinja2", "NoneType", "<class", "0x", ".py"):
        assert word not in answer.text
    return error


async def works(stand: Stand) -> None:
    answer = await stand.complete()
    assert answer.json()["choices"][0]["text"] == "hi"


# ---- bodies ------------------------------------------------------------------------------------------------------

BODIES: list[tuple[bytes, int, str]] = [
    (b"", 400, "invalid_json"),
    (b"not json", 400, "invalid_json"),
    (b"[]", 400, "invalid_json"),
    (b"[" * 100_000, 400, "invalid_json"),
    (b'{"model":' + b"[" * 100_000, 400, "invalid_value"),
    (b'{"model":"tiny","metadata":' + b"[" * 100_000, 400, "invalid_json"),
    (b'\xef\xbb\xbf{"model":"tiny"}', 400, "invalid_json"),
    (b'{"model":"tiny","user":"\xff\xfe"}', 400, "invalid_json"),
    (b'{"model":"tiny","user":"\\ud83d"}', 400, "invalid_json"),
    (b'{"model":"tiny","temperature":NaN}', 400, "invalid_json"),
    (b'{"model":"tiny","temperature":1e999}', 400, "invalid_value"),
    (b'{"model":"tiny","temperature":Infinity}', 400, "invalid_json"),
    (b'{"model":"' + b"x" * (1 << 20) + b'"}', 413, "body_too_large"),
]


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(("body", "status", "code"), BODIES, ids=lambda value: repr(value)[:40])
async def test_bodies_that_are_none(stand: Stand, path: str, body: bytes, status: int, code: str) -> None:
    error_of(await stand.post(path, body), status, code)
    assert not stand.generations and not stand.asked_of_node
    await works(stand)


async def test_a_key_that_stands_twice(stand: Stand) -> None:
    body = b'{"model":"tiny","messages":[{"role":"user","content":"a"}],"messages":[{"role":"user","content":"b"}]}'
    assert error_of(await stand.post(CHAT, body), 400, "invalid_json")["param"] == "messages"
    body = b'{"model":"tiny","messages":[{"role":"user","content":"a","content":"b"}]}'
    error_of(await stand.post(CHAT, body), 400, "invalid_json")


async def test_lone_surrogates_in_a_message(stand: Stand) -> None:
    body = b'{"model":"tiny","messages":[{"role":"user","content":"\\ud83d"}]}'
    error_of(await stand.post(CHAT, body), 400, "invalid_json")


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "application/json; charset=utf-16", ""]
)
async def test_content_types(stand: Stand, kind: str) -> None:
    error_of(await stand.post(TEXT, b'{"model":"tiny","prompt":"a"}', content_type=kind), 415, "unsupported_media_type")


async def test_content_types_that_are_json(stand: Stand) -> None:
    for kind in ("application/json", "Application/JSON; charset=UTF-8", 'application/json;charset="utf-8"'):
        answer = await stand.post(TEXT, b'{"model":"tiny","prompt":"a"}', content_type=kind)
        assert answer.status_code == 200


async def test_a_compressed_body(stand: Stand) -> None:
    answer = await stand.post(TEXT, b"\x1f\x8b", content_encoding="gzip")
    error_of(answer, 415, "unsupported_media_type")


async def test_a_text_that_cannot_fit(stand: Stand) -> None:
    stand.models[0] = model_like(stand, context_length=1000)
    answer = await stand.chat(messages=[{"role": "user", "content": "x" * 1_000_000}])
    error = error_of(answer, 400, "context_length_exceeded")
    assert error["context_length"] == 1000 and error["prompt_tokens"] > 1000
    assert "/v1/tokenize" not in stand.asked_of_node and not stand.generations


async def test_token_ids_that_cannot_fit(stand: Stand) -> None:
    """Whatever they are: so many are not looked through."""
    stand.models[0] = model_like(stand, context_length=1000)
    answer = await stand.complete(prompt=[5] * 2000 + [-1])
    assert error_of(answer, 400, "context_length_exceeded")["prompt_tokens"] == 2001
    assert not stand.generations


# ---- paths, methods, keys ----------------------------------------------------------------------------------------


async def test_paths_and_methods(stand: Stand) -> None:
    error_of(await stand.get("/v1/nothing"), 404, "not_found")
    error_of(await stand.get("/v1/models/"), 404, "model_not_found")
    answer = await stand.get(CHAT)
    error_of(answer, 405, "method_not_allowed")
    assert answer.headers["allow"] == "POST"
    error_of(await stand.http.request("OPTIONS", f"{stand.url}{CHAT}"), 405, "method_not_allowed")
    error_of(await stand.post("/v1/models", {}), 405, "method_not_allowed")


async def test_another_site_gets_no_leave(stand: Stand) -> None:
    for answer in (
        await stand.post(CHAT, chat(), origin="https://evil.example"),
        await stand.get("/v1/models", origin="https://evil.example"),
        await stand.http.request(
            "OPTIONS",
            f"{stand.url}{CHAT}",
            headers={"origin": "https://evil.example", "access-control-request-method": "POST"},
        ),
    ):
        assert not [name for name in answer.headers if name.startswith("access-control-")]


@pytest.mark.parametrize(
    ("host", "served"),
    [
        ("127.0.0.1:8080", True),
        ("[::1]:8080", True),
        ("localhost", True),
        ("shardline.localhost:1", True),
        ("192.168.1.5", True),
        ("evil.example", False),
        ("127.0.0.1.evil.example:8080", False),
        ("localhost.evil.example", False),
    ],
)
async def test_a_page_whose_name_leads_here(stand: Stand, host: str, served: bool) -> None:
    for answer in (
        await stand.get("/v1/models", host=host),
        await stand.post(TEXT, {"model": MODEL, "prompt": "a"}, host=host),
    ):
        if served:
            assert answer.status_code == 200
        else:
            error_of(answer, 403, "forbidden")


async def test_request_ids_are_kept_or_made(stand: Stand) -> None:
    assert (await stand.get("/healthz", **{"x-request-id": "abc-1"})).headers["x-request-id"] == "abc-1"
    ids = {(await stand.get("/healthz")).headers["x-request-id"] for _ in range(3)}
    assert len(ids) == 3


KEY, OTHER = "sk-alice-0123456789", "sk-bobby-0123456789"


async def test_keys(tmp_path: Path, shared_templates: Templates) -> None:
    async with standing(tmp_path, templates=shared_templates, keys=[KEY, OTHER]) as stand:
        for path in ("/v1/models", "/v1/models/tiny", "/v1/route-sessions", "/v1/route-sessions/x"):
            answer = await stand.get(path)
            error_of(answer, 401, "unauthorized")
            assert answer.headers["www-authenticate"] == "Bearer"
        error_of(await stand.chat(), 401, "unauthorized")
        error_of(await stand.post(CHAT, chat(), authorization="Bearer wrong"), 401, "unauthorized")
        # Before the body is looked at.
        error_of(await stand.post(CHAT, b"not json"), 401, "unauthorized")
        assert (await stand.post(CHAT, chat(), authorization=f"Bearer {KEY}", host="gw.example")).status_code == 200
        assert (await stand.get("/healthz")).status_code == 200
        assert (await stand.get("/readyz")).status_code == 200
        assert (await stand.get("/metrics")).status_code == 200


async def test_a_key_sees_and_cancels_its_own_sessions_only(tmp_path: Path) -> None:
    async with standing(tmp_path, keys=[KEY, OTHER]) as stand:
        mine, theirs = {"authorization": f"Bearer {KEY}"}, {"authorization": f"Bearer {OTHER}"}
        answer = await stand.post(TEXT, {"model": MODEL, "prompt": "a"}, authorization=f"Bearer {KEY}")
        session = answer.headers["shardline-route-session"]
        stand.sessions[session] = (stand.generations[0].request.key_id, [(1, b"{}")])
        path = f"/v1/route-sessions/{session}"
        assert (await stand.get(path, **mine)).json()["id"] == session
        assert (await stand.get("/v1/route-sessions", **mine)).json() == {"sessions": [{"id": session}]}
        assert (await stand.get("/v1/route-sessions", **theirs)).json() == {"sessions": []}
        error_of(await stand.get(path, **theirs), 404, "session_not_found")
        error_of(await stand.get(f"{path}/telemetry", **theirs), 404, "session_not_found")
        error_of(await stand.http.delete(f"{stand.url}{path}", headers=theirs), 404, "session_not_found")
        assert (await stand.http.delete(f"{stand.url}{path}", headers=mine)).status_code == 200


# ---- models ------------------------------------------------------------------------------------------------------


def model_like(stand: Stand, **facts: Any) -> Any:
    served = stand.models[0]
    known = {"text_digest": served.text_digest, "text_nodes": served.text_nodes, "head_nodes": served.head_nodes}
    return model(b"", "", **{**known, **facts})


@pytest.mark.parametrize("name", ["no-such", "", "../x", "x" * 10_000, "tiny\u0000", "TINY"])
async def test_models_that_are_not_served(stand: Stand, name: str) -> None:
    error = error_of(await stand.chat(model=name), 404, "model_not_found")
    assert error["param"] == "model" and len(error["message"]) < 300
    error_of(await stand.complete(model=name), 404, "model_not_found")
    assert not stand.generations and not stand.asked_of_node


@pytest.mark.parametrize("name", [None, 5])
async def test_models_that_are_no_name(stand: Stand, name: Any) -> None:
    assert error_of(await stand.chat(model=name), 400, "invalid_value")["param"] == "model"
    body = chat()
    del body["model"]
    assert error_of(await stand.post(CHAT, body), 400, "invalid_value")["param"] == "model"


async def test_a_model_with_a_gap(stand: Stand) -> None:
    stand.models[0] = model_like(stand, ready=False, missing=[(10, 20)])
    answer = await stand.chat()
    error = error_of(answer, 503, "model_unavailable")
    assert error["missing"] == [[10, 20]] and "10:20" in error["message"] and error["retryable"]
    assert int(answer.headers["retry-after"]) > 0
    listed = (await stand.get("/v1/models")).json()["data"]
    assert [(entry["id"], entry["ready"], entry["missing"]) for entry in listed] == [(MODEL, False, [[10, 20]])]
    answer = await stand.get("/readyz")
    assert error_of(answer, 503, "model_unavailable")["missing"] == {MODEL: [[10, 20]]}
    assert (await stand.get("/healthz")).json() == {"status": "live"}


async def test_a_gap_that_closes_by_itself_says_so(stand: Stand) -> None:
    stand.models[0] = model_like(stand, ready=False, missing=[(10, 20)], returning=True)
    answer = await stand.chat()
    error = error_of(answer, 503, "model_unavailable")
    assert error["missing"] == [[10, 20]] and "is loading" in error["advice"] and "Start" not in error["advice"]
    assert answer.headers["retry-after"] == "2"


async def test_what_nodes_of_two_engine_classes_lack_is_told_of_each(stand: Stand) -> None:
    """Together they have all layers, and no route: under another name, too."""
    stand.models[0] = model_like(stand, ready=False, missing=[(0, 3)], engine_class="llama/1")
    stand.models.append(model_like(stand, ready=False, missing=[(3, 4)], engine_class="torch/2", model="alias"))
    error = error_of(await stand.chat(), 503, "model_unavailable")
    assert "0:3 are missing; of engine class torch/2 3:4 are missing, and no route mixes" in error["message"]
    assert error["missing"] == [[0, 3]] and "node --engine" in error["advice"]
    stand.models.append(model_like(stand, ready=False, missing=[(2, 4)], engine_class="torch/2"))
    assert error_of(await stand.chat(), 503, "model_unavailable")["missing"] == [[2, 4]]


async def test_the_whole_one_of_two_engine_classes_is_used(stand: Stand) -> None:
    stand.models.insert(0, model_like(stand, ready=False, missing=[(0, 4)], engine_class="other"))
    assert (await stand.complete()).status_code == 200
    assert [entry["ready"] for entry in (await stand.get("/v1/models")).json()["data"]] == [True]
    assert (await stand.get(f"/v1/models/{MODEL}")).json()["ready"]


async def test_no_models_and_no_tracker(stand: Stand) -> None:
    stand.models.clear()
    error_of(await stand.get("/readyz"), 503, "model_unavailable")
    assert (await stand.get("/v1/models")).json() == {"object": "list", "data": []}
    stand.models_error = ShardlineError("tracker_unreachable", "no answer")
    for path in ("/readyz", "/v1/models", f"/v1/models/{MODEL}"):
        error_of(await stand.get(path), 503, "tracker_unreachable")
    error_of(await stand.chat(), 503, "tracker_unreachable")
    assert (await stand.get("/healthz")).status_code == 200


async def test_the_address_itself_says_where_to_go_on(stand: Stand) -> None:
    stand.models.clear()
    answer = await stand.get("/")
    assert (answer.status_code, answer.headers["content-type"]) == (200, "text/plain; charset=utf-8")
    assert "/v1/models" in answer.text and "docs" in answer.text
    error_of(await stand.post("/", {}), 405, "method_not_allowed")
    error_of(await stand.get("/v1"), 404, "not_found")


async def test_a_model_name_with_a_slash(stand: Stand) -> None:
    stand.models[0] = model_like(stand, model="org/name")
    assert (await stand.get("/v1/models/org/name")).json()["id"] == "org/name"
    assert (await stand.complete(model="org/name")).json()["model"] == "org/name"


async def test_a_head_that_does_not_answer(stand: Stand) -> None:
    await works(stand)
    stand.models[0] = model_like(stand, head_nodes=[])
    error_of(await stand.complete(), 503, "text_unavailable")


# ---- limits ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, 16),
        ({"max_tokens": None}, 16),
        ({"max_tokens": 3}, 3),
        ({"max_completion_tokens": 3, "max_tokens": 9}, 3),
        ({"max_tokens": 10**6}, 4096 - 21),
    ],
)
async def test_limits_reach_the_generation(stand: Stand, fields: dict[str, Any], expected: int) -> None:
    assert (await stand.chat(**fields)).status_code == 200
    assert stand.generations[0].request.max_tokens == expected


async def test_an_endless_model_without_a_cap_ends_at_the_default(stand: Stand) -> None:
    stand.script = lambda request: say(*[b"x"] * 1000)
    answer = (await stand.complete()).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["choices"][0]["text"] == "x" * 16
    assert answer["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize(("prompt", "fits"), [(63, True), (64, False), (65, False), (3000, False)])
@pytest.mark.parametrize("stream", [True, False])
async def test_the_end_of_the_context(stand: Stand, prompt: int, fits: bool, stream: bool) -> None:
    stand.models[0] = model_like(stand, context_length=64)
    stand.script = lambda request: say(*[b"x"] * 1000)
    answer = await stand.complete(prompt="p" * prompt, stream=stream)
    if fits:
        assert stand.generations[0].request.max_tokens == 1
        body = events_of(answer.content)[0][-1] if stream else answer.json()
        assert body["choices"][0]["finish_reason"] == "length"
    else:
        error = error_of(answer, 400, "context_length_exceeded")
        assert (error["prompt_tokens"] >= 64, error["context_length"]) == (True, 64)
        assert not stand.generations


async def test_a_huge_max_tokens_leaves_the_prompt_whole(stand: Stand) -> None:
    stand.models[0] = model_like(stand, context_length=64)
    assert (await stand.complete(prompt="p" * 40, max_tokens=1000)).status_code == 200
    request = stand.generations[0].request
    assert (request.prompt, request.max_tokens) == ([112] * 40, 24)


# ---- prompts -----------------------------------------------------------------------------------------------------


async def test_empty_prompts(stand: Stand, tmp_path: Path) -> None:
    assert error_of(await stand.complete(prompt=""), 400, "invalid_value")["param"] == "prompt"
    assert error_of(await stand.complete(prompt=[""]), 400, "invalid_value")["param"] == "prompt"
    assert error_of(await stand.complete(prompt=[]), 400, "invalid_value")["param"] == "prompt"
    await works(stand)
    async with standing(tmp_path / "bos", text=bundle(add_bos=True)) as with_bos:
        assert (await with_bos.complete(prompt="")).status_code == 200
        assert with_bos.generations[0].request.prompt == [BOS]
        await with_bos.complete(prompt="<s>a")
        assert with_bos.generations[1].request.prompt == [BOS, 97]
        await with_bos.complete(prompt=[97])
        assert with_bos.generations[2].request.prompt == [97]


@pytest.mark.parametrize("prompt", [[-1], [2147483647], [300], [263], [1, "a"], [[1, 2], [3], "x"], [1.5]])
async def test_token_ids_that_are_none(stand: Stand, prompt: Any) -> None:
    assert error_of(await stand.complete(prompt=prompt), 400, "invalid_value")["param"] == "prompt"
    assert not stand.generations and "/v1/tokenize" not in stand.asked_of_node


async def test_several_prompts(stand: Stand) -> None:
    stand.script = lambda request: say(bytes(request.prompt[:1]))
    answer = (await stand.complete(prompt=["ab", "cde"], n=2)).json()
    assert [(c["index"], c["text"]) for c in answer["choices"]] == [(0, "a"), (1, "a"), (2, "c"), (3, "c")]
    assert answer["usage"]["prompt_tokens"] == 5
    assert answer["usage"]["completion_tokens"] == 4
    answer = (await stand.complete(prompt=[[97], [98, 99]])).json()
    assert [c["text"] for c in answer["choices"]] == ["a", "b"]


async def test_echo(stand: Stand) -> None:
    for prompt, text in (("pq", "pqhi"), ([112, EOS, 113], "pqhi"), ("", None)):
        answer = await stand.complete(prompt=prompt, echo=True)
        if text is None:
            error_of(answer, 400, "invalid_value")
        else:
            assert answer.json()["choices"][0]["text"] == text
    events, _, done = events_of((await stand.complete(prompt="pq", echo=True, stream=True)).content)
    assert done and "".join(event["choices"][0]["text"] for event in events) == "pqhi"


async def test_infilling(stand: Stand, tmp_path: Path) -> None:
    assert error_of(await stand.complete(suffix="x"), 400, "unsupported_parameter")["param"] == "suffix"
    fim = {"prefix": 260, "suffix": 261, "middle": 262}
    async with standing(tmp_path / "fim", text=bundle(add_bos=True, fim=fim)) as filling:
        assert (await filling.complete(prompt="ab", suffix="c")).status_code == 200
        assert filling.generations[0].request.prompt == [BOS, 260, 97, 98, 261, 99, 262]
        assert (await filling.complete(prompt=[97], suffix="c")).status_code == 400


async def test_parts_make_the_same_prompt_as_their_text(stand: Stand) -> None:
    parts = [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]
    for role in ("system", "user"):
        await stand.chat(messages=[{"role": role, "content": parts}])
        await stand.chat(messages=[{"role": role, "content": "AB"}])
        assert stand.generations[-1].request.prompt == stand.generations[-2].request.prompt


async def test_assistant_prefill(stand: Stand) -> None:
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "The answer is "}]
    answer = (await stand.chat(messages=messages)).json()
    assert answer["choices"][0]["message"]["content"] == "hi"
    prompt = stand.generations[0].request.prompt
    assert bytes(token for token in prompt if token < 256).endswith(b"assistant\nThe answer is ")


# ---- templates ---------------------------------------------------------------------------------------------------


async def test_a_template_that_refuses(tmp_path: Path, shared_templates: Templates) -> None:
    strict = "{% if messages[0].role != 'user' %}{{ raise_exception('roles must alternate') }}{% endif %}x"
    async with standing(tmp_path, text=bundle(strict), templates=shared_templates) as stand:
        answer = await stand.chat(messages=[{"role": "system", "content": "s"}])
        error = error_of(answer, 400, "template_error")
        assert (error["param"], error["type"]) == ("messages", "invalid_request_error")
        assert "roles must alternate" in error["message"]
        assert (await stand.chat()).status_code == 200


@pytest.mark.parametrize("template", ["{% if x %}", None])
async def test_a_broken_template_leaves_completions(
    tmp_path: Path, shared_templates: Templates, template: str | None
) -> None:
    async with standing(tmp_path, text=bundle(template), templates=shared_templates) as stand:
        error_of(await stand.chat(), 400, "template_error")
        await works(stand)


# ---- refusals of the cluster -------------------------------------------------------------------------------------

REFUSALS = [
    (ShardlineError("queue_full", "64 wait", retry_after=3), 429),
    (ShardlineError("capacity", "full", retry_after=3), 503),
    (ShardlineError("model_unavailable", "gone", missing=[[1, 2]]), 503),
    (ShardlineError("node_lost", "n-1 refused", node="n-1", layers=[0, 4], phase="opening"), 502),
]


@pytest.mark.parametrize(("refusal", "status"), REFUSALS, ids=lambda value: getattr(value, "code", ""))
@pytest.mark.parametrize("stream", [True, False])
async def test_a_route_that_does_not_open_has_a_real_status(
    stand: Stand, refusal: ShardlineError, status: int, stream: bool
) -> None:
    stand.script = lambda request: [Refuse(refusal)]
    answer = await stand.complete(stream=stream)
    error = error_of(answer, status, refusal.code)
    assert error["route_sessions"] == ["rs-0"]
    assert all(error[name] == value for name, value in refusal.details.items())
    assert ("retry-after" in answer.headers) == ("retry_after" in refusal.details)
    if status == 502:
        assert answer.headers["x-should-retry"] == "false"


async def test_a_failure_in_the_middle_is_never_half_an_answer(stand: Stand) -> None:
    lost = ShardlineError("node_lost", "n-1 is gone", node="n-1", layers=[0, 4], phase="decode", position=9)
    stand.script = lambda request: [*say(b"a", b"b", b"c"), Fail(lost)]
    answer = await stand.complete()
    error = error_of(answer, 502, "node_lost")
    assert (error["node"], error["layers"], error["phase"], error["position"]) == ("n-1", [0, 4], "decode", 9)
    assert answer.headers["x-should-retry"] == "false"


async def test_a_fault_of_ours_is_a_500_without_its_story(stand: Stand, caplog: pytest.LogCaptureFixture) -> None:
    stand.script = lambda request: [*say(b"a"), Fail(ZeroDivisionError("secret"))]
    answer = await stand.complete()
    error_of(answer, 500, "internal")
    assert "secret" not in answer.text


async def test_sampling_reaches_the_generation(stand: Stand) -> None:
    answer = await stand.chat(
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.05,
        repeat_penalty=1.1,
        presence_penalty=0.1,
        frequency_penalty=-0.1,
        logit_bias={"97": 5},
        seed=7,
        n=2,
        stop=["END"],
        min_tokens=2,
        max_tokens=8,
        ignore_eos=True,
        cache_prompt=False,
    )
    assert answer.status_code == 200
    requests = [generation.request for generation in stand.generations]
    assert [request.sampling.seed for request in requests] == [7, 8]
    assert [request.reuse for request in requests] == [False, False]
    sampling = requests[0].sampling
    assert json.loads(json.dumps(sampling.logit_bias)) == {"97": 5.0}
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 40, 0.05)
    assert (sampling.repeat_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.1, 0.1, -0.1)
    assert (sampling.min_tokens, sampling.ignore_eos, requests[0].stop) == (2, True, ("END",))


@pytest.mark.parametrize(
    "bias", [{"999999": 5}, {"-1": 5}, {"abc": 5}, {"10": 101}, {"10": "5"}, {"299": 1}, {"263": 1}]
)
async def test_biases_that_are_none(stand: Stand, bias: dict[str, Any]) -> None:
    """299 is a row of the model without a token: nobody can mean it."""
    assert error_of(await stand.chat(logit_bias=bias), 400, "invalid_value")["param"] == "logit_bias"
    assert not stand.generations


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("logit_bias", {"logit_bias": {str(i): -100 for i in range(263)}}),
        ("logit_bias", {"logit_bias": {str(EOS): 100}, "ignore_eos": True}),
        ("logit_bias", {"logit_bias": {str(EOS): 100, str(END): 100}, "min_tokens": 1}),
        ("logit_bias", {"logit_bias": {str(i): -100 for i in range(263) if i not in (EOS, END)}, "min_tokens": 2}),
    ],
)
async def test_what_leaves_no_token_at_all_is_refused_by_name(stand: Stand, param: str, fields: dict[str, Any]) -> None:
    error = error_of(await stand.chat(**fields), 400, "no_token_left")
    assert error["param"] == param and not error["retryable"]
    assert error_of(await stand.complete(**fields), 400, "no_token_left")["param"] == param
    assert "/v1/tokenize" not in stand.asked_of_node and not stand.generations


@pytest.mark.parametrize(
    "fields",
    [
        {"logit_bias": {str(i): -100 for i in range(1, 263)}},
        {"logit_bias": {str(EOS): 100, "97": 100}, "ignore_eos": True},
        {"logit_bias": {str(EOS): 100}},
        {"logit_bias": {str(i): -99.9 for i in range(263)}},
    ],
)
async def test_one_token_that_is_left_is_enough(stand: Stand, fields: dict[str, Any]) -> None:
    assert (await stand.chat(**fields)).status_code == 200
