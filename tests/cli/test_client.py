"""What a command makes of every answer, and of none."""

from __future__ import annotations

import socket

import pytest

from shardline.cli.client import ADVICE, Endpoint
from shardline.errors import CATALOGUE, ShardlineError


def test_the_secret_and_the_protocol_go_along(stage) -> None:
    stage.json("GET /v1/nodes", {"nodes": []})
    assert Endpoint("Tracker", stage.url, "a-secret").get("/v1/nodes") == {"nodes": []}
    (_, headers, _) = stage.asked[0]
    assert headers["Authorization"] == "Bearer a-secret"
    assert headers["Shardline-Protocol"] == "1"


def test_a_url_may_have_a_path_and_no_secret_is_fine(stage) -> None:
    stage.json("GET /behind/v1/models", {"data": []})
    Endpoint("Gateway", f"{stage.url}/behind/", "").get("/v1/models")
    assert "Authorization" not in stage.asked[0][1]


def test_proxy_variables_are_not_followed(stage, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    stage.json("GET /v1/models", {"data": []})
    assert Endpoint("Gateway", stage.url, "").get("/v1/models") == {"data": []}


def test_an_error_object_is_raised_with_its_code(stage) -> None:
    body = {"error": {"code": "queue_full", "message": "64 requests wait", "type": "rate_limit_error", "limit": 64}}
    stage.json("GET /v1/models", body, status=429)
    with pytest.raises(ShardlineError) as raised:
        Endpoint("Gateway", stage.url, "").get("/v1/models")
    assert (raised.value.code, raised.value.message) == ("queue_full", "64 requests wait")


@pytest.mark.parametrize(
    ("status", "body"), [(200, b"<html>login</html>"), (502, b"<html>Bad Gateway</html>"), (404, b"{}"), (500, b"[1]")]
)
def test_another_program_behind_the_url_is_named_as_such(stage, status: int, body: bytes) -> None:
    stage.answers["GET /v1/nodes"] = (status, "text/html", body)
    with pytest.raises(ShardlineError, match=r"is no Shardline Tracker") as raised:
        Endpoint("Tracker", stage.url, "").get("/v1/nodes")
    assert raised.value.code == "tracker_unreachable"


def test_nobody_there() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(ShardlineError, match="no Gateway answers at") as raised:
            Endpoint("Gateway", url, "").get("/v1/models")
    assert raised.value.code == "gateway_unreachable"


def test_a_stream_gives_its_events_without_comments(stage) -> None:
    stage.events(
        "POST /v1/x", ": keep-alive", 'data: {"n": 1}', "event: other", 'data: {"n": 2}', "data: [DONE]", "data: {}"
    )
    assert list(Endpoint("Gateway", stage.url, "").stream("/v1/x", {"a": "ü"})) == [{"n": 1}, {"n": 2}]
    assert stage.asked[0][2] == b'{"a": "\\u00fc"}'


def test_an_error_event_ends_a_stream(stage) -> None:
    stage.events("POST /v1/x", 'data: {"n": 1}', 'data: {"error": {"code": "node_lost", "message": "n-1 is gone"}}')
    events = Endpoint("Gateway", stage.url, "").stream("/v1/x", {})
    assert next(events) == {"n": 1}
    with pytest.raises(ShardlineError, match="n-1 is gone"):
        next(events)


def test_a_stream_that_breaks_off_is_not_taken_for_whole(stage) -> None:
    stage.events("POST /v1/x", 'data: {"n": 1}')
    events = Endpoint("Gateway", stage.url, "").stream("/v1/x", {})
    next(events)
    with pytest.raises(ShardlineError, match="broke off"):
        next(events)


@pytest.mark.parametrize(
    ("who", "code", "words"),
    [
        ("Gateway", "unauthorized", "SHARDLINE_API_KEY"),
        ("Gateway", "unauthorized", "shardline keys add NAME"),
        ("Gateway", "rate_limit_exceeded", "Ask again in 3 s"),
        ("Tracker", "unauthorized", "--credential-file"),
        ("Gateway", "session_not_found", "`shardline sessions`"),
        ("Gateway", "queue_full", "Ask again in 3 s"),
        ("Tracker", "queue_full", CATALOGUE["queue_full"].advice),
    ],
)
def test_advice_is_for_somebody_at_a_terminal(stage, who: str, code: str, words: str) -> None:
    stage.json("GET /v1/x", {"error": ShardlineError(code, "no", retry_after=3).body()}, status=400)
    with pytest.raises(ShardlineError) as raised:
        Endpoint(who, stage.url, "").get("/v1/x")
    assert words in raised.value.advice and raised.value.details["retry_after"] == 3


def test_every_sentence_for_a_terminal_is_of_a_code_that_there_is() -> None:
    assert {code for _, code in ADVICE} <= set(CATALOGUE)


def test_closer_advice_stands_above_that_of_the_table(stage) -> None:
    error = ShardlineError("unauthorized", "no certificate", advice="Join first.")
    stage.json("GET /v1/x", {"error": error.body()}, status=401)
    with pytest.raises(ShardlineError) as raised:
        Endpoint("Tracker", stage.url, "").get("/v1/x")
    assert raised.value.advice == "Join first."


def test_advice_of_the_other_side_is_kept(stage) -> None:
    error = ShardlineError("layers_invalid", "too many", advice="Give --nodes 1 to 6.")
    stage.json("GET /v1/x", {"error": error.body()}, status=400)
    with pytest.raises(ShardlineError) as raised:
        Endpoint("Gateway", stage.url, "").get("/v1/x")
    assert raised.value.advice == "Give --nodes 1 to 6."


@pytest.mark.parametrize("who", ["Gateway", "Tracker"])
def test_who_is_not_reached_is_named_with_its_flag(stage, who: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        with pytest.raises(ShardlineError) as raised:
            Endpoint(who, f"http://127.0.0.1:{free.getsockname()[1]}", "").get("/v1/x")
    assert f"--{who.lower()} URL" in raised.value.advice
    with pytest.raises(ShardlineError) as foreign:
        Endpoint(who, stage.url, "").get("/v1/x")
    assert "Another program listens there" in foreign.value.advice
