"""How values are written on the command line: layer ranges, memory sizes, secrets elsewhere; how layers are shared out.

Owns the parsing and its messages. Shown by tests/cli/test_values.py.
"""

from __future__ import annotations

import re
import sys
from itertools import pairwise
from typing import Any

import click

from shardline.errors import ShardlineError

LINE_LIMIT = 4096
"""Characters of a line for joining."""
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


class LayerRange(click.ParamType[tuple[int, int]]):
    """`0:15` -> (0, 15): half-open, as a Python slice."""

    name = "first:last"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        if isinstance(value, tuple):
            return value
        match = re.fullmatch(r"(\d{1,5}):(\d{1,5})", str(value))
        if match is None:
            self.fail(f"{value!r} is not a range such as 0:15 (half-open: layers 0 to 14)", param, ctx)
        first, last = int(match[1]), int(match[2])
        if first >= last:
            self.fail(f"{value!r} holds no layer: the end is not part of the range", param, ctx)
        return first, last


class LayerRanges(click.ParamType[list[tuple[int, int]]]):
    """`0:10,10:20,20:30` -> one range a Node."""

    name = "first:last,…"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[tuple[int, int]]:
        if isinstance(value, list):
            return value
        return [LayerRange().convert(text.strip(), param, ctx) for text in str(value).split(",")]


class Memory(click.ParamType[int]):
    """`4GiB`, `512M`, `800B` -> bytes. Nobody means bytes who names no unit."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        text = str(value).strip().lower()
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?", text)
        if match is not None and text[-1].isdigit():
            self.fail(f"{value!r} has no unit: write {value}GiB or {value}MiB, as you mean it", param, ctx)
        if match is None or float(match[1]) <= 0:
            self.fail(f"{value!r} is not a size such as 4GiB or 512MB", param, ctx)
        return int(float(match[1]) * _UNITS[match[2] or ""])


def counted(count: int, noun: str) -> str:
    """`1 token`, `2 tokens`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def split_evenly(n_layers: int, nodes: int) -> list[tuple[int, int]]:
    """`nodes` contiguous ranges over all layers, sizes differing by at most one, the longer ones first."""
    if not 1 <= nodes <= n_layers:
        raise ShardlineError(
            "layers_invalid",
            f"{nodes} Nodes cannot share {n_layers} layers: each needs one",
            param="nodes",
            advice=f"Give --nodes 1 to {n_layers}.",
        )
    size, longer = divmod(n_layers, nodes)
    ends = [size * i + min(i, longer) for i in range(nodes + 1)]
    return list(pairwise(ends))


def check_cover(ranges: list[tuple[int, int]], n_layers: int) -> None:
    """Refuse ranges that leave a layer of [0, n_layers) out, or that reach past it."""
    reach = 0
    for first, last in sorted(ranges):
        if last > n_layers:
            raise _uncovered(f"{first}:{last} reaches past the {n_layers} layers of the model", n_layers)
        if first > reach:
            raise _uncovered(f"no Node has the layers {reach}:{first}", n_layers)
        reach = max(reach, last)
    if reach < n_layers:
        raise _uncovered(f"no Node has the layers {reach}:{n_layers}", n_layers)


def _uncovered(why: str, n_layers: int) -> ShardlineError:
    example = ",".join(f"{first}:{last}" for first, last in split_evenly(n_layers, min(2, n_layers)))
    advice = f"Give --layers ranges that together cover 0:{n_layers}, such as {example}; or --nodes alone."
    return ShardlineError("layers_invalid", why, param="layers", advice=advice)


class ListenAddress(click.ParamType[str]):
    """`0.0.0.0`, `::1`, `node.lan`: where to listen, without scheme and port."""

    name = "address"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        text = str(value).strip()
        if not text or "/" in text:
            self.fail(f"{value!r} is no address: give one alone, such as 0.0.0.0 or 192.0.2.10", param, ctx)
        if text.count(":") == 1 or "]:" in text:
            flags = [] if ctx is None else [p.name for p in ctx.command.params]
            is_tracker = param is not None and param.name == "listen" and "tracker_port" in flags
            port = "--tracker-port" if is_tracker else "--port"
            self.fail(f"{value!r} has a port in it: give the address alone, and the port with {port}", param, ctx)
        return text.strip("[]")


class JoinLine(click.ParamType[str]):
    """A line for joining: as it is, in a file (`@FILE`), or on stdin (`-`). Its token is in no message."""

    name = "line"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value == "-":
            return sys.stdin.readline(LINE_LIMIT).strip()
        if not value.startswith("@"):
            return str(value)
        try:
            with open(value[1:], encoding="utf-8", errors="replace") as file:
                return file.readline(LINE_LIMIT).strip()
        except OSError as error:
            self.fail(f"{value[1:]} cannot be read: {error.strerror}", param, ctx)
