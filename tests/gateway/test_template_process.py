"""The process that renders templates: each way in which it can fail to answer, and whose fault that is."""

from __future__ import annotations

import asyncio
import io
import os
import signal
from collections.abc import AsyncIterator

import msgspec
import pytest

from shardline.errors import ShardlineError
from shardline.gateway import template_worker
from shardline.gateway.template_process import TemplateProcess
from shardline.gateway.template_worker import EXIT_NO_MEMORY, LENGTH, Answer, Job, Refused, Rendered, serve

ENDLESS = "{% for i in range(10**5) %}{% for j in range(10**5) %}{% if i < 0 %}x{% endif %}{% endfor %}{% endfor %}"
NATIVE = "{{ 9 ** (9 ** 9) }}"


def job(template: str, cpu_s: float = 20.0, number: int = 1) -> Job:
    return Job(number, template, {}, 1000, cpu_s)


@pytest.fixture
async def process() -> AsyncIterator[TemplateProcess]:
    made = TemplateProcess()
    assert await made.answer(job("ready")) == Rendered(1, "ready")
    yield made
    await made.end()
    assert made.pid is None


async def error_of(process: TemplateProcess, asked: Job, *signals: int) -> ShardlineError:
    """What comes of `asked` while the process gets these signals."""
    pid = process.pid
    assert pid is not None
    answering = asyncio.create_task(process.answer(asked))
    await asyncio.sleep(0.05)
    for number in signals:
        os.kill(pid, number)
    with pytest.raises(ShardlineError) as caught:
        await answering
    assert process.pid is None, "nothing is left of a process that did not answer"
    assert await process.answer(job("next", number=2)) == Rendered(2, "next")
    return caught.value


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM])
async def test_ended_from_outside(process: TemplateProcess, sent: int) -> None:
    error = await error_of(process, job(ENDLESS), sent)
    assert (error.code, error.fault.status, error.fault.retryable) == ("template_lost", 500, True)


async def test_ended_while_it_was_idle(process: TemplateProcess) -> None:
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    try:
        assert await process.answer(job("x")) == Rendered(1, "x")
    except ShardlineError as error:
        assert error.code == "template_lost"
    assert await process.answer(job("y")) == Rendered(1, "y")


@pytest.mark.parametrize("template", [ENDLESS, NATIVE])
async def test_out_of_processor_time(process: TemplateProcess, template: str) -> None:
    error = await error_of(process, job(template, cpu_s=0.2))
    assert (error.code, error.fault.status) == ("template_error", 400)
    assert error.message.endswith("longer than 0.2 s")


async def test_kept_from_computing(process: TemplateProcess) -> None:
    """Stopped, as by a machine that is busy with other things: not the template's fault."""
    error = await error_of(process, job(ENDLESS, cpu_s=0.3), signal.SIGSTOP)
    assert (error.code, error.fault.status, error.fault.retryable) == ("template_busy", 503, True)
    assert error.details["retry_after"] >= 1


async def test_crashed_by_what_it_renders(process: TemplateProcess) -> None:
    error = await error_of(process, job(ENDLESS), signal.SIGSEGV)
    assert (error.code, error.fault.status) == ("template_error", 400)


async def test_a_job_that_does_not_fit_into_memory(process: TemplateProcess) -> None:
    small = msgspec.msgpack.encode([[]] * 14_000_000)
    assert len(small) < 20 << 20
    error = await error_of(process, Job(1, "x", {"messages": msgspec.Raw(small)}, 1000, 20.0))
    assert (error.code, error.fault.status) == ("template_error", 400)
    assert "memory" in error.message


def test_the_exit_code_for_a_job_without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise MemoryError

    monkeypatch.setattr(template_worker, "serve", full)
    monkeypatch.setattr(template_worker, "confine", lambda: None)
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(io.BytesIO()))
    before = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(SystemExit) as caught:
            template_worker.main()
    finally:
        signal.signal(signal.SIGINT, before)
    assert caught.value.code == EXIT_NO_MEMORY


def test_an_answer_that_is_too_long_to_be_sent_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_worker, "FRAME_BYTES", 100)
    body = msgspec.msgpack.encode(job("{{ 'x' * 200 }}", number=7))
    sink = io.BytesIO()
    serve(io.BytesIO(LENGTH.pack(len(body)) + body), sink, lambda asked: Rendered(asked.number, "x" * 200))
    answer = msgspec.msgpack.decode(sink.getvalue()[2 * LENGTH.size :], type=Answer)
    assert answer == Refused(7, "failed", "it writes more than 100 bytes")


async def test_whoever_cancels_leaves_no_process_within_a_job(process: TemplateProcess) -> None:
    pid = process.pid
    answering = asyncio.create_task(process.answer(job(ENDLESS)))
    await asyncio.sleep(0.02)
    answering.cancel()
    await asyncio.wait({answering})
    assert pid is not None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert await process.answer(job("next")) == Rendered(1, "next")
