"""How an HTTP exchange can fail, told by *where* it failed, so that a caller knows what may have happened.

Owns the hierarchy below `HttpFailure`. It does not decide what a failure means (node lost, Tracker gone, Seam lost):
the caller does. Shown by tests/transport/test_http_client.py.
"""

from __future__ import annotations


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
