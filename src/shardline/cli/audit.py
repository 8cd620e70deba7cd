"""`shardline audit MODEL`: does a model work here, on which engine, whole or cut, and what has been found out about it.

Owns what is shown; formats/verdict.py decides. Only headers are read. Shown by tests/cli/test_audit.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardline.cli.cuts import ranges
from shardline.cli.listings import as_json_option, columns, size
from shardline.cli.model_outline import Wish, read_outline
from shardline.errors import ShardlineError

if TYPE_CHECKING:
    from shardline.formats.outline import Engine, Outline
    from shardline.formats.verdict import Verdict

ENGINES: tuple[Engine, ...] = ("llama", "torch")
CONTEXTS = (8_192, 131_072, 1_048_576)
"""Tokens of a session for which its state is told, as far as the model's context goes."""
_NAMES = {"llama": "llama.cpp", "torch": "PyTorch"}


@click.command()
@click.argument("model", type=click.Path(exists=True, path_type=Path), metavar="MODEL")
@click.option("--engine", type=click.Choice(ENGINES), help="Of this engine alone [default: of both]")
@as_json_option
def audit(model: Path, engine: Engine | None, as_json: bool) -> None:
    """Say whether MODEL works here, and with which limits.

    For each engine: the whole model on one Node, and a route of several; why not, where it can be cut, what crosses a
    cut, how large everything is, and the page with what was found out. MODEL is described by the same as for `shardline
    plan`. Nothing is loaded. It ends with 1 where the model is blocked on every engine that was asked for.
    """
    answer = audit_answer(model, (engine,) if engine is not None else ENGINES)
    if as_json:
        import json

        click.echo(json.dumps(answer, indent=2, ensure_ascii=False))
    else:
        click.echo(audit_text(answer))
    if answer["verdict"] == "blocked":
        raise click.exceptions.Exit(1)


def audit_answer(model: Path, engines: tuple[Engine, ...]) -> dict[str, Any]:
    """All that is shown, as JSON values. Errors: those of `read_outline`, but for `architecture_unsupported`, which is
    an answer."""
    from shardline.formats.verdict import refused, verdict_of

    found: list[tuple[Verdict, Outline | None]] = []
    refusal: ShardlineError | None = None
    for engine in engines:
        try:
            outline = read_outline(model, Wish(engine))
        except ShardlineError as error:
            if error.code != "architecture_unsupported":
                raise
            refusal = error
            found.append((refused(engine, error), None))
        else:
            found.append((verdict_of(outline), outline))
    words = [way.word for verdict, _ in found for way in (verdict.single, verdict.route)]
    best = next((word for word in ("works", "works with limits") if word in words), "blocked")
    outlines = [outline for _, outline in found if outline is not None]
    return {
        "model": model.name or str(model),
        "verdict": best,
        **(_facts(outlines[0]) if outlines else _facts_of_refused(refusal)),
        "engines": [_engine(verdict, outline) for verdict, outline in found],
    }


def _facts(outline: Outline) -> dict[str, Any]:
    shape, row = outline.shape, outline.row
    return {
        "source": outline.source,
        "architecture": shape.architecture,
        "layers": shape.n_layers,
        "context_length": shape.context_length,
        "rollback": row.rollback,
        "page": _page(row.page),
    }


def _facts_of_refused(refusal: ShardlineError | None) -> dict[str, Any]:
    from shardline.formats.architectures import ROWS

    name = None if refusal is None else refusal.details.get("architecture")
    row = next((row for row in ROWS if row.name == name), None)
    return {
        "source": None,
        "architecture": name,
        "layers": None,
        "context_length": None,
        "rollback": None if row is None else row.rollback,
        "page": _page(None if row is None else row.page),
    }


def _page(page: str | None) -> str:
    return f"docs/{page or 'architectures.md'}"


def _engine(verdict: Verdict, outline: Outline | None) -> dict[str, Any]:
    told: dict[str, Any] = {
        "engine": verdict.engine,
        "single": {"verdict": verdict.single.word, "reasons": list(verdict.single.reasons)},
        "route": {"verdict": verdict.route.word, "reasons": list(verdict.route.reasons)},
        "positions": [],
        "illegal": [],
        "weight_bytes": None,
        "state_bytes": None,
        "seam_bytes_per_token": None,
    }
    if outline is None or (verdict.blocked and outline.cuts.rules is None and not outline.cuts.runs_whole):
        return told
    cuts = outline.cuts
    return {
        **told,
        "positions": list(cuts.positions()),
        "illegal": [{"from": first, "to": last, "reason": reason} for (first, last), reason in cuts.illegal()],
        "weight_bytes": outline.size_bytes,
        "state_bytes": _states(outline),
        "seam_bytes_per_token": _seams(outline),
    }


def _states(outline: Outline) -> dict[str, int] | None:
    """Tokens of a session -> what it keeps on all Nodes together."""
    from shardline.formats.session_state import state_bytes

    if outline.states is None:
        return None
    states, width, most = outline.states, outline.kv_element_bytes, outline.shape.context_length
    lengths = [tokens for tokens in CONTEXTS if most is None or tokens <= most] or [most or CONTEXTS[0]]
    return {
        str(tokens): state_bytes(states, 0, outline.n_layers, tokens=tokens, element_bytes=width) for tokens in lengths
    }


def _seams(outline: Outline) -> list[int] | None:
    """The bytes that cross a legal cut for a token, the different ones in ascending order."""
    if outline.seam is None:
        return None
    positions = outline.cuts.positions()
    return sorted({outline.seam.row_bytes(p, outline.n_layers, outline.seam_dtype) for p in positions})


def audit_text(answer: dict[str, Any]) -> str:
    """For people."""
    known = answer["layers"] is not None
    what = f"{answer['architecture']}, {answer['layers']} layers" if known else str(answer["architecture"])
    lines = [f"{answer['model']}: {what}: {answer['verdict']}", ""]
    rows = [(_NAMES[e["engine"]], e["single"]["verdict"], e["route"]["verdict"]) for e in answer["engines"]]
    lines += [columns(("ENGINE", "ONE NODE", "ROUTE"), rows), ""]
    for told in answer["engines"]:
        lines += _engine_lines(told)
    if answer["rollback"] is not None:
        lines.append(f"Going back within a session: {answer['rollback'].replace('_', ' ')}")
    lines.append(f"What is known of it: {answer['page']}")
    return "\n".join(lines)


def _engine_lines(told: dict[str, Any]) -> list[str]:
    name = _NAMES[told["engine"]]
    single, route = told["single"]["reasons"], told["route"]["reasons"]
    lines = [f"{name}: {reason}" for reason in single]
    lines += [f"{name}, route: {reason}" for reason in route if reason not in single]
    if told["positions"]:
        lines.append(f"{name}: cuts at {ranges(told['positions'])}")
    if told["weight_bytes"] is not None:
        lines.append(f"{name}: {_sizes(told)}")
    return lines


def _sizes(told: dict[str, Any]) -> str:
    parts = [f"{size(told['weight_bytes'])} of weights"]
    for tokens, count in (told["state_bytes"] or {}).items():
        parts.append(f"{size(count)} for a session of {int(tokens):,} tokens")
    if told["seam_bytes_per_token"]:
        crossing = " or ".join(f"{count:,}" for count in told["seam_bytes_per_token"])
        parts.append(f"{crossing} bytes a token over a Seam")
    return ", ".join(parts)
