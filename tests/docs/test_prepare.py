"""The set-up script: what it skips, and what it says where a step fails. No package is installed here."""

from __future__ import annotations

import importlib.util
import runpy
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def prepare(tmp_path: Path) -> ModuleType:
    """The script as a module, at home in an empty folder."""
    spec = importlib.util.spec_from_file_location("prepare", ROOT / "scripts" / "prepare.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.ROOT = tmp_path
    module.VENV = tmp_path / ".venv"
    module.PYTHON = module.VENV / "bin" / "python"
    module.LOG = module.VENV / "prepare.log"
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    return module


def test_a_stamped_step_is_skipped_until_its_source_changes(prepare: ModuleType) -> None:
    prepare.PYTHON.parent.mkdir(parents=True)
    prepare.PYTHON.symlink_to(sys.executable)
    for name, key, _ in prepare.steps("test"):
        prepare.stamp_path(name).write_text(prepare.digest(key))
    prepare.run = None  # A step that is not skipped would fail.
    prepare.install("test")
    (prepare.ROOT / "pyproject.toml").write_text("[project]\nname = 'other'\n")
    todo = [name for name, key, _ in prepare.steps("test") if not prepare.is_stamped(name, prepare.digest(key))]
    assert todo == ["shardline[llama,torch,bt]", "the tools of the tests"]


def test_torch_comes_before_what_needs_it_and_the_model_without_its_dependencies(
    prepare: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_INDEX", "https://example.invalid/cpu")
    steps = {name: arguments for name, _, arguments in prepare.steps("bench")}
    assert list(steps)[1] == prepare.TORCH
    assert steps[prepare.TORCH] == [prepare.TORCH, "--index-url", "https://example.invalid/cpu"]
    assert steps[f"the small model, {prepare.MODEL}"] == ["--no-deps", prepare.MODEL]
    assert "the tools of the tests" not in steps


def test_the_demo_needs_no_torch(prepare: ModuleType) -> None:
    names = [name for name, _, _ in prepare.steps("demo")]
    assert prepare.TORCH not in names and "shardline[llama]" in names


def test_the_site_and_the_pages_need_neither_engine_nor_model(
    prepare: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [name for name, _, _ in prepare.steps("site")] == ["pip", "the tools of the site"]
    assert [(name, how) for name, _, how in prepare.steps("docs")][1:] == [("shardline", ["--editable", "."])]
    prepare.NEEDED_BYTES = 1 << 60
    monkeypatch.setattr(prepare, "make_venv", lambda title: prepare.PYTHON.parent.mkdir(parents=True))
    prepare.run = lambda title, argv: None
    prepare.install("site")
    assert prepare.is_stamped("the tools of the site", prepare.digest("[project]\n"))


def test_what_to_type_again_is_what_was_typed(
    prepare: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TORCH_INDEX", raising=False)
    monkeypatch.setenv("GOALS", "faults")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(prepare, "make_venv", lambda title: prepare.PYTHON.parent.mkdir(parents=True))
    prepare.NEEDED_BYTES = 0
    prepare.steps = lambda goal: [(prepare.TORCH, prepare.TORCH, [prepare.TORCH])]
    prepare.run = lambda title, argv: None
    prepare.install("test")
    assert "make faults TORCH_INDEX=" in capsys.readouterr().out


class Installer:
    """Stands where pip is: notes what was asked for, and makes the wheel that `pip wheel` would."""

    def __init__(self, prepare: ModuleType, runs: list[str | None]) -> None:
        self.prepare, self.runs = prepare, runs
        self.asked: list[list[str]] = []
        prepare.run = self.run
        prepare.computes = lambda: self.runs.pop(0)

    def run(self, title: str, argv: list[object], **_: str) -> None:
        words = [str(word) for word in argv[5:]]
        self.asked.append(words)
        if words[0] == "wheel":
            folder = Path(words[words.index("--wheel-dir") + 1])
            (folder / "llama_cpp_python-0.3.36-py3-none-any.whl").write_text("built")


def test_llama_is_compiled_once_and_its_wheel_kept(prepare: ModuleType, tmp_path: Path) -> None:
    prepare.WHEELS = tmp_path / "cache" / "wheels"
    first = Installer(prepare, [None])
    prepare.install_llama("title")
    assert [words[0] for words in first.asked] == ["wheel", "install", "install"]
    assert [path.read_text() for path in prepare.WHEELS.iterdir()] == ["built"], "nothing else is left there"
    second = Installer(prepare, [None])
    prepare.install_llama("title")
    assert [words[0] for words in second.asked] == ["install", "install"]


def test_a_wheel_of_another_processor_is_compiled_anew_and_not_taken_from_pips_cache(
    prepare: ModuleType, tmp_path: Path
) -> None:
    prepare.WHEELS = tmp_path
    (tmp_path / "llama_cpp_python-0.3.36-py3-none-any.whl").write_text("of another machine")
    installer = Installer(prepare, ["ended by signal 4", None])
    prepare.install_llama("title")
    built = next(words for words in installer.asked if words[0] == "wheel")
    assert "--no-cache-dir" in built
    assert (tmp_path / "llama_cpp_python-0.3.36-py3-none-any.whl").read_text() == "built"


def test_a_build_that_does_not_compute_is_said(prepare: ModuleType, tmp_path: Path) -> None:
    prepare.WHEELS = tmp_path
    Installer(prepare, ["ended by signal 11"])
    with pytest.raises(prepare.StepFailed, match="does not compute: ended by signal 11"):
        prepare.install_llama("title")


def test_a_ready_made_wheel_comes_from_the_named_index_only(
    prepare: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare.WHEELS = tmp_path
    monkeypatch.setenv("LLAMA_INDEX", "https://example.invalid/llama")
    installer = Installer(prepare, [None])
    prepare.install_llama("title")
    (words,) = installer.asked
    assert words[-4:] == ["--extra-index-url", "https://example.invalid/llama", "--only-binary", "llama-cpp-python"]


@pytest.mark.parametrize(
    ("output", "words"),
    [
        ("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device", "disk is full"),
        ("ERROR: No matching distribution found for torch==2.13.0", "TORCH_INDEX=https://download.pytorch.org/whl/cpu"),
        ("NewConnectionError(...): Failed to establish a new connection: Connection refused", "index was not reached"),
        ("ssl.SSLCertVerificationError: CERTIFICATE_VERIFY_FAILED", "PIP_CERT"),
        ("PermissionError: [Errno 13] Permission denied: '.venv'", "No right to write"),
        ("CMake Error: CMAKE_CXX_COMPILER not set, after EnableLanguage", "apt install g++"),
        ("c++: fatal error: Killed signal terminated program cc1plus", "CMAKE_BUILD_PARALLEL_LEVEL=1"),
        ("something else", "prepare.log"),
    ],
)
def test_a_failed_step_says_what_to_do(prepare: ModuleType, output: str, words: str) -> None:
    assert words in prepare.advice_for(output)


def test_a_failing_command_is_quoted(prepare: ModuleType) -> None:
    prepare.VENV.mkdir()
    code = "print('Collecting x'); print('No space left on device'); raise SystemExit(3)"
    with pytest.raises(prepare.StepFailed) as failed:
        prepare.run("[1/2] step", [sys.executable, "-c", code])
    assert "exit code 3" in str(failed.value) and "No space left" in str(failed.value)
    assert "disk is full" in failed.value.advice
    assert "Collecting x" in prepare.LOG.read_text()


def test_too_little_disk_is_said_before_anything_is_made(prepare: ModuleType) -> None:
    prepare.NEEDED_BYTES = 1 << 60
    with pytest.raises(prepare.StepFailed, match="needs about 3 GB"):
        prepare.install("demo")
    assert not prepare.VENV.exists()


def test_an_old_python_names_a_newer_one_or_what_to_install(
    prepare: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare.OLDEST = (4, 0)
    monkeypatch.setattr(prepare, "newer_python", lambda: None)
    with pytest.raises(prepare.StepFailed, match=r"needs 4\.0 or newer"):
        prepare.check_python()


def test_it_parses_on_pythons_that_are_too_old() -> None:
    """No syntax past 3.6: its message is for exactly those who have an old one."""
    import ast

    ast.parse((ROOT / "scripts" / "prepare.py").read_text(encoding="utf-8"), feature_version=(3, 6))


def test_progress_of_pip_is_told_in_megabytes(prepare: ModuleType) -> None:
    assert prepare.detail_of("Progress 52428800 of 191794682") == "50 of 182 MB"
    assert prepare.detail_of("  Downloading torch-2.13.0.whl (182 MB)") == "Downloading torch-2.13.0.whl (182 MB)"
    assert prepare.detail_of("  [12/345] Building CXX object a.o") == "compiled 12 of 345 files"
    assert prepare.detail_of("Requirement already satisfied: pip") is None


def test_the_makefile_says_that_python_is_missing() -> None:
    done = subprocess.run(
        ["make", "demo", "PYTHON=no-such-python"], cwd=ROOT, capture_output=True, text=True, timeout=10
    )
    assert done.returncode != 0
    assert "no-such-python is not there. What to do: install Python 3.11" in done.stderr


def test_a_taken_port_is_said_before_anything_is_made(prepare: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setattr(sys, "argv", ["prepare.py", "demo", "--port", str(port)])
        monkeypatch.setattr(prepare, "who_listens", lambda port: "a server of smol runs there")
        monkeypatch.setattr(prepare, "install", lambda goal: pytest.fail("it installed"))
        assert prepare.main() == 1
    assert not prepare.VENV.exists()
    prepare.check_port(0)


def test_who_listens_is_told_by_its_models() -> None:
    """In words of `who_listens`, from a server that answers, and from one that is no HTTP server."""
    prepare = runpy.run_path(str(ROOT / "scripts" / "prepare.py"))
    for body, words in ((b'{"data": [{"id": "smol"}]}', "a server of smol"), (b"<html>", "another program")):
        with socket.socket() as listening:
            listening.bind(("127.0.0.1", 0))
            listening.listen()
            thread = threading.Thread(target=answer_once, args=(listening, body))
            thread.start()
            assert words in prepare["who_listens"](listening.getsockname()[1])
            thread.join()


def answer_once(listening: socket.socket, body: bytes) -> None:
    connection, _ = listening.accept()
    with connection:
        connection.recv(65536)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
