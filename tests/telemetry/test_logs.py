"""What a log line has, and what it never has."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest
import structlog

from shardline.telemetry.logs import HIDDEN, configure_logs


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    root, ours = logging.getLogger(), logging.getLogger("shardline")
    before = (root.handlers[:], root.level, ours.level)
    yield
    root.handlers[:], root.level = before[0], before[1]
    ours.setLevel(before[2])
    structlog.reset_defaults()


def lines(out: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in out.getvalue().splitlines()]


def test_both_kinds_of_logger_give_one_shape() -> None:
    early = structlog.get_logger("shardline.node.host")
    out = io.StringIO()
    configure_logs(role="node", stream=out)
    early.info("session_opened", slot=3)
    logging.getLogger("shardline.node.run").info("shard_state", extra={"state": "ready"})
    first, second = lines(out)
    assert (first["event"], first["slot"], first["role"], first["level"]) == ("session_opened", 3, "node", "info")
    assert (second["event"], second["state"], second["role"], second["level"]) == (
        "shard_state",
        "ready",
        "node",
        "info",
    )
    assert str(first["timestamp"]).endswith("Z") and str(second["timestamp"]).endswith("Z")


def test_levels_and_libraries() -> None:
    out = io.StringIO()
    configure_logs(role="node", level="warning", stream=out)
    structlog.get_logger("shardline.x").info("too_quiet")
    logging.getLogger("uvicorn.error").info("also quiet")
    logging.getLogger("uvicorn.error").warning("heard")
    assert [line["event"] for line in lines(out)] == ["heard"]


@pytest.mark.parametrize("style", ["json", "console"])
def test_secrets_and_words_of_users_are_hidden(style: str) -> None:
    out = io.StringIO()
    configure_logs(role="gateway", style=style, stream=out)  # type: ignore[arg-type]
    log = structlog.get_logger("shardline.gateway")
    log.info(
        "request_received", prompt="my diary", api_key="sk-12345678", nested={"Authorization": "Bearer sk-12345678"}
    )
    logging.getLogger("shardline.gateway").info("opened", extra={"ticket": "sk-12345678", "messages": ["my diary"]})
    text = out.getvalue()
    assert "sk-12345678" not in text and "my diary" not in text
    assert text.count(HIDDEN) == 5


def test_a_traceback_is_part_of_its_line() -> None:
    out = io.StringIO()
    configure_logs(role="tracker", stream=out)
    try:
        raise ValueError("broken")
    except ValueError:
        structlog.get_logger("shardline.tracker").exception("request_failed", path="/v1/nodes")
    (line,) = lines(out)
    assert "ValueError: broken" in str(line["exception"])


def test_setting_up_twice_does_not_double_lines() -> None:
    out = io.StringIO()
    configure_logs(role="node", stream=io.StringIO())
    configure_logs(role="node", stream=out)
    structlog.get_logger("shardline.x").info("once")
    assert len(lines(out)) == 1


@pytest.mark.parametrize("style", ["json", "console"])
def test_a_traceback_shows_no_local_variables(style: str) -> None:
    out = io.StringIO()
    configure_logs(role="node", style=style, stream=out)  # type: ignore[arg-type]
    try:
        authorization = "Bearer " + "sk-" + "12345678"
        raise ValueError(f"{len(authorization)} characters")
    except ValueError:
        structlog.get_logger("shardline.node").exception("request_failed")
    assert "ValueError: 18 characters" in out.getvalue()
    assert "sk-12345678" not in out.getvalue()
