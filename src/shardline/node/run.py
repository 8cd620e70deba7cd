"""Starting and ending a Node: bind, place, load, test, register, serve; and all of it backwards.

Owns the order of these and the pieces' lives. The socket is bound before anything slow, the server answers while the
engine loads, and the Tracker hears of the Shard from the first moment. Shown by tests/cluster/.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import psutil
import structlog
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from shardline.errors import ShardlineError, first_of
from shardline.model import backends
from shardline.model.backend import ShardDescription
from shardline.model.self_test import choose_prefill_chunk
from shardline.node.app import NodeApp, node_app
from shardline.node.artifact_advertiser import Advertised, Advertiser
from shardline.node.artifact_door import ArtifactDoor
from shardline.node.artifact_gift import give_own_file
from shardline.node.artifact_pieces import ArtifactPieces
from shardline.node.artifact_scrub import scrub_often
from shardline.node.artifact_start import from_nothing
from shardline.node.engine_files import EngineFiles
from shardline.node.host import ShardHost
from shardline.node.info import Identity, Planned, host_id, node_info
from shardline.node.plan import KvRoom, ModelFacts, inspect_model, kv_room
from shardline.node.presence import Presence
from shardline.node.swarm import Swarm
from shardline.node.tracker_patience import answered
from shardline.options import NodeOptions
from shardline.settings import Settings
from shardline.transport.addresses import advertised_url, split_url
from shardline.transport.carrier import HttpCarrier
from shardline.transport.credentials import identity_key
from shardline.transport.failures import HttpFailure, OwnLack
from shardline.transport.http_client import HttpClient
from shardline.transport.http_server import HttpServer, bind, check_listener, check_tracker, warn_of_plain_http
from shardline.transport.join import join_line, joined
from shardline.transport.membership import Membership
from shardline.transport.spans import traced
from shardline.transport.tracker_client import TrackerClient
from shardline.wire.messages import NodeInfo, PlacementRequest
from shardline.wire.tickets import node_id_of, public_bytes

log = structlog.get_logger(__name__)
_PLACEMENT_RETRY_S = 0.5
_PROBE_S = 1.0
_STOP_S = 1.0


async def run(options: NodeOptions) -> None:
    """Serve one Shard until cancelled. Raises `ShardlineError` for what its operator must correct."""
    if options.join is None:
        check_listener(options.host, insecure_plain_http=options.insecure_plain_http, credential=options.credential)
        _check_no_keys(options.tracker_url)
        check_tracker(options.tracker_url, insecure_plain_http=options.insecure_plain_http)
        warn_of_plain_http(options.host)
    sock = bind(options.host, options.port)
    try:
        if options.join is None:
            await _run(options, sock, identity_key(options.identity_path), None)
            return
        if options.model is not None:
            # A model that cannot be served is told before the token is spent.
            await asyncio.to_thread(inspect_model, options)
        line = join_line(options.join)
        state_dir, identity = options.state_dir, options.identity_path
        async with joined(line, state_dir=state_dir, settings=options.settings, identity_path=identity) as member:
            credential = member.membership.credential
            known = replace(options, tracker_url=line.tracker, credential=credential)
            await _run(known, sock, member.key, member.membership)
    finally:
        sock.close()


def _check_no_keys(tracker_url: str) -> None:
    """A Tracker with keys would refuse this Node for as long as it asks."""
    if split_url(tracker_url).scheme == "https":
        raise ShardlineError(
            "setting_invalid",
            f"{tracker_url} is of a cluster with keys, which a Node joins by a line",
            advice="Ask for one, on the machine of the Tracker: shardline invite. Then: shardline node --join 'LINE'",
            param="tracker",
        )


async def _run(
    options: NodeOptions, sock: socket.socket, key: Ed25519PrivateKey, membership: Membership | None
) -> None:
    """`membership`: of a Node in a cluster with keys."""
    tls = None if membership is None else membership.tls
    client = HttpClient(options.settings, credential=options.credential, tls=tls, part="the Node")
    async with AsyncExitStack() as stack:
        stack.push_async_callback(client.aclose)
        tracker = TrackerClient(client, options.tracker_url)
        pieces: ArtifactPieces | None = None
        if options.model is None:
            node_id = node_id_of(public_bytes(key))
            start = await stack.enter_async_context(from_nothing(options, tracker, client, node_id))
            options, facts, pieces = start
        else:
            facts = await asyncio.to_thread(inspect_model, options)
        first, last = await _layers(options, facts, tracker, key)
        node = _Node(options, facts, first, last, client, tracker, key, membership, pieces)
        await node.serve(sock)


async def _layers(
    options: NodeOptions, facts: ModelFacts, tracker: TrackerClient, key: Ed25519PrivateKey
) -> tuple[int, int]:
    """The range that the operator named, or what the Tracker's placement gives."""
    if options.first is not None and options.last is not None:
        if not 0 <= options.first < options.last <= facts.n_layers:
            raise ShardlineError(
                "layers_invalid", f"layers {options.first}:{options.last} of a model with {facts.n_layers}"
            )
        return options.first, options.last
    memory = options.memory_bytes or psutil.virtual_memory().available
    request = PlacementRequest(
        content_id=facts.content_id,
        engine_class=facts.engine_class,
        n_layers=facts.n_layers,
        memory_bytes=memory,
        layer_bytes=facts.layer_bytes,
        embedding_bytes=facts.embedding_bytes,
        output_bytes=facts.output_bytes,
        kv_reserve_bytes=facts.kv_reserve_bytes,
        legal_cuts=facts.legal_cuts,
        illegal_parts=facts.illegal_parts,
        node=node_id_of(public_bytes(key)),
        host=host_id(),
        host_memory_bytes=psutil.virtual_memory().total,
    )
    placing = partial(tracker.placement, request)
    answer = await answered(placing, options.announce, pause_s=_PLACEMENT_RETRY_S, command="shardline serve")
    log.info("node_placed", first=answer.first, last=answer.last, reason=answer.reason)
    options.announce(
        "placed",
        first=answer.first,
        last=answer.last,
        n_layers=facts.n_layers,
        model=facts.name,
        reason=answer.reason,
    )
    return answer.first, answer.last


def _not_loaded(cause: ShardlineError) -> ShardlineError:
    """What ends a Node whose Shard did not load, with the advice for that: nobody starts it again by itself."""
    advice = cause.advice
    if cause.code == "engine_lost":
        advice = "The last lines of its log say why. Correct that, then start the Node again."
    return ShardlineError(cause.code, f"the Shard did not load: {cause.message}", advice=advice, **cause.details)


class _Node:
    """The pieces of one running Node."""

    def __init__(
        self,
        options: NodeOptions,
        facts: ModelFacts,
        first: int,
        last: int,
        client: HttpClient,
        tracker: TrackerClient,
        key: Ed25519PrivateKey,
        membership: Membership | None,
        pieces: ArtifactPieces | None,
    ) -> None:
        self._pieces = pieces
        self._door = ArtifactDoor(options.settings)
        self._swarm: Swarm | None = None
        if pieces is not None:
            self._door.put(pieces.artifact)
            self._swarm = pieces.swarm = Swarm(
                options.settings,
                options.host,
                partial(tracker.sources, node=node_id_of(public_bytes(key))),
                environment=options.environment,
                tls=None if membership is None else membership.tls,
                download_pace=pieces.pace,
                upload_pace=self._door.pace,
                bans=pieces.bans,
                on_banned=pieces.accuse,
            )
            self._swarm.put(pieces.artifact)
        self._options = options
        self._membership = membership
        self._settings: Settings = options.settings
        self._facts = facts
        self._client = client
        self._tracker = tracker
        self._key = key
        self._files = EngineFiles(options, facts, first, last, pieces)
        self._planned = Planned(
            model=facts.name,
            content_id=facts.content_id,
            first=first,
            last=last,
            n_layers=facts.n_layers,
            engine=options.engine,
            threads=options.threads,
        )
        self._engine = backends.engine(
            options.engine, self._files.spec(), self._settings, inherited=options.environment, inline=options.inline
        )

    def _cutting(self, done: int, total: int) -> None:
        self._options.announce("cutting", done=done, total=total)

    def _loading(self, done: int, total: int) -> None:
        self._options.announce("loading", done=done, total=total)

    def _room(self, description: ShardDescription) -> KvRoom:
        return kv_room(self._options, description)

    async def serve(self, sock: socket.socket) -> None:
        """Everything at work, until cancelled; then the goodbye, in order."""
        scheme = "http" if self._membership is None else "https"
        host, port = sock.getsockname()[:2]
        url = advertised_url(self._options.advertise_url, scheme, host, port)
        identity = Identity(key=self._key, url=url)
        try:
            async with asyncio.TaskGroup() as tasks:
                await self._serve(sock, identity, tasks)
        except* ShardlineError as group:
            raise first_of(group) from None

    async def _serve(self, sock: socket.socket, identity: Identity, tasks: asyncio.TaskGroup) -> None:
        settings, options = self._settings, self._options
        host = ShardHost(
            node_id=identity.node_id,
            settings=settings,
            engine=self._engine,
            carrier=HttpCarrier(self._client),
            probe=self._reaches,
            kv_room=self._room,
            prefill_chunk=lambda times: choose_prefill_chunk(times.prefill_ms_per_row, settings),
            tasks=tasks,
            prepare=lambda: self._files.make(self._cutting),
        )

        def info() -> NodeInfo:
            doing = None if self._pieces is None else self._pieces.doing
            return node_info(host, identity, self._planned, settings, doing)

        presence = Presence(
            identity=identity,
            tracker=self._tracker,
            client=self._client,
            info=info,
            settings=settings,
            membership=self._membership,
        )
        app = NodeApp(
            host=host,
            identity=identity,
            settings=settings,
            credential=options.credential,
            info=info,
            ticket_key=lambda: presence.ticket_key,
            expelled=lambda: presence.expelled,
            door=self._door,
            log_lines=options.log_lines,
        )
        host.on_change = lambda: self._state_changed(host, presence)
        self._engine.on_progress = self._loading
        tls = None if self._membership is None else self._membership.tls.server()
        whole = traced(node_app(app, options.credential), options.spans)
        server = HttpServer(whole, sock=sock, settings=settings, lifespan="off", direct=app.steps, tls=tls)
        await server.start()
        options.announce("listening", url=identity.url, node=identity.node_id, model=self._facts.name)
        known = tasks.create_task(presence.run())
        running = [known, *map(tasks.create_task, self._works(identity, presence, host))]
        try:
            await asyncio.wait({known})
            raise known.result()
        except (asyncio.CancelledError, ShardlineError):
            await self._say_goodbye(host, presence, known)
            raise
        finally:
            for task in running:
                task.cancel()
            await self._engine.stop()
            await server.stop(_STOP_S)
            if self._swarm is not None and self._pieces is not None:
                await self._swarm.take(self._pieces.artifact.content_id)

    def _works(self, identity: Identity, presence: Presence, host: ShardHost) -> list[Coroutine[Any, Any, None]]:
        return [host.run(), self._announce_ready(host, presence), *self._giving(identity, presence, host)]

    def _giving(self, identity: Identity, presence: Presence, host: ShardHost) -> list[Coroutine[Any, Any, None]]:
        """What a Node with pieces does beside its Shard: tell what it has, and read it again now and then. One with a
        file of its own gives that, where somebody may want it."""
        pieces, swarm = self._pieces, self._swarm
        if pieces is None or swarm is None:
            if self._options.engine == "scripted":
                return []
            giving = give_own_file(
                self._options,
                self._facts,
                identity=identity,
                tracker=self._tracker,
                door=self._door,
                epoch=lambda: presence.epoch,
                tls=None if self._membership is None else self._membership.tls,
            )
            return [giving]
        told = [Advertised(pieces.artifact, lambda: pieces.fetching, pieces.accused)]
        advertiser = Advertiser(
            identity=identity,
            tracker=self._tracker,
            epoch=lambda: presence.epoch,
            artifacts=told,
            bittorrent_port=lambda: swarm.port,
        )

        async def damaged() -> None:
            await pieces.bring(self._planned.first, self._planned.last)

        scrubbing = scrub_often(pieces.artifact, self._settings, host.settled, damaged)
        return [advertiser.run(), scrubbing, swarm.run()]

    async def _say_goodbye(self, host: ShardHost, presence: Presence, known: asyncio.Task[ShardlineError]) -> None:
        """No new sessions, an end for those that run, and then the last word to the Tracker."""
        if host.state != "failed":
            self._options.announce("draining", sessions=len(host.sessions))
        host.close_doors()
        async with asyncio.TaskGroup() as tasks:
            telling = tasks.create_task(presence.leaving())
            await host.drain()
            await asyncio.wait({telling}, timeout=_STOP_S)
            telling.cancel()
        # First no more heartbeats: after the last word they would bring the Node back.
        known.cancel()
        await asyncio.wait({known})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_STOP_S):
                await presence.goodbye()

    def _state_changed(self, host: ShardHost, presence: Presence) -> None:
        presence.changed()
        log.info("shard_state", state=host.state, reason=host.reason)
        if host.state == "testing":
            self._options.announce("testing")

    async def _announce_ready(self, host: ShardHost, presence: Presence) -> None:
        """Tell whoever waits once the Tracker knows a ready Shard; a first load that failed ends the Node."""
        await presence.registered.wait()
        await host.settled.wait()
        if host.load_failure is not None:
            raise _not_loaded(host.load_failure)
        await presence.tell_now()
        self._options.announce("ready", node=presence.node_id, layers=f"{self._planned.first}:{self._planned.last}")

    async def _reaches(self, url: str) -> bool:
        """Whether the Node at `url` answers over the link that steps take."""
        try:
            answer = await self._client.request("GET", f"{url}/healthz", timeout_s=_PROBE_S, limit="probe")
        except OwnLack:
            return True  # nothing is known of the link: the push has its own limit
        except HttpFailure:
            return False
        return answer.status == 200
