"""The Tracker's API, typed, as Nodes and Gateways call it.

Owns paths and shapes, and turns every way of not reaching the Tracker into `tracker_unreachable`, a lack of our own
into `resources_exhausted`. It keeps no state: who remembers nonces, epochs and routes is the caller. Shown by
tests/transport/test_tracker_client.py.
"""

from __future__ import annotations

from types import NoneType
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec

from shardline.errors import ShardlineError
from shardline.transport import answers
from shardline.transport.addresses import make_url, split_url
from shardline.transport.authority import TRACKER
from shardline.transport.failures import HttpFailure, OwnLack
from shardline.transport.http_client import HttpClient, peer_of
from shardline.wire.artifacts import SOURCES_LIMIT, ArtifactList, Source, SourceList
from shardline.wire.joining import AuthorityAnswer, JoinAnswer, JoinRequest
from shardline.wire.messages import (
    HeartbeatAnswer,
    ModelList,
    Outcome,
    PlacementAnswer,
    PlacementRequest,
    RegisterAnswer,
    RouteAnswer,
    RouteRequest,
    Signed,
    TrackerNonce,
)

T = TypeVar("T")
REGISTER_S = 10.0
"""A registration includes the dial-back: the Tracker calls the Node before it answers."""
EXPLAIN_BYTES = 16 << 20
BUNDLE_FILE_S = 60.0
"""A file of a bundle has some megabytes."""


class TrackerClient:
    """One Tracker at `url`. Every method raises `tracker_unreachable`, or the error that the Tracker answered.

    `unproved`: over https, whoever answers will do; for the one question whose answer is proved otherwise.
    """

    def __init__(self, client: HttpClient, url: str, *, unproved: bool = False) -> None:
        parts = split_url(url)
        self._client = client
        self._url = url.rstrip("/")
        if parts.scheme == "https" and parts.party is None and not unproved:
            self._url = make_url(parts.scheme, parts.host, parts.port, parts.target.rstrip("/"), party=TRACKER)

    @property
    def url(self) -> str:
        return self._url.replace(f"{TRACKER}@", "", 1)

    # Node

    async def nonce(self) -> TrackerNonce:
        """A nonce to sign in a registration; good once, for a short time."""
        return await self._call("GET", "/v1/register/nonce", TrackerNonce)

    async def register(self, registration: Signed) -> RegisterAnswer:
        """Register a Node; answers after the Tracker has called it back."""
        return await self._call("POST", "/v1/nodes", RegisterAnswer, registration, timeout_s=REGISTER_S)

    async def heartbeat(self, node: str, heartbeat: Signed) -> HeartbeatAnswer:
        return await self._call("POST", f"/v1/nodes/{_part(node)}/heartbeat", HeartbeatAnswer, heartbeat)

    async def leave(self, node: str, heartbeat: Signed) -> None:
        """Take a Node out now. The statement is a heartbeat with `leaving`, so that nobody else can."""
        await self._call("DELETE", f"/v1/nodes/{_part(node)}", NoneType, heartbeat)

    async def placement(self, request: PlacementRequest) -> PlacementAnswer:
        return await self._call("POST", "/v1/placement", PlacementAnswer, request)

    async def advertise(self, node: str, advertisement: Signed) -> None:
        """Say which pieces of an artifact a Node gives to others; `not_found` where the Tracker does not offer it."""
        await self._call("POST", f"/v1/nodes/{_part(node)}/pieces", NoneType, advertisement)

    async def sources(self, content_id: str, node: str) -> list[Source]:
        """Whom to ask for pieces, the nearest first, without `node` itself; `not_found` for what is not offered."""
        path = f"/v1/artifacts/{_part(content_id)}/sources?node={_part(node)}"
        found = await self._call("GET", path, SourceList, max_body=EXPLAIN_BYTES)
        return found.sources[:SOURCES_LIMIT]

    async def bundle_file(self, content_id: str, path: str, most: int) -> bytes:
        """One file of an offered bundle, of at most `most` bytes, as it is on the Tracker's disk: nothing of it is
        believed before it was checked. `not_found` where the bundle has none at `path`."""
        url = f"{self._url}/v1/artifacts/{_part(content_id)}/bundle/{quote(path)}"
        try:
            response = await self._client.request("GET", url, timeout_s=BUNDLE_FILE_S, limit="bundle", max_body=most)
            if response.status >= 400:
                raise answers.error_of(peer_of(url), *response)
        except OwnLack as failure:
            raise failure.error() from None
        except HttpFailure as failure:
            raise self._unreachable(failure) from failure
        return response.body

    async def authority(self) -> AuthorityAnswer:
        """The certificate of the cluster's authority, to be compared with a pin."""
        return await self._call("GET", "/v1/cluster/ca", AuthorityAnswer)

    async def join(self, request: JoinRequest) -> JoinAnswer:
        return await self._call("POST", "/v1/join", JoinAnswer, request)

    # Gateway

    async def routes(self, request: RouteRequest) -> RouteAnswer:
        """A route with one ticket a hop, or the error that says which layers are missing."""
        return await self._call("POST", "/v1/routes", RouteAnswer, request)

    async def outcome(self, route: str, outcome: Outcome) -> None:
        await self._call("POST", f"/v1/routes/{_part(route)}/outcome", NoneType, outcome)

    async def models(self) -> ModelList:
        return await self._call("GET", "/v1/models", ModelList)

    # Both, and people

    async def nodes(self) -> dict[str, Any]:
        """`{"nodes": [{id, url, pid, shards, engine, health, kv, …}]}`."""
        return await self._call("GET", "/v1/nodes", dict[str, Any], max_body=EXPLAIN_BYTES)

    async def artifacts(self) -> ArtifactList:
        """Every Model Artifact that the Tracker offers or knows of, and who has what."""
        return await self._call("GET", "/v1/artifacts", ArtifactList, max_body=EXPLAIN_BYTES)

    async def explain(self, model: str) -> dict[str, Any]:
        """Every candidate for a route of `model`, and why it was or was not taken."""
        return await self._call(
            "GET", f"/v1/routes/explain?model={quote(model, safe='')}", dict[str, Any], max_body=EXPLAIN_BYTES
        )

    async def _call(
        self,
        method: str,
        path: str,
        kind: type[T],
        body: msgspec.Struct | None = None,
        *,
        timeout_s: float | None = None,
        max_body: int | None = None,
    ) -> T:
        try:
            return await self._client.json(
                method, self._url + path, kind, body=body, timeout_s=timeout_s, max_body=max_body
            )
        except OwnLack as failure:
            raise failure.error() from None
        except HttpFailure as failure:
            raise self._unreachable(failure) from failure

    def _unreachable(self, failure: HttpFailure) -> ShardlineError:
        return ShardlineError(
            "tracker_unreachable", f"the Tracker at {self.url} did not answer: {failure.why}", tracker=self.url
        )


def _part(text: str) -> str:
    """One segment of a path, whatever is in it."""
    return quote(text, safe="")
