"""Chat messages into a prompt, by the template of a Model Artifact, which comes from strangers.

Owns the worker process that renders (started at first use, killed at its deadline, started again), what a template
is given, and the rule by which a trailing assistant message is continued. It runs no template itself. Shown by
tests/gateway/test_template.py.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import msgspec
import structlog

from shardline.errors import ShardlineError
from shardline.gateway.detokenize import Vocabulary
from shardline.gateway.template_worker import FRAME_BYTES, LENGTH, OUTPUT_SPARE, Answer, Job, Refused
from shardline.settings import Settings

log = structlog.get_logger(__name__)

WAITING = 64
"""Jobs that wait for the worker."""
_START_S = 10.0
_DECODER: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


@dataclass(frozen=True, slots=True)
class _Ticket:
    job: Job
    answer: asyncio.Future[Answer]


SLOW_TRIES = 2
SLOW_PAUSE_S = 10.0
SLOW_KEPT = 16


class Templates:
    """Renders for one Gateway; enter it before use. Jobs run one after another, in order."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._jobs: asyncio.Queue[_Ticket] = asyncio.Queue(WAITING)
        self._numbers = itertools.count(1)
        self._slow: dict[str, tuple[int, float]] = {}
        """Template -> how often in a row it passed its limit, and when last."""
        self._worker: asyncio.subprocess.Process | None = None
        self._tasks = asyncio.TaskGroup()
        self._runner: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Templates:
        await self._tasks.__aenter__()
        self._runner = self._tasks.create_task(self._run())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._runner is not None:
            self._runner.cancel()
        await self._tasks.__aexit__(kind, error, trace)

    @property
    def worker_pid(self) -> int | None:
        """Of the worker that runs now."""
        return None if self._worker is None else self._worker.pid

    async def prompt(self, vocabulary: Vocabulary, messages: Sequence[Mapping[str, Any]], *, continued: bool) -> str:
        """The text that the model reads. `continued`: it ends where the last message's text ends.

        Raises `template_error` with the template's own words, where it has some.
        """
        bundle = vocabulary.bundle
        template = bundle.chat_template
        if template is None:
            raise _error("the model has no chat template: use /v1/completions")
        shown = [_known_role(message, template) for message in messages]
        mark = ""
        if continued:
            # In front of this mark everything is as the template writes it, spaces too: it trims behind it.
            mark = "SHARDLINE" + secrets.token_hex(8)
            shown[-1] = {**shown[-1], "content": shown[-1]["content"] + mark}
        variables = {
            "messages": shown,
            "add_generation_prompt": not continued,
            "bos_token": vocabulary.control_text(bundle.bos),
            "eos_token": vocabulary.control_text(bundle.eos),
            "tools": None,
            "documents": None,
        }
        text = await self.render(template, variables)
        if not continued:
            return text
        if mark not in text:
            raise _error("the chat template does not show the last message, so it cannot be continued")
        return text[: text.rindex(mark)]

    async def render(self, template: str, variables: Mapping[str, Any]) -> str:
        """The template's output; at most four times the input, within `template_s`."""
        size = len(template) + len(msgspec.msgpack.encode(variables))
        if size > FRAME_BYTES // 2:
            raise _error("the messages are too long for a chat template")
        self._check_not_slow(template)
        job = Job(next(self._numbers), template, dict(variables), 4 * size + OUTPUT_SPARE)
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(self._settings.queue_wait_s):
                await self._jobs.put(_Ticket(job, answer))
                rendered = await answer
        except TimeoutError:
            raise ShardlineError("deadline", "chat templates wait for each other too long", limit="template") from None
        if isinstance(rendered, Refused):
            raise _error(_WORDS[rendered.reason].format(rendered.message))
        return rendered.text

    async def _run(self) -> None:
        try:
            while True:
                ticket = await self._jobs.get()
                if ticket.answer.done():
                    continue
                try:
                    answer = await self._exchange(ticket.job)
                except ShardlineError as error:
                    await self._end_worker()
                    if not ticket.answer.done():
                        ticket.answer.set_exception(error)
                else:
                    if not ticket.answer.done():
                        ticket.answer.set_result(answer)
        finally:
            await self._end_worker()

    async def _exchange(self, job: Job) -> Answer:
        worker = await self._started()
        if worker.stdin is None or worker.stdout is None:
            raise ShardlineError("internal", "the template process has no pipes")
        body = msgspec.msgpack.encode(job)
        try:
            async with asyncio.timeout(self._settings.template_s):
                worker.stdin.write(LENGTH.pack(len(body)) + body)
                await worker.stdin.drain()
                head = await worker.stdout.readexactly(LENGTH.size)
                answer = _DECODER.decode(await worker.stdout.readexactly(min(LENGTH.unpack(head)[0], FRAME_BYTES)))
        except TimeoutError:
            log.warning("template_killed", limit_s=self._settings.template_s)
            count, _ = self._slow.get(job.template, (0, 0.0))
            self._slow = {job.template: (count + 1, time.monotonic()), **self._slow}
            self._slow = dict(list(self._slow.items())[:SLOW_KEPT])
            raise _error(f"the chat template took longer than {self._settings.template_s:g} s") from None
        except (OSError, EOFError, msgspec.MsgspecError):
            log.warning("template_worker_lost", exit_code=worker.returncode)
            raise _error("the chat template ended the process that renders it") from None
        if answer.number != job.number:
            raise ShardlineError("internal", "the template process answered another job")
        self._slow.pop(job.template, None)
        return answer

    def _check_not_slow(self, template: str) -> None:
        """A template that has passed its limit twice in a row is not tried again for a while: each try holds up the
        chats of all other models."""
        count, at = self._slow.get(template, (0, 0.0))
        if count >= SLOW_TRIES and time.monotonic() - at < SLOW_PAUSE_S:
            raise _error(f"the chat template took longer than {self._settings.template_s:g} s, {count} times in a row")

    async def _started(self) -> asyncio.subprocess.Process:
        """The worker, ready: the time that it takes to start is not the template's."""
        if self._worker is not None and self._worker.returncode is None:
            return self._worker
        try:
            async with asyncio.timeout(_START_S):
                worker = self._worker = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-I",
                    "-m",
                    "shardline.gateway.template_worker",
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.DEVNULL,
                    env={},
                    start_new_session=True,
                )
                if worker.stdout is not None:
                    await worker.stdout.readexactly(LENGTH.size)
        except (OSError, EOFError, TimeoutError) as error:
            log.error("template_worker_not_started", error=str(error))
            raise ShardlineError("internal", "the process that renders chat templates does not start") from None
        return worker

    async def _end_worker(self) -> None:
        worker, self._worker = self._worker, None
        if worker is None:
            return
        if worker.stdin is not None:
            worker.stdin.close()
        with suppress(ProcessLookupError):
            worker.kill()
        await worker.wait()


_WORDS = {
    "raised": "the chat template refuses these messages: {}",
    "syntax": "the chat template of the model is not valid: {}",
    "failed": "the chat template failed: {}",
}


def _error(message: str) -> ShardlineError:
    return ShardlineError("template_error", message, param="messages")


def _known_role(message: Mapping[str, Any], template: str) -> dict[str, Any]:
    """Most templates know no developer: it is their system."""
    if message["role"] == "developer" and "developer" not in template:
        return {**message, "role": "system"}
    return dict(message)
