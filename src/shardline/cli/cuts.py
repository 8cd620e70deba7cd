"""`shardline cuts MODEL`: where llama.cpp can cut a GGUF model, why not elsewhere, and the most even cut for N Nodes.

Owns what is shown; formats/cuts.py decides. Only the header is read. Shown by tests/cli/test_cuts.py.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardline.cli.listings import as_json_option, columns, size
from shardline.errors import ShardlineError

if TYPE_CHECKING:
    from shardline.formats.cuts import Cuts
    from shardline.formats.gguf_files import GGUFModel

_KV_TOKENS = 1000
_KV_ELEMENT_BYTES = 2
"""llama.cpp keeps keys and values as 16-bit floats."""

_PROOFS = {
    "exact": "compared with the uncut model: equal to the bit",
    "close": "compared with the uncut model: equal but for float rounding",
    "unproven": "not compared with the uncut model",
}


@click.command()
@click.argument("model", type=click.Path(exists=True, path_type=Path), metavar="MODEL.gguf")
@click.option("--nodes", type=click.IntRange(1, 64), help="Propose the most even cut for so many Nodes.")
@as_json_option
def cuts(model: Path, nodes: int | None, as_json: bool) -> None:
    """Say where MODEL can be cut for llama.cpp, and why not elsewhere.

    A position is the number of the first layer behind the cut. With --nodes: a cut for so many Nodes, as even by bytes
    as the legal positions allow. KV is that of 1,000 tokens; layers with a sliding window take less.
    """
    answer = cuts_answer(read_gguf(model), nodes)
    if as_json:
        import json

        click.echo(json.dumps(answer, indent=2, ensure_ascii=False))
    else:
        click.echo(cuts_text(model.name, answer))


def read_gguf(path: Path) -> GGUFModel:
    """The headers of a GGUF model; `model_file_invalid` names the file."""
    from shardline.formats.gguf_files import read_model

    if path.is_dir():
        raise ShardlineError(
            "model_file_invalid",
            f"{path} is a folder: llama.cpp takes a GGUF file",
            advice="Give a .gguf file; of a split one, any part.",
        )
    try:
        return read_model(path)
    except ShardlineError as error:
        if path.name in error.message:
            raise
        raise ShardlineError(
            error.code, f"{path.name}: {error.message}", advice=error.advice, **error.details
        ) from None


def cuts_answer(model: GGUFModel, nodes: int | None) -> dict[str, Any]:
    """All that is shown, as JSON values. Errors: those of `even_cut`, where `nodes` is more than one."""
    from shardline.formats.cuts import cuts_of

    cuts = cuts_of(model.header)
    return {
        "architecture": cuts.shape.architecture,
        "layers": cuts.n_layers,
        "proof": cuts.rules.proof if cuts.rules is not None else "refused",
        "reason": cuts.refusal.message if cuts.refusal is not None else None,
        "warnings": cuts.warnings(),
        "positions": list(cuts.positions()),
        "illegal": [{"from": first, "to": last, "reason": reason} for (first, last), reason in cuts.illegal()],
        "parts": _parts(model, cuts, nodes) if nodes is not None else None,
    }


def _parts(model: GGUFModel, cuts: Cuts, nodes: int) -> list[dict[str, int | None]]:
    from shardline.formats.cuts import even_cut
    from shardline.formats.memory import kv_bytes_per_token, weight_bytes

    weights = weight_bytes(model.tensors, cuts.n_layers)
    parts: list[dict[str, int | None]] = []
    for first, last in even_cut(cuts, weights, nodes):
        kv = kv_bytes_per_token(cuts.shape, first, last, element_bytes=_KV_ELEMENT_BYTES)
        parts.append(
            {
                "first": first,
                "last": last,
                "weight_bytes": weights.of_shard(first, last),
                "kv_bytes_per_1000_tokens": None if kv is None else kv * _KV_TOKENS,
            }
        )
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
    lines += [f"Warning: {warning}" for warning in answer["warnings"]]
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
