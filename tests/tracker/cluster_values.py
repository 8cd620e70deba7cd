"""Values for the Tracker's tests: Shards, Nodes with keys that sign, candidates, and a clock that stands still."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from shardline.settings import PROTOCOL
from shardline.tracker.selection import Candidate, Link, Links
from shardline.wire.messages import (
    EngineHealth,
    EngineInfo,
    Heartbeat,
    KvInfo,
    NodeInfo,
    NodeLimits,
    NodeProof,
    Nonce,
    Registration,
    ShardInfo,
    StepTimes,
)
from shardline.wire.tickets import node_id_of, public_bytes, sign

CLASS = "scripted/1/none/F32"


def shard(first: int, last: int, n_layers: int = 30, **changes: Any) -> ShardInfo:
    """A ready Shard; Seam layouts named by the boundary, so that neighbours agree."""
    values: dict[str, Any] = dict(
        model="tiny",
        content_id="c" * 8,
        first=first,
        last=last,
        n_layers=n_layers,
        state="ready",
        layout_in="none" if first == 0 else "rows",
        layout_out="none" if last == n_layers else "rows",
        prefill_chunk=64,
        context_length=2048,
        vocab_size=100,
        kv_bytes_per_token=16,
        text_digest="t" * 64 if first == 0 or last == n_layers else None,
        times=StepTimes(decode_ms=10.0, prefill_ms_per_row=1.0),
    )
    return ShardInfo(**{**values, **changes})


def candidate(node: str, first: int, last: int, n_layers: int = 30, **changes: Any) -> Candidate:
    """An idle Shard on a Node with 10,000 tokens of KV; `decode_ms` is taken, too."""
    own = {name: changes.pop(name) for name in list(changes) if name in Candidate.__slots__ and name != "shard"}
    if "decode_ms" in changes:
        changes["times"] = StepTimes(decode_ms=changes.pop("decode_ms"), prefill_ms_per_row=1.0)
    values: dict[str, Any] = dict(url=f"http://10.0.0.1:80/{node}", engine_class=CLASS, kv_capacity=10_000)
    values |= dict(kv_reserved=0, sessions=0)
    return Candidate(node=node, shard=shard(first, last, n_layers, **changes), **{**values, **own})


def links_of(table: Mapping[tuple[str, str], Link]) -> Links:
    return lambda source, to: table.get((source, to))


NO_LINKS: Links = links_of({})


@dataclass
class ManualClock:
    """Both clocks of the Tracker, moved by hand."""

    now: float = 1000.0
    unix: float = 1_700_000_000.0

    def monotonic(self) -> float:
        return self.now

    def unix_time(self) -> float:
        return self.unix

    def advance(self, seconds: float) -> None:
        self.now += seconds
        self.unix += seconds


@dataclass
class SigningNode:
    """What a Node says, signed with its key; nothing behind it."""

    url: str
    shards: list[ShardInfo]
    key: Ed25519PrivateKey = field(default_factory=Ed25519PrivateKey.generate)
    count: int = 0
    epoch: str = ""
    kv: KvInfo = field(default_factory=lambda: KvInfo(capacity_tokens=10_000))
    changes: dict[str, Any] = field(default_factory=dict)

    @property
    def id(self) -> str:
        return node_id_of(public_bytes(self.key))

    def info(self, **changes: Any) -> NodeInfo:
        values: dict[str, Any] = dict(
            id=self.id,
            protocol=PROTOCOL,
            version="0",
            url=self.url,
            pid=4711,
            host="here",
            memory_bytes=1 << 34,
            rss_bytes=1 << 20,
            engine=EngineInfo(
                backend="scripted",
                engine_class=CLASS,
                build="1",
                dtype="F32",
                quantisation="none",
                device="cpu",
                threads=1,
            ),
            health=EngineHealth(alive=True, pid=4712),
            shards=self.shards,
            kv=self.kv,
            limits=NodeLimits(step_body_bytes=1 << 20, queue_bytes=1 << 20),
        )
        return NodeInfo(**{**values, **self.changes, **changes})

    def registration(self, nonce: str, time: float, **changes: Any) -> Registration:
        values = dict(public_key=public_bytes(self.key).hex(), nonce=nonce, time=time, info=self.info())
        return Registration(**{**values, **changes})

    def register_statement(self, nonce: str, time: float, **changes: Any) -> str:
        return sign(self.key, "register", self.registration(nonce, time, **changes))

    def heartbeat(self, **changes: Any) -> Heartbeat:
        self.count += 1
        values = dict(node=self.id, epoch=self.epoch, count=self.count, info=self.info())
        return Heartbeat(**{**values, **changes})

    def heartbeat_statement(self, **changes: Any) -> str:
        return sign(self.key, "heartbeat", self.heartbeat(**changes))

    def prove(self, nonce: str) -> NodeProof:
        proof = sign(self.key, "node", Nonce(nonce=nonce, url=self.url))
        return NodeProof(id=self.id, protocol=PROTOCOL, proof=proof)
