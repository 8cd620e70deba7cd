"""`llm`, from the command line: models in extra-openai-models.yaml."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from reporting import AS_JSON, GREETING, MODEL, RESULT, URL, WEATHER, run

CHAT = {"model_id": "shards", "model_name": MODEL, "api_base": f"{URL}/v1", "api_key_name": "shards"}
MODELS = [
    {**CHAT, "supports_tools": True, "supports_schema": True},
    {**CHAT, "model_id": "shards-whole", "can_stream": False},
    {**CHAT, "model_id": "shards-text", "completion": True},
    {**CHAT, "model_id": "shards-responses", "responses": True, "supports_tools": True},
]
WEATHER_FUNCTION = "def get_weather(city: str) -> str:\n    'Weather of a city'\n    return f'21 in {city}'\n"


def llm(*argv: str) -> str:
    done = subprocess.run(["llm", *argv], capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def prompt() -> None:
    assert llm("-m", "shards", "Hi") == GREETING
    assert llm("-m", "shards", "-s", "Be kind.", "-o", "temperature", "0", "-o", "max_tokens", "4", "Hi")


def no_stream() -> None:
    assert llm("-m", "shards", "--no-stream", "Hi") == GREETING
    assert llm("-m", "shards-whole", "Hi") == GREETING


def conversation() -> None:
    """The second turn brings the first; usage was kept."""
    assert llm("-m", "shards", "Hi") == GREETING
    assert llm("-c", "And again?") == GREETING
    (last,) = json.loads(llm("logs", "-n", "1", "--json"))
    assert last["output_tokens"] > 0 and last["input_tokens"] > last["output_tokens"], last


def tools() -> None:
    assert llm("-m", "shards", "--functions", WEATHER_FUNCTION, WEATHER).endswith(RESULT)


def schema() -> None:
    assert json.loads(llm("-m", "shards", "--schema", "city, degrees int", AS_JSON)) == {"city": "Oslo", "degrees": 21}


def completions() -> None:
    assert llm("-m", "shards-text", "Hi") == GREETING


def responses() -> None:
    assert llm("-m", "shards-responses", "Hi") == GREETING
    assert llm("-m", "shards-responses", "--functions", WEATHER_FUNCTION, WEATHER).endswith(RESULT)


if __name__ == "__main__":
    folder = Path(os.environ["HOME"]) / "llm"
    folder.mkdir()
    os.environ["LLM_USER_PATH"] = str(folder)
    # JSON is YAML, too.
    (folder / "extra-openai-models.yaml").write_text(json.dumps(MODELS))
    llm("keys", "set", "shards", "--value", "none")
    run(prompt, no_stream, conversation, tools, schema, completions, responses)
