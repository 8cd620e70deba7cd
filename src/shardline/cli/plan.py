"""`shardline plan MODEL --node 8GiB --node 16GiB`: how a model would lie on these machines, before anything is loaded.

Owns the flags and what is shown; formats/plan.py computes. Shown by tests/cli/test_plan.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardline.cli.listings import as_json_option, columns, size
from shardline.cli.model_outline import Wish, read_outline
from shardline.cli.values import Memory, counted
from shardline.errors import ShardlineError

if TYPE_CHECKING:
    from shardline.formats.outline import Engine, Outline
    from shardline.formats.plan import Assumptions, Machine, Placed, Plan

BANDWIDTH_GB_S = 50.0
"""Two channels of DDR5: an ordinary computer without an accelerator."""
KV_TOKENS = 8192
_PROMPT_TOKENS = 8192
_GB = 1e9


@click.command()
@click.argument("model", type=click.Path(exists=True, path_type=Path), metavar="MODEL")
@click.option("--node", "nodes", type=Memory(), multiple=True, required=True, help="Memory of a Node. Repeatable.")
@click.option("--kv-tokens", type=click.IntRange(1, 1 << 31), help="Of all sessions together  [default: 8192]")
@click.option("--sessions", type=click.IntRange(1, 256), default=1, show_default=True, help="At a time.")
@click.option("--rtt", metavar="TIME", default="1ms", show_default=True, help="Round trip between Nodes: 500us, 2ms.")
@click.option(
    "--bandwidth",
    "bandwidths",
    type=click.FloatRange(0.01, 1e5),
    multiple=True,
    metavar="GB/s",
    help="Of the memory that holds the weights; once for all Nodes, or once for each  [default: 50]",
)
@click.option("--engine", type=click.Choice(["llama", "torch"]), help="[default: llama for GGUF, else torch]")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16", "float16"]), help="Of the PyTorch engine.")
@click.option("--size", "size_bytes", type=Memory(), help="Of a build's files, where MODEL is a config.json alone.")
@click.option(
    "--dense-bits",
    type=click.FloatRange(0.5, 32),
    help="Of that build's numbers outside of routed experts (Q8_0: 8.5).",
)
@as_json_option
def plan(
    model: Path,
    nodes: tuple[int, ...],
    kv_tokens: int | None,
    sessions: int,
    rtt: str,
    bandwidths: tuple[float, ...],
    engine: Engine | None,
    dtype: str | None,
    size_bytes: int | None,
    dense_bits: float | None,
    as_json: bool,
) -> None:
    """Say how MODEL would lie on these Nodes.

    For each Node its layers and bytes, for each cut what crosses it, and a bound of the speed. MODEL is a GGUF file
    (its first bytes, with the header, are enough), the folder or manifest of a Model Artifact, a folder with
    safetensors files, or a config.json. Nothing is loaded. Nodes stand in the order in which layers go through them; as
    few as are enough are used. It ends with 1 where the model does not fit.
    """
    from shardline.formats.plan import Assumptions, Machine, plan_on

    outline = read_outline(model, Wish(engine, dtype, size_bytes, dense_bits))
    rates = _rates(bandwidths, len(nodes))
    machines = [Machine(memory, rate * _GB) for memory, rate in zip(nodes, rates, strict=True)]
    given = Assumptions(kv_tokens=kv_tokens or KV_TOKENS * sessions, sessions=sessions, rtt_s=seconds(rtt))
    answer = plan_answer(model, outline, machines, given, plan_on(outline, machines, given))
    if as_json:
        import json

        click.echo(json.dumps(answer, indent=2, ensure_ascii=False))
    else:
        click.echo(plan_text(model.name or str(model), answer))
    if not answer["fits"]:
        raise click.exceptions.Exit(1)


def seconds(text: str) -> float:
    """`2ms`, `500us`, `0.1s` -> seconds; `setting_invalid` for what is none of these, or more than a minute."""
    units = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
    unit = next((unit for unit in units if text.endswith(unit)), None)
    try:
        value = float(text.removesuffix(unit or "")) * units[unit or ""]
    except (KeyError, ValueError):
        value = -1.0
    if not 0 <= value <= 60:
        raise ShardlineError("setting_invalid", f"{text!r:.40} is no time such as 2ms or 500us", param="rtt")
    return value


def _rates(bandwidths: tuple[float, ...], nodes: int) -> list[float]:
    if len(bandwidths) <= 1:
        return [*(bandwidths or (BANDWIDTH_GB_S,))] * nodes
    if len(bandwidths) != nodes:
        raise ShardlineError(
            "setting_invalid",
            f"{counted(nodes, 'Node')} and {counted(len(bandwidths), 'bandwidth')}",
            param="bandwidth",
            advice="Give --bandwidth once for all Nodes, or once for each.",
        )
    return list(bandwidths)


def plan_answer(
    model: Path, outline: Outline, machines: list[Machine], given: Assumptions, found: Plan
) -> dict[str, Any]:
    """All that is shown, as JSON values; bytes, seconds and tokens, nothing rounded for people."""
    shape = outline.shape
    return {
        "model": model.name,
        "source": outline.source,
        "engine": outline.engine,
        "architecture": shape.architecture,
        "layers": shape.n_layers,
        "context_length": shape.context_length,
        "weight_bytes": outline.size_bytes,
        "page": f"docs/{outline.row.page}" if outline.row.page is not None else None,
        "warnings": warnings_of(outline, given),
        "assumptions": {
            "kv_tokens": given.kv_tokens,
            "sessions": given.sessions,
            "rtt_s": given.rtt_s,
            "reserve_share": given.reserve_share,
            "bandwidth_bytes_per_s": [machine.bandwidth for machine in machines],
        },
        "fits": found.fits,
        "lacking_bytes": found.lacking_bytes,
        "one_is_enough": len(found.placed) == 1,
        "nodes": [_node(placed, machines[placed.node]) for placed in found.placed],
        "seams": [
            {
                "position": position,
                "row_bytes": row_bytes,
                "prompt_bytes": None if row_bytes is None else row_bytes * _PROMPT_TOKENS,
                "tensors": None if outline.seam is None else _tensors(outline, position),
            }
            for position, row_bytes in found.seams
        ],
        "estimate": {"tokens_per_s_at_most": found.tokens_per_s, "step_s": found.step_s},
    }


def _node(placed: Placed, machine: Machine) -> dict[str, int]:
    return {
        "node": placed.node,
        "first": placed.first,
        "last": placed.last,
        "memory_bytes": machine.memory_bytes,
        "weight_bytes": placed.need.weights,
        "kv_bytes": placed.need.kv,
        "buffer_bytes": placed.need.buffers + placed.need.process,
        "reserve_bytes": placed.reserve,
        "free_bytes": placed.free,
        "read_bytes_per_token": placed.read_bytes,
    }


def _tensors(outline: Outline, position: int) -> list[list[object]]:
    if outline.seam is None:
        return []
    return outline.seam.layout(position, outline.n_layers, outline.seam_dtype).to_json()


def warnings_of(outline: Outline, given: Assumptions) -> list[str]:
    """What a person should know before believing the numbers."""
    found = outline.cuts.warnings()
    if outline.cuts.refusal is not None:
        found.append(outline.cuts.refusal.message)
    if outline.states is None:
        found.append("what a session keeps cannot be told from this description: KV is not counted")
    if outline.quantised and outline.engine == "torch":
        found.append(
            "the PyTorch engine does not load quantised checkpoints: bytes are those of the files, and the model has "
            "to be stored unquantised first, which --dtype bfloat16 plans for"
        )
    context = outline.shape.context_length
    if context is not None and given.kv_tokens // given.sessions > context:
        found.append(f"a session has at most {context} tokens: the model was trained for no more")
    return found


def plan_text(name: str, answer: dict[str, Any]) -> str:
    """For people."""
    model = f"{answer['architecture']}, {answer['layers']} layers, {size(answer['weight_bytes'])} of weights"
    lines = [f"{name}: {model} ({answer['source']}; engine {answer['engine']})"]
    lines += [f"Warning: {warning}" for warning in answer["warnings"]]
    if not answer["fits"]:
        lacking = answer["lacking_bytes"]
        why = f"about {size(lacking)} are lacking" if lacking else "no legal cut fits into the memory of each"
        lines.append(f"It does not fit: {why}.")
        return "\n".join(lines)
    lines += ["", columns(_HEADER, [_row(node) for node in answer["nodes"]]), ""]
    lines += [_seam_line(seam) for seam in answer["seams"]]
    if answer["one_is_enough"]:
        only = answer["nodes"][0]["node"] + 1
        lines.append(
            f"One machine is enough: Node {only} holds the whole model, and more Nodes would not make it faster."
        )
    lines.append(_speed_line(answer))
    if answer["page"] is not None:
        lines.append(f"What is known of this model: {answer['page']}")
    return "\n".join(lines)


_HEADER = ("NODE", "LAYERS", "WEIGHTS", "KV", "BUFFERS", "RESERVE", "FREE", "OF")


def _row(node: dict[str, Any]) -> tuple[str, ...]:
    parts = ("weight_bytes", "kv_bytes", "buffer_bytes", "reserve_bytes", "free_bytes", "memory_bytes")
    return (str(node["node"] + 1), f"{node['first']}:{node['last']}", *(size(node[part]) for part in parts))


def _seam_line(seam: dict[str, Any]) -> str:
    if seam["row_bytes"] is None:
        return f"Seam at {seam['position']}: how much crosses it cannot be told from this description"
    tensors = ", ".join(f"{name} {dtype} {shape}" for name, dtype, shape in seam["tensors"])
    prompt = f"{size(seam['prompt_bytes'])} for a prompt of {_PROMPT_TOKENS:,} tokens"
    return f"Seam at {seam['position']}: {seam['row_bytes']:,} bytes a token ({tensors}, and the token id); {prompt}"


def _speed_line(answer: dict[str, Any]) -> str:
    given, speed = answer["assumptions"], answer["estimate"]["tokens_per_s_at_most"]
    if speed is None:
        return "No bound of the speed can be told."
    rates = [rate / _GB for rate in given["bandwidth_bytes_per_s"]]
    read = sum(node["read_bytes_per_token"] for node in answer["nodes"])
    memory = "–".join(f"{rate:g}" for rate in sorted({min(rates), max(rates)}))
    return (
        f"Estimate: at most {speed:.1f} tokens/s for one session (reads {size(read)} of weights a token, at"
        f" {memory} GB/s; {given['rtt_s'] * 1e3:g} ms round trip). Real engines reach about half of such a bound."
    )
