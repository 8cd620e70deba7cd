"""The connections of one HTTP client: opened, kept while they are idle, taken again, closed.

Owns the keep-alive pool (no hidden limit: callers bound their own concurrency), and tells a peer that is not reached
from a lack of our own. It knows no request. Shown by tests/transport/test_http_client.py and test_own_lack.py.
"""

from __future__ import annotations

import asyncio
import ssl
from functools import partial

import structlog

from shardline.settings import Settings
from shardline.transport.addresses import Url, host_port
from shardline.transport.connection import Connection
from shardline.transport.failures import BrokenResponse, ConnectFailed, OwnLack, lack
from shardline.transport.tls import SHUTDOWN_S, ClusterTls, is_party, party_at, reason
from shardline.transport.tracing import untraced

_CLOSE_S = 2.0

log = structlog.get_logger(__name__)


class Origin:
    """One (scheme, party, host, port, checked address): where its connections go, and those that wait for work."""

    __slots__ = ("authority", "dial", "host", "idle", "open", "party", "peer", "retired", "tls")

    def __init__(
        self,
        host: str,
        port: int,
        address: tuple[str, int] | None,
        tls: ssl.SSLContext | None,
        party: str | None,
    ) -> None:
        self.host = host
        self.party = party
        self.peer = host_port(host, port)
        self.authority = host_port(host.partition("%")[0], port)
        self.dial = address or (host, port)
        self.tls = tls
        self.open = 0
        """Connections that are open or being opened."""
        self.retired = False
        """Dropped from the pool: a connection that still comes back is closed."""
        self.idle: dict[Connection, float] = {}
        """Idle connections with the loop time since when; the newest last, and taken first."""


class Pool:
    """All connections of one client. `part` is the process in words, for what it lacks.

    With `ClusterTls` it connects to parties of the cluster only: https, and a URL that says which party must answer.
    `foreign`: to servers that are none of ours, as `Connection` has it.
    """

    def __init__(
        self, settings: Settings, *, part: str, tls: ssl.SSLContext | ClusterTls | None, foreign: bool = False
    ) -> None:
        self._foreign = foreign
        self._settings = settings
        self._part = part
        self._tls = tls
        self._origins: dict[tuple[str, str | None, str, int, tuple[str, int] | None], Origin] = {}
        self._open: set[Connection] = set()
        self._closed = False
        self._all_gone: asyncio.Event | None = None
        self._sweep: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        """Open connections, idle ones included."""
        return len(self._open)

    def origin(self, url: Url, address: tuple[str, int] | None) -> Origin:
        """Where `url` is served; `address` is dialled instead of its host."""
        key = (url.scheme, url.party, url.host, url.port, address)
        origin = self._origins.get(key)
        if origin is None:
            tls = self._context() if url.scheme == "https" else None
            origin = self._origins[key] = Origin(url.host, url.port, address, tls, url.party)
        return origin

    def _context(self) -> ssl.SSLContext:
        if isinstance(self._tls, ClusterTls):
            return self._tls.client
        return self._tls or ssl.create_default_context()

    def _check_origin(self, origin: Origin) -> None:
        """Before anybody is dialled: a cluster with keys speaks to parties it can check, one without to no other."""
        if isinstance(self._tls, ClusterTls) and origin.party is None:
            raise ConnectFailed(origin.peer, "nobody said which party of the cluster answers there over https")
        if origin.party is not None and not isinstance(self._tls, ClusterTls):
            raise ConnectFailed(origin.peer, f"it is {origin.party} of a cluster with keys, and this process has none")

    def take(self, origin: Origin) -> Connection | None:
        """The idle connection that was used last; None if there is no fresh enough one."""
        oldest = asyncio.get_running_loop().time() - self._settings.client_idle_s
        while origin.idle:
            connection, since = origin.idle.popitem()
            if since >= oldest and connection.is_usable():
                return connection
            connection.close()
        return None

    async def dial(self, origin: Origin, due: float) -> Connection:
        """A new connection, by `due` (loop time). Raises `ConnectFailed`, or `OwnLack` where it is our own fault."""
        loop = asyncio.get_running_loop()
        seconds = max(0.0, min(self._settings.connect_s, due - loop.time()))
        host, port = origin.dial
        done, gone = partial(self._done, origin), partial(self._gone, origin)
        self._check_origin(origin)
        if self._closed:
            raise ConnectFailed(origin.peer, "the client is closed")
        origin.open += 1
        try:
            # What is read from it later is for whoever uses it then, not for the request that opens it.
            with untraced():
                async with asyncio.timeout(seconds):
                    transport, connection = await loop.create_connection(
                        lambda: Connection(origin.peer, self._settings.header_bytes, done, gone, foreign=self._foreign),
                        host,
                        port,
                        ssl=origin.tls,
                        server_hostname=None if origin.tls is None else origin.host,
                        ssl_shutdown_timeout=None if origin.tls is None else SHUTDOWN_S,
                    )
        except TimeoutError:
            raise ConnectFailed(origin.peer, f"no connection within the limit connect ({seconds:.3g} s)") from None
        except ssl.SSLError as error:
            raise ConnectFailed(origin.peer, reason(error)) from None
        except (OSError, UnicodeError) as error:
            raise self._not_connected(origin, error) from None
        finally:
            origin.open -= 1
        if origin.party is not None and not is_party(party_at(transport), origin.party):
            connection.abort()
            raise ConnectFailed(origin.peer, f"another party of the cluster answers there, not {origin.party}")
        # Counted here and not when the socket is made: a loop need not tell the end of a connection whose making was
        # cancelled.
        if connection.lost:
            raise ConnectFailed(origin.peer, "the connection was closed as soon as it was open")
        if self._closed:
            connection.abort()
            raise ConnectFailed(origin.peer, "the client is closed")
        origin.open += 1
        self._open.add(connection)
        return connection

    async def aclose(self) -> None:
        """Close all connections; requests that run fail. Returns when the sockets are closed."""
        self._closed = True
        if self._sweep is not None:
            self._sweep.cancel()
            self._sweep = None
        for connection in list(self._open):
            connection.fail(BrokenResponse(connection.peer, "the client was closed"))
        if self._open:
            self._all_gone = asyncio.Event()
            try:
                async with asyncio.timeout(_CLOSE_S):
                    await self._all_gone.wait()
            except TimeoutError:
                log.warning("connections_left", connections=len(self._open))

    def _not_connected(self, origin: Origin, error: OSError | UnicodeError) -> ConnectFailed | OwnLack:
        what = lack(error) if isinstance(error, OSError) else None
        if what is None:
            return ConnectFailed(origin.peer, f"no connection ({str(error) or 'it was closed while it was made'})")
        failure = OwnLack(origin.peer, self._part, what)
        log.warning("resources_exhausted", reason=failure.why, wanted=origin.peer)
        # Idle connections are what can be given up: the next try may find room.
        for other in self._origins.values():
            for connection in other.idle:
                connection.close()
            other.idle.clear()
        return failure

    def _done(self, origin: Origin, connection: Connection, keep: bool) -> None:
        if not keep or self._closed or origin.retired:
            connection.close()
            return
        loop = asyncio.get_running_loop()
        origin.idle[connection] = loop.time()
        if self._sweep is None:
            self._sweep = loop.call_later(self._settings.client_idle_s, self._drop_idle)

    def _gone(self, origin: Origin, connection: Connection) -> None:
        if connection not in self._open:
            return
        self._open.remove(connection)
        origin.open -= 1
        origin.idle.pop(connection, None)
        if self._all_gone is not None and not self._open:
            self._all_gone.set()

    def _drop_idle(self) -> None:
        """Close what was idle too long; come again when the next one will have been."""
        self._sweep = None
        loop = asyncio.get_running_loop()
        oldest = loop.time() - self._settings.client_idle_s
        next_since: float | None = None
        for key, origin in list(self._origins.items()):
            for connection, since in list(origin.idle.items()):
                if since > oldest:
                    next_since = since if next_since is None else min(next_since, since)
                    break
                del origin.idle[connection]
                connection.close()
            if not origin.open:
                origin.retired = True
                del self._origins[key]
        if next_since is not None:
            self._sweep = loop.call_later(max(0.01, next_since - oldest), self._drop_idle)
