"""Chat messages into a prompt, by the template of a Model Artifact, which comes from strangers.

Owns whose turn it is (models take turns, so that one with a slow template does not keep the others waiting), what a
template is given, and the rule by which a trailing assistant message is continued. It runs no template itself: its
processes do (template_process.py). Shown by tests/gateway/test_template.py.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import msgspec

from shardline.errors import ShardlineError
from shardline.gateway.detokenize import Vocabulary
from shardline.gateway.template_process import TemplateProcess, TooSlow, template_error
from shardline.gateway.template_worker import FRAME_BYTES, OUTPUT_SPARE, Answer, Job, Refused
from shardline.settings import Settings

PROCESSES = 3
"""Templates that are rendered at a time, each of another model. A process is started when it is first needed."""
WAITING = 256
"""Jobs of one model that wait."""
SLOW_TRIES = 2
SLOW_PAUSE_S = 10.0
SLOW_KEPT = 16
_RETRY_AFTER_S = 5


@dataclass(frozen=True, slots=True)
class _Ticket:
    bundle: str
    job: Job
    answer: asyncio.Future[Answer]
    """Done, too, when nobody waits for it any more."""
    begun: asyncio.Event = field(default_factory=asyncio.Event)


class _Turns:
    """Jobs that wait, in a line for each text bundle. Bundles take turns; of each, one job is under way at a time."""

    def __init__(self) -> None:
        self._lines: dict[str, deque[_Ticket]] = {}
        """Of every bundle that has a job waiting, or taken."""
        self._ready: asyncio.Queue[str] = asyncio.Queue()
        """Bundles of which a job may be taken, each once: bounded by the bundles that there are."""

    def put(self, ticket: _Ticket) -> None:
        """Raises `template_busy` when the line is full."""
        line = self._lines.get(ticket.bundle)
        if line is None:
            self._lines[ticket.bundle] = deque([ticket])
            self._ready.put_nowait(ticket.bundle)
            return
        if len(line) >= WAITING:
            line.extend([waiting for _ in range(len(line)) if not (waiting := line.popleft()).answer.done()])
        if len(line) >= WAITING:
            raise _busy(f"{len(line)} chats wait for the template of this model, the limit")
        line.append(ticket)

    async def take(self) -> _Ticket:
        return self._lines[await self._ready.get()].popleft()

    def done(self, ticket: _Ticket) -> None:
        """What was taken is over: the bundle goes to the end of those that have jobs."""
        if self._lines[ticket.bundle]:
            self._ready.put_nowait(ticket.bundle)
        else:
            del self._lines[ticket.bundle]


class Templates:
    """Renders for one Gateway; enter it before use. `clock` gives monotonic seconds."""

    def __init__(self, settings: Settings, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._clock = clock
        self._turns = _Turns()
        self._numbers = itertools.count(1)
        self._slow: dict[str, tuple[int, float]] = {}
        """Text bundle -> how often in a row its template passed its limit, and when last."""
        self._idle = [TemplateProcess() for _ in range(PROCESSES)]
        """The last one is used next: it is warm."""
        self._tasks = asyncio.TaskGroup()
        self._runners: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Templates:
        await self._tasks.__aenter__()
        self._runners = [self._tasks.create_task(self._run()) for _ in self._idle]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for runner in self._runners:
            runner.cancel()
        try:
            await self._tasks.__aexit__(kind, error, trace)
        finally:
            for process in self._idle:
                await process.end()

    async def prompt(
        self,
        vocabulary: Vocabulary,
        messages: Sequence[Mapping[str, Any]],
        *,
        continued: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
        more: Mapping[str, Any] | None = None,
    ) -> str:
        """The text that the model reads. `continued`: it ends where the last message's text ends. `more`: variables of
        this template alone, which stand back behind those that all have.

        Raises `template_error` with the template's own words, where it has some.
        """
        bundle = vocabulary.bundle
        template = bundle.chat_template
        if template is None:
            raise template_error("the model has no chat template: use /v1/completions")
        shown = [_known_role(message, template) for message in messages]
        mark = ""
        if continued:
            # In front of this mark everything is as the template writes it, spaces too: it trims behind it.
            mark = "SHARDLINE" + secrets.token_hex(8)
            shown[-1] = {**shown[-1], "content": shown[-1]["content"] + mark}
        variables = {
            **(more or {}),
            "messages": shown,
            "add_generation_prompt": not continued,
            "bos_token": vocabulary.control_text(bundle.bos),
            "eos_token": vocabulary.control_text(bundle.eos),
            "tools": list(tools) if tools else None,
            "documents": None,
        }
        text = await self.render(vocabulary.digest, template, variables)
        if not continued:
            return text
        if mark not in text:
            raise template_error("the chat template does not show the last message, so it cannot be continued")
        return text[: text.rindex(mark)]

    async def render(self, bundle: str, template: str, variables: Mapping[str, Any]) -> str:
        """The output of the template of this text bundle; at most four times the input, within `template_s`.

        Waits for its turn for `queue_wait_s` at most. Raises `template_error` for what is the template's or the
        messages' fault; `template_busy` and `template_lost` for what a retry can cure.
        """
        size = len(template) + len(msgspec.msgpack.encode(variables))
        if size > FRAME_BYTES // 2:
            raise template_error("the messages are too long for a chat template")
        self._check_not_slow(bundle)
        job = Job(next(self._numbers), template, dict(variables), 4 * size + OUTPUT_SPARE, self._settings.template_s)
        ticket = _Ticket(bundle, job, asyncio.get_running_loop().create_future())
        self._turns.put(ticket)
        try:
            async with asyncio.timeout(self._settings.queue_wait_s):
                await ticket.begun.wait()
            rendered = await ticket.answer  # within the limits of the process
        except TimeoutError:
            raise _busy(f"no turn for the chat template came in {self._settings.queue_wait_s:g} s") from None
        finally:
            ticket.answer.cancel()
        if isinstance(rendered, Refused):
            raise template_error(_WORDS[rendered.reason].format(rendered.message))
        return rendered.text

    async def _run(self) -> None:
        while True:
            ticket = await self._turns.take()
            process = self._idle.pop()
            try:
                if not ticket.answer.done():  # else its client has left
                    await self._render(process, ticket)
            finally:
                self._idle.append(process)
                self._turns.done(ticket)

    async def _render(self, process: TemplateProcess, ticket: _Ticket) -> None:
        ticket.begun.set()
        try:
            self._check_not_slow(ticket.bundle)
            answer = await process.answer(ticket.job)
        except Exception as error:
            # Whatever went wrong, it is this job's, and its client is the one to hear of it.
            if isinstance(error, TooSlow):
                self._was_slow(ticket.bundle)
            if not ticket.answer.done():
                ticket.answer.set_exception(error)
        else:
            self._slow.pop(ticket.bundle, None)
            if not ticket.answer.done():
                ticket.answer.set_result(answer)

    def _was_slow(self, bundle: str) -> None:
        count, _ = self._slow.pop(bundle, (0, 0.0))
        self._slow[bundle] = (count + 1, self._clock())
        while len(self._slow) > SLOW_KEPT:
            del self._slow[next(iter(self._slow))]

    def _check_not_slow(self, bundle: str) -> None:
        """A template that has passed its limit twice in a row is not tried again for a while: each try costs a
        processor, and a process that other models wait for."""
        count, at = self._slow.get(bundle, (0, 0.0))
        if count >= SLOW_TRIES and self._clock() - at < SLOW_PAUSE_S:
            limit_s = self._settings.template_s
            raise template_error(f"the chat template took longer than {limit_s:g} s, {count} times in a row")


_WORDS = {
    "raised": "the chat template refuses these messages: {}",
    "syntax": "the chat template of the model is not valid: {}",
    "failed": "the chat template failed: {}",
}


def _busy(message: str) -> ShardlineError:
    return ShardlineError("template_busy", message, limit="queue", retry_after=_RETRY_AFTER_S)


def _known_role(message: Mapping[str, Any], template: str) -> dict[str, Any]:
    """Most templates know no developer: it is their system."""
    if message["role"] == "developer" and "developer" not in template:
        return {**message, "role": "system"}
    return dict(message)
