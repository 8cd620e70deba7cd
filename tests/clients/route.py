"""The route that clients are tried on: a cluster of real processes, two Nodes, and what its scripted model says.

Owns the script: which words in a prompt bring which answer. Asks nothing. Used by all tests of this folder.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anyio.from_thread import BlockingPortal, start_blocking_portal

from tests.support.cluster import Cluster, scripted_cluster

GREETING = "Grüße 😀 from two Nodes."
RESULT = "It is 21 degrees in Oslo."
"""Said once the result of a tool is in the prompt."""
CALL = {"name": "get_weather", "arguments": {"city": "Oslo"}}
"""Called where the prompt asks for the weather, and tools are there."""
CITY = {"city": "Oslo", "degrees": 21}
"""Said where the prompt asks for JSON."""
TITLE = {"title": "🌍 Greetings"}
"""Said to what chat pages ask for beside the chat."""
EDITED = 'print("hello, shards")\n'
"""What the file greeting.py is to become."""

TEMPLATE = (
    "{% if tools %}<|system|>{{ tools | tojson }}<tool_call></tool_call><|end|>{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<call {{ c.function.name }} {{ c.function.arguments | tojson }}>{% endfor %}"
    "<|end|>{% endfor %}<|assistant|>"
)


def pieces(text: str, size: int = 3) -> list[str]:
    """Tokens of `size` bytes: characters and marks lie over several of them."""
    data = text.encode()
    cut = [data[at : at + size] for at in range(0, len(data), size)]
    return ["b64:" + base64.b64encode(piece).decode() for piece in cut]


def rule(contains: str, answer: str) -> dict[str, Any]:
    return {"contains": contains, "pieces": pieces(answer)}


SCRIPT: dict[str, Any] = {
    "model": "tiny-chat",
    "answer": pieces(GREETING),
    "answers": [
        rule("greeting.py", f"greeting.py\n```python\n{EDITED}```\n"),
        rule("<|tool|>", RESULT),
        rule("the weather", f"<tool_call>\n{json.dumps(CALL)}\n</tool_call>"),
        rule("as JSON", json.dumps(CITY)),
        rule("### Task", json.dumps(TITLE, ensure_ascii=False)),
    ],
    "chat_template": TEMPLATE,
    "context_length": 32768,
}


@dataclass(frozen=True)
class Route:
    """A running cluster, as a client sees it. It runs in a thread of its own: clients may block."""

    url: str
    """Of the Gateway, without `/v1`."""
    model: str
    _cluster: Cluster
    _portal: BlockingPortal

    @contextmanager
    def guarded(self, key: str) -> Iterator[str]:
        """One more Gateway, which asks for `key`; its address."""
        keys = self._cluster.folder / "keys.txt"
        keys.write_text(key + "\n")
        keys.chmod(0o600)
        gateway = self._portal.call(self._cluster.start_gateway, "--api-keys", str(keys))
        yield gateway.url
        assert self._portal.call(gateway.end) == 0


@contextmanager
def client_route(folder: Path) -> Iterator[Route]:
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(scripted_cluster(folder, layers=("0:3", "3:6"), script=SCRIPT)) as cluster,
    ):
        yield Route(cluster.gateway.url, cluster.model, cluster, portal)
