"""The ring of a process's last log lines: what is in it, what never is, and who gets which."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator

import pytest
import structlog

from shardline.errors import ShardlineError
from shardline.telemetry.log_tail import LogTail
from shardline.telemetry.logs import HIDDEN, configure_logs
from shardline.wire.messages import LOG_CHARS, LOG_LINES


@pytest.fixture
def tail() -> Iterator[LogTail]:
    root, ours = logging.getLogger(), logging.getLogger("shardline")
    before = (root.handlers[:], root.level, ours.handlers[:], ours.level)
    kept = LogTail()
    configure_logs(role="node", stream=io.StringIO(), tail=kept)
    yield kept
    root.handlers[:], root.level, ours.handlers[:] = before[:3]
    ours.setLevel(before[3])
    structlog.reset_defaults()


def texts(tail: LogTail) -> list[str]:
    return [line.text for line in tail.since("", 0).lines]


def test_a_line_is_its_event_and_keys(tail: LogTail) -> None:
    structlog.get_logger("shardline.node.host").info(
        "shard_state", state="ready", reason="all is well", why=None, layers=[0, 4]
    )
    logging.getLogger("shardline.node.run").warning("by the library", extra={"state": "ready"})
    first, second = tail.since("", 0).lines
    assert first.text == 'shard_state state=ready reason="all is well" layers="[0, 4]"'
    assert (first.n, first.level, second.n, second.level) == (1, "info", 2, "warning")
    assert second.text == "by the library state=ready"


def test_the_last_lines_are_kept_and_only_new_ones_are_told(tail: LogTail) -> None:
    log = structlog.get_logger("shardline.x")
    for i in range(LOG_LINES + 50):
        log.info("line", i=i)
    kept = tail.since("", 0)
    assert [line.n for line in kept.lines] == list(range(51, LOG_LINES + 51))
    assert [line.n for line in tail.since(kept.boot, LOG_LINES + 48).lines] == [LOG_LINES + 49, LOG_LINES + 50]
    assert tail.since(kept.boot, LOG_LINES + 50).lines == []
    assert len(tail.since("of another process", LOG_LINES + 50).lines) == LOG_LINES


def test_secrets_and_words_of_users_are_hidden(tail: LogTail) -> None:
    log = structlog.get_logger("shardline.node")
    log.info("opened", prompt="my diary", nested={"Authorization": "Bearer sk-1"}, ticket="sk-1")
    (line,) = texts(tail)
    assert "diary" not in line and "sk-1" not in line and line.count(HIDDEN) == 3


def test_an_exception_is_its_type_and_place_and_only_ours_have_words(tail: LogTail) -> None:
    log = structlog.get_logger("shardline.node")
    for error in (ValueError("my diary"), ShardlineError("engine_lost", "the worker is gone")):
        try:
            raise error
        except Exception:
            log.exception("task_failed", task="push")
    log.error("task_failed", exc_info=error)
    theirs, ours, again = texts(tail)
    assert theirs.startswith('task_failed task=push raised="ValueError at telemetry/test_log_tail.py:')
    assert "diary" not in theirs and ours.endswith(': the worker is gone"') and again.endswith(': the worker is gone"')


def test_what_a_worker_prints_of_an_exception_is_its_type_too(tail: LogTail) -> None:
    log = structlog.get_logger("shardline.model.worker_process")
    for line in (
        'File "engine.py", line 5, in run',
        "jinja2.exceptions.SecurityError: my diary",
        "ValueError: my\ndiary",
        "GGML_ASSERT(n > 0) failed",
    ):
        log.info("worker_said", line=line)
    log.warning("prefix_not_reused", reason="the engine failed: ValueError: my diary")
    log.error("task_failed", exc_info=ShardlineError("engine_error", "the engine failed: ValueError: my diary"))
    *lines, quoted, raised = texts(tail)
    place, theirs, ours, abort = lines
    for line in (quoted, raised):
        assert "the engine failed: ValueError" in line and "diary" not in line
    assert "diary" not in theirs + ours and "SecurityError: [not told]" in theirs and "ValueError" in ours
    assert "line 5" in place and "GGML_ASSERT(n > 0) failed" in abort


def test_lines_of_libraries_are_not_in_it(tail: LogTail) -> None:
    logging.getLogger("asyncio").error("Task exception was never retrieved: my diary")
    assert texts(tail) == []


def test_a_line_is_one_short_printable_line(tail: LogTail) -> None:
    structlog.get_logger("shardline.x").info("said", line="\x1b[31mred\r\nnext\u202eback" + "x" * 1000)
    (line,) = texts(tail)
    assert line.isprintable() and len(line) == LOG_CHARS


def test_setting_up_twice_does_not_double_lines(tail: LogTail) -> None:
    again = LogTail()
    configure_logs(role="node", stream=io.StringIO(), tail=again)
    structlog.get_logger("shardline.x").info("once")
    assert (texts(tail), texts(again)) == ([], ["once"])
