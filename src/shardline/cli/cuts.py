"""`shardline cuts MODEL`: where an engine can cut a model, why not elsewhere, and the most even cut for N Nodes.

Owns what is shown; formats/cuts.py decides. Only headers are read. Shown by tests/cli/test_cuts.py.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardline.cli.listings import as_json_option, columns, size
from shardline.cli.model_outline import Wish, read_outline

if TYPE_CHECKING:
    from shardline.formats.outline import Engine, Outline

_KV_TOKENS = 1000

_PROOFS = {
    "exact": "compared with the uncut model: equal to the bit",
    "close": "compared with the uncut model: equal but for float rounding",
    "unproven": "not compared with the uncut model",
}


@click.command()
@click.argument("model", type=click.Path(exists=True, path_type=Path), metavar="MODEL")
@click.option("--nodes", type=click.IntRange(1, 64), help="Propose the most even cut for so many Nodes.")
@click.option("--engine", type=click.Choice(["llama", "torch"]), help="[default: llama for GGUF, else torch]")
@as_json_option
def cuts(model: Path, nodes: int | None, engine: Engine | None, as_json: bool) -> None:
    """Say where MODEL can be cut, and why not elsewhere.

    MODEL is described by the same as for `shardline plan`: a GGUF file or its beginning, a Model Artifact, a folder, a
    config.json. A position is the number of the first layer behind the cut. With --nodes: a cut for so many Nodes, as
    even by bytes as the legal positions allow. KV is that of one session of 1,000 tokens.
    """
    answer = cuts_answer(read_outline(model, Wish(engine)), nodes)
    if as_json:
        import json

        click.echo(json.dumps(answer, indent=2, ensure_ascii=False))
    else:
        click.echo(cuts_text(model.name or str(model), answer))


def cuts_answer(outline: Outline, nodes: int | None) -> dict[str, Any]:
    """All that is shown, as JSON values. Errors: those of `even_cut`, where `nodes` is more than one."""
    cuts = outline.cuts
    return {
        "architecture": cuts.shape.architecture,
        "engine": outline.engine,
        "layers": cuts.n_layers,
        "proof": cuts.rules.proof if cuts.rules is not None else "refused",
        "reason": cuts.refusal.message if cuts.refusal is not None else None,
        "page": f"docs/{outline.row.page}" if outline.row.page is not None else None,
        "warnings": cuts.warnings(),
        "positions": list(cuts.positions()),
        "illegal": [{"from": first, "to": last, "reason": reason} for (first, last), reason in cuts.illegal()],
        "seams": _seams(outline),
        "parts": _parts(outline, nodes) if nodes is not None else None,
    }


def _seams(outline: Outline) -> list[dict[str, Any]]:
    """What crosses at which positions; equal ones together, the most common first."""
    if outline.seam is None:
        return []
    found: dict[str, dict[str, Any]] = {}
    for position in outline.cuts.positions():
        layout = outline.seam.layout(position, outline.n_layers, outline.seam_dtype)
        row_bytes = outline.seam.row_bytes(position, outline.n_layers, outline.seam_dtype)
        new = {"tensors": layout.to_json(), "row_bytes": row_bytes, "positions": []}
        found.setdefault(layout.digest, new)["positions"].append(position)
    return sorted(found.values(), key=lambda seam: -len(seam["positions"]))


def _parts(outline: Outline, nodes: int) -> list[dict[str, int | None]]:
    from shardline.formats.cuts import even_cut
    from shardline.formats.session_state import state_bytes

    parts: list[dict[str, int | None]] = []
    for first, last in even_cut(outline.cuts, outline.weights, nodes):
        kv = None
        if outline.states is not None:
            width = outline.kv_element_bytes
            kv = state_bytes(outline.states, first, last, tokens=_KV_TOKENS, element_bytes=width)
        weights = outline.weights.of_shard(first, last)
        parts.append({"first": first, "last": last, "weight_bytes": weights, "kv_bytes_per_1000_tokens": kv})
    return parts


def cuts_text(name: str, answer: dict[str, Any]) -> str:
    """For people: positions as ranges, each reason once."""
    lines = [f"{name}: {answer['architecture']}, {answer['layers']} layers"]
    if answer["reason"] is not None:
        lines.append(f"No cut: {answer['reason']}")
    else:
        lines.append(f"Parts {_PROOFS[answer['proof']]}")
        lines.append(f"Cuts at: {ranges(answer['positions']) or 'none'}")
        for reason, positions in _by_reason(answer["illegal"]).items():
            lines.append(f"Not at:  {ranges(positions)} ({reason})")
    if len(answer["seams"]) > 1 or any(len(seam["tensors"][0][2]) > 1 for seam in answer["seams"]):
        lines += [_crossing(seam) for seam in answer["seams"]]
    lines += [f"Warning: {warning}" for warning in answer["warnings"]]
    if answer["page"] is not None:
        lines.append(f"What is known of this model: {answer['page']}")
    if answer["parts"] is not None:
        rows = [
            (
                f"{part['first']}:{part['last']}",
                size(part["weight_bytes"]),
                size(part["kv_bytes_per_1000_tokens"]),
            )
            for part in answer["parts"]
        ]
        lines += ["", columns(("LAYERS", "WEIGHTS", "KV OF 1,000 TOKENS"), rows)]
    return "\n".join(lines)


def _crossing(seam: dict[str, Any]) -> str:
    """Said where it is not one row of the model's width."""
    tensors = ", ".join(f"{name} {dtype} {shape}" for name, dtype, shape in seam["tensors"])
    return f"Crosses: {tensors}, and the token id: {seam['row_bytes']:,} bytes a token (at {ranges(seam['positions'])})"


def _by_reason(runs: list[dict[str, Any]]) -> dict[str, list[int]]:
    """Positions by reason; where the reason names the part, its numbers are left to `--json`."""
    found: dict[str, list[int]] = {}
    for run in runs:
        reason = run["reason"].split(", and layers ")[0]
        found.setdefault(reason, []).extend(range(run["from"], run["to"]))
    return found


def ranges(positions: list[int]) -> str:
    """`[1, 2, 3, 5]` -> `1–3, 5`; of evenly spaced ones `4, 8 … 24`."""
    steps = {b - a for a, b in pairwise(positions)}
    if len(positions) > 4 and len(steps) == 1 and steps != {1}:
        return f"{positions[0]}, {positions[1]} … {positions[-1]}"
    runs: list[list[int]] = []
    for position in positions:
        if runs and position == runs[-1][1] + 1:
            runs[-1][1] = position
        else:
            runs.append([position, position])
    return ", ".join(str(a) if a == b else f"{a}–{b}" for a, b in runs)
