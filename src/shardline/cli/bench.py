"""`shardline bench MODEL.gguf`: split against unsplit on this machine, as a table made for pasting.

Owns the flags; bench_run.py measures, bench_report.py writes. Progress goes to stderr, the report to stdout.
Shown by tests/cli/test_bench.py.
"""

from __future__ import annotations

import math
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardline.cli.model_outline import read_gguf
from shardline.cli.values import LayerRanges, check_cover
from shardline.errors import ShardlineError

if TYPE_CHECKING:
    from shardline.cli.bench_report import ModelFacts
    from shardline.cli.bench_run import Wanted
    from shardline.formats.gguf_files import GGUFModel


class Counts(click.ParamType[tuple[int, ...]]):
    """`1,2,3` -> (1, 2, 3): each from 1 to 64, each once."""

    name = "numbers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            numbers = tuple(sorted({int(text) for text in str(value).split(",")}))
        except ValueError:
            self.fail(f"{value!r} is not a list of numbers such as 1,2,3", param, ctx)
        if not numbers or not 1 <= numbers[0] <= numbers[-1] <= 64:
            self.fail(f"{value!r}: each number from 1 to 64", param, ctx)
        return numbers


@click.command()
@click.argument("model", type=click.Path(exists=True, path_type=Path), metavar="MODEL.gguf")
@click.option("--nodes", type=Counts(), default="1,2,3", show_default=True, help="Routes to measure.")
@click.option(
    "--layers", "ranges", type=LayerRanges(), multiple=True, help="Layers of each Node of one route [default: even]."
)
@click.option("--streams", type=Counts(), default="1,8", show_default=True, help="Streams at a time.")
@click.option("--rounds", type=click.IntRange(1, 1000), default=5, show_default=True, help="Medians are of so many.")
@click.option("--tokens", type=click.IntRange(8, 4096), default=64, show_default=True, help="Decoded a stream and run.")
@click.option("--prompt", type=click.IntRange(1, 4096), default=32, show_default=True, help="Tokens in front of them.")
@click.option(
    "--prefill", type=click.IntRange(0, 65536), default=2048, show_default=True, help="Of the prefill run; 0: none."
)
@click.option("--threads", type=click.IntRange(1, 256), default=1, show_default=True, help="Threads of each Node.")
@click.option("--apart", is_flag=True, help="One stream: engines on cores of their own, all else on the others.")
@click.option("--busy", type=click.IntRange(0, 64), default=0, help="Processes that compute without a pause beside it.")
@click.option("--rpc-server", metavar="PATH", help="RPC server of llama.cpp [default: found on PATH].")
@click.option("--llama-bench", metavar="PATH", help="llama-bench of llama.cpp [default: found on PATH].")
@click.option("--torch", is_flag=True, help="The PyTorch engine on 2 Nodes, too.")
@click.option("--json", "as_json", is_flag=True, help="All figures, and the report in them, as JSON.")
def bench(model: Path, as_json: bool, **flags: Any) -> None:
    """Measure Nodes against unsplit llama.cpp.

    All stand ready side by side and take turns. One stream: each Node, and the unsplit run, have --threads. Several
    streams, and prefill: the unsplit run has as many threads as all Nodes together. The report is Markdown.
    """
    from shardline.cli import bench_report
    from shardline.cli.bench_run import measure

    source = read_gguf(model)
    wanted = _wanted(model, source, **flags)
    facts = _facts(model, source)
    load = bench_report.load_average()
    figures = measure(wanted, lambda words: click.echo(words, err=True))
    machine = bench_report.this_machine(load)
    if as_json:
        import json

        click.echo(json.dumps(bench_report.as_json(wanted, figures, machine, facts), indent=1))
    else:
        click.echo(bench_report.as_markdown(wanted, figures, machine, facts))


def _wanted(
    model: Path,
    source: GGUFModel,
    *,
    ranges: tuple[list[tuple[int, int]], ...],
    prompt: int,
    prefill: int,
    rpc_server: str | None,
    llama_bench: str | None,
    **counts: Any,
) -> Wanted:
    from shardline.cli.bench_run import Wanted
    from shardline.formats.cuts import cuts_of, even_cut
    from shardline.formats.memory import weight_bytes
    from shardline.formats.shape import shape_of_gguf

    shape = shape_of_gguf(source.header)
    longest = max(prompt + counts["tokens"], prefill + 1)
    if shape.context_length is not None and longest > shape.context_length:
        raise ShardlineError(
            "setting_invalid",
            f"{longest} tokens do not fit the model's context of {shape.context_length}",
            param="prefill",
            advice="Lower --prefill, --prompt or --tokens.",
        )
    if counts["apart"]:
        _check_apart(counts["threads"])
    for each in ranges:
        check_cover(each, shape.n_layers)
    named = {len(each): each for each in ranges}
    weights = weight_bytes(source.tensors, shape.n_layers)
    cuts = cuts_of(source.header)
    for nodes in counts["nodes"]:
        if nodes not in named:
            even_cut(cuts, weights, nodes)  # refuses what the measurement would refuse much later
    return Wanted(
        ranges=named,
        model=model.resolve(),
        prompt_tokens=prompt,
        prefill_tokens=prefill,
        rpc_server=_program("rpc_server", rpc_server, ("ggml-rpc-server", "rpc-server")),
        llama_bench=_program("llama_bench", llama_bench, ("llama-bench",)),
        weights=weights,
        **counts,
    )


def _check_apart(threads: int) -> None:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
    if cores <= threads:
        raise ShardlineError(
            "setting_invalid",
            f"engines of {threads} threads apart from all else need {threads + 1} cores that this process may choose, "
            f"there are {cores}",
            param="apart",
            advice="Leave --apart out.",
        )


def _program(param: str, given: str | None, names: tuple[str, ...]) -> Path | None:
    """The program that is named, or one of `names` on PATH, or none."""
    if given is None:
        found = next(filter(None, map(shutil.which, names)), None)
        return None if found is None else Path(found)
    path = shutil.which(given)
    if path is None:
        raise ShardlineError(
            "setting_invalid",
            f"{given} is no program",
            param=param,
            advice="Name a program that can be run, or leave the flag out.",
        )
    return Path(path)


def _facts(model: Path, source: GGUFModel) -> ModelFacts:
    from shardline.cli.bench_report import ModelFacts
    from shardline.model.llama_source import quantisation_of

    return ModelFacts(
        name=source.header.text("general.name", model.stem),
        parameters=sum(math.prod(tensor.shape) for tensor in source.tensors.values()),
        quantisation=quantisation_of(source.header),
        nbytes=sum(path.stat().st_size for path in source.paths),
    )
