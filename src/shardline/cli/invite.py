"""`shardline invite`: another line by which a Node or a Gateway joins the cluster.

It asks the Tracker that runs, as the operator that whoever owns its state folder is. Shown by tests/cli/test_invite.py.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from shardline.cli.invocation import Invocation, pass_invocation, tracker_at, tracker_url_of
from shardline.cli.listings import as_json_option

if TYPE_CHECKING:
    from shardline.cli.client import Endpoint
    from shardline.cli.config import Configuration


def operator_of(configuration: Configuration) -> Endpoint:
    """The Tracker of a cluster with keys, which lets its operator in. Raises `setting_invalid` where it has no keys."""
    from shardline.errors import ShardlineError

    url = tracker_url_of(configuration)
    if not url.startswith("https:"):
        nobody = configuration.sources["tracker"] == "default"
        raise ShardlineError(
            "setting_invalid",
            "no cluster that other machines can join runs here" if nobody else f"other machines cannot join {url}",
            advice="Start one for them: shardline serve --listen 0.0.0.0",
            param="tracker",
        )
    return tracker_at(configuration, url)


@click.command()
@click.option("--tracker", "tracker_url", metavar="URL", help="The Tracker [default: the one of this machine].")
@click.option("--gateway", "for_gateway", is_flag=True, help="A line for a Gateway, which a Node cannot use.")
@as_json_option
@pass_invocation
def invite(invocation: Invocation, tracker_url: str | None, for_gateway: bool, as_json: bool) -> None:
    """Print a line by which another machine joins this cluster.

    On the machine of the Tracker. The line works once, for a day.
    """
    from shardline.cli.process import join_command

    configuration = invocation.configuration(tracker=tracker_url)
    part = "gateway" if for_gateway else "node"
    answer = operator_of(configuration).post(f"/v1/invitations?part={part}")
    click.echo(json.dumps(answer, indent=2) if as_json else join_command(answer["line"], part))
