"""What one call of the command line carries: global flags, and the configuration that they lead to.

Owns the way from `shardline --flag … command` to a checked `Configuration` and to the endpoints that commands talk to.
Shown by tests/cli/test_main.py.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import click

from shardline.errors import ShardlineError

if TYPE_CHECKING:
    from pathlib import Path

    from shardline.cli.client import Endpoint
    from shardline.cli.config import Configuration


_PATHS = ("state_dir", "credential_file")
"""Global flags that name files, beside --config."""


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
            arguments += ["--config", _absolute(self.config)]
        for assignment in self.assignments:
            arguments += ["--set", assignment]
        for name, value in self.flags.items():
            if value is not None:
                arguments += [f"--{name.replace('_', '-')}", _absolute(value) if name in _PATHS else value]
        return arguments

    def finding_arguments(self) -> list[str]:
        """Those of them without which another command would not find what this one runs, from any folder."""
        named = {"--config": self.config, **{f"--{n.replace('_', '-')}": self.flags.get(n) for n in _PATHS}}
        return [word for flag, value in named.items() if value is not None for word in (flag, _absolute(value))]


def _absolute(path: str) -> str:
    return os.path.abspath(os.path.expanduser(path))


pass_invocation = click.make_pass_decorator(Invocation)


def credential_of(configuration: Configuration, *, starts: bool = False, tracker: str | None = None) -> str:
    """The cluster credential: of the file that is named, else of the state folder. It is made there by whoever
    `starts` a cluster, and by nobody else: one that was made elsewhere opens nothing. `tracker`: whom it is for.
    Raises `setting_invalid`."""
    from shardline.cli.state import check_room_for
    from shardline.transport.credentials import existing_credential, made_credential

    path = configuration.credential_path
    try:
        if configuration.places.credential_file:
            return existing_credential(path)
        if starts:
            check_room_for(path)
            return made_credential(path)
        if path.exists():
            return existing_credential(path)
    except ShardlineError as error:
        if error.code != "setting_invalid":
            raise
        advice = f"Copy {path} anew from a machine of the cluster (mode 600), or name another: --credential-file FILE"
        raise ShardlineError(error.code, error.message, advice=advice, param="credential_file") from None
    what = f"there is no cluster credential: {path} is missing"
    raise ShardlineError("setting_invalid", what, advice=_way_to_credential(path, tracker), param="credential_file")


def _way_to_credential(path: Path, tracker: str | None) -> str:
    from shardline.cli.recognition import part_at
    from shardline.transport.addresses import is_loopback, split_url

    if tracker is not None and is_loopback(split_url(tracker).host) and part_at(tracker) == "Tracker":
        return (
            f"The Tracker at {tracker} runs with another state folder: name `credential` in that one, "
            "shardline --credential-file FOLDER/credential …, or use that folder here, too (--state-dir FOLDER)."
        )
    return (
        f"Copy `credential` from the state folder of the Tracker's machine to {path} (mode 600), or name it: "
        "--credential-file FILE. Of a cluster on this machine: start its Tracker first (shardline serve)."
    )


def environment() -> dict[str, str]:
    """The variables of this process, for those that start others."""
    return dict(os.environ)


def note_absent_state(configuration: Configuration) -> None:
    """Say that the state folder which was named is not there, to whoever looks for something in it."""
    if configuration.sources["state_dir"] == "flag --state-dir" and not configuration.state_dir.is_dir():
        click.echo(f"NOTE: there is no folder {configuration.state_dir} (--state-dir)", err=True)


def tracker_of(configuration: Configuration) -> Endpoint:
    """The Tracker that a command which only looks means, as `tracker_at` has it. Raises `cluster_ambiguous`."""
    return tracker_at(configuration, tracker_url_of(configuration))


def tracker_at(configuration: Configuration, url: str) -> Endpoint:
    """The Tracker at `url`, with the cluster credential; where there is none yet, without one: looking makes no
    files."""
    from shardline.cli.client import Endpoint

    note_absent_state(configuration)
    if url.startswith("https:"):
        return _keyed_tracker(configuration, url)
    _warn_of_plain_http(url)
    known = configuration.credential_path.exists() or configuration.places.credential_file
    return Endpoint("Tracker", url, credential_of(configuration) if known else "")


def tracker_url_of(configuration: Configuration) -> str:
    """The Tracker that a command which only looks means: where nobody says, and none runs here, the one of the cluster
    that something of this state folder has joined. Raises `cluster_ambiguous`."""
    from shardline.cli.recognition import part_at

    url = configuration.url("tracker")
    joined = joined_trackers(configuration)
    if not joined or part_at(url) == "Tracker":
        return url
    if len(joined) > 1:
        listed = "".join(f"\n    {tracker}" for tracker in joined)
        raise ShardlineError(
            "cluster_ambiguous",
            f"this machine has joined {len(joined)} clusters:{listed}",
            advice=f"Name the Tracker of the one you mean: --tracker {joined[0]}",
        )
    return joined[0]


def joined_trackers(configuration: Configuration) -> list[str]:
    """URLs of the Trackers that were joined from here, where it matters: nobody names one, and none runs here."""
    from shardline.options import JOINED

    # Reading memberships takes longer to import than most commands run, so the folder is looked for first.
    if configuration.sources["tracker"] != "default" or not (configuration.state_dir / JOINED).is_dir():
        return []
    from shardline.transport.membership import kept_in

    found: set[str] = set()
    for folder in (configuration.state_dir / JOINED).glob("*"):
        # One that cannot be read is told by whoever wants to use it.
        with contextlib.suppress(ShardlineError):
            kept = kept_in(folder)
            found.update(() if kept is None else (kept.tracker,))
    return sorted(found)


def _warn_of_plain_http(url: str) -> None:
    from shardline.transport.addresses import is_loopback, split_url

    if not is_loopback(split_url(url).host):
        click.echo(f"WARNING: {url} is plain HTTP: whoever is on the way reads the credential.", err=True)


def _keyed_tracker(configuration: Configuration, url: str) -> Endpoint:
    """The Tracker of a cluster with keys: as its operator on its own machine, elsewhere as a Node that joined here."""
    import time

    from shardline.cli.client import Endpoint
    from shardline.cli.recognition import speaks_tls
    from shardline.transport.authority import AUTHORITY_FILE, OPERATOR, Authority
    from shardline.transport.membership import OwnMembership, joined_folders, kept_in, kept_membership

    path = configuration.state_dir / AUTHORITY_FILE
    if path.exists():
        own = OwnMembership(Authority.made(path, time.time()), OPERATOR, configuration.settings, [])
        return Endpoint("Tracker", url, credential_of(configuration), own.tls.client)
    for folder in joined_folders(configuration.state_dir, url):
        kept = kept_in(folder)
        if kept is not None:
            return Endpoint("Tracker", url, kept.credential, kept_membership(folder, kept).tls.client)
    if not speaks_tls(url):
        # Nobody has such a cluster there: what a plain look finds is the better answer.
        return Endpoint("Tracker", url, "")
    raise ShardlineError(
        "setting_invalid",
        f"{url} is of a cluster with keys, and {configuration.state_dir} has none of it",
        advice="Ask on the machine of the Tracker, or where a Node has joined it (--state-dir FOLDER).",
        param="tracker",
    )


def gateway_of(configuration: Configuration) -> Endpoint:
    """The Gateway, with the API key if there is one."""
    from shardline.cli.client import Endpoint

    note_absent_state(configuration)
    url = configuration.url("gateway")
    if configuration.sources["gateway"] == "default" and joined_trackers(configuration):
        absent = (
            "The cluster that this machine has joined has its Gateway elsewhere: ask there, or name it: --gateway URL"
        )
        return Endpoint("Gateway", url, configuration.places.api_key, absent=absent)
    key = configuration.places.api_key
    if not key and any(url == cluster.gateway for cluster in configuration.clusters):
        key = configuration.own_key()  # ours, as its entry in the state folder says: nobody else is told the key
    return Endpoint("Gateway", url, key)
