"""The computed tables of docs/audits: by the planner, from the config.json files in docs/audits/models.

`scripts/reference.py` writes them between `<!-- generated: NAME -->` and `<!-- end -->`; `shardline plan` and
`shardline cuts` give the same numbers for one model at a time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from shardline.formats.architectures import Architecture, LlamaRules, of_gguf
from shardline.formats.cuts import Cuts
from shardline.formats.layer_kinds import LayerKinds
from shardline.formats.outline import Engine, Outline, outline_of_build, outline_of_config
from shardline.formats.parameters import Bits
from shardline.formats.plan import RESERVE_SHARE, Assumptions, Machine, fewest, need_of, read_bytes
from shardline.formats.session_state import state_bytes

MODELS = Path(__file__).resolve().parent.parent / "docs" / "audits" / "models"
GB = 10**9
MEMORIES = (24, 48, 64, 128)
BANDWIDTHS = (50, 273, 546, 819, 1008, 1792)
LENGTHS = (8_192, 131_072, 1_048_576)
GIVEN = Assumptions(kv_tokens=8_192)
ENGINES: tuple[Engine, ...] = ("llama", "torch")


@dataclass(frozen=True)
class Build:
    """Files of a model: `gigabytes` as published (0: as config.json says), `dense` bits outside of routed experts."""

    model: str
    name: str
    gigabytes: float = 0
    dense: float | None = None
    bits: float | None = None

    def outline(self, engine: Engine) -> Outline:
        config = json.loads((MODELS / f"{self.model}.json").read_text(encoding="utf-8"))
        if self.bits is not None:
            equal = Bits.equal(self.bits)
            return outline_of_config(config, engine, bits=lambda _: equal)
        if not self.gigabytes:
            return outline_of_config(config, engine)
        return outline_of_build(config, engine, int(self.gigabytes * GB), dense_bits=self.dense)


FLASH, GLM = "deepseek-v4-flash", "glm-5.2"
BUILDS: dict[str, tuple[Build, ...]] = {
    FLASH: (
        Build(FLASH, "UD-IQ1_S (unsloth, 0731)", 82.7, 8.5),
        Build(FLASH, "Q2 (antirez, Q8_0 attention)", 86.8, 8.5),
        Build(FLASH, "UD-IQ2_XXS (unsloth, 0731)", 91.3, 8.5),
        Build(FLASH, "UD-Q2_K_XL (unsloth, 0731)", 97.7, 8.5),
        Build(FLASH, "UD-IQ3_XXS (unsloth, 0731)", 105.2, 8.5),
        Build(FLASH, "UD-Q8_K_XL (MXFP4 experts, BF16 attention)", 161.9, 16.0),
        Build(FLASH, "Q4 (antirez, Q8_0 attention)", 164.6, 8.5),
        Build(FLASH, "as released: FP4 experts, FP8"),
        Build(FLASH, "BF16, unquantised", bits=16.0),
    ),
    GLM: (
        Build(GLM, "1-bit (unsloth)", 176),
        Build(GLM, "UD-IQ2_M (unsloth)", 239),
        Build(GLM, "3-bit (unsloth)", 325),
        Build(GLM, "4-bit, small (unsloth)", 375),
        Build(GLM, "4-bit, large / NVFP4", 475),
        Build(GLM, "8-bit (unsloth)", 810),
        Build(GLM, "BF16, as released", bits=16.0),
    ),
    "ornith": (
        Build("ornith-9b", "9B Q4_K_M", 5.6),
        Build("ornith-9b", "9B Q8_0", 9.5),
        Build("ornith-9b", "9B BF16", bits=16.0),
        Build("ornith-35b-a3b", "35B-A3B UD-Q4_K_XL", 22.2),
        Build("ornith-35b-a3b", "35B-A3B Q8_0", 36.9),
        Build("ornith-35b-a3b", "35B-A3B BF16", bits=16.0),
        Build("ornith-397b-a17b", "397B-A17B UD-Q4_K_XL", 219.2),
        Build("ornith-397b-a17b", "397B-A17B Q8_0", 421.5),
    ),
}
VARIANTS = {FLASH: (FLASH,), GLM: (GLM,), "ornith": ("ornith-9b", "ornith-35b-a3b", "ornith-397b-a17b")}


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)]) + "\n"


def gigabytes(count: float) -> str:
    return f"{count / GB:.1f}" if count >= 10 * GB else f"{count / GB:.2f}"


@cache
def plain(model: str) -> Outline:
    return Build(model, "").outline("torch")


def size_table(name: str) -> str:
    """Numbers of the model, and what crosses a cut."""
    rows = []
    for model in VARIANTS[name]:
        outline = plain(model)
        counted = outline.parameters
        if counted is None or outline.seam is None:
            raise SystemExit(f"{model} has no numbers")
        widths = [
            sorted({outline.seam.layout(at, outline.n_layers, dtype).row_bytes for at in range(1, outline.n_layers)})
            for dtype in ("F16", "F32")
        ]
        crossing = [" or ".join(f"{count:,}" for count in counts) for counts in widths]
        totals = (f"{counted.total / 1e9:.1f} B", f"{counted.active / 1e9:.2f} B", str(outline.n_layers))
        rows.append((model, *totals, *crossing))
    header = ("model", "numbers", "read for a token", "layers", "Seam, B a token (16 bit)", "(32 bit)")
    return table(header, rows)


def state_table(name: str) -> str:
    """What one session keeps, all layers together, with 16-bit rows."""
    rows = []
    for model in VARIANTS[name]:
        outline = plain(model)
        states = outline.states
        if states is None:
            raise SystemExit(f"{model} says nothing of its sessions")
        at = [state_bytes(states, 0, len(states), tokens=count, element_bytes=2) for count in LENGTHS]
        fixed = state_bytes(states, 0, len(states), tokens=0, element_bytes=2)
        growth = (at[2] - at[1]) / (LENGTHS[2] - LENGTHS[1])
        longest = outline.shape.context_length or 0
        sizes = [gigabytes(count) if length <= longest else "–" for length, count in zip(LENGTHS, at, strict=True)]
        rewinds = "yes" if all(state.rewinds for state in states) else "no"
        rows.append((model, f"{growth:,.0f}", f"{fixed / 1e6:.1f} MB", *sizes, rewinds))
    header = ("model", "B a token", "of fixed size", "8k, GB", "128k, GB", "1M, GB", "rewinds exactly")
    return table(header, rows)


def node_table(name: str) -> str:
    """The smallest number of equal Nodes, for each build and engine that cuts the model."""
    rows = []
    for build in BUILDS[name]:
        for engine in _engines(build):
            outline = build.outline(engine)
            whole = need_of(outline, 0, outline.n_layers, GIVEN).total / (1 - RESERVE_SHARE)
            row = (build.name, engine, gigabytes(outline.size_bytes), f"{whole / GB:.0f} GB")
            rows.append((*row, *(_count(outline, memory) for memory in MEMORIES)))
            if outline.cuts.rules is None:
                anywhere = replace(outline, cuts=Cuts(outline.shape, LlamaRules(), None, LayerKinds()))
                counts = [_count(anywhere, memory) for memory in MEMORIES]
                rows.append((build.name, "if it could be cut", *row[2:], *counts))
    sizes = [f"{memory} GB" for memory in MEMORIES]
    return table(("build", "engine", "GB", "one machine of", *sizes), rows)


def _engines(build: Build) -> tuple[Engine, ...]:
    """What is stored as BF16, or as released, is for the PyTorch engine; quantised builds are for llama.cpp."""
    return ("torch",) if build.bits is not None or not build.gigabytes else ("llama",)


def _count(outline: Outline, memory: int) -> str:
    found = fewest(outline, Machine(memory * GB, 1.0), GIVEN)
    return "–" if found is None else str(found)


def bound_table(name: str) -> str:
    """Weights read for a token, and the tokens/s that this allows one session at most."""
    rows = []
    for build in BUILDS[name]:
        outline = build.outline("llama")
        read = read_bytes(outline, 0, outline.n_layers)
        rows.append((build.name, gigabytes(read), *(f"{rate * GB / read:.0f}" for rate in BANDWIDTHS)))
    return table(("build", "GB a token", *(f"{rate} GB/s" for rate in BANDWIDTHS)), rows)


def seam_table(name: str) -> str:
    """What a prompt and a token cost at one Seam."""
    rows = []
    for model in VARIANTS[name]:
        outline = plain(model)
        if outline.seam is None:
            continue
        kinds = sorted({outline.seam.borrows(at) for at in range(1, outline.n_layers)})
        for borrowed in kinds:
            at = next(p for p in range(1, outline.n_layers) if outline.seam.borrows(p) is borrowed)
            for dtype in ("F16", "F32"):
                size = outline.seam.row_bytes(at, outline.n_layers, dtype)
                where = f"{model}, {dtype}" + (", with the selection" if borrowed else "")
                prompts = [gigabytes(size * length) for length in LENGTHS[:2]]
                seconds = [f"{size * LENGTHS[0] / rate:.1f} s" for rate in (125e6, 1250e6)]
                rows.append((where, f"{size:,}", f"{size / 125e6 * 1e3:.2f} ms", *prompts, *seconds))
    header = ("Seam", "B a token", "1 Gbit/s", "8k, GB", "128k, GB", "8k at 1 Gbit/s", "8k at 10 Gbit/s")
    return table(header, rows)


def cut_table(name: str) -> str:
    """Positions at which each engine cuts the model."""
    rows = []
    for model in VARIANTS[name]:
        for engine in ENGINES:
            cuts = Build(model, "").outline(engine).cuts
            positions = cuts.positions()
            reason = cuts.refusal.message if cuts.refusal is not None else ""
            rows.append((model, engine, _ranges(positions) or f"none: {reason}"))
    return table(("model", "engine", "cut in front of layer"), rows)


def _ranges(positions: Sequence[int]) -> str:
    from shardline.cli.cuts import ranges

    return ranges(list(positions))


def support_table(_: str) -> str:
    """What the engines of Shardline do with each audited architecture, as the table of architectures has it."""
    rows = []
    for name, gguf in (
        ("DeepSeek-V4-Flash, preview and 0731", "deepseek4"),
        ("DeepSeek-V4.1-Flash", "deepseek41"),
        ("GLM-5.2", "glm-dsa"),
        ("GLM-5.3-Flash", "glm5-next"),
        ("Ornith 9B", "qwen35"),
        ("Ornith 35B-A3B, 397B-A17B", "qwen35moe"),
    ):
        row = of_gguf(gguf)
        rows.append((name, f"`{gguf}`", *_support(row), row.rollback.replace("_", " ")))
    header = ("model", "GGUF", "PyTorch engine", "llama.cpp, one Node", "llama.cpp, route", "rollback")
    return table(header, rows)


def _support(row: Architecture) -> tuple[str, str, str]:
    if row.blocked is not None:
        return f"refused: {row.blocked}", "refused", "refused"
    torch = row.torch if row.reason is None else f"refused: {row.reason}"
    rules = row.llama
    if rules is None or rules.proof == "refused":
        return torch, "whole", f"refused: {'not known' if rules is None else rules.reason}"
    return torch, "whole", f"{rules.proof}, at legal cuts"


TABLES: dict[str, Callable[[str], str]] = {
    "size": size_table,
    "state": state_table,
    "nodes": node_table,
    "bound": bound_table,
    "seam": seam_table,
    "cuts": cut_table,
    "support": support_table,
}
PAGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "audits/deepseek-v4-flash.md": (FLASH, ("size", "state", "cuts", "nodes", "seam", "bound")),
    "audits/glm-5.2.md": (GLM, ("size", "state", "cuts", "nodes", "seam", "bound")),
    "audits/ornith.md": ("ornith", ("size", "state", "cuts", "nodes", "seam", "bound")),
    "audits/compatibility.md": (FLASH, ("support",)),
}
"""Page -> whose numbers it has, and which tables."""
