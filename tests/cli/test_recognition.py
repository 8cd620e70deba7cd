"""Who answers where a command met somebody else; that real parts are told apart is shown in test_up.py."""

from __future__ import annotations

import socket

import pytest

from shardline.cli.client import Endpoint, for_a_person
from shardline.cli.recognition import part_at, speaks_tls
from shardline.errors import ShardlineError

GATEWAY, TRACKER, NODE = {"status": "live"}, {"status": "ok"}, {"state": "ready"}


@pytest.mark.parametrize(
    ("who", "lives", "found"),
    [("Tracker", GATEWAY, "Gateway"), ("Gateway", TRACKER, "Tracker"), ("Tracker", NODE, "Node")],
)
@pytest.mark.parametrize("code", ["not_found", "unauthorized", "protocol_mismatch"])
def test_another_part_is_named_instead_of_its_refusal(stage, who: str, lives: object, found: str, code: str) -> None:
    stage.json("GET /v1/x", {"error": ShardlineError(code, "no").body()}, status=400)
    stage.json("GET /healthz", lives)
    with pytest.raises(ShardlineError, match=f"is a {found}, not a {who}") as raised:
        Endpoint(who, stage.url, "a-secret").get("/v1/x")
    assert f"--{who.lower()} URL" in raised.value.advice
    assert "Authorization" not in stage.asked[-1][1], "the second look takes no secret along"


@pytest.mark.parametrize("lives", [TRACKER, {"status": "fine"}, ["ok"], "ok"])
def test_a_refusal_of_whom_was_asked_stands(stage, lives: object) -> None:
    stage.json("GET /v1/x", {"error": ShardlineError("unauthorized", "no").body()}, status=401)
    stage.json("GET /healthz", lives)
    with pytest.raises(ShardlineError) as raised:
        Endpoint("Tracker", stage.url, "").get("/v1/x")
    assert raised.value.code == "unauthorized"


def test_an_error_that_only_the_right_part_can_make_needs_no_second_look(stage) -> None:
    error = ShardlineError("queue_full", "no")
    assert for_a_person(error, "Gateway", stage.url).code == "queue_full"
    assert stage.asked == []


def test_nobody_and_the_other_kind_of_http(stage) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        gone = f"http://127.0.0.1:{free.getsockname()[1]}"
        assert part_at(gone) is None and not speaks_tls(gone)
    assert not speaks_tls(stage.url)
    secure = stage.url.replace("http:", "https:")
    assert part_at(secure) is None
    with pytest.raises(ShardlineError, match="speaks plain HTTP") as raised:
        Endpoint("Gateway", secure, "").get("/v1/models")
    assert raised.value.advice.endswith(f"--gateway {stage.url}")
