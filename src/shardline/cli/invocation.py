"""What one call of the command line carries: global flags, and the configuration that they lead to.

Owns the way from `shardline --flag … command` to a checked `Configuration` and to the endpoints that commands talk to.
Shown by tests/cli/test_main.py.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import click

from shardline.errors import ShardlineError

if TYPE_CHECKING:
    from shardline.cli.client import Endpoint
    from shardline.cli.config import Configuration


@dataclass(slots=True)
class Invocation:
    """Global flags as given; `None` where not."""

    config: str | None = None
    assignments: tuple[str, ...] = ()
    flags: dict[str, str | None] = field(default_factory=dict)
    supervised: bool = False
    debug: bool = False

    def configuration(self, **flags: str | None) -> Configuration:
        """All sources merged; `flags` are those of the command itself (names of places)."""
        from shardline.cli.config import resolve

        return resolve(
            flags={**self.flags, **flags}, assignments=self.assignments, config=self.config, environ=os.environ
        )

    def child_arguments(self) -> list[str]:
        """The global flags for a process that is started on behalf of this one."""
        arguments = []
        if self.config is not None:
            arguments += ["--config", self.config]
        for assignment in self.assignments:
            arguments += ["--set", assignment]
        for name, value in self.flags.items():
            if value is not None:
                arguments += [f"--{name.replace('_', '-')}", value]
        return arguments

    def finding_arguments(self) -> list[str]:
        """Those of them without which another command would not find what this one runs."""
        named = {
            "--config": self.config,
            **{f"--{n.replace('_', '-')}": self.flags.get(n) for n in ("state_dir", "credential_file")},
        }
        return [word for flag, value in named.items() if value is not None for word in (flag, value)]


pass_invocation = click.make_pass_decorator(Invocation)


def credential_of(configuration: Configuration) -> str:
    """The cluster credential: of the file that is named, else of the state folder, where the first process makes it."""
    from shardline.cli.state import check_room_for
    from shardline.transport.credentials import existing_credential, made_credential

    path = configuration.credential_path
    try:
        if configuration.places.credential_file:
            return existing_credential(path)
        check_room_for(path)
        return made_credential(path)
    except ShardlineError as error:
        if error.code != "setting_invalid":
            raise
        advice = f"Copy {path} anew from a machine of the cluster (mode 600), or name another: --credential-file FILE"
        raise ShardlineError(error.code, error.message, advice=advice, param="credential_file") from None


def environment() -> dict[str, str]:
    """The variables of this process, for those that start others."""
    return dict(os.environ)


def tracker_of(configuration: Configuration) -> Endpoint:
    """The Tracker, with the cluster credential; where there is none yet, without one: looking makes no files."""
    from shardline.cli.client import Endpoint

    known = configuration.credential_path.exists() or configuration.places.credential_file
    return Endpoint("Tracker", configuration.url("tracker"), credential_of(configuration) if known else "")


def gateway_of(configuration: Configuration) -> Endpoint:
    """The Gateway, with the API key if there is one."""
    from shardline.cli.client import Endpoint

    return Endpoint("Gateway", configuration.url("gateway"), configuration.places.api_key)
