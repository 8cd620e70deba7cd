"""docs/architectures.md shows the table as it is."""

from __future__ import annotations

from pathlib import Path

from shardline.formats.architectures import ROWS, Architecture, LlamaRules

PAGE = Path(__file__).parents[2] / "docs" / "architectures.md"


def line(row: Architecture) -> str:
    def names(values: tuple[str, ...]) -> str:
        return ", ".join(f"`{value}`" for value in values) or "–"

    torch = row.torch if row.reason is None else f"refused: {row.reason}"
    rollback = row.rollback.replace("_", " ")
    name = row.name if row.page is None else f"[{row.name}]({row.page})"
    return f"| {name} | {names(row.gguf)} | {names(row.model_types)} | {torch} | {llama(row)} | {rollback} |"


def llama(row: Architecture) -> str:
    """The column of llama.cpp: how far it is proven, then what a cut must keep to."""
    rules = row.llama
    if row.blocked is not None:
        return "refused"
    if rules is None:
        return "whole only" if row.gguf else "–"
    if rules.proof == "refused":
        return f"whole only: {rules.reason}"
    return "; ".join([rules.proof, *conditions(rules)])


def conditions(rules: LlamaRules) -> list[str]:
    found = []
    if rules.align > 1 or rules.align_key:
        group = [str(rules.align)] if rules.align > 1 else []
        group += [f"key `{rules.align_key}`"] if rules.align_key else []
        windowed = ", if there are windows" if rules.align_windowed else ""
        found.append(f"cut at multiples of {' and of '.join(group)}{windowed}")
    if rules.indexers:
        found.append("cut before layers with an indexer of their own")
    kinds = {
        "a layer with a window": rules.window is not None,
        "a layer without a window": rules.unwindowed_layer,
        "a recurrent layer and one with attention": rules.recurrent is not None,
        "a layer with experts": rules.sparse_layer,
        f"{rules.min_layers} layers": rules.min_layers > 1,
    }
    needed = [what for what, needs in kinds.items() if needs]
    if needed:
        found.append(f"each part has {', '.join(needed)}")
    if rules.counts and rules.count_cure is None:
        found.append(f"no model and no part of {' or '.join(str(count) for count, _ in rules.counts)} layers")
    elif rules.count_cure == "fold_q_norm":
        found.append(f"close, in a model of {rules.counts[0][0]} layers")
    elif rules.counts:
        found.append(f"no part of {' or '.join(str(count) for count, _ in rules.counts)} layers, unless the model has")
    if rules.window_required:
        found.append("only with windows")
    if rules.sections == "need":
        found.append("only with key `rope.dimension_sections`")
    if rules.zero_keys:
        found.append("only without " + ", ".join(f"`{key}`" for key in rules.zero_keys))
    if rules.single_session:
        found.append("one session at a time")
    return found


def test_the_page_has_every_row_in_order() -> None:
    rows = [text for text in PAGE.read_text(encoding="utf-8").splitlines() if text.startswith("| ")][1:]
    assert rows == [line(row) for row in ROWS]
