"""The measurement itself: which systems stand ready, which work each does, and in which order.

Owns fairness: one stream is held against the unsplit model with the threads of one Node, as each Node stands for a
machine of its own; several streams and prefill against as many threads as all Nodes have together. The unsplit run is
next to each run that is held against it. Shown by tests/cli/test_bench_run.py.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from shardline.cli.bench_figures import Round, Row
from shardline.cli.bench_systems import (
    LlamaBench,
    Measured,
    NodeMemory,
    Prompts,
    Ranges,
    Route,
    System,
    Unsplit,
    busy_processes,
    engines_apart,
    route,
    rpc_servers,
)
from shardline.formats.memory import WeightBytes

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What is to be measured."""

    model: Path
    nodes: tuple[int, ...]
    streams: tuple[int, ...]
    rounds: int
    tokens: int
    """Decoded in each stream of each run."""
    prompt_tokens: int
    """In front of them."""
    prefill_tokens: int
    """Of the prefill measurement; 0: none."""
    threads: int
    """Of each Node."""
    ranges: Mapping[int, Ranges] = field(default_factory=dict)
    """Layers of each Node, by their number; else the most even cut."""
    apart: bool
    """One stream: engines on cores of their own."""
    busy: int
    rpc_server: Path | None
    llama_bench: Path | None
    torch: bool
    weights: WeightBytes

    @property
    def kv_tokens(self) -> int:
        """Of every cache, split or not."""
        needed = max(max(self.streams) * (self.prompt_tokens + self.tokens), self.prefill_tokens + 16)
        return -(-needed // 256) * 256

    def unsplit_threads(self, nodes: int, streams: int, *, prefill: bool) -> int:
        return self.threads * max(1, nodes) if prefill or streams > 1 else self.threads


@dataclass(slots=True)
class Figures:
    """All that was measured."""

    facts: dict[str, Any] = field(default_factory=dict)
    """Of the unsplit model: build, bytes."""
    decode: list[Row] = field(default_factory=list)
    prefill: list[Row] = field(default_factory=list)
    seams: list[tuple[str, float, float]] = field(default_factory=list)
    """Layers, bytes a token in decode, in prefill; of the route with the most Nodes."""
    memory: list[NodeMemory] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {
            "facts": self.facts,
            "decode": [row.to_json() for row in self.decode],
            "prefill": [row.to_json() for row in self.prefill],
            "seams": self.seams,
            "memory": [asdict(node) for node in self.memory],
        }


class Unsplits:
    """The unsplit model with each number of threads. With several, llama.cpp's own way to wait and the one that Nodes
    have both stand ready; the faster one of the warm-up is the measure."""

    def __init__(self, wanted: Wanted, stack: ExitStack) -> None:
        self._wanted = wanted
        self._stack = stack
        self._ready: dict[tuple[int, bool], Unsplit] = {}
        self._passive: dict[tuple[int, int, int], bool] = {}

    def warm(self, threads: int, prompts: Prompts, tokens: int) -> None:
        if threads == 1:
            self.take(1, True).run(prompts, tokens)
            return
        costs = {}
        for passive in (True, False):
            found = self.take(threads, passive).run(prompts, tokens)
            costs[passive] = found.first_s if found.decode is None else 1 / found.decode
        self._passive[threads, len(prompts), tokens] = costs[True] <= costs[False]

    def run(self, threads: int, prompts: Prompts, tokens: int) -> Measured:
        return self.take(threads, self._passive.get((threads, len(prompts), tokens), True)).run(prompts, tokens)

    def take(self, threads: int, passive: bool) -> Unsplit:
        key = threads, passive
        if key not in self._ready:
            w = self._wanted
            made = Unsplit(w.model, threads=threads, sequences=max(w.streams), kv_tokens=w.kv_tokens, passive=passive)
            self._stack.callback(made.close)
            self._ready[key] = made
        return self._ready[key]


@dataclass(frozen=True, slots=True)
class _Case:
    """A row and how it is measured."""

    row: Row
    system: System
    prompt_tokens: int
    tokens: int
    prefill: bool


def measure(wanted: Wanted, say: Say) -> Figures:
    """Start everything, measure in turns, end everything."""
    figures = Figures()
    with tempfile.TemporaryDirectory(prefix="shardline-bench-") as name, ExitStack() as stack:
        unsplits = Unsplits(wanted, stack)
        figures.facts = unsplits.take(wanted.threads, True).facts
        routes = {}
        for nodes in wanted.nodes:
            say(f"starting a route of {_nodes(nodes)} …")
            ranges = wanted.ranges.get(nodes)
            made = route(
                Path(name),
                wanted.model,
                nodes,
                "llama",
                threads=wanted.threads,
                kv_tokens=wanted.kv_tokens,
                ranges=ranges,
            )
            routes[nodes] = stack.enter_context(made)
        cases = _cases(wanted, routes, stack, Path(name))
        stack.enter_context(busy_processes(wanted.busy))
        _rounds(wanted, cases, unsplits, figures.facts["vocab_size"], say)
        figures.decode = [case.row for case in cases if not case.prefill]
        figures.prefill = [case.row for case in cases if case.prefill]
        _look(wanted, routes, figures)
    return figures


def _cases(wanted: Wanted, routes: Mapping[int, Route], stack: ExitStack, folder: Path) -> list[_Case]:
    cases = []
    for streams in wanted.streams:
        for nodes, system in routes.items():
            cases.append(_decode_case(wanted, _nodes(nodes), nodes, streams, system))
        if streams == 1:
            cases += _beside(wanted, stack, folder)
    if wanted.prefill_tokens:
        for nodes, system in routes.items():
            cases.append(_prefill_case(wanted, _nodes(nodes), nodes, system))
        if wanted.llama_bench is not None and wanted.rpc_server is not None:
            cases.append(_prefill_case(wanted, "llama.cpp RPC, 2 servers", 2, _rpc(wanted, stack)))
    return cases


def _beside(wanted: Wanted, stack: ExitStack, folder: Path) -> list[_Case]:
    """Other systems at one stream."""
    found = []
    if wanted.llama_bench is not None:
        alone = LlamaBench(wanted.llama_bench, wanted.model, threads=wanted.threads)
        found.append(_decode_case(wanted, "llama-bench, unsplit", 0, 1, alone))
        if wanted.rpc_server is not None:
            found.append(_decode_case(wanted, "llama.cpp RPC, 2 servers", 2, 1, _rpc(wanted, stack)))
    if wanted.torch:
        made = route(folder, wanted.model, 2, "torch", threads=wanted.threads, kv_tokens=wanted.kv_tokens)
        found.append(_decode_case(wanted, "2 Nodes, PyTorch engine", 2, 1, stack.enter_context(made)))
    return found


def _rpc(wanted: Wanted, stack: ExitStack) -> LlamaBench:
    assert wanted.rpc_server is not None and wanted.llama_bench is not None
    servers = stack.enter_context(rpc_servers(wanted.rpc_server, 2, wanted.threads))
    return LlamaBench(wanted.llama_bench, wanted.model, threads=wanted.threads, servers=servers)


def _decode_case(wanted: Wanted, name: str, nodes: int, streams: int, system: System) -> _Case:
    threads = wanted.unsplit_threads(nodes, streams, prefill=False)
    row = Row(name, nodes, streams, wanted.threads, threads)
    return _Case(row, system, wanted.prompt_tokens, wanted.tokens, prefill=False)


def _prefill_case(wanted: Wanted, name: str, nodes: int, system: System) -> _Case:
    threads = wanted.unsplit_threads(nodes, 1, prefill=True)
    return _Case(Row(name, nodes, 1, wanted.threads, threads), system, wanted.prefill_tokens, 1, prefill=True)


def _rounds(wanted: Wanted, cases: list[_Case], unsplits: Unsplits, vocab_size: int, say: Say) -> None:
    for number in range(wanted.rounds + 1):
        warming = number == 0
        for place, case in enumerate(cases):
            prompts = prompts_of(case.row.streams, case.prompt_tokens, vocab_size, seed=f"{number} {place}")
            threads = case.row.unsplit_threads
            if warming:
                unsplits.warm(threads, prompts, case.tokens)
                case.system.run(prompts, case.tokens)
                continue
            # llama.cpp's own programs are not looked for among the processes: they stay where the system puts them.
            apart = wanted.apart and case.row.streams == 1 and not case.prefill
            apart = apart and not isinstance(case.system, LlamaBench)
            with engines_apart(threads) if apart else nullcontext():
                if number % 2:
                    plain = unsplits.run(threads, prompts, case.tokens)
                    own = case.system.run(prompts, case.tokens)
                else:
                    own = case.system.run(prompts, case.tokens)
                    plain = unsplits.run(threads, prompts, case.tokens)
            _note(case, own, plain)
        say(f"round {number} of {wanted.rounds}" + (" (warm-up)" if warming else ""))


def _note(case: _Case, own: Measured, plain: Measured) -> None:
    if case.prefill:
        case.row.rates.append(Round(case.prompt_tokens / own.first_s, case.prompt_tokens / plain.first_s))
    elif own.decode is not None and plain.decode is not None:
        case.row.rates.append(Round(own.decode, plain.decode))
        if own.first_s:
            case.row.first_s.append(Round(own.first_s, plain.first_s))


def prompts_of(streams: int, tokens: int, vocab_size: int, *, seed: str) -> list[list[int]]:
    """Token ids by chance, others for each seed and stream: nothing of a prompt was computed before. The first ids of
    a vocabulary are spared, as control tokens and bytes stand there."""
    chance = random.Random(seed)
    lowest = min(1000, vocab_size // 2)
    return [[chance.randrange(lowest, vocab_size) for _ in range(tokens)] for _ in range(streams)]


def _look(wanted: Wanted, routes: Mapping[int, Route], figures: Figures) -> None:
    """What is read once, behind the rounds: Seams and memory."""
    most = max(routes)
    prompts = prompts_of(1, wanted.prompt_tokens, figures.facts["vocab_size"], seed="seams")
    routes[most].run(prompts, wanted.tokens)
    figures.seams = routes[most].seams()
    for nodes in sorted(routes):
        figures.memory += routes[nodes].memory(wanted.weights)


def _nodes(count: int) -> str:
    return f"{count} Node" + ("s" if count > 1 else "")
