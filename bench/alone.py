"""`transformers.generate` alone, in a process of its own: the measure that a route is held against.

Reads one JSON request a line from stdin, answers one a line: seconds to the first token, decode tokens per second.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from shardline.model.worker_process import worker_environment


class Alone:
    """The process, from the side that asks."""

    def __init__(self, model: Path, threads: int, *, sleeping: bool) -> None:
        """`sleeping`: idle OpenMP threads sleep at once, as those of an engine worker do; else as torch has them."""
        environment = worker_environment(os.environ, threads) if sleeping else dict(os.environ)
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "bench.alone", str(model), str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
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


def loaded(path: Path) -> tuple[Any, Callable[[str], list[int]]]:
    """The unsplit transformers model in float32, and its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if path.is_dir():
        tokenizer = AutoTokenizer.from_pretrained(path)
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval(), tokenizer.encode
    # transformers' own loading of GGUF takes half a minute and one more package; class and weights are the same.
    from shardline.formats.gguf_files import read_model
    from shardline.model.tokenizer import text_of_gguf
    from shardline.model.torch_build import build, fill_buffers
    from shardline.model.torch_gguf import config_of, load_gguf
    from shardline.model.torch_weights import ShardWeights

    source = read_model(path)
    config = config_of(source)
    skeleton = build(config, torch.float32)
    weights = ShardWeights(skeleton, 0, skeleton.n_layers, None)
    fill_buffers(skeleton, 0, skeleton.n_layers)
    load_gguf(source, weights)
    weights.finish()
    text = text_of_gguf(source.header, config.vocab_size, config.max_position_embeddings)
    if text is None:
        raise SystemExit(f"{path} has no tokenizer")
    return skeleton.model.eval(), partial(text.tokenize, add_special=False, parse_special=True)


def main() -> None:
    import torch

    torch.set_num_threads(int(sys.argv[2]))
    model, tokenize = loaded(Path(sys.argv[1]))
    print("{}", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        ids = torch.tensor([tokenize(request["prompt"])])
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
