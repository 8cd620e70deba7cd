"""What an engine makes of a model, as a verdict: whole on one Node, and cut over a route; each with its reasons.

Owns what counts as a limit and what as a refusal. Everything else comes from the table of architectures and the cuts of
the model (architectures.py, cuts.py), which the engines obey. Pure. Shown by tests/cli/test_audit.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from shardline.errors import ShardlineError
from shardline.formats.cuts import ONE_SESSION
from shardline.formats.outline import Engine, Outline

Word = Literal["works", "works with limits", "blocked"]
_UNTRIED: Final = "nobody has compared this architecture on this engine: the Node's self-test decides when it loads"
_QUANTISED: Final = (
    "the checkpoint is quantised, which this engine does not load: store it unquantised first, or use a GGUF file"
)
_GGUF_WANTED: Final = "this engine reads GGUF files: convert the model first"
_NO_CUT: Final = "no position is legal"


@dataclass(frozen=True, slots=True)
class Way:
    """One way to serve a model. `reasons`: why it is blocked, or what limits it; empty where nothing does."""

    word: Word
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Verdict:
    """Of one engine. `single`: the whole model on one Node; `route`: cut over several."""

    engine: Engine
    single: Way
    route: Way

    @property
    def blocked(self) -> bool:
        return self.single.word == self.route.word == "blocked"


def refused(engine: Engine, error: ShardlineError) -> Verdict:
    """Of an engine that does not take the model at all."""
    way = Way("blocked", (error.message,))
    return Verdict(engine, way, way)


def verdict_of(outline: Outline) -> Verdict:
    """Of the engine that `outline` is for."""
    cuts, refusal = outline.cuts, outline.cuts.refusal
    reason = refusal.message if refusal is not None else _NO_CUT
    shared = _limits(outline)
    alone = [warning for warning in cuts.warnings() if warning == ONE_SESSION]
    single = _way([*shared, *alone]) if cuts.rules is not None or cuts.runs_whole else Way("blocked", (reason,))
    if cuts.rules is None or not cuts.positions():
        return Verdict(outline.engine, single, Way("blocked", (reason,)))
    of_parts = [w for w in cuts.warnings() if not (outline.engine == "torch" and _UNTRIED in shared)]
    return Verdict(outline.engine, single, _way([*shared, *of_parts]))


def _way(limits: list[str]) -> Way:
    return Way("works with limits" if limits else "works", tuple(limits))


def _limits(outline: Outline) -> list[str]:
    """What limits the engine with this model, cut or whole."""
    found = []
    if outline.engine == "torch":
        if outline.row.torch == "untried":
            found.append(_UNTRIED)
        if outline.quantised:
            found.append(_QUANTISED)
    elif outline.source in ("config.json", "safetensors headers"):
        found.append(_GGUF_WANTED)
    return found
