"""`shardline artifact seed`: give what this machine holds of Model Artifacts to others.

Owns the two ways: as a party of a cluster, known to its Tracker (node/seeder.py), or by itself, to whoever is told the
URL. Shown by tests/cli/test_artifact_store.py and tests/cluster/test_from_nothing.py.
"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardline.cli.invocation import Invocation, credential_of, environment, pass_invocation
from shardline.cli.offering import offering, trusted_keys
from shardline.cli.roles import (
    JOIN_HELP,
    check_one_tracker,
    files_option,
    host_towards,
    is_default,
    joined_url,
    listener,
    party_credential,
    run_role,
    writable,
)
from shardline.cli.values import JoinLine
from shardline.options import STORE_FOLDER, SeederOptions

if TYPE_CHECKING:
    from shardline.cli.config import Configuration
    from shardline.settings import Settings


@click.command()
@click.argument("content_ids", nargs=-1, metavar="[CONTENT_ID]…")
@click.option("--tracker", "tracker_url", metavar="URL", help="Be known to this Tracker; Nodes then find it.")
@click.option("--join", "line", type=JoinLine(), metavar="LINE", help=JOIN_HELP)
@offering
@files_option
@click.option("--advertise", "advertise_url", metavar="URL", help="URL, or HOST[:PORT], by which others reach it.")
@click.option("--store", type=click.Path(file_okay=False, path_type=Path), metavar="FOLDER",
              help="[default: artifacts/ in the state folder]")  # fmt: skip
@listener(0, "Port to listen on; 0: any free one.")
@pass_invocation
def seed(
    invocation: Invocation,
    /,
    *,
    content_ids: tuple[str, ...],
    tracker_url: str | None,
    line: str | None,
    host: str,
    port: int,
    insecure_plain_http: bool,
    trust: tuple[Path, ...],
    allow_unsigned: bool,
    folders: tuple[Path, ...],
    artifacts: tuple[Path, ...],
    store: Path | None,
    **given: Any,
) -> None:
    """Give what the store holds to others, until it is stopped.

    Without CONTENT_ID and --artifact everything in the store. With --tracker or --join the Tracker knows it and names
    it to Nodes; else whoever has the credential of the cluster may ask.
    """
    check_one_tracker(line, tracker_url)
    configuration = invocation.configuration(tracker=tracker_url)
    folder = store or configuration.state_dir / STORE_FOLDER
    if tracker_url is None and line is None:
        if artifacts or folders or trust or allow_unsigned:
            raise click.UsageError("--artifact, --files, --trust and --allow-unsigned go with --tracker or --join")
        _seed_alone(configuration, folder, content_ids, host, port, insecure_plain_http)
        return
    from shardline.node.seeder import run

    url = joined_url(line) if line is not None else configuration.url("tracker")
    if line is not None and is_default("host"):
        host = host_towards(url)
    run_role(
        invocation,
        "seeder",
        configuration,
        lambda announce: SeederOptions(
            settings=configuration.settings,
            tracker_url=url,
            host=host,
            port=port,
            credential=party_credential(configuration, line, insecure_plain_http=insecure_plain_http),
            join=line,
            state_dir=configuration.state_dir if line is None else writable(configuration.state_dir),
            store=folder,
            bundles=artifacts,
            look_in=folders,
            content_ids=content_ids,
            trusted_keys=trusted_keys(trust),
            allow_unsigned=allow_unsigned,
            insecure_plain_http=insecure_plain_http,
            environment=environment(),
            announce=announce,
            **given,
        ),
        run,
    )


def _seed_alone(
    configuration: Configuration,
    folder: Path,
    content_ids: tuple[str, ...],
    host: str,
    port: int,
    insecure_plain_http: bool,
) -> None:
    from shardline.artifact.bundle import TrustPolicy
    from shardline.artifact.shelf import Shelf
    from shardline.artifact.store import Store
    from shardline.cli.process import run_until_signal
    from shardline.transport.http_server import check_listener, warn_of_plain_http
    from shardline.transport.piece_server import PieceServer, piece_app

    settings = configuration.settings
    credential = credential_of(configuration, starts=True)
    check_listener(host, insecure_plain_http=insecure_plain_http, credential=credential)
    warn_of_plain_http(host)
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(contextlib.closing(Store(folder, reserve_bytes=settings.store_reserve_bytes)))
        shelf = Shelf()
        for content_id in content_ids or store.content_ids():
            # What lies in our own store was believed when it came; its name says what its bytes must be.
            policy = TrustPolicy(content_ids=frozenset({content_id}))
            shelf.put(stack.enter_context(store.open(content_id, policy)))
        app = piece_app(PieceServer(shelf, settings), credential)
        run_until_signal(_serve(app, host, port, settings), drain_s=settings.drain_s)


async def _serve(app: Any, host: str, port: int, settings: Settings) -> None:
    from shardline.transport.http_server import serve

    server = await serve(app, settings=settings, host=host, port=port, lifespan="off")
    try:
        click.echo(f"{server.url}: others fetch with --from {server.url}")
        await asyncio.Event().wait()
    finally:
        await server.stop()
