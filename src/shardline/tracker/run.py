"""The Tracker as a role: binds, serves, and frees everything when it is cancelled.

Owns the order of start and end. Shown by tests/tracker/test_run.py.
"""

from __future__ import annotations

import asyncio
import time

from shardline.artifact.bundle import TrustPolicy
from shardline.artifact.signing import read_public_key
from shardline.errors import ShardlineError, first_of
from shardline.options import TrackerOptions
from shardline.tracker.app import create_app
from shardline.tracker.enrolment import Enrolment
from shardline.tracker.examination import ask_with
from shardline.tracker.offers import Offer, load_offers
from shardline.tracker.state import TrackerState, dial_with
from shardline.transport.addresses import advertised_url, is_loopback, make_url, reachable_address
from shardline.transport.authority import AUTHORITY_FILE, TRACKER, Authority
from shardline.transport.credentials import identity_key
from shardline.transport.http_client import HttpClient
from shardline.transport.http_server import HttpServer, bind, check_listener, warn_of_plain_http
from shardline.transport.membership import OwnMembership
from shardline.transport.spans import traced


async def run(options: TrackerOptions) -> None:
    """Serve until cancelled. Raises what a person can correct: `address_in_use`, `insecure_listener` …"""
    if not options.keys:
        check_listener(options.host, insecure_plain_http=options.insecure_plain_http, credential=options.credential)
        warn_of_plain_http(options.host)
    offers = await asyncio.to_thread(_offers, options)
    sock = bind(options.host, options.port)
    try:
        key = identity_key(options.key_path or options.state_dir / "tracker.key")
        host, port = sock.getsockname()[:2]
        own, enrolment = _cluster_keys(options, reachable_address(host), port) if options.keys else (None, None)
    except BaseException:
        sock.close()
        raise
    settings = options.settings
    # Without the credential: whoever is dialled back has proved nothing yet.
    tls = None if own is None else own.tls
    client = HttpClient(settings, part="the Tracker", tls=tls)
    # With it: for Nodes that were called back, and whose registrations came with it.
    asking = HttpClient(settings, part="the Tracker", credential=options.credential, tls=tls)
    state = TrackerState(
        settings,
        dial=dial_with(client, settings),
        loopback=is_loopback(options.host),
        key=key,
        enrolment=enrolment,
        offers=offers,
        ask=ask_with(asking, settings),
    )
    server = HttpServer(
        traced(create_app(state, options.credential, enrolment), options.spans),
        sock=sock,
        settings=settings,
        tls=None if tls is None else tls.server(strangers=True),
    )
    try:
        async with asyncio.TaskGroup() as tasks:
            await server.start()
            url = server.url if own is None else make_url("https", reachable_address(host), port)
            options.announce("listening", url=url)
            if own is not None and enrolment is not None:
                tasks.create_task(own.renew())
                options.announce("inviting", line=enrolment.invite().line)
            options.announce("ready")
            await asyncio.Event().wait()
    except* ShardlineError as group:
        raise first_of(group) from None
    finally:
        options.announce("draining")
        await server.stop()
        await client.aclose()
        await asking.aclose()


def _offers(options: TrackerOptions) -> list[Offer]:
    """What the operator offers; raises `artifact_untrusted`, `artifact_invalid`, `setting_invalid`."""
    policy = TrustPolicy(keys=tuple(map(read_public_key, options.trusted_keys)), allow_unsigned=options.allow_unsigned)
    return load_offers(options.artifacts, policy)


def _cluster_keys(options: TrackerOptions, host: str, port: int) -> tuple[OwnMembership, Enrolment]:
    """What a Tracker has that strangers can reach: its own certificate, and the say who else gets one."""
    settings = options.settings
    authority = Authority.made(options.state_dir / AUTHORITY_FILE, time.time())
    url = advertised_url(options.advertise, "https", host, port)
    enrolment = Enrolment(
        authority,
        folder=options.state_dir,
        url=url,
        credential=options.credential,
        settings=settings,
        announce=lambda line: options.announce("inviting", line=line),
    )
    return OwnMembership(authority, TRACKER, settings, [host]), enrolment
