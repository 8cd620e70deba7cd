"""`shardline chat`: one question, or a conversation, with the account of each generation as it runs.

Owns what is sent and what a person sees; the Gateway does the rest. Shown by tests/cli/test_chat.py.
"""

from __future__ import annotations

import contextlib
import re
import sys
from typing import Any

import click

from shardline.cli.invocation import Invocation, gateway_of, pass_invocation
from shardline.cli.listings import start_of_a_node
from shardline.errors import ShardlineError

_HELP = "Enter sends. /new forgets the conversation, /quit or Ctrl-D ends, /help says this. Ctrl-C stops an answer."
_COMMAND = re.compile("/[a-z]*")
"""A line that is this alone is a command. Longer ones may well be what somebody asks: /etc/hosts, what is it?"""


@click.command()
@click.option("-m", "--message", help="Ask this and end; without it: a conversation. `-`: read it from stdin.")
@click.option("--model", help="Name as in /v1/models [default: the first that is served].")
@click.option("--system", help="Instructions that stand before the conversation.")
@click.option("--max-tokens", type=click.IntRange(1), help="[default: the Gateway's]")
@click.option("--temperature", type=click.FloatRange(0), help="[default: 1, as the API]")
@click.option("--seed", type=int, help="Same seed, same answer.")
@click.option("--gateway", "gateway_url", metavar="URL", help="The Gateway [default: the one of this machine].")
@click.option("--json", "as_json", is_flag=True, help="With -m: one JSON object at the end, text and telemetry.")
@pass_invocation
def chat(
    invocation: Invocation,
    /,
    message: str | None,
    model: str | None,
    system: str | None,
    gateway_url: str | None,
    as_json: bool,
    **sampling: Any,
) -> None:
    """Ask the served model, with live telemetry.

    Shows the route, prefill progress, tokens/s, and of each hop the time to compute, to wait and to send.
    """
    if as_json and message is None:
        raise click.UsageError("--json goes with -m")
    if message is not None and not message.strip():
        raise click.UsageError('-m "" asks nothing: give a question, or leave -m out for a conversation')
    gateway = gateway_of(invocation.configuration(gateway=gateway_url))
    name = model or _served(invocation, gateway)
    conversation = Conversation(gateway, name, system, {k: v for k, v in sampling.items() if v is not None})
    if message is not None:
        text = sys.stdin.read() if message == "-" else message
        answer(conversation, text, as_json=as_json)
        return
    _talk(conversation)


def _served(invocation: Invocation, gateway: Any) -> str:
    """The first model; where there is none and the Tracker offers one, how a Node takes that."""
    try:
        return first_model(gateway)
    except ShardlineError as error:
        if error.code != "model_unavailable":
            raise
        offer = _offered(invocation)
        if offer is None:
            raise _said_how(invocation, error) from None
        advice = f"The Tracker offers {offer[1]}; start a Node for it: shardline node --tracker {offer[0]}"
        raise ShardlineError(error.code, error.message, advice=advice) from None


def _said_how(invocation: Invocation, error: ShardlineError) -> ShardlineError:
    """`error`, that no model is served; in a cluster with keys, with the way in which Nodes get into that."""
    tracker = invocation.configuration().places.tracker
    if not tracker.startswith("https:"):
        return error
    return ShardlineError(error.code, error.message, advice=f"No Node is there. {start_of_a_node(tracker)}")


def _offered(invocation: Invocation) -> tuple[str, str] | None:
    """URL of the Tracker, and a model that it offers; None where there is none, or nobody to ask."""
    from shardline.cli.invocation import tracker_of

    with contextlib.suppress(ShardlineError):
        tracker = tracker_of(invocation.configuration())
        for artifact in tracker.get("/v1/artifacts").get("artifacts", []):
            if artifact.get("offered"):
                return tracker.url, str(artifact.get("name"))
    return None


def first_model(gateway: Any) -> str:
    """The first model that the Gateway serves whole; where none is whole, the first one."""
    models = gateway.get("/v1/models").get("data", [])
    if not models:
        raise ShardlineError(
            "model_unavailable",
            f"the Gateway at {gateway.url} serves no model yet",
            advice="`shardline nodes` shows the Nodes there are. Start one: shardline node --model PATH",
        )
    return str(next((model for model in models if model.get("ready", True)), models[0])["id"])


def unknown_model(gateway: Any, name: str) -> ShardlineError:
    """`name` is not served: the names that are."""
    names = [str(model["id"]) for model in gateway.get("/v1/models").get("data", [])]
    if not names:
        return ShardlineError(
            "model_not_found",
            f"the model {name!r} is not served at {gateway.url}; no model is",
            advice="`shardline nodes` shows the Nodes there are. Start one: shardline node --model PATH",
        )
    return ShardlineError(
        "model_not_found",
        f"the model {name!r} is not served at {gateway.url}; there are: {', '.join(names)}",
        advice=f"Give --model one of these names, or leave it out for {names[0]}.",
    )


class Conversation:
    """Messages so far. A question whose answer failed is taken back, so that it can be asked again."""

    def __init__(self, gateway: Any, model: str, system: str | None, sampling: dict[str, Any]) -> None:
        self._gateway = gateway
        self.model = model
        self._sampling = sampling
        self._start: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []
        self._messages = list(self._start)

    def forget(self) -> None:
        self._messages = list(self._start)

    def ask(self, question: str, view: Any) -> tuple[str, dict[str, Any] | None]:
        """Stream one answer into `view`; returns the whole text and the last telemetry event."""
        asked = [*self._messages, {"role": "user", "content": question}]
        body = {
            "model": self.model,
            "messages": asked,
            "stream": True,
            "stream_options": {"include_usage": True, "include_telemetry": True},
            "timings_per_token": True,
            **self._sampling,
        }
        try:
            return self._streamed(asked, body, view)
        except ShardlineError as error:
            raise unknown_model(self._gateway, self.model) if error.code == "model_not_found" else error from None

    def _streamed(
        self, asked: list[dict[str, str]], body: dict[str, Any], view: Any
    ) -> tuple[str, dict[str, Any] | None]:
        text = ""
        last: dict[str, Any] | None = None
        for chunk in self._gateway.stream("/v1/chat/completions", body):
            telemetry = chunk.get("telemetry")
            if telemetry is not None:
                last = telemetry
                view.event(telemetry)
            elif last is not None and chunk.get("timings"):
                view.event(advanced(last, chunk["timings"]))
            for choice in chunk.get("choices", []):
                delta = (choice.get("delta") or {}).get("content") or ""
                if delta:
                    text += delta
                    view.text(delta)
        self._messages = [*asked, {"role": "assistant", "content": text}]
        return text, last


def advanced(event: dict[str, Any], timings: dict[str, Any]) -> dict[str, Any]:
    """The last account, as far as a chunk of the answer says that it has gone on since: accounts come twice a second,
    chunks with every token."""
    known = event["decode"]["tokens"]
    tokens = max(known or 0, timings.get("predicted_n") or 0)
    if known is None or tokens == known or event["phase"] not in ("prefill", "decode"):
        return event
    prefill = {**event["prefill"], "done": event["prefill"]["total"]}
    return {**event, "phase": "decode", "prefill": prefill, "decode": {**event["decode"], "tokens": tokens}}


class _NoView:
    """For --json: nothing is shown before the end."""

    def text(self, delta: str) -> None:
        pass

    def event(self, event: dict[str, Any]) -> None:
        pass

    def close(self) -> None:
        pass


def answer(conversation: Conversation, question: str, *, as_json: bool = False) -> None:
    """Ask once and show the answer with its account; the account goes to stderr where stdout is no terminal."""
    from shardline.cli.live import LineView, TerminalView

    view: Any
    if as_json:
        view = _NoView()
    elif sys.stdout.isatty():
        view = TerminalView()
    else:
        view = LineView(sys.stdout, sys.stderr)
    try:
        text, last = conversation.ask(question, view)
    finally:
        view.close()
    if as_json:
        import json

        print(json.dumps({"model": conversation.model, "text": text, "telemetry": last}, ensure_ascii=False))


def _talk(conversation: Conversation) -> None:
    from shardline.cli.live import failure_words

    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (line editing and history of input())
    print(f"{conversation.model}. {_HELP}", file=sys.stderr)
    while True:
        try:
            line = input("> ").rstrip()
        except (EOFError, KeyboardInterrupt):
            print(file=sys.stderr)
            return
        if line in ("/quit", "/exit"):
            return
        if line == "/new":
            conversation.forget()
            continue
        if _COMMAND.fullmatch(line):
            unknown = "" if line in ("/", "/help") else f"{line} is no command; with a blank in front it is sent. "
            print(unknown + _HELP, file=sys.stderr)
            continue
        question = line.strip()
        if not question:
            continue
        try:
            answer(conversation, question)
        except KeyboardInterrupt:
            print("stopped", file=sys.stderr)
        except ShardlineError as error:
            print(f"failed: {failure_words(error)}", file=sys.stderr)
