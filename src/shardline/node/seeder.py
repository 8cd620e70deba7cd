"""A seeder: a Node without a Shard and without an engine, which gives pieces of Model Artifacts to others.

Owns the order of its start and end, and what it says of itself; it is known to the Tracker as every Node is. Files of
artifact folders are used where they lie, and one that is not found is told with where it was looked for. Shown by
tests/cluster/test_from_nothing.py and tests/cluster/test_possession.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from starlette.types import ASGIApp, Receive, Scope, Send

import shardline
from shardline.artifact.adoption import adopt_all
from shardline.artifact.bundle import TrustPolicy, load_bundle
from shardline.artifact.signing import read_public_key
from shardline.artifact.store import Store, StoredArtifact
from shardline.errors import ShardlineError, first_of
from shardline.node.app import check_party, is_open, tell_log, tell_node
from shardline.node.artifact_advertiser import Advertised, Advertiser
from shardline.node.artifact_door import ArtifactDoor
from shardline.node.artifact_scrub import scrub_often
from shardline.node.info import Identity, host_id
from shardline.node.presence import Presence
from shardline.node.swarm import Swarm
from shardline.options import LogReader, SeederOptions
from shardline.settings import PROTOCOL, Settings
from shardline.transport.addresses import advertised_url, reachable_address, split_url
from shardline.transport.authority import AUTHORITY_FILE, Authority
from shardline.transport.bodies import send_json
from shardline.transport.boundary import ControlGate, ErrorBoundary, no_such_method
from shardline.transport.credentials import identity_key
from shardline.transport.http_client import HttpClient
from shardline.transport.http_server import HttpServer, bind, check_listener, check_tracker, warn_of_plain_http
from shardline.transport.join import join_line, joined
from shardline.transport.membership import Membership, OwnMembership
from shardline.transport.tracker_client import TrackerClient
from shardline.wire.messages import EngineHealth, EngineInfo, KvInfo, NodeInfo, NodeLimits
from shardline.wire.tickets import node_id_of, public_bytes

BACKEND = "none"
"""Engine of a Node that computes nothing."""
_STOP_S = 1.0
_FILES_SHOWN = 5


async def run(options: SeederOptions) -> None:
    """Give pieces away until cancelled. Raises `ShardlineError` for what its operator must correct."""
    keyed = split_url(options.tracker_url).scheme == "https"
    if options.join is None and not keyed:
        check_listener(options.host, insecure_plain_http=options.insecure_plain_http, credential=options.credential)
        check_tracker(options.tracker_url, insecure_plain_http=options.insecure_plain_http)
        warn_of_plain_http(options.host)
    async with AsyncExitStack() as stack:
        sock = stack.enter_context(contextlib.closing(bind(options.host, options.port)))
        store = Store(options.store, reserve_bytes=options.settings.store_reserve_bytes)
        stack.callback(store.close)
        artifacts = await asyncio.to_thread(_opened, options, store, stack)
        if options.join is not None:
            line = join_line(options.join)
            joining = joined(
                line, state_dir=options.state_dir, settings=options.settings, identity_path=options.identity_path
            )
            member = await stack.enter_async_context(joining)
            known = replace(options, tracker_url=line.tracker, credential=member.membership.credential)
            await _run(known, sock, artifacts, member.key, member.membership)
            return
        key = identity_key(options.identity_path)
        await _run(options, sock, artifacts, key, _own_membership(options, key) if keyed else None)


def _own_membership(options: SeederOptions, key: Ed25519PrivateKey) -> OwnMembership:
    """On the machine of a Tracker with keys the certificate is made here, by the authority in the state folder."""
    path = options.state_dir / AUTHORITY_FILE
    if not path.exists():
        raise ShardlineError(
            "setting_invalid",
            f"{options.tracker_url} is of a cluster with keys, whose authority is not in {options.state_dir}",
            advice="Ask for a line, on the machine of the Tracker: shardline invite. Then: --join 'LINE'",
            param="tracker",
        )
    party = node_id_of(public_bytes(key))
    return OwnMembership(Authority.made(path, time.time()), party, options.settings, [])


def _opened(options: SeederOptions, store: Store, stack: AsyncExitStack) -> list[StoredArtifact]:
    """All that is given away; closed by `stack`. Blocking."""
    found = []
    policy = TrustPolicy(keys=tuple(map(read_public_key, options.trusted_keys)), allow_unsigned=options.allow_unsigned)
    for folder in options.bundles:
        artifact = store.add(load_bundle(folder, policy))
        stack.callback(artifact.close)
        options.announce("adopting", name=artifact.bundle.manifest.name)
        look_in = [folder.absolute(), *options.look_in, folder.absolute().parent]
        adopt_all(artifact, look_in)
        _check_whole(artifact, look_in)
        found.append(artifact)
    content_ids = options.content_ids or (() if options.bundles else store.content_ids())
    for content_id in content_ids:
        artifact = store.open(content_id, TrustPolicy(content_ids=frozenset({content_id})))
        stack.callback(artifact.close)
        found.append(artifact)
    if not found:
        raise ShardlineError(
            "not_found",
            f"there is nothing to give away: the store {options.store} is empty",
            advice="Name an artifact folder: shardline artifact seed --artifact DIR",
        )
    for artifact in found:
        holding = artifact.holding()
        options.announce(
            "offering",
            name=holding.name,
            content_id=holding.content_id,
            held=holding.held_bytes,
            total=holding.total_bytes,
        )
    return found


def _check_whole(artifact: StoredArtifact, looked: list[Path]) -> None:
    missing = [
        entry.path
        for entry, file in zip(artifact.bundle.manifest.files, artifact.files, strict=True)
        if len(file.held()) < file.count
    ]
    if missing:
        names = ", ".join(missing[:_FILES_SHOWN])
        where = ", ".join(str(folder) for folder in looked)
        raise ShardlineError(
            "artifact_incomplete",
            f"{len(missing)} of its files are not there, or not whole: {names}; looked in {where}",
            advice="Say where they lie: --files FOLDER",
        )


async def _run(
    options: SeederOptions,
    sock: socket.socket,
    artifacts: list[StoredArtifact],
    key: Ed25519PrivateKey,
    member: Membership | OwnMembership | None,
) -> None:
    settings = options.settings
    client = HttpClient(
        settings, credential=options.credential, tls=None if member is None else member.tls, part="the seeder"
    )
    try:
        await _serve(options, sock, artifacts, key, member, client)
    except* ShardlineError as group:
        raise first_of(group) from None
    finally:
        await client.aclose()


async def _serve(
    options: SeederOptions,
    sock: socket.socket,
    artifacts: list[StoredArtifact],
    key: Ed25519PrivateKey,
    member: Membership | OwnMembership | None,
    client: HttpClient,
) -> None:
    settings = options.settings
    host, port = sock.getsockname()[:2]
    scheme = "http" if member is None else "https"
    url = advertised_url(options.advertise_url, scheme, reachable_address(host), port)
    identity = Identity(key=key, url=url)
    tracker = TrackerClient(client, options.tracker_url)
    presence = Presence(
        identity=identity,
        tracker=tracker,
        client=client,
        info=lambda: seeder_info(identity, settings),
        settings=settings,
        membership=member if isinstance(member, Membership) else None,
    )
    door = ArtifactDoor(settings)
    swarm = Swarm(
        settings,
        options.host,
        partial(tracker.sources, node=identity.node_id),
        environment=options.environment,
        tls=None if member is None else member.tls,
        upload_pace=door.pace,
    )
    for artifact in artifacts:
        door.put(artifact)
        swarm.put(artifact)
    advertiser = Advertiser(
        identity=identity,
        tracker=tracker,
        epoch=lambda: presence.epoch,
        artifacts=[Advertised(artifact) for artifact in artifacts],
        bittorrent_port=lambda: swarm.port,
    )
    app = seeder_app(identity, settings, options.credential, door, lambda: presence.expelled, options.log_lines)
    tls = None if member is None else member.tls.server()
    server = HttpServer(app, sock=sock, settings=settings, lifespan="off", tls=tls)
    await server.start()
    options.announce("listening", url=url, node=identity.node_id)
    works = [advertiser.run(), swarm.run(), _announce_ready(options, presence)]
    works += [scrub_often(one, settings, presence.registered, at_once=True) for one in artifacts]
    works += [member.renew()] if isinstance(member, OwnMembership) else []
    try:
        await _until_unwanted(presence, works)
    finally:
        await server.stop(_STOP_S)
        for artifact in artifacts:
            await swarm.take(artifact.content_id)


async def _until_unwanted(presence: Presence, works: list[Coroutine[Any, Any, None]]) -> None:
    """Everything at work, until the Tracker wants this Node no more, which is raised, or the end, which it is told."""
    try:
        async with asyncio.TaskGroup() as tasks:
            known = tasks.create_task(presence.run())
            running = [known, *map(tasks.create_task, works)]
            try:
                await asyncio.wait({known})
                raise known.result()
            finally:
                for task in running:
                    task.cancel()
    except asyncio.CancelledError:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_STOP_S):
                await presence.goodbye()
        raise


async def _announce_ready(options: SeederOptions, presence: Presence) -> None:
    await presence.registered.wait()
    options.announce("ready", node=presence.node_id)


def seeder_app(
    identity: Identity,
    settings: Settings,
    credential: str,
    door: ArtifactDoor,
    expelled: Callable[[], frozenset[str]],
    log_lines: LogReader | None = None,
) -> ASGIApp:
    """What a seeder answers: who it is, that it lives, its last log lines, pieces, and blocks of them."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        path = scope["path"]
        check_party(scope, path, expelled())
        if door.leads(path):
            await door(scope, receive, send)
        elif path not in ("/v1/node", "/v1/log", "/healthz"):
            raise ShardlineError("not_found", "nothing is served at this path")
        elif scope["method"] != "GET":
            raise no_such_method("GET")
        elif path == "/v1/node":
            await tell_node(scope, send, identity, credential, lambda: seeder_info(identity, settings))
        elif path == "/v1/log":
            await tell_log(scope, send, log_lines)
        else:
            await send_json(send, {"state": "ready"})

    return ErrorBoundary(ControlGate(app, credential=credential, is_open=is_open))


def seeder_info(identity: Identity, settings: Settings) -> NodeInfo:
    """What a seeder says of itself."""
    return NodeInfo(
        id=identity.node_id,
        protocol=PROTOCOL,
        version=shardline.__version__,
        url=identity.url,
        pid=os.getpid(),
        host=host_id(),
        memory_bytes=psutil.virtual_memory().total,
        rss_bytes=psutil.Process().memory_info().rss,
        engine=EngineInfo(
            backend=BACKEND, engine_class=BACKEND, build="", dtype="", quantisation="", device="", threads=0
        ),
        health=EngineHealth(alive=True),
        shards=[],
        kv=KvInfo(),
        limits=NodeLimits(step_body_bytes=settings.step_body_bytes, queue_bytes=settings.queue_bytes),
    )
