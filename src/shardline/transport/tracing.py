"""Which request a task works for: its id, and the W3C trace context that its client sent.

Owns what of these fields is believed, that they stand in every log line of the task and of those that it starts, and
that requests to other parts of the cluster carry them on. Steps carry none: their session does. It makes no spans
(spans.py): the trace context is passed on as it came. Shown by tests/transport/test_tracing.py and
tests/cluster/test_request_ids.py.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass

import structlog

REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
_PARENT = re.compile(rb"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}(?:-[!-~]{1,100})?")
_STATE = re.compile(rb"[ -~]{1,512}")
_NAMES = ("request_id", "trace_id")
"""Keys in log lines."""
Headers = Iterable[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class Trace:
    """What goes on with a request. Every value fits into a header field as it is."""

    request_id: str
    parent: str = ""
    """`traceparent`; empty: the client sent none, or none that is one."""
    state: str = ""
    """`tracestate`; only beside a parent."""

    @property
    def trace_id(self) -> str:
        return self.parent[3:35]

    @property
    def fields(self) -> str:
        """Header lines."""
        lines = f"x-request-id: {self.request_id}\r\n"
        lines += f"traceparent: {self.parent}\r\n" if self.parent else ""
        return lines + (f"tracestate: {self.state}\r\n" if self.state else "")


_fields: ContextVar[str] = ContextVar("shardline_trace_fields", default="")


def trace_of(headers: Headers, fresh_id: str) -> Trace:
    """Of the fields of a request; one that has no id of its own, or none that can be one, gets `fresh_id`."""
    request_id, parent, state = fresh_id, "", ""
    parents = 0
    for name, value in headers:
        if name == b"x-request-id" and REQUEST_ID.fullmatch(value):
            request_id = value.decode("ascii")
        elif name == b"traceparent":
            parents += 1
            found = _PARENT.fullmatch(value)
            if found and found[1].strip(b"0") and found[2].strip(b"0") and _is_whole(value):
                parent = value.decode("ascii")
        elif name == b"tracestate" and _STATE.fullmatch(value):
            state = value.decode("ascii")
    if parents != 1:  # two of them: which one is meant?
        parent = ""
    return Trace(request_id, parent, state if parent else "")


def _is_whole(value: bytes) -> bool:
    """Version 00 has nothing behind its flags; later ones may."""
    return not value.startswith(b"00-") or len(value) == 55


@contextlib.contextmanager
def tracing(trace: Trace) -> Iterator[None]:
    """Around the work for one request."""
    token = _fields.set(trace.fields)
    named = {"request_id": trace.request_id, **({"trace_id": trace.trace_id} if trace.parent else {})}
    try:
        with structlog.contextvars.bound_contextvars(**named):
            yield
    finally:
        _fields.reset(token)


def trace_fields() -> str:
    """Header lines for a request that is made for the one at hand; empty where there is none."""
    return _fields.get()


@contextlib.contextmanager
def untraced() -> Iterator[None]:
    """Around the start of what outlives the request at hand and works for all: a connection, a task that stays."""
    token = _fields.set("")
    held = structlog.contextvars.get_contextvars()
    structlog.contextvars.unbind_contextvars(*_NAMES)
    try:
        yield
    finally:
        _fields.reset(token)
        structlog.contextvars.bind_contextvars(**{name: held[name] for name in _NAMES if name in held})
