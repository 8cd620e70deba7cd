"""llama.cpp over its RPC servers, as a measure: the loop of `shardline.model.llama_unsplit` with their devices.

Started by upstream/measure.py. Servers are registered before the model loads, so that the library shares its layers
out over them as it does for its own programs. One JSON request a line on stdin, one answer a line on stdout.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
from pathlib import Path

_LIBRARIES = ("libggml-base.so", "libggml-cpu.so", "libggml-rpc.so", "libggml.so")


def register(folder: Path, servers: list[str]) -> list[ctypes.CDLL]:
    """Make the devices of `servers` known to the ggml of `folder`."""
    _base, _cpu, rpc, ggml = loaded = [ctypes.CDLL(str(folder / name)) for name in _LIBRARIES]
    rpc.ggml_backend_rpc_add_server.restype = ctypes.c_void_p
    rpc.ggml_backend_rpc_add_server.argtypes = [ctypes.c_char_p]
    ggml.ggml_backend_register.argtypes = [ctypes.c_void_p]
    for server in servers:
        found = rpc.ggml_backend_rpc_add_server(server.encode())
        if not found:
            raise SystemExit(f"no RPC server at {server}")
        ggml.ggml_backend_register(found)
    return loaded


def main() -> None:
    parser = argparse.ArgumentParser(prog="upstream.rpc_client", description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--library", type=Path, required=True)
    parser.add_argument("--servers", required=True)
    parser.add_argument("--sequences", type=int, required=True)
    parser.add_argument("--kv-tokens", type=int, required=True)
    given = parser.parse_args()
    register(given.library.parent, given.servers.split(","))

    from shardline.model import llama_unsplit
    from shardline.model.llama_window_library import window_library

    library = window_library(str(given.library))
    llama_unsplit.library = lambda: library
    model = llama_unsplit.Unsplit(given.model, threads=1, sequences=given.sequences, kv_tokens=given.kv_tokens)
    devices = [device.name for device in library.devices()]
    print(json.dumps({**model.facts(), "devices": devices}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(model.generate(request["prompts"], request["tokens"])._asdict()), flush=True)


if __name__ == "__main__":
    main()
