"""What a Node says of itself: the body of `GET /v1/node`, of its registration and of each heartbeat.

Owns the identity of the process (key, id, URL) and the reading of machine facts. Everything that changes is read from
the host at the moment of asking. Shown by tests/node/test_trust.py.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from functools import cache

import msgspec
import psutil
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

import shardline
from shardline.node.host import ShardHost
from shardline.settings import PROTOCOL, Settings
from shardline.telemetry.log_tail import printable
from shardline.wire.messages import EngineInfo, KvInfo, NodeInfo, NodeLimits, NodeProof, Nonce, ShardInfo
from shardline.wire.tickets import node_id_of, public_bytes, sign

_WORDS_CHARS = 500


@dataclass(frozen=True, slots=True)
class Identity:
    """Who this Node is. The id is made from the public key."""

    key: Ed25519PrivateKey
    url: str

    @property
    def node_id(self) -> str:
        return node_id_of(public_bytes(self.key))

    def prove(self, nonce: str) -> NodeProof:
        """The answer to a dial-back: a signature over the caller's nonce and the URL that this Node goes by."""
        proof = sign(self.key, "node", Nonce(nonce=nonce, url=self.url))
        return NodeProof(id=self.node_id, protocol=PROTOCOL, proof=proof)


@dataclass(frozen=True, slots=True)
class Planned:
    """What this Node is going to hold, known before the engine has loaded it."""

    model: str
    content_id: str
    first: int
    last: int
    n_layers: int
    engine: str
    threads: int


@cache
def host_id() -> str:
    """Name of the machine, for Nodes that share one: its machine id where there is one, else its host name."""
    try:
        with open("/etc/machine-id", encoding="ascii") as file:
            machine = file.read().strip()[:32]
    except OSError:
        machine = ""
    return f"{socket.gethostname()}/{machine}" if machine else socket.gethostname()


def shard_info(host: ShardHost, planned: Planned, doing: str | None = None) -> ShardInfo:
    """`doing`: what it is about to, where nothing else is to be said of its state."""
    d = host.description
    return ShardInfo(
        model=planned.model,
        content_id=d.content_id if d else planned.content_id,
        first=planned.first,
        last=planned.last,
        n_layers=planned.n_layers,
        state=host.state,
        reason=brief(host.reason or doing),
        layout_in=d.layout_in.digest if d else "",
        layout_out=d.layout_out.digest if d else "",
        prefill_chunk=host.prefill_chunk,
        context_length=d.context_length if d else 0,
        vocab_size=d.vocab_size if d else 0,
        kv_bytes_per_token=d.kv_bytes_per_token if d else 0,
        rollback=d.rollback if d else False,
        text_digest=d.text_digest if d else None,
        times=host.times,
    )


def node_info(
    host: ShardHost, identity: Identity, planned: Planned, settings: Settings, doing: str | None = None
) -> NodeInfo:
    d = host.description
    engine = d.engine if d else _unloaded(planned)
    health = host.engine.health()
    return NodeInfo(
        id=identity.node_id,
        protocol=PROTOCOL,
        version=shardline.__version__,
        url=identity.url,
        pid=os.getpid(),
        host=host_id(),
        memory_bytes=psutil.virtual_memory().total,
        rss_bytes=_rss(health.pid),
        engine=engine,
        health=msgspec.structs.replace(health, last_error=brief(health.last_error)),
        shards=[shard_info(host, planned, doing)],
        kv=KvInfo(
            capacity_tokens=host.sessions.ledger.capacity,
            # Between the loss of an engine and the news of it, what was kept is gone and still counted.
            used_tokens=max(0, host.engine.kv() - host.sessions.prefixes.tokens),
            reserved_tokens=host.sessions.ledger.reserved,
            cached_tokens=host.sessions.prefixes.tokens,
            sessions=len(host.sessions),
        ),
        limits=NodeLimits(step_body_bytes=settings.step_body_bytes, queue_bytes=settings.queue_bytes),
        queue_bytes=host.queue_bytes,
    )


def brief(text: str | None) -> str | None:
    """What an engine or a library said, in one short printable line: the Tracker takes no other."""
    return None if text is None else printable(text, _WORDS_CHARS)


def _unloaded(planned: Planned) -> EngineInfo:
    return EngineInfo(
        backend=planned.engine,
        engine_class=f"{planned.engine}/loading",
        build="",
        dtype="",
        quantisation="",
        device="",
        threads=planned.threads,
    )


def _rss(worker_pid: int | None) -> int:
    """Resident bytes of the Node and of its engine worker."""
    total = 0
    for pid in {os.getpid(), worker_pid or os.getpid()}:
        try:
            total += psutil.Process(pid).memory_info().rss
        except psutil.Error:  # the worker died between two looks
            continue
    return total
