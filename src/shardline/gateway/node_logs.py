"""The log tails of the Nodes, as whoever looks at the cluster sees them: also of Nodes that have died since.

Owns when Nodes are asked (at most once a second, while somebody looks, never else), what of their answers is believed,
and what is remembered: the last lines of each, of so many Nodes. A Node that answers nonsense, slowly or too much loses
its own lines only. Shown by tests/gateway/test_node_logs.py and tests/cluster/test_log_tails.py.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import msgspec

from shardline.errors import ShardlineError
from shardline.telemetry.log_tail import printable
from shardline.transport.failures import HttpFailure
from shardline.wire.messages import LOG_LINES, LogLine, LogLines

FRESH_S = 1.0
"""No Node is asked again before."""
ANSWER_S = 1.0
ANSWER_BYTES = 512 << 10
"""A whole tail with its JSON around it, where each character takes four bytes."""
NODES = 128
"""Of so many Nodes lines are kept; the one that was longest unheard makes way."""
ROUND_BYTES = 512 << 10
"""A reader gets about so much at a time; what is left follows in the next round."""
_AT_ONCE = 8
_LEVELS = frozenset({"debug", "info", "warning", "error", "critical"})
_encoder = msgspec.json.Encoder()
T = TypeVar("T")


class AskedNode(Protocol):
    """What is asked of the HTTP client (transport/http_client.py)."""

    async def json(self, method: str, url: str, kind: type[T], *, timeout_s: float, limit: str, max_body: int) -> T: ...


class ShownLine(msgspec.Struct, frozen=True, kw_only=True):
    """A line as it is shown; `n` counts all lines that this Gateway has heard, of any Node."""

    n: int
    time: float
    level: str
    text: str


class LogNews(msgspec.Struct, frozen=True, kw_only=True):
    """The event `log`: lines of one Node, to be put behind those that came before."""

    node: str
    lines: list[ShownLine]


@dataclass(slots=True)
class _Tail:
    boot: str = ""
    after: int = 0
    """Number of its last line, of the process `boot`."""
    heard_at: float = 0.0
    lines: deque[ShownLine] = field(default_factory=lambda: deque(maxlen=LOG_LINES))


class NodeLogs:
    """The tails that one Gateway knows. `urls`: the Nodes that live, with the URLs that the Tracker has dialled."""

    def __init__(
        self,
        client: AskedNode,
        urls: Callable[[], Mapping[str, str]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._urls = urls
        self._clock = clock
        self._lock = asyncio.Lock()
        self._asked_at: float | None = None
        self._count = 0
        self._tails: dict[str, _Tail] = {}

    async def look(self) -> None:
        """Ask every Node for what is new; whoever looks while that is under way has its answers."""
        async with self._lock:
            now = self._clock()
            if self._asked_at is not None and now - self._asked_at < FRESH_S - 0.05:
                return
            slots = asyncio.Semaphore(_AT_ONCE)
            async with asyncio.TaskGroup() as tasks:
                for node, url in list(self._urls().items())[:NODES]:
                    tasks.create_task(self._ask(node, url, slots))
            self._asked_at = self._clock()

    def news(self, seen: dict[str, int]) -> list[bytes]:
        """Events with what a reader has not seen, about `ROUND_BYTES` of them; `seen` (by Node, the last line) goes on.

        First of those that it heard of longest ago: whoever floods waits behind all others.
        """
        for gone in seen.keys() - self._tails.keys():
            del seen[gone]
        events: list[bytes] = []
        for node in sorted(self._tails, key=lambda node: seen.get(node, 0)):
            lines = [line for line in self._tails[node].lines if line.n > seen.get(node, 0)]
            if lines and sum(map(len, events)) < ROUND_BYTES:
                seen[node] = lines[-1].n
                events.append(_encoder.encode(LogNews(node=node, lines=lines)))
        return events

    async def _ask(self, node: str, url: str, slots: asyncio.Semaphore) -> None:
        known = self._tails.get(node) or _Tail()
        path = f"{url}/v1/log?boot={known.boot}&after={known.after}"
        async with slots:
            try:
                answer = await self._client.json(
                    "GET", path, LogLines, timeout_s=ANSWER_S, limit="log", max_body=ANSWER_BYTES
                )
            except (ShardlineError, HttpFailure):
                return  # it keeps no lines, or does not answer: its state is the Tracker's to tell
        self._take(node, answer)

    def _take(self, node: str, answer: LogLines) -> None:
        boot = "".join(c for c in answer.boot[:32] if c in "0123456789abcdef")
        tail = self._tails.get(node)
        if tail is None:
            tail = self._tails[node] = _Tail()
            self._make_room()
        tail.heard_at = self._clock()
        if boot != tail.boot:
            tail.boot, tail.after = boot, 0
        for line in answer.lines[-LOG_LINES:]:
            if tail.after < line.n < 1 << 50:  # numbers that do not grow would be told again and again
                tail.after = line.n
                self._count += 1
                tail.lines.append(_shown(line, self._count))

    def _make_room(self) -> None:
        while len(self._tails) > NODES:
            others = list(self._tails)[:-1]
            del self._tails[min(others, key=lambda node: self._tails[node].heard_at)]


def _shown(line: LogLine, n: int) -> ShownLine:
    """A line of a Node that may be anybody's: short, printable, of a level that there is."""
    moment = line.time if math.isfinite(line.time) and 0 <= line.time < 1e11 else 0.0
    return ShownLine(n=n, time=moment, level=line.level if line.level in _LEVELS else "info", text=printable(line.text))
