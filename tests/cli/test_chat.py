"""`shardline chat`: what is sent, what is shown, and how it fails."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import termios
from typing import Any

import pytest
from click.testing import CliRunner

from shardline.cli.chat import Conversation, first_model
from shardline.cli.client import Endpoint
from shardline.cli.main import cli
from shardline.errors import ShardlineError

MODELS = {"object": "list", "data": [{"id": "smol"}, {"id": "other"}]}


def delta(text: str, **more: Any) -> str:
    return "data: " + json.dumps({"choices": [{"index": 0, "delta": {"content": text}}], **more})


def answering(stage, event: dict[str, Any]) -> None:
    stage.json("GET /v1/models", MODELS)
    stage.events(
        "POST /v1/chat/completions",
        'data: {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}',
        "data: " + json.dumps({"choices": [], "telemetry": event}),
        delta("Hel"),
        delta("lo", telemetry={**event, "phase": "completed"}),
        'data: {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}',
        'data: {"choices": [], "usage": {"total_tokens": 3}}',
        "data: [DONE]",
    )


def test_one_question_writes_the_answer_to_stdout_and_the_account_to_stderr(stage, event: dict[str, Any]) -> None:
    answering(stage, event)
    done = CliRunner().invoke(
        cli, ["chat", "--gateway", stage.url, "-m", "hi", "--max-tokens", "7", "--system", "Be brief"]
    )
    assert done.exit_code == 0, done.output
    assert done.stdout == "Hello\n"
    assert "n-0 0:15 → n-1 15:30" in done.stderr and "12.5 tokens/s" in done.stderr
    body = json.loads(stage.asked[-1][2])
    assert body == {
        "model": "smol",
        "messages": [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "hi"}],
        "stream": True,
        "stream_options": {"include_usage": True, "include_telemetry": True},
        "timings_per_token": True,
        "max_tokens": 7,
    }


def test_the_account_keeps_up_with_the_tokens(stage, event: dict[str, Any]) -> None:
    """Accounts come twice a second; what is shown between two of them is not behind the text."""
    early = {**event, "phase": "prefill", "prefill": {"done": 1, "total": 9}, "decode": {"tokens": 0}}
    stage.events(
        "POST /v1/chat/completions",
        "data: " + json.dumps({"choices": [], "telemetry": early}),
        delta("a", timings={"predicted_n": 1}),
        delta("b", timings={"predicted_n": 2}),
        "data: " + json.dumps({"choices": [], "telemetry": {**event, "phase": "completed"}}),
        delta("", timings={"predicted_n": 99}),
        "data: [DONE]",
    )

    class Seen:
        def __init__(self) -> None:
            self.states: list[tuple[str, int, int]] = []

        def text(self, delta: str) -> None:
            pass

        def event(self, event: dict[str, Any]) -> None:
            self.states.append((event["phase"], event["prefill"]["done"], event["decode"]["tokens"]))

    seen = Seen()
    conversation = Conversation(Endpoint("Gateway", stage.url, ""), "smol", None, {})
    _, last = conversation.ask("hi", seen)
    assert seen.states[:3] == [("prefill", 1, 0), ("decode", 9, 1), ("decode", 9, 2)]
    assert seen.states[3:] == [("completed", 41, 17)] * 2
    assert last == {**event, "phase": "completed"}


def test_json_has_text_and_telemetry(stage, event: dict[str, Any]) -> None:
    answering(stage, event)
    done = CliRunner().invoke(
        cli, ["chat", "--gateway", stage.url, "-m", "-", "--json", "--model", "other"], input="from stdin"
    )
    assert json.loads(done.stdout) == {"model": "other", "text": "Hello", "telemetry": {**event, "phase": "completed"}}
    assert json.loads(stage.asked[-1][2])["messages"] == [{"role": "user", "content": "from stdin"}]


def test_a_conversation_goes_on_and_can_be_forgotten(stage, event: dict[str, Any]) -> None:
    answering(stage, event)
    done = CliRunner().invoke(cli, ["chat", "--gateway", stage.url], input="one\n\ntwo\n/new\nthree\n/quit\n")
    assert done.exit_code == 0, done.output
    asked = [json.loads(body)["messages"] for what, _, body in stage.asked if what.startswith("POST")]
    assert [[m["content"] for m in messages] for messages in asked] == [["one"], ["one", "Hello", "two"], ["three"]]


def test_commands_of_a_conversation_are_not_sent(stage, event: dict[str, Any]) -> None:
    answering(stage, event)
    typed = "/help\n/hepl\n/etc/hosts, what is it?\n /hepl\n/exit\n"
    done = CliRunner().invoke(cli, ["chat", "--gateway", stage.url], input=typed)
    asked = [json.loads(body)["messages"][-1]["content"] for what, _, body in stage.asked if what.startswith("POST")]
    assert asked == ["/etc/hosts, what is it?", "/hepl"]
    assert done.stderr.count("/new forgets the conversation") == 3 and "/hepl is no command" in done.stderr


def test_a_failed_answer_is_told_and_the_question_taken_back(stage, event: dict[str, Any]) -> None:
    stage.json("GET /v1/models", MODELS)
    failure = ShardlineError("node_lost", "Node n-1 is gone", node="n-1")
    stage.events("POST /v1/chat/completions", delta("Hel"), "data: " + json.dumps({"error": failure.body()}))
    done = CliRunner().invoke(cli, ["chat", "--gateway", stage.url], input="one\ntwo\n")
    assert done.exit_code == 0
    assert done.stderr.count("failed: Node n-1 is gone (node_lost)") == 2
    assert len(json.loads(stage.asked[-1][2])["messages"]) == 1


def test_an_error_of_one_question_is_raised(stage) -> None:
    stage.json("GET /v1/models", MODELS)
    stage.json(
        "POST /v1/chat/completions", {"error": ShardlineError("capacity", "all routes are full").body()}, status=503
    )
    conversation = Conversation(Endpoint("Gateway", stage.url, ""), "smol", None, {})
    with pytest.raises(ShardlineError, match="all routes are full"):
        conversation.ask("hi", None)


def test_a_model_that_is_not_served_is_told_with_those_that_are(stage) -> None:
    stage.json("GET /v1/models", MODELS)
    refusal = ShardlineError("model_not_found", "the model 'nope' is not served here").body()
    stage.json("POST /v1/chat/completions", {"error": refusal}, status=404)
    done = CliRunner().invoke(cli, ["chat", "--gateway", stage.url, "-m", "hi", "--model", "nope"])
    assert isinstance(done.exception, ShardlineError)
    assert "there are: smol, other" in done.exception.message
    assert done.exception.advice == "Give --model one of these names, or leave it out for smol."
    stage.json("GET /v1/models", {"data": []})
    done = CliRunner().invoke(cli, ["chat", "--gateway", stage.url, "-m", "hi", "--model", "nope"])
    assert isinstance(done.exception, ShardlineError) and "shardline node --model" in done.exception.advice


def test_the_first_model_that_is_whole_is_taken(stage) -> None:
    stage.json("GET /v1/models", {"data": [{"id": "half", "ready": False}, {"id": "whole", "ready": True}]})
    assert first_model(Endpoint("Gateway", stage.url, "")) == "whole"


def test_no_model_yet(stage) -> None:
    stage.json("GET /v1/models", {"data": []})
    with pytest.raises(ShardlineError) as raised:
        first_model(Endpoint("Gateway", stage.url, ""))
    assert raised.value.code == "model_unavailable"


def test_no_model_yet_in_a_cluster_with_keys(stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Node gets into it by a line only."""
    stage.json("GET /v1/models", {"data": []})
    monkeypatch.setenv("SHARDLINE_TRACKER", "https://127.0.0.1:9")
    done = CliRunner().invoke(cli, ["chat", "--gateway", stage.url, "-m", "hi"])
    assert isinstance(done.exception, ShardlineError) and "shardline invite" in done.exception.advice


def test_json_needs_a_message() -> None:
    assert CliRunner().invoke(cli, ["chat", "--json"]).exit_code == 2


def test_on_a_terminal_the_account_is_redrawn_and_the_answer_stays_whole(stage, event: dict[str, Any]) -> None:
    answering(stage, event)
    ours, theirs = os.openpty()
    termios.tcsetwinsize(theirs, (30, 100))
    process = subprocess.Popen(
        [sys.executable, "-m", "shardline", "chat", "-m", "hi", "--gateway", stage.url],
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm"},
    )
    os.close(theirs)
    shown = b""
    try:
        while chunk := os.read(ours, 65536):
            shown += chunk
    except OSError:
        pass  # The end of a terminal whose other side has closed.
    finally:
        os.close(ours)
    assert process.wait(10) == 0
    last = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode()).replace("\r", "").splitlines()[-8:]
    assert "Hello" in last
    assert any(line.split() == ["phase", "completed"] for line in last)
    assert any("n-0 0:15 → n-1 15:30" in line for line in last)


def test_nothing_is_no_question() -> None:
    done = CliRunner().invoke(cli, ["chat", "-m", ""])
    assert done.exit_code == 2 and "asks nothing" in done.output


def test_a_model_that_is_offered_and_served_by_nobody(stage: Any) -> None:
    stage.json("GET /v1/models", {"data": []})
    stage.json("GET /v1/artifacts", {"artifacts": [{"name": "Tiny", "offered": True}]})
    arguments = ["--set", f"tracker={stage.url}", "chat", "-m", "x", "--gateway", stage.url]
    refused = CliRunner().invoke(cli, arguments).exception
    assert isinstance(refused, ShardlineError)
    assert refused.advice.endswith(f"offers Tiny; start a Node for it: shardline node --tracker {stage.url}")
