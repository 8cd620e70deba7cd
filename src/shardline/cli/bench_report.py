"""The report of a measurement, made for pasting: versions, machine, model, and a Markdown table for each question.

Owns the words and columns. Nothing is measured here but the machine itself. Shown by tests/cli/test_bench_figures.py.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from shardline import __version__
from shardline.cli.bench_figures import Row, markdown
from shardline.cli.bench_run import Figures, Wanted
from shardline.cli.listings import size


@dataclass(frozen=True, slots=True)
class Machine:
    """Where it was measured."""

    cpu: str
    cores: int
    memory_bytes: int
    system: str
    load_start: float
    load_end: float

    def words(self) -> str:
        return (
            f"{self.cpu}, {self.cores} cores, {size(self.memory_bytes)}, {self.system}; "
            f"load average {self.load_start:.1f} at the start, {self.load_end:.1f} at the end"
        )


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What was measured with."""

    name: str
    parameters: int
    quantisation: str
    nbytes: int

    def words(self) -> str:
        return f"{self.name}, {self.parameters / 1e6:,.0f} M parameters, {self.quantisation}, {size(self.nbytes)}"


def load_average() -> float:
    """Of the last minute; 0.0 where the system keeps none."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0


def this_machine(load_start: float) -> Machine:
    return Machine(
        cpu=_cpu(),
        cores=psutil.cpu_count(logical=False) or os.cpu_count() or 1,
        memory_bytes=psutil.virtual_memory().total,
        system=f"{platform.system()} {platform.release()}",
        load_start=load_start,
        load_end=load_average(),
    )


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def as_json(wanted: Wanted, figures: Figures, machine: Machine, model: ModelFacts) -> dict[str, Any]:
    """Everything, for programs."""
    return {
        "versions": {"shardline": __version__, "engine": figures.facts["build"], "python": platform.python_version()},
        "machine": asdict(machine),
        "model": asdict(model),
        "rounds": wanted.rounds,
        "tokens": wanted.tokens,
        "prompt_tokens": wanted.prompt_tokens,
        "prefill_tokens": wanted.prefill_tokens,
        "apart": wanted.apart,
        "busy": wanted.busy,
        **figures.to_json(),
        "report": as_markdown(wanted, figures, machine, model),
    }


def as_markdown(wanted: Wanted, figures: Figures, machine: Machine, model: ModelFacts) -> str:
    """The whole report."""
    beside = f"; beside {wanted.busy} process{'es' * (wanted.busy > 1)} that never pause" if wanted.busy else ""
    head = [
        f"Shardline {__version__}, {figures.facts['build']}, Python {platform.python_version()}  ",
        f"{machine.words()}{beside}  ",
        f"{model.words()}  ",
        f"medians of {wanted.rounds} rounds; a ratio is of one round, to the unsplit run next to it (in brackets: "
        "smallest and largest)",
    ]
    parts = ["\n".join(head)]
    alone = [row for row in figures.decode if row.streams == 1]
    several = [row for row in figures.decode if row.streams > 1]
    parts += [_one_stream(wanted, alone)] if alone else []
    parts += [_several(wanted, several)] if several else []
    parts += [_prefill(wanted, figures.prefill)] if figures.prefill else []
    return "\n\n".join([*parts, _seams(figures), _memory(figures)])


def _one_stream(wanted: Wanted, rows: Sequence[Row]) -> str:
    title = (
        f"**Decode, one stream** ({wanted.tokens} tokens behind {wanted.prompt_tokens}; "
        f"threads of each Node and of the unsplit run: {wanted.threads}{'; engines apart' if wanted.apart else ''})"
    )
    header = ("system", "tokens/s", "unsplit", "ratio", "added ms a step", "per hop", "first token ms", "unsplit")
    return f"{title}\n\n" + markdown(header, [_alone_cells(row) for row in rows])


def _alone_cells(row: Row) -> tuple[str, ...]:
    first = ("–", "–") if not row.first_s else tuple(f"{ms:.0f}" for ms in row.first_ms)
    hop = row.added_ms_per_hop
    return (
        row.system,
        f"{row.rate:.1f}",
        f"{row.unsplit_rate:.1f}",
        _ratio(row),
        f"{row.added_ms:.2f}",
        "–" if hop is None else f"{hop:.2f}",
        *first,
    )


def _several(wanted: Wanted, rows: Sequence[Row]) -> str:
    title = f"**Decode, several streams** (all of them together; {wanted.tokens} tokens each)"
    header = ("system", "streams", "threads", "tokens/s", "unsplit", "ratio")
    cells = [
        (row.system, str(row.streams), _threads(row), f"{row.rate:.1f}", f"{row.unsplit_rate:.1f}", _ratio(row))
        for row in rows
    ]
    return f"{title}\n\n" + markdown(header, cells)


def _prefill(wanted: Wanted, rows: Sequence[Row]) -> str:
    title = f"**Prefill of {wanted.prefill_tokens:,} tokens** (until the first token is at the client)"
    header = ("system", "threads", "tokens/s", "unsplit", "ratio")
    cells = [(row.system, _threads(row), f"{row.rate:.1f}", f"{row.unsplit_rate:.1f}", _ratio(row)) for row in rows]
    return f"{title}\n\n" + markdown(header, cells)


def _seams(figures: Figures) -> str:
    cells = [(where, f"{decode:,.0f}", f"{prefill:,.0f}") for where, decode, prefill in figures.seams]
    return "**Body bytes a token over each Seam**\n\n" + markdown(("layers", "decode", "prefill"), cells)


def _memory(figures: Figures) -> str:
    cells = [(n.layers, *map(size, (n.resident, n.weights, n.kv)), _signed(n.beside)) for n in figures.memory]
    header = ("layers of the Node", "resident", "Shard", "KV", "beside them")
    return "**Memory of each Node with its engine worker**\n\n" + markdown(header, cells)


def _signed(count: int) -> str:
    return size(count) if count >= 0 else f"-{size(-count)}"


def _threads(row: Row) -> str:
    nodes = max(1, row.nodes)
    return f"{nodes} x {row.threads} / {row.unsplit_threads}"


def _ratio(row: Row) -> str:
    low, high = row.spread
    return f"{row.ratio:.3f} ({low:.2f}–{high:.2f})"
