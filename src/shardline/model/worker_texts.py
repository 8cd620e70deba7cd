"""Texts on their way to token ids, beside the engine: two lanes between the Node and its worker, a thread at each end.

A lane is a socket of its own, because the worker reads the other one only between two batches. A text that is long, or
slow, keeps the next text of its lane waiting and nobody else: no step, and not the other lane. Owns both ends, the
queue in front of the lanes, and its bounds. Refuses to end the worker (worker_process.py).
Shown by tests/model/test_worker_texts.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shardline.errors import ShardlineError
from shardline.model.channel import (
    FRAME_LIMIT,
    Compile,
    Fault,
    FrameReader,
    Refused,
    TextAnswer,
    TextRequest,
    Tokenize,
    Tokens,
    frame,
)
from shardline.model.generation import fault_of
from shardline.model.limits import over_limit
from shardline.settings import Settings

LANES = 2
WAITING = 64
"""Texts that wait for a lane; the next one is refused with `queue_overflow`."""
WAITING_BYTES = 64 << 20
"""Bytes that they may have together."""
_RECEIVE_BYTES = 256 << 10


# ---- in the worker ---------------------------------------------------------------------------------------------------


def answer_texts(lane: socket.socket, tokenize: Callable[[TextRequest], list[int]]) -> None:
    """The work of one thread: each text is answered, in order, until the Node closes its end. Raises what makes the
    engine unusable."""
    reader = FrameReader(TextRequest)
    with contextlib.suppress(OSError):  # closed with an answer unread: the Node is gone, or gives this worker up
        while data := lane.recv(_RECEIVE_BYTES):
            for request in reader.feed(data):
                lane.sendall(_answered(tokenize, request))


def _answered(tokenize: Callable[[TextRequest], list[int]], request: TextRequest) -> bytes:
    try:
        ids = tokenize(request)
    except Exception as error:  # a tokenizer's fault is an answer, whatever it is
        fault = fault_of(error)
        if fault.code == "engine_lost":
            raise
        return frame(Refused(Fault.of(fault)))
    try:
        return frame(Tokens(ids))
    except ValueError:
        return frame(Refused(Fault.of(_too_long(f"{len(ids)} token ids"))))


def _too_long(what: str) -> ShardlineError:
    return ShardlineError("invalid_value", f"the text is too long: {what} pass no frame of {FRAME_LIMIT} bytes")


# ---- in the Node -----------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Text:
    data: bytes
    """The frame."""
    ids: asyncio.Future[list[int]]


class _Lane:
    """The Node's end of one lane: one text out, its token ids back, then the next."""

    def __init__(
        self, end: socket.socket, *, on_free: Callable[[], None], on_garbage: Callable[[ShardlineError], None]
    ) -> None:
        end.setblocking(False)
        self.text: _Text | None = None
        """On its way. One whose caller has left stays until it is answered: no thread can be told to stop."""
        self.since = 0.0
        self._end = end
        self._on_free = on_free
        self._on_garbage = on_garbage
        self._loop = asyncio.get_running_loop()
        self._reader = FrameReader(TextAnswer)
        self._unsent = memoryview(b"")
        self._loop.add_reader(end.fileno(), self._readable)

    def take(self, text: _Text) -> None:
        self.text, self.since = text, time.monotonic()
        self._unsent = memoryview(text.data)
        self._loop.add_writer(self._end.fileno(), self._writable)

    def _writable(self) -> None:
        try:
            self._unsent = self._unsent[self._end.send(self._unsent) :]
        except BlockingIOError:
            return
        except OSError:
            self._fall_silent()
            return
        if not self._unsent:
            self._loop.remove_writer(self._end.fileno())

    def _readable(self) -> None:
        try:
            data = self._end.recv(_RECEIVE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._fall_silent()
            return
        try:
            answers = list(self._reader.feed(data))
        except ValueError as error:
            self._on_garbage(ShardlineError("engine_lost", f"the engine worker sent what cannot be read: {error}"))
            return
        for answer in answers:
            self._take_answer(answer)

    def _fall_silent(self) -> None:
        """The worker has ended: why is told by its other socket, and then to the text that waits here."""
        self._loop.remove_reader(self._end.fileno())
        self._loop.remove_writer(self._end.fileno())

    def _take_answer(self, answer: Tokens | Refused) -> None:
        text, self.text = self.text, None
        if text is None:
            self._on_garbage(ShardlineError("engine_lost", "the engine worker gave an answer that nobody asked for"))
            return
        if not text.ids.done():
            if isinstance(answer, Tokens):
                text.ids.set_result(answer.tokens)
            else:
                text.ids.set_exception(answer.fault.error())
        self._on_free()

    def close(self) -> None:
        self._fall_silent()
        self._end.close()


class TextLanes:
    """All lanes to one worker, and the texts that wait for one."""

    def __init__(
        self, ends: Sequence[socket.socket], settings: Settings, on_garbage: Callable[[ShardlineError], None]
    ) -> None:
        """Takes over `ends`. `on_garbage` is called with the error when the worker sent what no worker sends."""
        self._settings = settings
        self._waiting: deque[_Text] = deque()
        self._lanes = [_Lane(end, on_free=self._next, on_garbage=on_garbage) for end in ends]

    async def compile(self, request: Compile) -> None:
        """See whether a grammar can be kept to. Raises why not, and what `tokenize` raises."""
        await self._ask(request, "grammar")

    async def tokenize(self, request: Tokenize) -> list[int]:
        """The token ids of a text. Raises what the tokenizer refused with, `queue_overflow`, `deadline` (limit
        `control`, which each text has for itself, its wait included), `invalid_value` for one that passes no frame, or
        why the worker was lost."""
        return await self._ask(request, f"{len(request.text)} characters")

    async def _ask(self, request: TextRequest, what: str) -> list[int]:
        try:
            data = frame(request)
        except ValueError:  # too large, or with a lone surrogate in it
            raise _too_long(what) from None
        if len(self._waiting) >= WAITING or sum(len(text.data) for text in self._waiting) > WAITING_BYTES:
            raise ShardlineError("queue_overflow", f"{len(self._waiting)} texts wait to be tokenised")
        text = _Text(data, asyncio.get_running_loop().create_future())
        self._waiting.append(text)
        self._next()
        try:
            async with asyncio.timeout(self._settings.control_s):
                return await text.ids
        except TimeoutError:
            raise ShardlineError("deadline", "the engine did not read a text in time", limit="control") from None
        finally:
            with contextlib.suppress(ValueError):  # on its way, or answered
                self._waiting.remove(text)

    def _next(self) -> None:
        """A free lane takes the text that waited longest."""
        for lane in self._lanes:
            if lane.text is None and self._waiting:
                lane.take(self._waiting.popleft())

    def hung(self, now: float) -> ShardlineError | None:
        """The error to end the worker with, where no lane can take a text for longer than the limit `step`; `now`:
        monotonic seconds. One that is stuck alone costs the other lane nothing, and no session its caches."""
        limit_s = self._settings.step_s
        stuck = all(lane.text is not None and now - lane.since > limit_s for lane in self._lanes)
        return over_limit("step", limit_s) if stuck else None

    def fail(self, error: ShardlineError) -> None:
        """The worker is lost: tell all that wait."""
        for text in [*(lane.text for lane in self._lanes), *self._waiting]:
            if text is not None and not text.ids.done():
                text.ids.set_exception(error)

    def close(self) -> None:
        for lane in self._lanes:
            lane.close()
