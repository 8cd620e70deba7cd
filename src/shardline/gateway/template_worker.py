"""The process in which chat templates run: renders what it is sent, and has nothing that a template could want.

Owns the Jinja environment (that of transformers' chat templates), the sandbox, and the bounds on memory, files,
output and processor time; the clock is watched by who started it (template_process.py). Speaks MessagePack with a
4-byte length in front, over stdin and stdout: a `Job` in, a `Rendered` or `Refused` out. Run as `python -I -m
shardline.gateway.template_worker`.
Shown by tests/gateway/test_template.py.
"""

from __future__ import annotations

import json
import signal
import struct
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from typing import Any, BinaryIO, Literal

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils
import msgspec

LENGTH = struct.Struct("<I")
FRAME_BYTES = 160 << 20
MEMORY_BYTES = 768 << 20
"""Address space of the process; a template that wants more gets a MemoryError."""
OUTPUT_SPARE = 1 << 20
"""Output may be four times as long as the input, and this much more."""
EXIT_NO_MEMORY = 3
"""Exit code where a job does not even fit into memory."""
COMPILED = 16
MESSAGE_CHARACTERS = 1000


class Job(msgspec.Struct, frozen=True, array_like=True):
    number: int
    """Comes back with the answer."""
    template: str
    variables: dict[str, Any]
    output_limit: int
    """Characters."""
    cpu_s: float
    """Processor time that rendering may take; past it the process ends by SIGPROF."""


class Rendered(msgspec.Struct, frozen=True, array_like=True, tag="rendered"):
    number: int
    text: str


class Refused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """`raised`: by the template itself; `syntax`: it is not a template; `failed`: all else."""

    number: int
    reason: Literal["raised", "syntax", "failed"]
    message: str


Answer = Rendered | Refused


class TemplateRaised(jinja2.TemplateError):
    """`raise_exception` of the template: it refuses the messages."""


class _TooLong(Exception):
    pass


class _Generation(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks an assistant's text for training; here it is its content."""

    tags = {"generation"}  # noqa: RUF012  (the class attribute that Jinja reads)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


class _Namespace(jinja2.utils.Namespace):
    """A namespace whose names are names: no template stores an attribute that Python reads."""

    def __init__(*args: Any, **names: Any) -> None:
        self, *given = args
        values = dict(*given, **names)
        for name in values:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if not isinstance(name, str) or name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot hold the name {str(name)[:40]!r}")


def _raise_exception(message: Any) -> None:
    raise TemplateRaised(str(message))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: Jinja's own filter escapes for HTML, and models were not trained on that."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _new_dict(*args: Any, **names: Any) -> dict[Any, Any]:
    return dict(*args, **names)


def environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """As transformers renders chat templates, less what no chat template needs."""
    made = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    made.filters["tojson"] = _tojson
    made.globals.pop("lipsum")
    made.globals.update(
        raise_exception=_raise_exception, strftime_now=_strftime_now, dict=_new_dict, namespace=_Namespace
    )
    return made


class Renderer:
    """Renders jobs, and keeps the last few templates compiled."""

    def __init__(self) -> None:
        self._environment = environment()
        self._compiled: OrderedDict[str, jinja2.Template] = OrderedDict()

    def render(self, job: Job) -> Answer:
        """Never raises but for what ends the process."""
        template: jinja2.Template | None = None
        try:
            template = self._compile(job.template)
            return Rendered(job.number, _text(template, job))
        except TemplateRaised as error:
            return Refused(job.number, "raised", _cut(str(error.message)))
        except jinja2.TemplateSyntaxError as error:
            # Also of what is compiled at run time, which is no fault of the messages.
            return Refused(job.number, "syntax", _cut(f"line {error.lineno}: {error.message}"))
        except (jinja2.UndefinedError, jinja2.exceptions.SecurityError) as error:
            return Refused(job.number, "failed", _cut(str(error.message)))
        except _TooLong:
            return Refused(job.number, "failed", f"it writes more than {job.output_limit} characters")
        except MemoryError:
            return Refused(job.number, "failed", "it needs too much memory")
        except RecursionError:
            return Refused(job.number, "failed", "it is nested too deeply")
        except Exception as error:
            # A template can make any operator or filter fail; what Python says of that is not for a client.
            return Refused(job.number, "failed", f"line {_line(error)} fails on these messages")

    def _compile(self, source: str) -> jinja2.Template:
        template = self._compiled.get(source)
        if template is None:
            template = self._compiled[source] = self._environment.from_string(source)
            if len(self._compiled) > COMPILED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(source)
        return template


def _text(template: jinja2.Template, job: Job) -> str:
    pieces = []
    left = job.output_limit
    for piece in template.generate(job.variables):
        left -= len(piece)
        if left < 0:
            raise _TooLong
        pieces.append(piece)
    return "".join(pieces)


def _line(error: BaseException) -> int:
    """The template's line where it failed; Jinja rewrites tracebacks to its lines."""
    line, trace = 0, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<template>":
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


def _cut(message: str) -> str:
    return message if len(message) <= MESSAGE_CHARACTERS else message[:MESSAGE_CHARACTERS] + "…"


def confine() -> None:
    """Bound what the process can take, where the platform can: memory, files (none may grow), core dumps."""
    try:
        import resource
    except ImportError:
        return
    for limit, value in (
        (resource.RLIMIT_AS, MEMORY_BYTES),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, 16),
    ):
        _, most = resource.getrlimit(limit)
        wanted = value if most == resource.RLIM_INFINITY else min(value, most)
        resource.setrlimit(limit, (wanted, wanted))


def serve(source: BinaryIO, sink: BinaryIO, render: Callable[[Job], Answer]) -> None:
    """Say that the process is ready (an empty frame), then answer jobs until the other side closes.

    Raises MemoryError for a job that does not fit into memory.
    """
    sink.write(LENGTH.pack(0))
    sink.flush()
    decoder = msgspec.msgpack.Decoder(Job)
    while True:
        head = source.read(LENGTH.size)
        if len(head) < LENGTH.size:
            return
        job = decoder.decode(source.read(LENGTH.unpack(head)[0]))
        with processor_time(job.cpu_s):
            answer = encoded(render(job))
        sink.write(LENGTH.pack(len(answer)))
        sink.write(answer)
        sink.flush()


def encoded(answer: Answer) -> bytes:
    """`answer` as it is sent; a text that cannot be sent is refused instead."""
    reason = "it needs too much memory"
    with suppress(MemoryError):
        frame = msgspec.msgpack.encode(answer)
        if len(frame) <= FRAME_BYTES:
            return frame
        reason = f"it writes more than {FRAME_BYTES} bytes"
    return msgspec.msgpack.encode(Refused(answer.number, "failed", reason))


@contextmanager
def processor_time(limit_s: float) -> Iterator[None]:
    """SIGPROF ends the process, also within native code, when it has computed for longer. The time that others take
    from it on a busy machine does not count."""
    signal.setitimer(signal.ITIMER_PROF, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)


def main() -> None:
    # Ctrl-C goes to the whole process group; the Gateway ends this process by closing its stdin.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    confine()
    # A template that found its way to print must not write into the protocol.
    sink, sys.stdout = sys.stdout.buffer, sys.stderr
    try:
        serve(sys.stdin.buffer, sink, Renderer().render)
    except MemoryError:
        sys.exit(EXIT_NO_MEMORY)


if __name__ == "__main__":
    main()
