"""`transformers.generate` alone, in a process of its own: the measure that a route is held against.

Reads one JSON request a line from stdin, answers one a line: seconds to the first token, decode tokens per second.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


class Alone:
    """The process, from the side that asks."""

    def __init__(self, model: Path, threads: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "bench.alone", str(model), str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._answer()

    def generate(self, prompt: str, tokens: int) -> dict[str, float]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompt": prompt, "tokens": tokens}) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, float]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("transformers alone did not start: run `python -m bench.alone MODEL THREADS` to see why")
        found: dict[str, float] = json.loads(line)
        return found

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()


def main() -> None:
    model_path, threads = Path(sys.argv[1]), int(sys.argv[2])
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(threads)
    folder, name = (str(model_path), None) if model_path.is_dir() else (str(model_path.parent), model_path.name)
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32).eval()
    print("{}", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        ids = tokenizer(request["prompt"], return_tensors="pt").input_ids
        clock = _Clock()
        with torch.inference_mode():
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=request["tokens"],
                min_new_tokens=request["tokens"],
                do_sample=False,
                streamer=clock,
            )
        times = clock.times
        found = {
            "first_s": times[1] - clock.started,
            "tokens_per_s": (len(times) - 2) / (times[-1] - times[1]),
            "prompt_tokens": float(ids.shape[1]),
        }
        print(json.dumps(found), flush=True)


class _Clock:
    """A streamer that keeps the time of each token; `generate` hands the prompt first."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.times: list[float] = []

    def put(self, value: Any) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


if __name__ == "__main__":
    main()
