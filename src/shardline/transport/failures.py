"""How an HTTP exchange can fail, told by *where* it failed, so that a caller knows what may have happened.

Owns the hierarchy below `HttpFailure`. It does not decide what a failure means (node lost, Tracker gone, Seam lost):
the caller does. Shown by tests/transport/test_http_client.py.
"""

from __future__ import annotations

import errno
import os
import socket

from shardline.errors import ShardlineError

_LACKS = {
    errno.EMFILE: "open files of the process (ulimit -n)",
    errno.ENFILE: "open files of the machine (fs.file-max)",
    errno.ENOMEM: "memory of the machine",
    errno.ENOBUFS: "network buffers of the machine",
    errno.EADDRNOTAVAIL: "local ports and addresses of the machine (net.ipv4.ip_local_port_range)",
}


class HttpFailure(Exception):
    """No usable answer from `peer` ("host:port"). The text is fit for people; it holds no secret and no URL path."""

    def __init__(self, peer: str, why: str) -> None:
        super().__init__(f"{peer}: {why}")
        self.peer = peer
        self.why = why

    @property
    def brief(self) -> str:
        """The kind of failure in words for a stranger: no address, no text of the system's."""
        return "its answer broke off"


class ConnectFailed(HttpFailure):
    """No connection: refused, unreachable, unresolved, or not within the limit `connect`. No byte was sent."""

    @property
    def brief(self) -> str:
        return "no connection"


class BeforeResponse(HttpFailure):
    """The connection broke before the first byte of the response: the request may have been carried out, or not.

    `reused`: the connection had served before, so most likely the other side closed it while it was idle.
    """

    def __init__(self, peer: str, why: str, *, reused: bool) -> None:
        super().__init__(peer, why)
        self.reused = reused

    @property
    def brief(self) -> str:
        return "the connection broke"


class BrokenResponse(HttpFailure):
    """The response began, and then broke off, grew past its limit, or was not HTTP."""


class NotOurPeer(HttpFailure):
    """Something answered, but not a Shardline process: a proxy, a login page, another program on that port."""

    def __init__(self, peer: str, why: str) -> None:
        super().__init__(peer, f"not our peer: {why}")
        self.what = why

    @property
    def brief(self) -> str:
        return "something else answers there"


class TimedOut(HttpFailure):
    """The answer did not come within the wait that is called `limit`. The connection was closed."""

    def __init__(self, peer: str, limit: str, seconds: float) -> None:
        super().__init__(peer, f"no answer within the limit {limit} ({seconds:g} s)")
        self.limit = limit

    @property
    def brief(self) -> str:
        return self.why


class OwnLack(HttpFailure):
    """No connection, for a lack of this process: files, ports, memory. It says nothing of the peer or the link, and
    must not be held against them. No byte was sent.

    `part`: who lacks it, in words; `what`: the limit to raise.
    """

    def __init__(self, peer: str, part: str, what: str) -> None:
        super().__init__(peer, f"{part} is out of: {what}")

    @property
    def brief(self) -> str:
        return self.why

    def error(self) -> ShardlineError:
        """The same for whoever waits for the answer."""
        return ShardlineError("resources_exhausted", f"{self.why}; it could open no connection", retry_after=1)


def lack(error: OSError) -> str | None:
    """What this process or machine lacks, if that is why a connection could not be opened; None for every other cause.

    A resolver that could not open its files says that the name does not exist, or (as mDNS has it) that something is
    busy: so it is asked whether a file can be opened at all.
    """
    if not isinstance(error, socket.gaierror) and error.errno not in (errno.EBUSY, errno.EINVAL):
        return _LACKS.get(error.errno or 0)
    if error.errno == socket.EAI_MEMORY:
        return _LACKS[errno.ENOMEM]
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as own:
        return _LACKS.get(own.errno or 0)
    return None
