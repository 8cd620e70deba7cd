"""docs/architectures.md shows the table as it is."""

from __future__ import annotations

from pathlib import Path

from shardline.formats.architectures import ROWS, Architecture

PAGE = Path(__file__).parents[2] / "docs" / "architectures.md"


def line(row: Architecture) -> str:
    def names(values: tuple[str, ...]) -> str:
        return ", ".join(f"`{value}`" for value in values) or "–"

    engine = row.torch if row.reason is None else f"refused: {row.reason}"
    rollback = row.rollback.replace("_", " ")
    return f"| {row.name} | {names(row.gguf)} | {names(row.model_types)} | {engine} | {rollback} |"


def test_the_page_has_every_row_in_order() -> None:
    rows = [text for text in PAGE.read_text(encoding="utf-8").splitlines() if text.startswith("| ")][1:]
    assert rows == [line(row) for row in ROWS]
