"""The Tracker as a role: binds, serves, and frees everything when it is cancelled.

Owns the order of start and end. Shown by tests/tracker/test_run.py.
"""

from __future__ import annotations

import asyncio

from shardline.options import TrackerOptions
from shardline.tracker.app import create_app
from shardline.tracker.state import TrackerState, dial_with
from shardline.transport.addresses import is_loopback
from shardline.transport.credentials import identity_key
from shardline.transport.http_client import HttpClient
from shardline.transport.http_server import HttpServer, bind, check_listener


async def run(options: TrackerOptions) -> None:
    """Serve until cancelled. Raises what a person can correct: `address_in_use`, `insecure_listener` …"""
    settings = options.settings
    check_listener(options.host, insecure_plain_http=options.insecure_plain_http, credential=options.credential)
    sock = bind(options.host, options.port)
    try:
        key = identity_key(options.key_path or options.state_dir / "tracker.key")
    except BaseException:
        sock.close()
        raise
    # Without the credential: whoever is dialled back has proved nothing yet.
    client = HttpClient(settings, part="the Tracker")
    state = TrackerState(settings, dial=dial_with(client, settings), loopback=is_loopback(options.host), key=key)
    server = HttpServer(create_app(state, options.credential), sock=sock, settings=settings)
    try:
        await server.start()
        options.announce("listening", url=server.url)
        options.announce("ready")
        await asyncio.Event().wait()
    finally:
        options.announce("draining")
        await server.stop()
        await client.aclose()
