"""Asks Nodes to show blocks of what they say they hold, when the docket says so, and looks at what they show.

Owns the asking: which blocks, how many Nodes at a time, and whose fault it is when no answer comes. When to ask, and
what follows, is challenges.py's. Shown by tests/tracker/test_examination.py.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Sequence

import msgspec
import structlog

from shardline.artifact.possession import NONCE_BYTES, answer_bytes, drawn_blocks, is_true
from shardline.errors import ShardlineError
from shardline.settings import Settings
from shardline.tracker.artifacts import Catalogue
from shardline.tracker.challenges import Docket, Subject, Summons
from shardline.tracker.metrics import TrackerMetrics
from shardline.tracker.offers import Held, Offer, covers, union
from shardline.tracker.registry import NodeRecord, Registry
from shardline.transport import answers
from shardline.transport.failures import HttpFailure, OwnLack
from shardline.transport.http_client import HttpClient, peer_of
from shardline.wire.artifacts import POSSESSION_PATH, Challenge

AT_A_TIME = 4
"""Nodes that are asked at a time: an answer has a megabyte."""
_TICK_S = 0.25

Ask = Callable[[str, Challenge, int], Awaitable[bytes]]
"""(URL as it was dialled back, what is asked, bytes of the answer) -> the answer."""

log = structlog.get_logger(__name__)


def ask_with(client: HttpClient, settings: Settings) -> Ask:
    """The real question. `client` has the credential, or the keys, of the cluster: only the Tracker may ask."""

    async def ask(url: str, challenge: Challenge, size: int) -> bytes:
        response = await client.request(
            "POST",
            f"{url}{POSSESSION_PATH}",
            body=msgspec.json.encode(challenge),
            content_type="application/json",
            timeout_s=settings.possession_s,
            limit="possession",
            # What refuses is longer than the shortest answer.
            max_body=max(size, 64 << 10),
        )
        if response.status >= 400:
            raise answers.error_of(peer_of(url), *response)
        return response.body

    return ask


def draw(
    offer: Offer, held: Held, shards: Sequence[tuple[int, int]], nonce: bytes, public_key: bytes, summons: Summons
) -> list[tuple[int, int]]:
    """The blocks to ask for: of what is held, and half of them of the Shards that the Node serves from it, unless
    everything is under suspicion."""
    trees = offer.bundle.trees
    own = {} if summons.of_everything else union(offer.shard(first, last) for first, last in shards)
    if not own or not covers(held, own):
        return drawn_blocks(trees, held, nonce, public_key, summons.blocks)
    rest = {file: left for file, pieces in held.items() if (left := pieces - own[file] if file in own else pieces)}
    of_rest = drawn_blocks(trees, rest, nonce, public_key, summons.blocks // 2)
    return drawn_blocks(trees, own, nonce, public_key, summons.blocks - len(of_rest)) + of_rest


class Examiner:
    """`run()` asks until it is cancelled. `now`: monotonic seconds."""

    def __init__(
        self,
        catalogue: Catalogue,
        docket: Docket,
        registry: Registry,
        *,
        ask: Ask,
        now: Callable[[], float],
        metrics: TrackerMetrics,
    ) -> None:
        self._catalogue = catalogue
        self._docket = docket
        self._registry = registry
        self._ask = ask
        self._now = now
        self._metrics = metrics

    async def run(self) -> None:
        running: set[asyncio.Task[None]] = set()
        async with asyncio.TaskGroup() as tasks:
            while True:
                for summons in self._docket.take(self._now(), AT_A_TIME - len(running)):
                    task = tasks.create_task(self.examine(summons))
                    running.add(task)
                    task.add_done_callback(running.discard)
                await asyncio.sleep(_TICK_S)

    async def examine(self, summons: Summons) -> None:
        """One challenge, from the drawing to the verdict."""
        subject = summons.subject
        record = self._registry.nodes.get(subject.node)
        blocks = [] if record is None else self._drawn(record, summons)
        if record is None or not blocks or not _can_answer(record):
            self._docket.unjudged(subject, self._now())
            return
        try:
            fault = await self._fault(record.url, subject.content_id, blocks)
        except OwnLack as lack:
            log.warning("challenge_not_asked", node=subject.node, reason=lack.why)
            self._metrics.challenges.labels("unasked").inc()
            self._docket.unjudged(subject, self._now())
            return
        except BaseException:
            self._docket.unjudged(subject, self._now())
            raise
        self._judge(subject, record, fault)

    def _drawn(self, record: NodeRecord, summons: Summons) -> list[tuple[int, int]]:
        said = self._catalogue.advertised(summons.subject)
        if said is None:
            return []
        offer = self._catalogue.offer(summons.subject.content_id)
        shards = [
            (shard.first, shard.last)
            for shard in record.info.shards
            if (shard.content_id, shard.n_layers) == (offer.content_id, offer.n_layers)
        ]
        return draw(offer, said.held, shards, secrets.token_bytes(NONCE_BYTES), record.public_key, summons)

    async def _fault(self, url: str, content_id: str, blocks: list[tuple[int, int]]) -> str | None:
        """What is wrong with the answer; None where nothing is."""
        trees = self._catalogue.offer(content_id).bundle.trees
        challenge = Challenge(content_id=content_id, blocks=blocks)
        try:
            raw = await self._ask(url, challenge, answer_bytes(trees, blocks))
        except OwnLack:
            raise
        except HttpFailure as failure:
            return f"it did not show the blocks that were asked of it: {failure.why}"
        except ShardlineError as error:
            return f"it did not show the blocks that were asked of it: {error.code}: {error.message[:200]}"
        return None if is_true(trees, blocks, raw) else "what it showed is not what was asked of it"

    def _judge(self, subject: Subject, record: NodeRecord, fault: str | None) -> None:
        now = self._now()
        if fault is None:
            again = self._docket.proven(subject) is False
            self._docket.passed(subject, now)
            self._metrics.challenges.labels("passed").inc()
            if again:
                log.info("possession_proven_again", node=subject.node, content_id=subject.content_id)
        elif self._registry.nodes.get(subject.node) is not record or not _can_answer(record):
            # It ended while it was asked, or is another process now: this says nothing about its disk.
            self._docket.unjudged(subject, now)
        else:
            self._metrics.challenges.labels("failed").inc()
            lost = self._docket.failed(subject, fault, now)
            event = "possession_not_proven" if lost else "challenge_failed"
            log.warning(event, node=subject.node, content_id=subject.content_id, reason=fault)


def _can_answer(record: NodeRecord) -> bool:
    return record.beats and not record.leaving
