"""`shardline node --upstream URL`: the flags of a Node whose engine is another server, and what they are made into.

Owns these flags and which others do not go with them. The command itself is in roles.py. Shown by
tests/cli/test_composite.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from shardline.cli.config import Configuration
from shardline.errors import ShardlineError
from shardline.options import CompositeOptions
from shardline.wire.composite import EXTRA

_KEY_BYTES = 8 << 10
UPSTREAM = ("upstream", "upstream_key_file", "upstream_ca", "upstream_fields", "places")
"""Parameters that these flags become."""
_OF_BOTH = frozenset(
    {
        *("tracker_url", "line", "host", "port", "insecure_plain_http", "identity_path", "model", "advertise_url"),
        *("context_length", *UPSTREAM),
    }
)
"""Flags of `node` that go with --upstream."""


def upstream_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The flags of a composite Node."""
    file = click.Path(exists=True, dir_okay=False, path_type=Path)
    for option in (
        click.option(
            "--sessions", "places", type=click.IntRange(1, 4096), default=8, show_default=True,
            help="With --upstream: requests that it is given at a time.",
        ),
        click.option(
            "--upstream-field", "upstream_fields", multiple=True, type=click.Choice(sorted(EXTRA)), metavar="NAME",
            help="A field beside OpenAI's own that it does, as top_k; others are refused by name. Repeatable.",
        ),
        click.option("--upstream-ca", type=file, metavar="PEM", help="Verify an https upstream by these certificates."),
        click.option("--upstream-key-file", type=file, metavar="FILE", help="Key that the upstream wants, in a file."),
        click.option(
            "--upstream", metavar="URL",
            help="Serve the model by another server of OpenAI's API, as http://127.0.0.1:8000/v1; --model is its name"
            " there.",
        ),
    ):  # fmt: skip
        command = option(command)
    return command


def check_flags(upstream: str | None, model: str | None) -> None:
    """Raises a usage error for flags that do not go together."""
    given = _given()
    if upstream is None:
        alone = sorted(given & {*UPSTREAM})
        if alone:
            raise click.UsageError(f"{_flag(alone[0])} goes with --upstream URL")
        if model is not None and not Path(model).exists():
            raise click.BadParameter(f"Path '{model}' does not exist.", param_hint="'--model'")
        return
    if model is None:
        raise click.UsageError("--upstream needs --model NAME: what the upstream calls the model")
    other = sorted(given - _OF_BOTH)
    if other:
        raise click.UsageError(f"{_flag(other[0])} is of a Node that computes: it does not go with --upstream")


def _given() -> set[str]:
    context = click.get_current_context()
    default = click.core.ParameterSource.DEFAULT
    return {name for name in context.params if context.get_parameter_source(name) is not default}


def _flag(name: str) -> str:
    found = next(p for p in click.get_current_context().command.params if p.name == name)
    return max(found.opts, key=len)


def composite_options(
    configuration: Configuration, announce: Any, *, line: str | None, **given: Any
) -> CompositeOptions:
    """The options of the role. Raises `setting_invalid`, and what joining raises."""
    from shardline.cli.roles import joined_url, party_credential, with_room, writable

    insecure: bool = given["insecure_plain_http"]
    key_file, identity = given.pop("upstream_key_file"), given.pop("identity_path")
    return CompositeOptions(
        settings=configuration.settings,
        tracker_url=joined_url(line) if line is not None else configuration.url("tracker"),
        credential=party_credential(configuration, line, insecure_plain_http=insecure),
        state_dir=writable(configuration.state_dir) if line is not None else configuration.state_dir,
        join=line,
        upstream_key=None if key_file is None else _key(key_file),
        upstream_fields=frozenset(given.pop("upstream_fields")),
        identity_path=None if identity is None else with_room(identity),
        announce=announce,
        **given,
    )


def _key(path: Path) -> str:
    """The one line in a file that only its owner should read."""
    try:
        text = path.read_bytes()[: _KEY_BYTES + 1].decode("ascii").strip()
    except (OSError, UnicodeDecodeError):
        text = ""
    if not text or len(text) > _KEY_BYTES or len(text.split()) != 1:
        raise ShardlineError("setting_invalid", f"{path} holds no key: one line of text", param="upstream_key_file")
    return text
