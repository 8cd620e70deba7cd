"""A cluster with the scripted engine, and Schemathesis let loose on what its Gateway says of itself.

The cluster runs on a thread of its own: Schemathesis is not async. Owns what of the document is narrowed, so that cases
come through to the engine: names and ids that there are; for `Loose.takes`, also fields that go with others or hang on
the model. Everything else is as `GET /openapi.json` gives it out.
"""

from __future__ import annotations

import asyncio
import copy
import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import schemathesis
from schemathesis.config import SchemathesisConfig
from schemathesis.engine import Status, events, from_schema
from schemathesis.engine.recorder import ScenarioRecorder

from shardline.settings import Settings
from tests.support.api_cluster import api_cluster

Json = dict[str, Any]
KEY = "key-of-schemathesis-" + "k" * 16
HEADERS = {"Authorization": f"Bearer {KEY}"}
SETTINGS = Settings(default_max_tokens=16, drain_s=0.5, record_limit=20_000, record_bytes=1 << 30)
TEMPLATE = (
    "{{ tools }}{{ reasoning_effort }}{% if false %}<tool_call></tool_call>{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ANSWER_S = 20
"""A case that takes longer hangs."""
CONTEXT = 512
"""Tokens: an answer that does not end by itself ends there, before it looks like one that hangs."""
SCRIPT: Json = {"chat_template": TEMPLATE, "context_length": CONTEXT}
INPUTS = 64
"""As many as two thousand would be taken, and take their time."""
ENDLESS = "/v1/live"
"""Streams until its client leaves: followed by tests/gateway/test_live.py."""
GO_TOGETHER = {
    *("stream_options", "top_logprobs", "response_format", "grammar", "regex", "tools", "tool_choice", "logit_bias"),
    *("min_tokens", "repetition_penalty", "suffix", "echo", "text", "chat_template_kwargs", "dimensions", "seed"),
}
"""Fields whose values are taken or not by what other fields say, or the model, its template and its vocabulary."""
_TEXT: Json = {"type": "string", "minLength": 1, "maxLength": 20}
_TALK: Json = {
    "type": "array",
    "minItems": 1,
    "maxItems": 3,
    "items": {
        "type": "object",
        "required": ["role", "content"],
        "additionalProperties": False,
        "properties": {"role": {"enum": ["user", "assistant"]}, "content": _TEXT},
    },
}
_TEXTS: Json = {
    "oneOf": [
        _TEXT,
        {"type": "array", "minItems": 1, "maxItems": 4, "items": _TEXT},
        {"type": "array", "minItems": 1, "maxItems": 20, "items": {"type": "integer", "minimum": 0, "maximum": 255}},
    ]
}


@dataclass
class Findings:
    """Of one run. `answers`: how often each operation answered with which status."""

    cases: int = 0
    answers: dict[str, Counter[int]] = field(default_factory=dict)
    streams: int = 0
    """Answers that were a stream of events."""
    faults: list[str] = field(default_factory=list)

    def taken(self, operation: str) -> int:
        return self.answers.get(operation, Counter())[200]

    def add(self, recorder: ScenarioRecorder) -> None:
        self.cases += len(recorder.interactions)
        for name, interaction in recorder.interactions.items():
            answer = interaction.response
            self.answers.setdefault(recorder.label, Counter())[answer.status_code if answer else 0] += 1
            if answer is not None and "text/event-stream" in answer.headers.get("content-type", [""])[0]:
                self.streams += 1
            if answer is None:
                self.faults.append(f"{recorder.label}: no answer to {interaction.request.body!r}")
            for check in recorder.checks.get(name, ()):
                if check.status == Status.FAILURE and check.failure_info is not None:
                    asked, said = interaction.request, b"" if answer is None else answer.content[:500]
                    failure = check.failure_info.failure
                    self.faults.append(
                        f"{check.name}: {failure}\n{asked.method} {asked.uri} {asked.body!r}\n-> {said!r}"
                    )


@dataclass(frozen=True)
class Loose:
    """A running Gateway, and its document as it was fetched from there."""

    url: str
    model: str
    session: str
    """A Route Session that has ended."""
    document: Json

    def run(
        self, examples: int, *, boundaries: bool, takes: bool = False, seed: int = 1, only: str | None = None
    ) -> Findings:
        """Cases of every operation, or of the path `only`: `examples` drawn ones each; with `boundaries` all values at
        the edges of the document, and just behind them. `takes`: only what must be taken."""
        findings = Findings()
        document = self._taken() if takes else self._narrowed()
        if only is not None:
            document["paths"] = {only: document["paths"][only]}
        config = SchemathesisConfig.from_dict(
            {
                "base-url": self.url,
                "headers": HEADERS,
                "request-timeout": ANSWER_S,
                "continue-on-failure": True,
                "seed": seed,
                "generation": {
                    "max-examples": examples,
                    "mode": "positive" if takes else "all",
                    "database": "none",
                    "no-shrink": True,
                },
                "phases": {
                    "examples": {"enabled": False},
                    "coverage": {"enabled": boundaries},
                    "stateful": {"enabled": False},
                },
                # What fits the document may still be refused: no schema knows templates, grammars and vocabularies.
                "checks": {"positive_data_acceptance": {"enabled": takes}},
            }
        )
        schema = schemathesis.openapi.from_dict(document, config=config)
        if takes:
            schema.hook("map_body")(_with_plain_integers)
        for event in from_schema(schema).execute():
            if isinstance(event, events.ScenarioFinished):
                findings.add(event.recorder)
            elif isinstance(event, events.NonFatalError):
                findings.faults.append(f"{event.label}: {event.value}")
            elif isinstance(event, events.FatalError):
                raise event.exception
        return findings

    def _narrowed(self) -> Json:
        document = copy.deepcopy(self.document)
        del document["paths"][ENDLESS]
        for one in document["components"]["schemas"]["EmbeddingsRequest"]["properties"]["input"]["oneOf"]:
            if "maxItems" in one:
                one["maxItems"] = INPUTS
        for schema in document["components"]["schemas"].values():
            named = schema.get("properties", {}).get("model")
            if named is not None:
                named["enum"] = [self.model, None] if "anyOf" in named else [self.model]
        for path, operations in document["paths"].items():
            for operation in operations.values():
                for parameter in operation.get("parameters", ()):
                    if parameter["name"] == "id":
                        known = self.session if "route-sessions" in path else self.model
                        parameter["schema"] = {"type": "string", "enum": [known]}
        return document

    def _taken(self) -> Json:
        document = self._narrowed()
        for path, operations in list(document["paths"].items()):
            body = operations.get("post", {}).get("requestBody")
            if body is None:
                del document["paths"][path]
                continue
            name = body["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
            schema = document["components"]["schemas"][name]
            properties = schema["properties"]
            if "stream" in properties:
                properties["stream"] = {"type": "boolean"}
                schema["required"].append("stream")
            for field_name in GO_TOGETHER & set(properties):
                del properties[field_name]
            replaced = {"messages": _TALK, "prompt": _TEXTS, "input": _TEXTS, "system": _TEXT}
            replaced |= {"instructions": _TEXT, "content": _TEXT, "n": {"type": "integer", "minimum": 1, "maximum": 2}}
            if name == "ResponsesRequest":
                replaced |= {"input": _TEXT, "reasoning": {"type": "null"}, "prompt": {"type": "null"}}
            properties.update({key: value for key, value in replaced.items() if key in properties})
            if "tokens" in properties:
                properties["tokens"]["items"].update(minimum=0, maximum=255)
        return document


def _with_plain_integers(context: Any, body: Any) -> Any:
    """JSON Schema takes 1.0 for an integer, the Gateway does not."""
    if isinstance(body, dict):
        return {name: _with_plain_integers(context, value) for name, value in body.items()}
    if isinstance(body, list):
        return [_with_plain_integers(context, value) for value in body]
    return int(body) if isinstance(body, float) and body.is_integer() else body


@contextmanager
def loose(folder: Path) -> Iterator[Loose]:
    """Two Nodes, a Tracker and a Gateway, ready to be asked."""
    ready, broken = threading.Event(), []
    known: Json = {}

    async def run() -> None:
        async with api_cluster(folder, settings=SETTINGS, script=SCRIPT, api_keys=[KEY]) as made:
            known.update(url=made.url, model=made.model, loop=asyncio.get_running_loop(), end=asyncio.Event())
            ready.set()
            await known["end"].wait()

    def work() -> None:
        try:
            asyncio.run(run())
        except BaseException as error:
            broken.append(error)
        finally:
            ready.set()

    thread = threading.Thread(target=work, name="cluster")
    thread.start()
    try:
        assert ready.wait(30) and not broken, broken
        yield _asked(known["url"], known["model"])
    finally:
        if "loop" in known:
            known["loop"].call_soon_threadsafe(known["end"].set)
        thread.join(30)
    assert not thread.is_alive() and not broken, broken


def _asked(url: str, model: str) -> Loose:
    with httpx.Client(base_url=url, timeout=ANSWER_S, trust_env=False, headers=HEADERS) as http:
        body = {"model": model, "prompt": "Hi", "max_tokens": 2}
        answer = http.post("/v1/completions", content=json.dumps(body), headers={"content-type": "application/json"})
        assert answer.status_code == 200, answer.text
        document = http.get("/openapi.json").json()
    return Loose(url, model, answer.headers["shardline-route-session"], document)
