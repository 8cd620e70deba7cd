"""Who may register: nonces, signatures, what a Node may say of itself, and the URL it may advertise.

Owns every check of a statement before the Tracker calls anybody or changes anything. It dials nobody (state.py),
remembers no Node (registry.py), and leaves to bounds.py how large anything may be. No I/O; clocks are arguments.
Shown by tests/tracker/test_admission.py.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from typing import Any

import msgspec

from shardline.errors import ShardlineError
from shardline.settings import PROTOCOL
from shardline.tracker.bounds import ADVERTISEMENT_LIMIT, STATEMENT_LIMIT, check_bounds
from shardline.transport.addresses import check_callable_address, make_url, split_url
from shardline.wire.artifacts import ADVERTISEMENT_DOMAIN, ADVERTISEMENT_S, Advertisement, Fetching
from shardline.wire.composite import BY_NAME, content_id_of
from shardline.wire.messages import Heartbeat, NodeInfo, NodeProof, Nonce, Registration, ShardInfo, StepTimes
from shardline.wire.tickets import SignatureRefused, node_id_of, peek, verify

NONCE_TTL_S = 30.0
NONCE_LIMIT = 10_000
CLOCK_SKEW_S = 60.0


class NonceBook:
    """Nonces that were given out and not yet used: each is good once, for `NONCE_TTL_S`."""

    def __init__(self) -> None:
        self._given: OrderedDict[str, float] = OrderedDict()

    def give(self, now: float) -> str:
        """A fresh nonce; `queue_full` while too many are outstanding."""
        while self._given and now - next(iter(self._given.values())) >= NONCE_TTL_S:
            self._given.popitem(last=False)
        if len(self._given) >= NONCE_LIMIT:
            raise ShardlineError("queue_full", f"{NONCE_LIMIT} registrations have begun and not ended")
        nonce = secrets.token_hex(16)
        self._given[nonce] = now
        return nonce

    def take(self, nonce: str, now: float) -> bool:
        """Whether `nonce` was given out, is not too old and was not taken before; then it is used up."""
        given = self._given.pop(nonce, None)
        return given is not None and now - given < NONCE_TTL_S


class _Version(msgspec.Struct):
    """Only the protocol of a statement that cannot be read otherwise."""

    protocol: int | None = None


class _VersionOf(msgspec.Struct):
    info: _Version


def refused(why: str, **details: Any) -> ShardlineError:
    return ShardlineError("registration_refused", why, **details)


def check_protocol(theirs: int | str | None) -> None:
    """Raise `protocol_mismatch` with both versions unless `theirs` is ours; none given is a mismatch, too."""
    if str(theirs) != str(PROTOCOL):
        shown = "none" if theirs is None else str(theirs)[:20]
        raise ShardlineError(
            "protocol_mismatch",
            f"the Node speaks protocol {shown}, this Tracker speaks protocol {PROTOCOL}",
            node_protocol=shown,
            tracker_protocol=PROTOCOL,
        )


def open_registration(statement: str) -> tuple[Registration, bytes]:
    """The registration in `statement` and the key that signed it: who speaks is known, and nothing else yet."""
    _check_length(statement, "registration_refused")
    try:
        check_protocol(peek(statement, _VersionOf).info.protocol)
        claimed = peek(statement, Registration)
        public_key = bytes.fromhex(claimed.public_key)
        if len(public_key) != 32:
            raise refused("the public key is not an Ed25519 key of 32 bytes")
        registration = verify(public_key, "register", statement, Registration)
    except (SignatureRefused, ValueError) as error:
        raise refused(f"the registration is not validly signed: {error}") from None
    if registration.info.id != node_id_of(public_key):
        raise refused(f"the id {registration.info.id!r:.80} does not belong to the key that signed")
    check_bounds(registration, "registration_refused")
    return registration, public_key


def _check_length(statement: str, code: str, limit: int = STATEMENT_LIMIT) -> None:
    """Before anything of it is read."""
    if len(statement) > limit:
        raise ShardlineError(
            code, f"a statement of {len(statement)} characters, at most {limit} are taken", param="statement"
        )


def check_fresh(registration: Registration, nonces: NonceBook, now: float, unix_time: float) -> None:
    """The nonce is ours and unused, and the Node's clock is near ours."""
    if not nonces.take(registration.nonce, now):
        raise refused("the nonce is not one of this Tracker, is older than 30 s, or was used before")
    skew = registration.time - unix_time
    if abs(skew) > CLOCK_SKEW_S:
        raise refused(f"the clocks of Node and Tracker differ by {skew:.0f} s, more than {CLOCK_SKEW_S:.0f} s allow")


def check_url(url: str, *, loopback_ok: bool, keys: bool = False) -> None:
    """Only scheme, host and port, and no address that nobody may make the Tracker call; https in a cluster with `keys`.

    A host name is judged again by the address that it resolves to, before it is dialled.
    """
    try:
        parts = split_url(url)
    except ShardlineError as error:
        raise refused(f"url: {error.message}") from None
    if make_url(parts.scheme, parts.host, parts.port) != url:
        raise refused(f"url {url!r:.200} must be scheme, host and port, and nothing else (http://host:port)")
    if keys and parts.scheme != "https":
        raise refused(f"url {url!r:.200}: the Nodes of a cluster with keys speak https: join it (node --join)")
    check_callable_address(parts.host, loopback_ok=loopback_ok)


def check_info(info: NodeInfo) -> None:
    """What a Node says of itself can be true. Raises `registration_refused`, `layers_invalid`, `protocol_mismatch`."""
    check_protocol(info.protocol)
    check_bounds(info, "registration_refused")
    engine = info.engine
    for name, text in {
        "host": info.host,
        "version": info.version,
        "engine.engine_class": engine.engine_class,
        "engine.backend": engine.backend,
    }.items():
        _check_name(name, text)
    kv = info.kv
    counts = {
        "pid": info.pid,
        "memory_bytes": info.memory_bytes,
        "rss_bytes": info.rss_bytes,
        "kv.capacity_tokens": kv.capacity_tokens,
        "kv.used_tokens": kv.used_tokens,
        "kv.reserved_tokens": kv.reserved_tokens,
        "kv.cached_tokens": kv.cached_tokens,
        "kv.sessions": kv.sessions,
    }
    _check_counts(counts)
    for shard in info.shards:
        _check_shard(shard)
    contents = {shard.content_id for shard in info.shards}
    if len(contents) != len(info.shards):
        # A route visits a Node once: one session key, one slot.
        raise refused("two Shards of one Model Artifact on one Node: start a Node for each, or one wider Shard")


def _check_shard(shard: ShardInfo) -> None:
    _check_name("shard.model", shard.model)
    _check_name("shard.content_id", shard.content_id)
    if not 0 <= shard.first < shard.last <= shard.n_layers <= 100_000:
        raise ShardlineError(
            "layers_invalid",
            f"layers {shard.first}:{shard.last} are no range of a model of {shard.n_layers} layers",
            param="layers",
        )
    counts = {
        "shard.prefill_chunk": shard.prefill_chunk,
        "shard.context_length": shard.context_length,
        "shard.vocab_size": shard.vocab_size,
        "shard.kv_bytes_per_token": shard.kv_bytes_per_token,
    }
    _check_counts(counts)
    if shard.state == "ready" and (shard.prefill_chunk < 1 or shard.context_length < 1):
        raise refused("prefill_chunk and context_length of a ready Shard are at least 1")
    if shard.composite and (shard.first, shard.last, shard.n_layers, shard.text_digest) != (0, 1, 1, None):
        raise refused("a composite Shard is the whole model, told as one layer, and has no text bundle")
    by_name = (
        shard.content_id == content_id_of(shard.model) if shard.composite else shard.content_id.startswith(BY_NAME)
    )
    if by_name != shard.composite:
        # Else it would stand in one group with Shards of another kind, or of another name.
        raise refused("a composite Shard has the content id of its model's name, and no other Shard has such a one")
    if shard.times is not None:
        _check_times(shard.times)


def _check_times(times: StepTimes) -> None:
    for name, value in (("decode_ms", times.decode_ms), ("prefill_ms_per_row", times.prefill_ms_per_row)):
        if not 0 <= value <= 1e9:
            raise refused(f"times.{name} is {value}: not a time in milliseconds")


def _check_name(name: str, text: str) -> None:
    if not text:
        raise refused(f"{name} is empty")


def _check_counts(counts: dict[str, int]) -> None:
    for name, value in counts.items():
        if value < 0:
            raise refused(f"{name} is {value}: not a count")


def open_heartbeat(statement: str, public_key: bytes, node_id: str) -> Heartbeat:
    """The heartbeat that the Node of this key signed; raises what `check_info` raises, `unauthorized`, and
    `invalid_value` for what is too large."""
    _check_length(statement, "invalid_value")
    try:
        beat = verify(public_key, "heartbeat", statement, Heartbeat)
    except SignatureRefused as error:
        raise ShardlineError("unauthorized", f"the heartbeat is not one of Node {node_id}: {error}") from None
    if beat.node != node_id or beat.info.id != node_id:
        raise ShardlineError("unauthorized", f"the heartbeat is not one of Node {node_id}")
    check_info(beat.info)
    check_bounds(beat)
    for probe in beat.peers:
        rtt = probe.rtt_ms
        if rtt is not None and not 0 <= rtt <= 1e9:
            raise ShardlineError("invalid_value", "rtt_ms is not a time in milliseconds", param="peers")
    return beat


def open_advertisement(
    statement: str, public_key: bytes, node_id: str, unix_time: float
) -> tuple[Advertisement, float]:
    """What the Node of this key says that it gives away, and for how many more seconds it says so.

    Raises `unauthorized` for what it did not sign, and `invalid_value` for what is too large, or not of this time: as
    clocks may differ by `CLOCK_SKEW_S`, an advertisement that has ended for us is taken for so much longer.
    """
    _check_length(statement, "invalid_value", ADVERTISEMENT_LIMIT)
    try:
        said = verify(public_key, ADVERTISEMENT_DOMAIN, statement, Advertisement)
    except SignatureRefused as error:
        raise ShardlineError("unauthorized", f"the advertisement is not one of Node {node_id}: {error}") from None
    if said.node != node_id:
        raise ShardlineError("unauthorized", f"the advertisement is not one of Node {node_id}")
    check_bounds(said)
    left_s = said.expires - unix_time
    if not -CLOCK_SKEW_S < left_s <= ADVERTISEMENT_S + CLOCK_SKEW_S:
        raise ShardlineError(
            "invalid_value", f"an advertisement that ends in {left_s:.0f} s is not one of this time", param="expires"
        )
    if said.sequence < 0 or not (said.bittorrent_port is None or 0 < said.bittorrent_port < 1 << 16):
        raise ShardlineError("invalid_value", "sequence is a count, bittorrent_port a port", param="bittorrent_port")
    if said.fetching is not None:
        _check_fetching(said.fetching)
    return said, min(ADVERTISEMENT_S, left_s + CLOCK_SKEW_S)


def _check_fetching(said: Fetching) -> None:
    if not (0 <= said.first < said.last and 0 <= said.done_bytes <= said.total_bytes and said.bytes_per_s >= 0):
        raise ShardlineError("invalid_value", "fetching tells no layers, or more than all of them", param="fetching")


def check_proof(proof: NodeProof, registration_key: bytes, nonce: str, url: str) -> None:
    """Who answered at `url` holds the key, for this nonce and this URL; raises `registration_refused`."""
    check_protocol(proof.protocol)
    node_id = node_id_of(registration_key)
    if proof.id != node_id:
        raise refused(f"another Node answers at {url}: {proof.id[:80]!r}, not {node_id}")
    try:
        signed = verify(registration_key, "node", proof.proof, Nonce)
    except SignatureRefused as error:
        raise refused(f"the answer from {url} is not signed by {node_id}: {error}") from None
    if signed.nonce != nonce or signed.url != url:
        raise refused(f"the answer from {url} is signed for another question")
