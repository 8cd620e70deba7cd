"""What a whole answer of a Shardline process looks like, and how one that is not ours is told apart.

Owns the reading of JSON answers and error objects. Pure. Shown by tests/transport/test_http_client.py.
"""

from __future__ import annotations

from types import NoneType
from typing import NamedTuple, TypeVar, cast

import msgspec

from shardline.errors import ShardlineError, from_body
from shardline.transport.failures import NotOurPeer

T = TypeVar("T")


class Response(NamedTuple):
    """One whole answer. Header names are in lower case; fields of one name are joined with ", "."""

    status: int
    headers: dict[str, str]
    body: bytes


class _ErrorAnswer(msgspec.Struct):
    error: dict[str, object]


def is_json(headers: dict[str, str]) -> bool:
    return headers.get("content-type", "").partition(";")[0].strip().lower() == "application/json"


def error_of(peer: str, status: int, headers: dict[str, str], body: bytes) -> ShardlineError:
    """The catalogue error in an answer with status >= 400; raises `NotOurPeer` if there is none."""
    if is_json(headers):
        try:
            return from_body(msgspec.json.decode(body, type=_ErrorAnswer).error)
        except (msgspec.MsgspecError, RecursionError):
            pass
    kind = headers.get("content-type", "no content type")[:80]
    raise NotOurPeer(peer, f"it answered {status} with {kind} and no error object")


def decode(peer: str, response: Response, kind: type[T]) -> T:
    """The answer as `kind` (NoneType: whether it succeeded). Raises the error that it carries, or `NotOurPeer`."""
    if response.status >= 400:
        raise error_of(peer, *response)
    if response.status >= 300:
        raise NotOurPeer(peer, f"it answered {response.status}, and nothing of ours moves")
    if kind is NoneType and response.status == 204:
        return cast(T, None)
    if not is_json(response.headers):
        found = response.headers.get("content-type", "no content type")[:80]
        raise NotOurPeer(peer, f"it answered {response.status} with {found} where JSON was due")
    if kind is NoneType:
        return cast(T, None)
    try:
        return msgspec.json.decode(response.body, type=kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise NotOurPeer(peer, f"its answer is not a {kind.__name__} ({error})") from None
