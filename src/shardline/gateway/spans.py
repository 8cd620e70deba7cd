"""What a trace says of a completion: OpenTelemetry's attributes for generative models, and the phases of its sessions.

Owns these names and nothing else: a session's phases are read from its account when the request ends, so that a running
generation does nothing for them. No prompt and no answer is among them. Shown by tests/cluster/test_otel.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from shardline.errors import ShardlineError
from shardline.gateway.choices import Choice
from shardline.gateway.completions import Prepared
from shardline.gateway.openai_answers import Usage
from shardline.gateway.openai_requests import Asked
from shardline.transport.spans import OpenSpan, current_span
from shardline.wire.spans import Place, Span, Value

PHASES = ("queued", "routing", "opening", "prefill", "decode")
_NAME_CHARS = 200
View = dict[str, Any]


def tell_spans(prepared: Prepared, choices: Sequence[Choice], cost: Usage, view_of: Callable[[str], View]) -> None:
    """At the end of a completion: what it was, onto its span; and spans for its sessions. `view_of`: the account."""
    span = current_span()
    if span is None:
        return
    attributes = _asked(span.name, prepared.asked)
    if cost.known:
        attributes["gen_ai.usage.input_tokens"] = cost.prompt_tokens
        attributes["gen_ai.usage.output_tokens"] = cost.completion_tokens
        if cost.cached_tokens is not None:
            attributes["gen_ai.usage.cache_read.input_tokens"] = cost.cached_tokens
    span.name = f"{span.name} {prepared.asked.model[:_NAME_CHARS]}"
    span.attributes.update(attributes)
    for choice in choices:
        try:
            _session(span, view_of(choice.generation.telemetry().id))
        except ShardlineError:
            continue  # its account made way for others


def tell_embedding(model: str, tokens: int) -> None:
    """At the end of a request for vectors: of what, and how many tokens were computed."""
    span = current_span()
    if span is not None:
        name = model[:_NAME_CHARS]
        span.attributes.update(
            {
                "gen_ai.operation.name": span.name,
                "gen_ai.provider.name": "shardline",
                "gen_ai.request.model": name,
                "gen_ai.usage.input_tokens": tokens,
            }
        )
        span.name = f"{span.name} {name}"


def _asked(operation: str, asked: Asked) -> dict[str, Value]:
    sampling = asked.sampling
    found: dict[str, Value | None] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "shardline",
        "gen_ai.request.model": asked.model[:_NAME_CHARS],
        "gen_ai.response.model": asked.model[:_NAME_CHARS],
        "gen_ai.request.choice.count": asked.n,
        "gen_ai.request.max_tokens": asked.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.seed": sampling.seed,
        "gen_ai.output.type": "text",
    }
    return {name: value for name, value in found.items() if value is not None}


def _session(span: OpenSpan, view: View) -> None:
    """One span for a Route Session, and one below it for each of its phases."""
    began_ns = int(view["created"] * 1e9)
    ended_ns = int((view["ended"] or time.time()) * 1e9)
    code = None if view["failure"] is None else str(view["failure"]["code"])
    if code is not None:
        span.error = code
    route = view["route"]
    attributes: dict[str, Value] = {"shardline.session": view["id"], "shardline.phase": view["phase"]}
    if route is not None:
        attributes["shardline.route"] = route["id"]
        attributes["shardline.nodes"] = [hop["node"] for hop in route["hops"]]
        attributes["shardline.layers"] = [_layers(hop["layers"]) for hop in route["hops"]]
    place = span.place.child()
    _give(span, "route session", place, span.place, (began_ns, ended_ns), attributes, code)
    begins = [(phase, began_ns + int(ms * 1e6)) for phase, ms in view["phases"] if phase in PHASES]
    for number, (phase, begin) in enumerate(begins):
        end = begins[number + 1][1] if number + 1 < len(begins) else ended_ns
        _give(span, phase, place.child(), place, (begin, max(begin, end)), _of_phase(phase, view), None)


def _layers(layers: list[int] | None) -> str:
    """Of a composite Node nobody knows how many it has."""
    return "all" if layers is None else f"{layers[0]}:{layers[1]}"


def _of_phase(phase: str, view: View) -> dict[str, Value]:
    """Counts that nobody knows, as of a composite Node whose upstream does not tell them, are left out."""
    told: dict[str, Value | None] = {}
    if phase == "prefill":
        told = {"shardline.tokens": view["prefill"]["done"], "shardline.tokens_kept": view["prefill"]["cached"]}
    elif phase == "decode":
        told = {"shardline.tokens": view["decode"]["tokens"]}
    return {name: count for name, count in told.items() if count is not None}


def _give(
    span: OpenSpan,
    name: str,
    place: Place,
    parent: Place,
    times: tuple[int, int],
    attributes: dict[str, Value],
    error: str | None,
) -> None:
    span.sink(
        Span(
            name=name,
            place=place,
            parent=parent,
            kind="internal",
            began_ns=times[0],
            ended_ns=times[1],
            attributes=attributes,
            error=error,
        )
    )
