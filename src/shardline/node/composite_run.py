"""Starting and ending a composite Node: bind, serve, be known, reach the upstream; and all of it backwards.

Owns the order of these, and what such a Node says of itself. The Tracker hears of it after the first look at its
upstream, also where that is still to start, but not where its operator must correct something: that model never was.
It routes over it once its upstream has passed the self-test. Shown by tests/cluster/test_composite.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from contextlib import AsyncExitStack
from dataclasses import replace

import psutil
import structlog
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

import shardline
from shardline.errors import ShardlineError, first_of
from shardline.node.composite import Composite, CompositeHost
from shardline.node.composite_app import composite_app
from shardline.node.info import Identity, brief, host_id
from shardline.node.presence import Presence
from shardline.node.upstream import Upstream, UpstreamPlace, check_place, upstream_client
from shardline.options import CompositeOptions
from shardline.settings import PROTOCOL
from shardline.transport.addresses import advertised_url, is_loopback, split_url
from shardline.transport.credentials import identity_key
from shardline.transport.http_client import HttpClient
from shardline.transport.http_server import HttpServer, bind, check_listener, check_tracker, warn_of_plain_http
from shardline.transport.join import join_line, joined
from shardline.transport.membership import Membership
from shardline.transport.spans import traced
from shardline.transport.tracker_client import TrackerClient
from shardline.wire.composite import content_id_of
from shardline.wire.messages import EngineHealth, KvInfo, NodeInfo, NodeLimits, ShardInfo
from shardline.wire.steps import TOKENS_ONLY

log = structlog.get_logger(__name__)
_STOP_S = 1.0


async def run(options: CompositeOptions) -> None:
    """Serve one model until cancelled. Raises `ShardlineError` for what its operator must correct."""
    url = check_place(options.upstream, options.upstream_key)
    if options.join is None:
        check_listener(options.host, insecure_plain_http=options.insecure_plain_http, credential=options.credential)
        if split_url(options.tracker_url).scheme == "https":
            why = f"{options.tracker_url} is of a cluster with keys, which a Node joins by a line: --join 'LINE'"
            raise ShardlineError("setting_invalid", why, param="tracker")
        check_tracker(options.tracker_url, insecure_plain_http=options.insecure_plain_http)
        warn_of_plain_http(options.host)
    parts = split_url(url)
    if parts.scheme == "http" and options.upstream_ca is not None:
        why = "certificates are for an https upstream, and this one is http"
        raise ShardlineError("setting_invalid", why, param="upstream_ca")
    if parts.scheme == "http" and not is_loopback(parts.host):
        log.warning("upstream_in_the_open", host=parts.host, reason="prompts and the key go to it unencrypted")
    async with AsyncExitStack() as stack:
        sock = stack.enter_context(contextlib.closing(bind(options.host, options.port)))
        ca_file = None if options.upstream_ca is None else str(options.upstream_ca)
        upstream_http = upstream_client(options.settings, options.upstream_key, ca_file)
        stack.push_async_callback(upstream_http.aclose)
        place = UpstreamPlace(url=url, model=options.model, extra_fields=options.upstream_fields)
        upstream = Upstream(place, upstream_http, options.settings, secret=options.upstream_key)
        if options.join is None:
            await _run(options, sock, upstream, identity_key(options.identity_path), None)
            return
        line = join_line(options.join)
        joining = joined(
            line, state_dir=options.state_dir, settings=options.settings, identity_path=options.identity_path
        )
        member = await stack.enter_async_context(joining)
        known = replace(options, tracker_url=line.tracker, credential=member.membership.credential)
        await _run(known, sock, upstream, member.key, member.membership)


async def _run(
    options: CompositeOptions,
    sock: socket.socket,
    upstream: Upstream,
    key: Ed25519PrivateKey,
    membership: Membership | None,
) -> None:
    tls = None if membership is None else membership.tls
    client = HttpClient(options.settings, credential=options.credential, tls=tls, part="the Node")
    try:
        async with asyncio.TaskGroup() as tasks:
            await _serve(options, sock, upstream, key, membership, client, tasks)
    except* ShardlineError as group:
        raise first_of(group) from None
    finally:
        await client.aclose()


async def _serve(
    options: CompositeOptions,
    sock: socket.socket,
    upstream: Upstream,
    key: Ed25519PrivateKey,
    membership: Membership | None,
    client: HttpClient,
    tasks: asyncio.TaskGroup,
) -> None:
    settings = options.settings
    host_name, port = sock.getsockname()[:2]
    scheme = "http" if membership is None else "https"
    identity = Identity(key=key, url=advertised_url(options.advertise_url, scheme, host_name, port))
    host = CompositeHost(
        node_id=identity.node_id, composite=_composite(options), upstream=upstream, settings=settings, tasks=tasks
    )

    def info() -> NodeInfo:
        return composite_info(host, identity, options)

    presence = Presence(
        identity=identity,
        tracker=TrackerClient(client, options.tracker_url),
        client=client,
        info=info,
        settings=settings,
        membership=membership,
    )
    looked = asyncio.Event()
    host.on_change = lambda: _state_changed(host, presence, options, looked)
    app = composite_app(
        host,
        identity,
        settings,
        options.credential,
        info=info,
        ticket_key=lambda: presence.ticket_key,
        expelled=lambda: presence.expelled,
        log_lines=options.log_lines,
    )
    tls = None if membership is None else membership.tls.server()
    server = HttpServer(traced(app, options.spans), sock=sock, settings=settings, lifespan="off", tls=tls)
    await server.start()
    options.announce("listening", url=identity.url, node=identity.node_id, model=options.model)
    known = tasks.create_task(_be_known(looked, host, presence))
    running = [known, *map(tasks.create_task, [host.run(), _announce_ready(options, host, presence)])]
    try:
        await asyncio.wait({known})
        raise known.result()
    except (asyncio.CancelledError, ShardlineError):
        await _say_goodbye(options, host, presence, known)
        raise
    finally:
        for task in running:
            task.cancel()
        await server.stop(_STOP_S)


async def _be_known(looked: asyncio.Event, host: CompositeHost, presence: Presence) -> ShardlineError:
    """Like `Presence.run`, once the upstream was looked at; of a start that has failed nobody hears."""
    await looked.wait()
    if host.failure is not None or host.state == "draining":
        await asyncio.Event().wait()  # until whoever ends the Node ends this
    return await presence.run()


def _composite(options: CompositeOptions) -> Composite:
    return Composite(
        model=options.model,
        content_id=content_id_of(options.model),
        places=options.places,
        context_length=options.context_length,
    )


def _state_changed(host: CompositeHost, presence: Presence, options: CompositeOptions, looked: asyncio.Event) -> None:
    looked.set()
    presence.changed()
    log.info("upstream_state", state=host.state, reason=host.reason)
    if host.state == "testing":
        options.announce("testing", what="its upstream")
    elif host.state == "loading" and not host.settled.is_set():
        options.announce("waiting", reason=f"for the upstream: {host.reason}")


async def _announce_ready(options: CompositeOptions, host: CompositeHost, presence: Presence) -> None:
    await host.settled.wait()
    if host.failure is not None:
        raise host.failure
    await presence.registered.wait()
    await presence.tell_now()
    options.announce("ready", node=presence.node_id, layers="all")


async def _say_goodbye(
    options: CompositeOptions, host: CompositeHost, presence: Presence, known: asyncio.Task[ShardlineError]
) -> None:
    """No new sessions, an end for those that run, and then the last word to the Tracker."""
    options.announce("draining", sessions=len(host))
    host.close_doors()
    async with asyncio.TaskGroup() as tasks:
        telling = tasks.create_task(presence.leaving())
        await host.drain()
        await asyncio.wait({telling}, timeout=_STOP_S)
        telling.cancel()
    known.cancel()
    await asyncio.wait({known})
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_STOP_S):
            await presence.goodbye()


def composite_info(host: CompositeHost, identity: Identity, options: CompositeOptions) -> NodeInfo:
    """What a composite Node says of itself: what it does not know of its upstream is null, or 0."""
    composite, description = host.composite, host.description
    lost = host.state == "loading" and host.losses > 0
    return NodeInfo(
        id=identity.node_id,
        protocol=PROTOCOL,
        version=shardline.__version__,
        url=identity.url,
        pid=os.getpid(),
        host=host_id(),
        memory_bytes=psutil.virtual_memory().total,
        rss_bytes=psutil.Process().memory_info().rss,
        engine=composite.engine(),
        health=EngineHealth(alive=not lost, restarts=host.losses, last_error=brief(host.reason) if lost else None),
        shards=[
            ShardInfo(
                model=composite.model,
                content_id=composite.content_id,
                first=0,
                last=1,
                n_layers=1,
                state=host.state,
                reason=brief(host.reason),
                layout_in=TOKENS_ONLY.digest,
                layout_out=TOKENS_ONLY.digest,
                prefill_chunk=1,
                context_length=0 if description is None else description.context_length,
                vocab_size=0,
                kv_bytes_per_token=0,
                composite=True,
            )
        ],
        kv=KvInfo(capacity_tokens=host.ledger.capacity, reserved_tokens=host.ledger.reserved, sessions=len(host)),
        limits=NodeLimits(step_body_bytes=options.settings.step_body_bytes, queue_bytes=options.settings.queue_bytes),
    )
