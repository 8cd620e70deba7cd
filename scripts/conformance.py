"""Makes docs/reference/conformance.md: what the Gateway does with each field of other people's clients, and with them.

Of three things: the record of every field that the types of `openai` and `anthropic` have, each asked of our readers
(tests/gateway/client_fields.json, written by `python -m tests.support.client_fields`), our own schemas, and what each
client could do against two Nodes (tests/clients/conformance.json, written by `make clients`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from shardline.gateway import openapi, openapi_words
from shardline.gateway.openapi_operations import OPERATIONS

Json = dict[str, Any]
ROOT = Path(__file__).resolve().parent.parent
FIELDS = ROOT / "tests" / "gateway" / "client_fields.json"
CLIENTS = ROOT / "tests" / "clients" / "conformance.json"
HEAD = """
Every field that the types of OpenAI's and Anthropic's clients ({clients}) have, each sent alone to our readers, as the
tests do it: none is ignored, and none is an internal error. What the fields mean is in [the API](../api.md).

* **honoured**: it does what it says, or a value that cannot be meant is refused.
* **no effect**: accepted, because clients send it on their own; no answer is another one for it.
* **neutral only**: null, and what asks for nothing, are accepted; anything else is 400 `unsupported_parameter`.
* **refused**: 400 `unsupported_parameter` that names it, or the part that it stands in.

`a[b]` is an `a` of the type or role `b`. Below a part that is refused nothing is listed: it is refused as a whole.

What is honoured is so on every engine alike, split or not: fields are read by the Gateway, and sampling, masks and
log-probabilities are the tail's, which are one code for all engines. Engines differ in two things: a prompt is
[reused](../api.md#what-is-not-computed-again) only where an engine can go back exactly, and forms need `llguidance` on
the tail's machine.
"""


def page(note: str) -> str:
    """The whole page; `note` says that it is generated."""
    record: Json = json.loads(FIELDS.read_text(encoding="utf-8"))
    clients = ", ".join(f"`{name}` {version}" for name, version in record["clients"].items())
    parts = [f"# Conformance\n\n{note}{HEAD.format(clients=clients)}"]
    parts += [_endpoint(path, fields) for path, fields in record["fields"].items()]
    if CLIENTS.exists():
        parts.append(_clients(json.loads(CLIENTS.read_text(encoding="utf-8"))))
    return "\n".join(parts)


def _endpoint(path: str, fields: dict[str, str]) -> str:
    rows = [(f"`{name}`", what) for name, what in fields.items() if not _is_part(name, what)]
    lines = [f"## POST {path}\n", _table(("field", "what"), rows)]
    refused: dict[str, list[str]] = {}
    for name, what in fields.items():
        if _is_part(name, what):
            place, _, tag = name.rpartition("[")
            refused.setdefault(place, []).append(tag.rstrip("]") or "references")
    if refused:
        lines.append("Refused as a whole, by their type or role:\n")
        lines += [f"* `{place}`: {', '.join(f'`{tag}`' for tag in tags)}" for place, tags in refused.items()]
        lines.append("")
    ours = _ours(path, fields)
    if ours:
        lines.append(f"Beside them, ours and other servers': {', '.join(f'`{name}`' for name in ours)}.\n")
    return "\n".join(lines)


def _is_part(name: str, what: str) -> bool:
    return what == "refused" and name.endswith("]")


def _ours(path: str, fields: dict[str, str]) -> list[str]:
    """Fields of our request that the client's types do not have."""
    (body,) = [operation.body for operation in OPERATIONS if operation.path == path and operation.body is not None]
    theirs = {re.split(r"[.\[]", name)[0] for name in fields} | {"model"}
    properties = openapi.schemas()[openapi.request_name(body)]["properties"]
    return sorted(set(properties) - theirs)


def extensions() -> set[str]:
    """Fields that are described as extensions."""
    return {name for name, said in openapi_words.FIELDS.items() if said.startswith("Extension")}


def _clients(record: Json) -> str:
    rows = [
        (f"`{name}`", said["version"], ", ".join(_check(check, how) for check, how in said["checks"].items()))
        for name, said in record.items()
    ]
    return (
        "## Clients\n\n"
        "What each client could do, as it comes, against two Nodes; [how they are set up](../clients.md).\n\n"
        + _table(("client", "version", "what passed"), rows)
    )


def _check(name: str, how: str) -> str:
    said = name.replace("_", " ")
    return said if how == "passed" else f"**{said}: {how}**"


def _table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"
