"""The commands that look: `nodes`, `sessions`, `routes explain`, `config show`; for people, or `--json`.

Owns the columns. It computes nothing: what is shown is what the Tracker or the Gateway answered.
Shown by tests/cli/test_listings.py.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import click

from shardline.cli.invocation import Invocation, gateway_of, pass_invocation, tracker_of
from shardline.errors import ShardlineError

if TYPE_CHECKING:
    from shardline.cli.client import Endpoint

GONE_S = 300.0
"""Nodes that were heard of last so long ago are gone, and listed on demand."""
ALL = "all"
"""Layers of a composite Node: nobody knows how many there are."""
VECTOR = "vector"
"""Instead of tokens, where a prompt becomes a vector."""
_SESSION = re.compile("rs-[0-9a-f]{24}")
wide_option = click.option("-w", "--wide", is_flag=True, help="More columns than fit into 80 characters.")
as_json_option = click.option("--json", "as_json", is_flag=True, help="The whole answer, as JSON.")


def columns(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Left-aligned columns, two spaces between; nothing is cut, so that it can be searched and piped."""
    table = [list(header), *map(list, rows)]
    widths = [max(len(row[i]) for row in table) for i in range(len(header))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table
    )


def size(count: int | None) -> str:
    """Bytes as a person reads them."""
    if count is None:
        return "–"
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def _show(as_json: bool, answer: Any, text: str) -> None:
    click.echo(json.dumps(answer, indent=2, ensure_ascii=False) if as_json else text)


@click.command()
@click.option("--tracker", "tracker_url", metavar="URL", help="The Tracker [default: the one of this machine].")
@click.option("--all", "gone_too", is_flag=True, help="Also those that have been gone for more than five minutes.")
@as_json_option
@wide_option
@pass_invocation
def nodes(invocation: Invocation, tracker_url: str | None, gone_too: bool, as_json: bool, wide: bool) -> None:
    """List the Nodes, their layers and state.

    In a cluster with keys also its Gateways, by the ids that `expel` takes.
    """
    tracker = tracker_of(invocation.configuration(tracker=tracker_url))
    answer = tracker.get("/v1/nodes")
    if not gone_too:
        answer["nodes"] = [node for node in answer["nodes"] if not _is_long_gone(node)]
    texts = (
        nodes_text(answer["nodes"], wide=wide, tracker=tracker.url),
        gateways_text(answer.get("gateways") or []),
    )
    _show(as_json, answer, "\n\n".join(filter(None, texts)))


def _is_gone(node: dict[str, Any]) -> bool:
    return node.get("state") in ("left", "expired")


def _is_long_gone(node: dict[str, Any]) -> bool:
    return _is_gone(node) and float(node.get("last_seen_s") or 0) > GONE_S


def nodes_text(listed: Sequence[dict[str, Any]], *, wide: bool = False, tracker: str = "") -> str:
    """One line a Shard; a Node without one still has a line. `wide`: every column, in one table. `tracker`: who was
    asked."""
    if not listed:
        return f"No Nodes. {start_of_a_node(tracker)}"
    return _all_of_nodes(listed) if wide else _most_of_nodes(listed)


def gateways_text(listed: Sequence[dict[str, Any]]) -> str:
    """Who asks the Tracker for routes, by the id that `expel` takes; "" where it knows of none."""
    if not listed:
        return ""
    rows = [
        (
            gateway["id"],
            {"calls": "ready"}.get(gateway["state"], gateway["state"]),
            gateway["address"] or "–",
            "–" if gateway["last_seen_s"] is None else f"{gateway['last_seen_s']:.1f} s",
        )
        for gateway in listed
    ]
    return f"Gateways\n{columns(('GATEWAY', 'STATE', 'CALLS FROM', 'SEEN'), rows)}"


def start_of_a_node(tracker: str) -> str:
    """How a Node gets into the cluster of the Tracker at this URL."""
    if tracker.startswith("https:"):
        return "Each joins by a line of its own, which `shardline invite` prints on the machine of the Tracker."
    return "Start one: shardline node --model PATH"


def _most_of_nodes(listed: Sequence[dict[str, Any]]) -> str:
    """What fits into 80 columns: a table for each model and engine class, and below it why a Shard is not ready."""
    tables: dict[str, list[tuple[str, ...]]] = {}
    reasons = []
    for node in sorted(listed, key=_first_layer):
        kv = node.get("kv") or {}
        for shard in node.get("shards") or [{}]:
            state, reason = state_of(node, shard)
            reasons += [f"{node['id']} is {state}: {reason}"] if reason else []
            tables.setdefault(_title(node, shard), []).append(
                (
                    node["id"],
                    _layers_of(shard),
                    state,
                    "–" if _is_gone(node) else share(kv.get("used_tokens"), kv.get("capacity_tokens")),
                    "–" if _is_gone(node) else str(kv.get("sessions", 0)),
                    node.get("url", "–").removeprefix("http://"),
                )
            )
    header = ("NODE", "LAYERS", "STATE", "KV USED", "SESSIONS", "ADDRESS")
    texts = [f"{title}\n{columns(header, rows)}" for title, rows in tables.items()]
    notes = [*reasons, *_several_engines(listed)]
    return "\n\n".join([*texts, *(["\n".join(notes)] if notes else [])])


def _title(node: dict[str, Any], shard: dict[str, Any]) -> str:
    """What all in one table have in common."""
    engine = node.get("engine") or {}
    if not shard and engine.get("backend") == "none":
        return "Seeders: they compute nothing, and give pieces of Model Artifacts to Nodes"
    return f"{shard.get('model') or 'no model yet'}, {engine.get('engine_class') or 'no engine yet'}"


def _several_engines(listed: Sequence[dict[str, Any]]) -> list[str]:
    """A line for each model that Nodes of several engine classes have: what one lacks, no other makes up for."""
    classes: dict[str, set[str]] = {}
    names: dict[str, str] = {}
    for node in listed:
        for shard in node.get("shards") or []:
            engine = (node.get("engine") or {}).get("engine_class")
            # One that loads knows its class in part only.
            if engine and not engine.endswith("/loading"):
                model = str(shard.get("model"))
                content = str(shard.get("content_id", model))
                names.setdefault(content, model)
                classes.setdefault(content, set()).add(engine)
    return [
        f"{names[content]}: a route uses one engine class, so each of these needs Nodes for all layers; "
        f"`shardline routes explain {content}` says what is missing."
        for content, engines in sorted(classes.items())
        if len(engines) > 1
    ]


def _first_layer(node: dict[str, Any]) -> tuple[int, int]:
    """Heads first, tails last; Nodes without a Shard behind them."""
    ranges = [(shard["first"], shard["last"]) for shard in node.get("shards") or [] if "first" in shard]
    return min(ranges, default=(1 << 30, 0))


def share(part: int | None, whole: int | None) -> str:
    """`12 %`; a dash where there is no whole."""
    return f"{100 * (part or 0) / whole:.0f} %" if whole else "–"


def _all_of_nodes(listed: Sequence[dict[str, Any]]) -> str:
    rows = []
    for node in sorted(listed, key=_first_layer):
        kv = node.get("kv") or {}
        for shard in node.get("shards") or [{}]:
            rows.append(
                (
                    node["id"],
                    _layers_of(shard),
                    str(shard.get("model", "–")),
                    str((node.get("engine") or {}).get("engine_class", "–")),
                    _with_reason(*state_of(node, shard)),
                    "–" if _is_gone(node) else f"{kv.get('used_tokens', 0)}/{kv.get('capacity_tokens', 0)}",
                    "–" if _is_gone(node) else str(kv.get("sessions", 0)),
                    size(node.get("rss_bytes")),
                    f"{node['last_seen_s']:.1f} s" if node.get("last_seen_s") is not None else "–",
                    str(node.get("pid", "–")),
                    node.get("url", "–"),
                )
            )
    header = ("NODE", "LAYERS", "MODEL", "ENGINE", "STATE", "KV USED", "SESSIONS", "RSS", "SEEN", "PID", "URL")
    return columns(header, rows)


def _layers_of(shard: dict[str, Any]) -> str:
    if shard.get("composite"):
        return ALL
    return f"{shard['first']}:{shard['last']}" if "first" in shard else "–"


def _count(tokens: int | None) -> str:
    return "–" if tokens is None else str(tokens)


def state_of(node: dict[str, Any], shard: dict[str, Any]) -> tuple[str, str]:
    """The Tracker's word on the Node where it is in no route, else the Shard's own, each with its reason or ""; also
    the Shard's own where that says more: it is fetched, or loaded."""
    state = node.get("state", "ready")
    loads = state == "out" and shard.get("state") == "loading" and shard.get("reason")
    of = node if state != "ready" and not loads else shard
    return str(of.get("state") or "–"), str(of.get("reason") or "")


def _with_reason(state: str, reason: str) -> str:
    return f"{state} ({reason})" if reason else state


@click.command()
@click.argument("session", required=False)
@click.option("--cancel", is_flag=True, help="End SESSION; its KV is freed on all Nodes.")
@click.option("--gateway", "gateway_url", metavar="URL", help="The Gateway [default: the one of this machine].")
@as_json_option
@wide_option
@pass_invocation
def sessions(
    invocation: Invocation, /, session: str | None, cancel: bool, gateway_url: str | None, as_json: bool, wide: bool
) -> None:
    """List the Route Sessions, or show SESSION.

    Newest first; those of this API key. With SESSION, an id or its beginning: the whole account of one, the bytes over
    each Seam too.
    """
    gateway = gateway_of(invocation.configuration(gateway=gateway_url))
    if session is not None and not _SESSION.fullmatch(session):
        listed = gateway.get("/v1/route-sessions")["sessions"]
        session = full_id(session, [event["id"] for event in listed])
    if cancel:
        if session is None:
            raise click.UsageError("--cancel needs a SESSION")
        answer = gateway.delete(f"/v1/route-sessions/{_quoted(session)}")
        _show(as_json, answer, f"{session} cancelled")
    elif session is not None:
        answer = gateway.get(f"/v1/route-sessions/{_quoted(session)}")
        _show(as_json, answer, session_text(answer))
    else:
        answer = gateway.get("/v1/route-sessions")
        _show(as_json, answer, sessions_text(answer["sessions"], time.time(), wide=wide))


def full_id(given: str, known: Iterable[str]) -> str:
    """The one of `known` ids that `given` begins, with or without what all ids of its kind begin with (`n-`, `rs-`);
    `given` where it begins none. Raises `invalid_value` where it begins several."""
    found = sorted({one for one in known if one.startswith(given) or one.partition("-")[2].startswith(given)})
    if len(found) < 2 or given in found:
        return found[0] if len(found) == 1 else given
    shown = ", ".join(found[:8]) + (", …" if len(found) > 8 else "")
    message = f"{given!r} begins the ids of {len(found)}: {shown}"
    raise ShardlineError("invalid_value", message, advice="Give more of the one you mean.")


def _quoted(identifier: str) -> str:
    from urllib.parse import quote

    return quote(identifier, safe="")


def sessions_text(listed: Sequence[dict[str, Any]], now: float, *, wide: bool = False) -> str:
    """One line a session, in 80 columns; `wide`: with the model, and the route hop by hop."""
    if not listed:
        return "No Route Sessions."
    from shardline.cli.live import number, route_line

    rows = []
    for event in listed:
        failure = event.get("failure") or {}
        rows.append(
            (
                event["id"],
                "/".join(_count(event["prefill"][name]) for name in ("done", "total")),
                VECTOR if event.get("output") == "vector" else _count(event["decode"]["tokens"]),
                number(event["decode"].get("tokens_per_s")),
                f"{max(0.0, now - event['created']):.0f} s",
                _with_reason(event["phase"], failure.get("code") or ""),
                *((event["model"], route_line(event)) if wide else ()),
            )
        )
    header = ("SESSION", "PROMPT", "TOKENS", "TOKENS/S", "AGE", "PHASE", *(("MODEL", "ROUTE") if wide else ()))
    return columns(header, rows)


def session_text(event: dict[str, Any]) -> str:
    """The whole account of one session, Seams included."""
    from shardline.cli.live import block
    from shardline.cli.values import counted

    lines = [
        f"{label:8} {line}" for label, line in [("session", event["id"]), ("model", event["model"]), *block(event)]
    ]
    for seam in event.get("seams") or []:
        counts = "  ".join(
            f"{lane} {counted(seam[lane]['steps'], 'step')}, {counted(seam[lane]['rows'], 'row')}, "
            f"{size(seam[lane]['bytes'])}"
            for lane in ("prefill", "decode")
        )
        lines.append(f"{'seam':8} {seam['from']} → {seam['to']}  {counts}")
    return "\n".join(lines)


@click.group()
def routes() -> None:
    """Look at Inference Routes."""


@routes.command()
@click.argument("model")
@click.option("--tracker", "tracker_url", metavar="URL", help="The Tracker [default: the one of this machine].")
@as_json_option
@pass_invocation
def explain(invocation: Invocation, model: str, tracker_url: str | None, as_json: bool) -> None:
    """Say which route MODEL gets now, and why each candidate was or was not taken.

    MODEL is a name or a content_id, or the beginning of one.
    """
    answer = _explained(tracker_of(invocation.configuration(tracker=tracker_url)), model)
    _show(as_json, answer, explain_text(answer))


def _explained(tracker: Endpoint, model: str) -> Any:
    try:
        return tracker.get(f"/v1/routes/explain?model={_quoted(model)}")
    except ShardlineError as error:
        if error.code != "model_not_found":
            raise
        served = tracker.get("/v1/models")["models"]
        names = sorted({str(known["model"]) for known in served})
        full = full_id(model, [*names, *(str(known["content_id"]) for known in served)])
        if full != model:
            return _explained(tracker, full)
        there = f"; there are: {', '.join(names)}" if names else "; no Node serves any"
        advice = "Ask for one of these names." if names else start_of_a_node(tracker.url)
        raise ShardlineError(error.code, error.message + there, param="model", advice=advice) from None


def explain_text(answer: dict[str, Any]) -> str:
    """Per group of Shards that may share a route: the Shards, the links that are out, the routes by cost."""
    from shardline.cli.values import counted

    taken = " → ".join(answer["taken"]) if answer.get("taken") else "none"
    lines = [f"A request for {answer['model']} now takes: {taken}"]
    for group in answer["groups"]:
        composite = group.get("composite")
        size_of = "behind another server" if composite else counted(group["n_layers"], "layer")
        lines += ["", f"{group['content_id']}  {group['engine_class']}  {size_of}"]
        if group["missing"]:
            lines.append("  missing layers: " + ", ".join(f"{first}:{last}" for first, last in group["missing"]))
        shards = [
            (
                f"  {shard['node']}",
                ALL if composite else f"{shard['layers'][0]}:{shard['layers'][1]}",
                "–" if composite else f"{shard['decode_ms']:.2f}" + ("" if shard["measured"] else " (guessed)"),
                f"{shard['load']:.2f}",
                f"{shard['kv_reserved']}/{shard['kv_capacity']}",
                "yes" if shard["usable"] else f"no: {shard['reason']}",
            )
            for shard in group["shards"]
        ]
        lines.append(columns(("  SHARD OF", "LAYERS", "MS/TOKEN", "LOAD", "KV RESERVED", "USABLE"), shards))
        lines += [f"  not over {link['from']} → {link['to']}: {link['reason']}" for link in group["blocked"]]
        for route in group["routes"]:
            cost = (
                f"{route['estimate_ms']:.2f} ms/token (compute {route['compute_ms']:.2f}, hops {route['hop_ms']:.2f},"
            )
            cost += f" return {route['return_ms']:.2f})"
            cost = "its server's own time" if composite else cost
            mark = "taken:" if route["taken"] else "not taken:"
            lines.append(f"  {' → '.join(route['nodes'])}  {cost}  {mark} {route['reason']}")
        if not group["complete"]:
            lines.append("  … and dearer ones")
    return "\n".join(lines)


@click.group()
def config() -> None:
    """Look at the configuration."""


@config.command()
@as_json_option
@pass_invocation
def show(invocation: Invocation, as_json: bool) -> None:
    """Print each setting, its value, and where the value came from."""
    rows = invocation.configuration().rows()
    answer = {name: {"value": value, "source": source} for name, value, source in rows}
    _show(as_json, answer, columns(("SETTING", "VALUE", "SOURCE"), rows))
