"""Figures of a measurement: what was measured against what, round by round, and what follows from it.

Owns medians and ratios: a ratio is of one round, of two runs next to one another, so that a busy moment of the machine
hits both. Pure. Shown by tests/cli/test_bench_figures.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any


@dataclass(frozen=True, slots=True)
class Round:
    """One run of a system, and of the unsplit model next to it; the unit is the row's."""

    own: float
    unsplit: float

    @property
    def ratio(self) -> float:
        return self.own / self.unsplit


@dataclass(slots=True)
class Row:
    """One system at one kind of work. Rates in tokens per second."""

    system: str
    nodes: int
    """0: not a route."""
    streams: int
    threads: int
    """Of each process of the system that computes."""
    unsplit_threads: int
    rates: list[Round] = field(default_factory=list)
    first_s: list[Round] = field(default_factory=list)

    @property
    def rate(self) -> float:
        return median(r.own for r in self.rates)

    @property
    def unsplit_rate(self) -> float:
        return median(r.unsplit for r in self.rates)

    @property
    def ratio(self) -> float:
        return median(r.ratio for r in self.rates)

    @property
    def spread(self) -> tuple[float, float]:
        """Smallest and largest ratio of a round."""
        ratios = [r.ratio for r in self.rates]
        return min(ratios), max(ratios)

    @property
    def added_ms(self) -> float:
        """What a step takes longer than unsplit, with one token a stream and step; by pairs, as ratios are."""
        return median(1e3 * self.streams * (1 / r.own - 1 / r.unsplit) for r in self.rates)

    @property
    def added_ms_per_hop(self) -> float | None:
        """Of what is added, the share of one Seam between two Nodes; None where there is none."""
        return self.added_ms / (self.nodes - 1) if self.nodes > 1 else None

    @property
    def first_ms(self) -> tuple[float, float]:
        """Until the first token, in ms: of the system, and unsplit."""
        return 1e3 * median(r.own for r in self.first_s), 1e3 * median(r.unsplit for r in self.first_s)

    def to_json(self) -> dict[str, Any]:
        found = asdict(self)
        if self.rates:
            found |= {"rate": self.rate, "unsplit_rate": self.unsplit_rate, "ratio": self.ratio}
            found |= {"added_ms": self.added_ms, "added_ms_per_hop": self.added_ms_per_hop}
        return found


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose source is aligned, too; the first column to the left, the others to the right."""
    grid = [list(header), *map(list, rows)]
    widths = [max(3, *(len(row[i]) for row in grid)) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        first, *rest = cells
        padded = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True))]
        return f"| {' | '.join(padded)} |"

    rule = f"| {'-' * widths[0]} |" + "".join(f" {'-' * (width - 1)}: |" for width in widths[1:])
    return "\n".join([line(grid[0]), rule, *map(line, grid[1:])])
