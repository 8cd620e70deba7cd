"""The library of llama.cpp is taken only as it was verified, and its log is kept."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("llama_cpp")

from shardline.errors import ShardlineError
from shardline.model import llama_library
from shardline.model.llama_library import _CONTEXT_DEFAULTS, Log, check_layout, check_version, library

pytestmark = pytest.mark.llama

WARNING, ERROR, INFO, CONTINUED = 3, 4, 2, 5


def test_the_verified_version_loads_and_says_what_it_is():
    loaded = library()
    assert loaded is library()
    assert loaded.version in llama_library.VERSIONS
    assert loaded.commit == llama_library.VERSIONS[loaded.version]
    assert loaded.commit[:7] in loaded.build and loaded.version in loaded.build
    devices = loaded.devices()
    assert [d for d in devices if not d.accelerator], "the processor is a device"


def test_another_version_is_refused_and_the_advice_names_the_right_one():
    with pytest.raises(ShardlineError) as caught:
        check_version("0.3.35")
    assert caught.value.code == "engine_unavailable"
    assert "0.3.35" in caught.value.message and "llama-cpp-python==0.3.36" in caught.value.advice


def test_a_library_of_another_commit_is_refused():
    (verified,) = llama_library.VERSIONS.values()
    for built in (verified, verified[:7], f"{verified[:7]}-dirty", "unknown", ""):
        llama_library.check_commit(built, verified)
    with pytest.raises(ShardlineError, match="deadbee") as caught:
        llama_library.check_commit("deadbee-dirty", verified)
    assert caught.value.code == "engine_unavailable"


def test_a_missing_package_is_engine_unavailable():
    """In a process of its own, in which the package cannot be found."""
    code = """
import sys
sys.modules["llama_cpp"] = None
from shardline.errors import ShardlineError
from shardline.model import backends
from shardline.model.backend import ShardSpec
try:
    backends.load("llama", ShardSpec("nothing.gguf", 0, 1), lambda done, total: None)
except ShardlineError as error:
    print(error.code, "|", error.message, "|", error.advice)
from shardline.model.llama_library import library
try:
    library()
except ShardlineError as error:
    print(error.code, "|", error.message, "|", error.advice)
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    last = said.stdout.splitlines()[-1]
    assert last.startswith("engine_unavailable | ") and "not installed" in last and "shardline[llama]" in last


def test_a_library_that_is_refused_was_given_no_function_to_call():
    """It stays loaded, and shares its parts with the one that is taken."""
    structs = library().structs
    libraries = llama_library.open_libraries(Path(str(structs._lib._name)))
    get = llama_library.declare(libraries, "llama_log_get", (None, (ctypes.c_void_p, ctypes.c_void_p)))
    before, after, user = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    get(ctypes.addressof(before), ctypes.addressof(user))
    with pytest.raises(ShardlineError, match="not the layout expected"):
        llama_library.checked(libraries, structs, library().version, model_defaults={"split_mode": 7})
    get(ctypes.addressof(after), ctypes.addressof(user))
    assert before.value == after.value is not None


def test_a_struct_that_reads_otherwise_is_refused():
    structs = library().structs
    filled = SimpleNamespace(params=structs.llama_context_default_params())
    check_layout(filled, _CONTEXT_DEFAULTS)
    # A field more in front of the last ones, as in a later version: everything behind it reads its neighbour.
    size, at = ctypes.sizeof(filled.params), structs.llama_context_params.abort_callback.offset
    raw = bytes(filled.params)
    moved = structs.llama_context_params.from_buffer_copy((raw[:at] + bytes(8) + raw[at:])[:size])
    with pytest.raises(ShardlineError, match="not the layout expected") as caught:
        check_layout(SimpleNamespace(params=moved), _CONTEXT_DEFAULTS)
    assert caught.value.code == "engine_unavailable"
    assert "llama_context_params." in caught.value.message


def test_a_function_that_is_not_there_is_named():
    with pytest.raises(ShardlineError, match="no function llama_of_tomorrow") as caught:
        llama_library.declare([ctypes.CDLL(None)], "llama_of_tomorrow", (None, ()))
    assert caught.value.code == "engine_unavailable"


def test_type_traits_are_those_of_the_format():
    traits = library().type_traits(3)
    assert (traits.type_name, traits.blck_size, traits.type_size, traits.is_quantized) == (b"q4_1", 32, 20, True)


def test_the_log_keeps_lines_whole_and_shows_what_matters():
    shown: list[str] = []
    log = Log(shown.append)
    log.callback(INFO, b"loading\n", None)
    log.callback(WARNING, b"half a", None)
    log.callback(CONTINUED, b" line\nand another\n\n", None)
    log.callback(ERROR, b"caf\xc3\n", None)
    assert shown == [
        "llama.cpp warning: half a line\n",
        "llama.cpp warning: and another\n",
        "llama.cpp error: caf\N{REPLACEMENT CHARACTER}\n",
    ]
    assert log.last_words(2) == "and another | caf\N{REPLACEMENT CHARACTER}"
    log.clear()
    assert log.last_words() == ""


def test_warnings_that_are_no_news_are_kept_and_not_shown():
    shown: list[str] = []
    log = Log(shown.append)
    said = (
        b"load: adding 32 dummy tokens",
        b"llama_context: n_ctx_seq (16384) > n_ctx_train (8192) -- possible training context overflow",
        b"llama_context: n_ctx_seq (256) < n_ctx_train (8192) -- the full capacity will not be utilized",
    )
    for line in said:
        log.callback(WARNING, line + b"\n", None)
    assert shown == [f"llama.cpp warning: {said[2].decode()}\n"]
    assert "dummy tokens" in log.last_words()


def test_the_log_is_bounded():
    log = Log(lambda line: None)
    for i in range(1000):
        log.callback(ERROR, b"%d\n" % i, None)
    assert log.last_words(3) == "997 | 998 | 999"
    assert len(log.last_words(1000).split(" | ")) < 100


def test_an_abort_of_the_library_ends_its_process_and_says_why():
    """A batch over the context's limit is a GGML_ASSERT. Without GGML_NO_BACKTRACE it would fork a debugger."""
    code = """
from tests.support.llama_plain import Plain
from tests.support.llama_route import SMOLLM2
Plain(SMOLLM2, rows=8, context=256).run([(0, 0, list(range(20)), True)])
"""
    said = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        env={"GGML_NO_BACKTRACE": "1", "PYTHONPATH": ":".join(p for p in sys.path if p), "PATH": ""},
    )
    assert said.returncode == -6
    assert "GGML_ASSERT" in said.stderr and "n_batch" in said.stderr
