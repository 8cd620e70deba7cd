"""`shardline split MODEL --layers A:B -o FILE`: the Shard GGUF of some layers, as a file of its own.

Owns the command. What stands in the file is formats/shard_gguf.py's, how it is written artifact/shard_files.py's.
Shown by tests/cli/test_split.py.
"""

from __future__ import annotations

from pathlib import Path

import click

from shardline.cli.invocation import Invocation, pass_invocation
from shardline.cli.listings import size
from shardline.cli.model_outline import read_gguf
from shardline.cli.progress import progress
from shardline.cli.values import LayerRange
from shardline.errors import ShardlineError


@click.command()
@click.argument("model", type=click.Path(exists=True, path_type=Path), metavar="MODEL.gguf")
@click.option("--layers", type=LayerRange(), required=True, help="Half-open, as a Python slice: 0:15.")
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, metavar="FILE", help="Where to write.")
@click.option("--force", is_flag=True, help="Replace FILE where it is there.")
@pass_invocation
def split(invocation: Invocation, model: Path, layers: tuple[int, int], output: Path, force: bool) -> None:
    """Write some layers of MODEL as a GGUF file of their own.

    It is the file that a Node makes for itself: a valid model for llama.cpp, which takes hidden rows in place of
    tokens. Quantised bytes are copied as they are. `shardline cuts MODEL` says where a model can be cut. No Node wants
    it, nor `up`: they take the whole model, and cut for themselves.
    """
    from shardline.artifact.identity import content_id
    from shardline.artifact.shard_files import write_plan
    from shardline.formats.cuts import cuts_of
    from shardline.formats.shard_gguf import plan_shard

    source = read_gguf(model)
    _check_output(output, source.paths, force)
    # What is wrong with the range is said before a large file is read for its name.
    cuts = cuts_of(source.header)
    cuts.check_part(*layers)
    for warning in cuts.warnings():
        click.echo(f"shardline: {warning}", err=True)
    cache = invocation.configuration().state_dir / "content-ids"
    with progress("Naming the model") as show:
        identity = content_id(model, cache_dir=cache, progress=show)
    plan = plan_shard(source, *layers, content_id=identity)
    try:
        with progress("Writing") as show:
            write_plan(plan, source, output, progress=show)
    except ShardlineError as error:
        if error.code not in ("disk_full", "state_unwritable"):
            raise
        advice = "Make room there, or give it another place: -o FILE"
        raise ShardlineError(error.code, error.message, advice=advice, **error.details) from None
    click.echo(f"{output}: layers {layers[0]}:{layers[1]} of {cuts.n_layers}, {size(plan.nbytes)}")


def _check_output(output: Path, sources: tuple[Path, ...], force: bool) -> None:
    if output.is_dir():
        raise ShardlineError(
            "setting_invalid",
            f"{output} is a folder",
            param="output",
            advice=f"Give the part a file name in it: -o {output / 'part.gguf'}",
        )
    if not output.absolute().parent.is_dir():
        raise ShardlineError(
            "setting_invalid",
            f"there is no folder {output.parent}",
            param="output",
            advice="Make that folder, or name a file in one that is there: -o FILE",
        )
    if any(output.exists() and output.samefile(path) for path in sources):
        raise ShardlineError(
            "setting_invalid",
            f"{output} is the model itself",
            param="output",
            advice="Give the part a name of its own: -o FILE",
        )
    if output.exists() and not force:
        raise ShardlineError(
            "setting_invalid",
            f"{output} is there already",
            param="output",
            advice="Choose another name, or replace it with --force.",
        )
