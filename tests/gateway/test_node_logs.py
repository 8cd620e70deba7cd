"""Log tails of Nodes at the Gateway: when they are asked, what is believed, and what stays of those that are gone."""

from __future__ import annotations

import asyncio
import json
from typing import Any
from urllib.parse import parse_qs, urlsplit

import msgspec

from shardline.errors import ShardlineError
from shardline.gateway.node_logs import NODES, ROUND_BYTES, NodeLogs
from shardline.transport.failures import TimedOut
from shardline.wire.messages import LOG_CHARS, LOG_LINES


class Nodes:
    """Nodes that answer from memory: by host name, what each has written, as JSON would bring it."""

    def __init__(self, *names: str) -> None:
        self.lines: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
        self.boot = dict.fromkeys(names, "aa")
        self.fails: dict[str, Exception] = {}
        self.asked: list[str] = []
        self.now = 100.0
        self.logs = NodeLogs(self, lambda: {name: f"http://{name}:1" for name in self.lines}, lambda: self.now)

    def write(self, name: str, *texts: str, level: str = "info") -> None:
        known = self.lines[name]
        known += [{"n": len(known) + 1 + i, "time": 5.0, "level": level, "text": text} for i, text in enumerate(texts)]

    async def json(self, method: str, url: str, kind: Any, *, timeout_s: float, limit: str, max_body: int) -> Any:
        parts = urlsplit(url)
        name, query = str(parts.hostname), parse_qs(parts.query, keep_blank_values=True)
        self.asked.append(name)
        await asyncio.sleep(0)
        if name in self.fails:
            raise self.fails[name]
        same = query["boot"] == [self.boot[name]]
        lines = [line for line in self.lines[name] if not same or line["n"] > int(query["after"][0])]
        return msgspec.convert({"boot": self.boot[name], "lines": lines}, kind)

    async def look(self, seen: dict[str, int]) -> dict[str, list[str]]:
        self.now += 1.0
        await self.logs.look()
        events = [json.loads(event) for event in self.logs.news(seen)]
        return {event["node"]: [line["text"] for line in event["lines"]] for event in events}


async def test_each_reader_gets_all_once_and_then_what_is_new() -> None:
    nodes = Nodes("a", "b")
    nodes.write("a", "one", "two")
    first: dict[str, int] = {}
    second: dict[str, int] = {}
    assert await nodes.look(first) == {"a": ["one", "two"]}
    nodes.write("a", "three")
    nodes.write("b", "other")
    assert await nodes.look(first) == {"a": ["three"], "b": ["other"]}
    assert await nodes.look(second) == {"a": ["one", "two", "three"], "b": ["other"]}
    assert await nodes.look(first) == {}


async def test_all_who_look_within_a_second_share_one_question() -> None:
    nodes = Nodes("a")
    async with asyncio.TaskGroup() as tasks:
        for _ in range(5):
            tasks.create_task(nodes.logs.look())
    nodes.now += 0.9
    await nodes.logs.look()
    assert nodes.asked == ["a"]


async def test_the_lines_of_a_node_that_died_stay_and_another_life_follows_them() -> None:
    nodes = Nodes("a", "b")
    nodes.write("a", "last words")
    await nodes.look({})
    lines = nodes.lines.pop("a")
    assert (await nodes.look({}))["a"] == ["last words"]
    lines.clear()
    nodes.lines["a"], nodes.boot["a"] = lines, "bb"
    nodes.write("a", "born again")
    assert (await nodes.look({}))["a"] == ["last words", "born again"]


async def test_whoever_does_not_answer_loses_its_own_lines_only() -> None:
    nodes = Nodes("a", "b", "c")
    nodes.write("c", "well")
    nodes.fails = {"a": TimedOut("a:1", "log", 1.0), "b": ShardlineError("not_found", "keeps none")}
    assert await nodes.look({}) == {"c": ["well"]}


async def test_a_hostile_node_is_shown_as_short_printable_text() -> None:
    nodes = Nodes("a")
    nodes.boot["a"] = "x/../?&aa" * 100
    nodes.write("a", "<b>\x1b[2J\n\u202e" + "y" * 5000, level="<script>")
    nodes.lines["a"][0]["time"] = 1e300
    await nodes.look({})
    (event,) = nodes.logs.news({})
    (line,) = json.loads(event)["lines"]
    assert (line["level"], line["time"], len(line["text"])) == ("info", 0.0, LOG_CHARS)
    assert line["text"].startswith("<b> [2J") and line["text"].isprintable()
    await nodes.look({})  # what it calls its process is part of the next URL


async def test_numbers_that_do_not_grow_are_told_once() -> None:
    nodes = Nodes("a")
    nodes.write("a", "one", "two", "three")
    for line, number in zip(nodes.lines["a"], (7, 7, 3), strict=True):
        line["n"] = number
    seen: dict[str, int] = {}
    assert await nodes.look(seen) == {"a": ["one"]}
    assert await nodes.look(seen) == {}


async def test_whoever_floods_waits_behind_all_others() -> None:
    nodes = Nodes("a", "b", "c", "z")
    wide = "€" * LOG_CHARS
    for name in ("a", "b", "c"):
        nodes.write(name, *[wide] * LOG_LINES)
    seen: dict[str, int] = {}
    told = [await nodes.look(seen)]
    assert sum(len(texts) for texts in told[0].values()) * len(wide.encode()) < 2 * ROUND_BYTES
    for name in ("a", "b", "c"):
        nodes.write(name, *[wide] * LOG_LINES)
    nodes.write("z", "heard")
    told.append(await nodes.look(seen))
    assert told[1]["z"] == ["heard"]


async def test_of_so_many_nodes_lines_are_kept() -> None:
    nodes = Nodes("a")
    nodes.write("a", "first")
    seen: dict[str, int] = {}
    await nodes.look(seen)
    del nodes.lines["a"]
    for i in range(NODES):
        nodes.lines[f"n{i}"], nodes.boot[f"n{i}"] = [], "aa"
        nodes.write(f"n{i}", "here")
    told = await nodes.look({})
    assert len(told) == NODES and "a" not in told
    await nodes.look(seen)
    assert seen.keys() == told.keys(), "a reader forgets whom the Gateway has forgotten"
