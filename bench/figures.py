"""Medians, quantiles and tables of figures. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of the values lie; linear between neighbours."""
    ordered = sorted(values)
    at = share * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def median(values: Sequence[float]) -> float:
    return quantile(values, 0.5)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns, the first one to the left, the figures to the right."""
    grid = [list(header), *map(list, rows)]
    widths = [max(len(row[i]) for row in grid) for i in range(len(header))]
    lines = []
    for row in grid:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
