"""The flags by which a Tracker offers Model Artifacts to Nodes, for every command that runs one.

Owns the list of flags, and the reading of publishers' keys. What is believed, artifact/bundle.py says. Shown by
tests/cli/test_offering.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import click

from shardline.errors import ShardlineError


def offering(command: Callable[..., Any]) -> Callable[..., Any]:
    """The parameters `artifacts`, `trust` and `allow_unsigned`."""
    folder = click.Path(exists=True, file_okay=False, path_type=Path)
    for option in (
        click.option("--allow-unsigned", is_flag=True, help="Without --trust: offer what nobody signed."),
        click.option(
            "--trust",
            multiple=True,
            type=click.Path(exists=True, dir_okay=False, path_type=Path),
            metavar="PEM",
            help="Public key of a publisher, by one of which each artifact must be signed. Repeatable.",
        ),
        click.option(
            "--artifact",
            "artifacts",
            multiple=True,
            type=folder,
            metavar="DIR",
            help="Offer this model to Nodes that have no file: a folder that artifact create made. Repeatable.",
        ),
    ):
        command = option(command)
    return command


def trusted_keys(paths: Iterable[Path]) -> tuple[bytes, ...]:
    """The keys in these files (PEM); `setting_invalid` names the file that has none."""
    return tuple(map(_public_key, paths))


def _public_key(path: Path) -> bytes:
    from shardline.artifact.signing import KEY_BYTES_LIMIT, read_public_key

    try:
        with path.open("rb") as file:
            pem = file.read(KEY_BYTES_LIMIT)
        read_public_key(pem)
    except OSError as error:
        raise ShardlineError("setting_invalid", f"{path}: {error.strerror}", param="trust") from None
    except ShardlineError as error:
        raise ShardlineError("setting_invalid", f"{path}: {error.message}", param="trust") from None
    return pem
