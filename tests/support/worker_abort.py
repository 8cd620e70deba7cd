"""Workers whose llama.cpp aborts at SIGUSR2: by the library's own `ggml_abort`, as a failed GGML_ASSERT does.

`aborting(folder)` makes a folder for PYTHONPATH; workers started with it have the ear.
"""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
SIGNAL = signal.SIGUSR2
WORDS = "GGML_ASSERT(ne00 == ne10) failed"
_SITE = """\
import sys
if "shardline.model.worker" in sys.orig_argv:
    from tests.support.worker_abort import install
    install()
"""


def aborting(folder: Path) -> str:
    """The PYTHONPATH for processes whose workers shall abort at `SIGNAL`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sitecustomize.py").write_text(_SITE)
    return os.pathsep.join([str(folder), str(REPOSITORY)])


def install() -> None:
    signal.signal(SIGNAL, lambda *_: _abort())


def _abort() -> None:
    import llama_cpp

    library = ctypes.CDLL(str(Path(llama_cpp.__file__).parent / "lib" / "libggml-base.so"))
    library.ggml_abort(b"ops.cpp", 1234, b"%s", WORDS.encode())
