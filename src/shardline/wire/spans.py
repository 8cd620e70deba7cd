"""A span as the rooms hand it on: what one process did for one trace, and for how long.

Owns the shape of a span and of its place in a trace, in the terms of W3C Trace Context; nothing of OpenTelemetry's
packages. Pure. Shown by tests/transport/test_spans.py.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

Value = str | bool | int | float | list[str]
Kind = Literal["server", "internal"]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a span stands: lowercase hexadecimal, 32 digits of the trace and 16 of the span."""

    trace: str
    span: str

    def child(self) -> Place:
        return Place(self.trace, secrets.token_hex(8))


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Something that has ended. Times are Unix nanoseconds."""

    name: str
    place: Place
    parent: Place | None
    kind: Kind
    began_ns: int
    ended_ns: int
    attributes: Mapping[str, Value] = field(default_factory=dict)
    error: str | None = None
    """Its code, where it failed."""


SpanSink = Callable[[Span], None]
"""Takes a span; never blocks, never raises."""


def new_place(trace: str | None = None) -> Place:
    """A place in `trace`, or in a trace of its own."""
    return Place(trace or secrets.token_hex(16), secrets.token_hex(8))
