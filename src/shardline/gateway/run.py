"""The Gateway as a role: bind, join the pieces, serve, and free everything when it is cancelled.

Owns the order of start and end: running generations are given `drain_s` before the listener's connections close.
Shown by tests/cluster/.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import ssl
import time
from dataclasses import replace

import structlog

import shardline
from shardline.errors import ShardlineError, first_of
from shardline.gateway.app import GatewayApp
from shardline.gateway.clients import Clients
from shardline.gateway.cluster_view import ClusterView
from shardline.gateway.completions import Completions
from shardline.gateway.cross_origin import check_origins
from shardline.gateway.generate import RouteGenerations
from shardline.gateway.keys import ApiKeys
from shardline.gateway.live import Joining, Live
from shardline.gateway.metrics import GatewayMetrics
from shardline.gateway.node_logs import NodeLogs
from shardline.gateway.template import Templates
from shardline.gateway.text import TextStore
from shardline.options import GatewayOptions
from shardline.settings import Settings
from shardline.telemetry.records import Records
from shardline.transport.addresses import is_loopback, make_url, split_url
from shardline.transport.authority import AUTHORITY_FILE, Authority
from shardline.transport.carrier import HttpCarrier
from shardline.transport.http_client import HttpClient
from shardline.transport.http_server import Drain, HttpServer, bind, check_listener, check_tracker, warn_of_plain_http
from shardline.transport.join import join_line, joined
from shardline.transport.membership import Membership, OwnMembership
from shardline.transport.spans import traced
from shardline.transport.tls import public_tls
from shardline.transport.tracker_client import TrackerClient

log = structlog.get_logger(__name__)


async def run(options: GatewayOptions) -> None:
    """Serve until cancelled. Raises what a person can correct: `address_in_use`, `insecure_listener` …"""
    settings = options.settings
    public = _public_tls(options)
    if public is None:
        check_listener(options.host, insecure_plain_http=options.insecure_plain_http, credential=options.credential)
        warn_of_plain_http(options.host)
    if options.join is None:
        check_tracker(options.tracker_url, insecure_plain_http=options.insecure_plain_http)
    own = None if options.join is not None else _cluster_keys(options)
    clients = Clients(ApiKeys.from_lines(options.api_keys), options.state_dir)
    if not is_loopback(options.host) and not clients.ask_for_keys:
        raise ShardlineError("insecure_listener", "a Gateway beyond loopback needs API keys: shardline keys add NAME")
    check_origins(settings.cors_origins, keys=clients.ask_for_keys)
    sock = bind(options.host, options.port)
    try:
        if options.join is None:
            await _run(options, sock, clients, public, own)
            return
        line = join_line(options.join)
        async with joined(line, state_dir=options.state_dir, settings=settings, part="gateway") as member:
            known = replace(options, tracker_url=line.tracker, credential=member.membership.credential)
            await _run(known, sock, clients, public, member.membership)
    except* ShardlineError as group:
        raise first_of(group) from None
    finally:
        sock.close()


async def _run(
    options: GatewayOptions,
    sock: socket.socket,
    clients: Clients,
    public: ssl.SSLContext | None,
    member: OwnMembership | Membership | None,
) -> None:
    """`member`: of a Gateway in a cluster with keys."""
    settings = options.settings
    tls = None if member is None else member.tls
    client = HttpClient(settings, credential=options.credential, tls=tls, part="the Gateway")
    try:
        async with (
            TextStore(options.state_dir / "text", client, settings) as texts,
            Templates(settings) as templates,
            asyncio.TaskGroup() as tasks,
        ):
            tracker = TrackerClient(client, options.tracker_url)
            records = Records(settings)
            metrics = GatewayMetrics()
            generations = RouteGenerations(
                tracker=tracker,
                client=client,
                carrier=HttpCarrier(client),
                records=records,
                settings=settings,
                metrics=metrics,
            )
            party = None if member is None else member.party
            live = _live(options, records, tracker, client, generations, party, joining=_joining(options, clients))
            app = GatewayApp(
                completions=Completions(generations, texts, templates, settings),
                generations=generations,
                records=records,
                clients=clients,
                settings=settings,
                metrics=lambda: metrics.text(generations.running, generations.waiting),
                live=live,
            )
            whole = traced(app.asgi(), options.spans)
            server = HttpServer(
                whole, sock=sock, settings=settings, drain=_drain(generations, live), lifespan="off", tls=public
            )
            running = tasks.create_task(generations.run())
            keeping = tasks.create_task(clients.run())
            staying = [] if member is None else [member.renew(), _until_expelled(tracker, settings)]
            renewing = [tasks.create_task(work) for work in staying]
            await server.start()
            options.announce("listening", url=server.url, tracker=options.tracker_url)
            tasks.create_task(_look_for(tracker, options.tracker_url))
            options.announce("ready")
            try:
                await asyncio.Event().wait()
            finally:
                options.announce("draining", sessions=generations.running)
                await server.stop(settings.drain_s + 2.0)
                for task in (running, keeping, *renewing):
                    task.cancel()
    finally:
        await client.aclose()


def _live(
    options: GatewayOptions,
    records: Records,
    tracker: TrackerClient,
    client: HttpClient,
    generations: RouteGenerations,
    party: str | None,
    *,
    joining: Joining,
) -> Live:
    cluster = ClusterView(tracker, generations.models)
    return Live(
        records=records,
        cluster=cluster,
        logs=NodeLogs(client, lambda: cluster.node_urls),
        settings=options.settings,
        version=shardline.__version__,
        gateway=generations.gateway_id if party is None else party,
        joining=joining,
    )


def _drain(generations: RouteGenerations, live: Live) -> Drain:
    async def drain() -> None:
        await generations.drain()
        live.close()  # whoever looks sees how what ran has ended

    return drain


def _joining(options: GatewayOptions, clients: Clients) -> Joining:
    """What the page may say of how to join: a folder of this machine only to whoever is on it."""
    parts = split_url(options.tracker_url)
    with_keys = parts.scheme == "https"
    return Joining(
        tracker=make_url(parts.scheme, parts.host, parts.port),
        keys=with_keys,
        is_local=is_loopback(parts.host),
        flags=[] if with_keys or clients.ask_for_keys else list(options.finding_flags),
    )


def _public_tls(options: GatewayOptions) -> ssl.SSLContext | None:
    """What clients speak to, where the operator gave a certificate."""
    if options.tls_cert is None and options.tls_key is None:
        return None
    if options.tls_cert is None or options.tls_key is None:
        raise ShardlineError("setting_invalid", "--tls-cert and --tls-key go together", param="tls_cert")
    return public_tls(options.tls_cert, options.tls_key)


def _cluster_keys(options: GatewayOptions) -> OwnMembership | None:
    """The certificate of this Gateway, in a cluster with keys: made here, by the authority in the state folder."""
    if split_url(options.tracker_url).scheme != "https":
        return None
    path = options.state_dir / AUTHORITY_FILE
    if not path.exists():
        raise ShardlineError(
            "setting_invalid",
            f"{options.tracker_url} is of a cluster with keys, whose authority is not in {options.state_dir}",
            advice="Run it there, as shardline serve does, or join: shardline invite --gateway, there, prints how.",
            param="tracker",
        )
    party = f"gateway-{secrets.token_hex(8)}"
    return OwnMembership(Authority.made(path, time.time()), party, options.settings, [])


async def _until_expelled(tracker: TrackerClient, settings: Settings) -> None:
    """A Gateway sends no heartbeats, so it asks as often. Raises `join_refused` once it is out of the cluster; all else
    may pass."""
    while True:
        await asyncio.sleep(settings.tracker_heartbeat_s)
        try:
            await tracker.models()
        except ShardlineError as error:
            if error.code == "join_refused":
                raise


async def _look_for(tracker: TrackerClient, url: str) -> None:
    """A wrong URL shows itself at the start, not at the first request. The Gateway serves all the same: it may come."""
    try:
        await tracker.models()
    except ShardlineError as error:
        log.warning("tracker_unreachable", tracker=url, reason=error.message)
