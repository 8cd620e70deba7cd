"""One process that renders chat templates, as the Gateway sees it: started, asked, judged, buried.

Owns the process, the time that it may take, and the verdict on one that gives no answer: the template's own fault
(`template_error`), that of a busy machine (`template_busy`), or of neither (`template_lost`). Which job is next is
template.py's. Shown by tests/gateway/test_template_process.py.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from contextlib import suppress

import msgspec
import structlog

from shardline.errors import ShardlineError
from shardline.gateway.template_worker import EXIT_NO_MEMORY, FRAME_BYTES, LENGTH, Answer, Job

log = structlog.get_logger(__name__)

CLOCK_FACTOR = 5
"""A job may take so many times its processor time by the clock, where the machine is busy."""
_START_S = 10.0
_GRACE_S = 1.0
"""For a process whose pipe has ended to be gone altogether."""
_BY_ITS_OWN_DOING = frozenset(
    {-signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS, -signal.SIGFPE, -signal.SIGILL, -signal.SIGXFSZ}
)
"""What native code does to itself. Nobody sends these; the killer of a machine without memory sends SIGKILL."""
_answers: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


def template_error(message: str) -> ShardlineError:
    """The fault of a template, or of the messages that it was given."""
    return ShardlineError("template_error", message, param="messages")


class TooSlow(ShardlineError):
    """The template used all the processor time that it may."""

    def __init__(self, limit_s: float) -> None:
        super().__init__("template_error", f"the chat template took longer than {limit_s:g} s", param="messages")


class TemplateProcess:
    """One process at a time; `answer` is called by one task, `end` by the same at its end."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        """Of the process that runs now."""
        return None if self._process is None else self._process.pid

    async def answer(self, job: Job) -> Answer:
        """Have `job` rendered. Raises what is to be told where there is no answer; the next call starts anew."""
        try:
            return await self._exchange(job)
        except BaseException:
            # Somewhere within a job, or dead: what it would say next belongs to nobody.
            await self.end()
            raise

    async def end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if process.stdin is not None:
            process.stdin.close()
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()

    async def _exchange(self, job: Job) -> Answer:
        process = await self._started()
        if process.stdin is None or process.stdout is None:
            raise ShardlineError("internal", "the template process has no pipes")
        body = msgspec.msgpack.encode(job)
        try:
            async with asyncio.timeout(CLOCK_FACTOR * job.cpu_s):
                process.stdin.write(LENGTH.pack(len(body)) + body)
                await process.stdin.drain()
                head = await process.stdout.readexactly(LENGTH.size)
                answer = _answers.decode(await process.stdout.readexactly(min(LENGTH.unpack(head)[0], FRAME_BYTES)))
        except TimeoutError:
            log.warning("template_process_starved", clock_s=CLOCK_FACTOR * job.cpu_s)
            message = "the machine has too little processor time for a chat template now"
            raise ShardlineError("template_busy", message, limit="template", retry_after=1) from None
        except (OSError, EOFError):
            raise await self._verdict(process, job) from None
        except msgspec.MsgspecError:
            log.error("template_process_garbled")
            raise ShardlineError("template_lost", "the process that renders chat templates wrote garbage") from None
        if answer.number != job.number:
            raise ShardlineError("internal", "the template process answered another job")
        return answer

    async def _verdict(self, process: asyncio.subprocess.Process, job: Job) -> ShardlineError:
        """Why the process ended instead of answering."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_GRACE_S):
                await process.wait()
        code = process.returncode
        log.warning("template_process_ended", exit_code=code)
        if code == -signal.SIGPROF:
            return TooSlow(job.cpu_s)
        if code == EXIT_NO_MEMORY:
            return template_error("the messages need too much memory for a chat template")
        if code in _BY_ITS_OWN_DOING:
            return template_error("the chat template ended the process that renders it")
        return ShardlineError("template_lost", "the process that renders chat templates was ended from outside")

    async def _started(self) -> asyncio.subprocess.Process:
        """The process, ready: the time that it takes to start is not the template's."""
        if self._process is not None and self._process.returncode is None:
            return self._process
        await self.end()
        try:
            async with asyncio.timeout(_START_S):
                process = self._process = await asyncio.create_subprocess_exec(
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
                if process.stdout is not None:
                    await process.stdout.readexactly(LENGTH.size)
        except (OSError, EOFError, TimeoutError) as error:
            log.error("template_process_not_started", error=str(error))
            raise ShardlineError("template_lost", "the process that renders chat templates does not start") from None
        return process
