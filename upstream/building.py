"""Building the patched llama.cpp: the library, the RPC server, the C++ test. CPU only, as the pinned wheel is built.

Owns the cmake flags. Unchanged parts are not built again. Shown by `make upstream`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from upstream.source import Source

JOBS = 2
TARGETS = ("llama", "ggml-rpc-server")
# What llama-cpp-python's own CMakeLists.txt sets, and RPC; everything else is llama.cpp's default.
FLAGS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DBUILD_SHARED_LIBS=ON",
    "-DLLAMA_CURL=OFF",
    "-DGGML_RPC=ON",
    "-DGGML_CCACHE=OFF",
    "-DLLAMA_BUILD_COMMON=ON",
    "-DLLAMA_BUILD_TOOLS=ON",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_SERVER=OFF",
    "-DLLAMA_BUILD_APP=OFF",
)
TEST = Path(__file__).resolve().parent / "tests" / "test-layer-window.cpp"


def build(source: Source) -> None:
    """Everything of `TARGETS`. SystemExit with what to do where a tool is missing."""
    for tool, what in (("cmake", "cmake"), (_compiler(), "g++")):
        if shutil.which(tool) is None:
            raise SystemExit(
                f"make upstream: {tool} is not there. What to do: install it (Debian, Ubuntu: apt install {what})"
            )
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    log = source.folder / "build.log"
    with log.open("w", encoding="utf-8") as out:
        configure = ["cmake", *generator, "-S", str(source.tree), "-B", str(source.build), *FLAGS]
        # A source tree that lies in somebody's repository would take that one's commit for its own.
        environment = {**os.environ, "GIT_DIR": os.devnull}
        for command in (configure, ["cmake", "--build", str(source.build), f"-j{JOBS}", "--target", *TARGETS]):
            if subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, env=environment).returncode:
                words = log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:]
                raise SystemExit(
                    "\n".join([f"make upstream: {' '.join(command[:2])} failed:", *words, f"All of it: {log}"])
                )


def build_test(source: Source) -> Path:
    """The C++ test, against the library."""
    program = source.build / TEST.stem
    include = [f"-I{source.tree / 'include'}", f"-I{source.tree / 'ggml' / 'include'}"]
    link = [f"-L{source.bin}", "-lllama", "-lggml", "-lggml-base", f"-Wl,-rpath,{source.bin}"]
    command = [_compiler(), "-O1", "-std=c++17", "-Wall", *include, str(TEST), "-o", str(program), *link]
    subprocess.run(command, check=True)
    return program


def run_test(source: Source, models: Path) -> str:
    """The C++ test on all models of a folder; its output. SystemExit where a number differs."""
    program = build_test(source)
    command = [str(program), *(str(path) for path in sorted(models.glob("*.gguf")))]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "GGML_NO_BACKTRACE": "1"})
    sys.stdout.write(done.stdout)
    if done.returncode:
        raise SystemExit(f"make upstream: the C++ test failed ({done.returncode}) {done.stderr[-500:]}")
    return done.stdout


def _compiler() -> str:
    return os.environ.get("CXX") or "c++"
