"""What a client may take from the word of a Node that gave a session up, or of a Tracker that refused one.

Owns which codes are a Node's to use, and that it can blame itself and its own links only; the Tracker hears no more of
it than the client. Shown by tests/gateway/test_session.py, test_generate.py and the fault table in tests/cluster/.
"""

from __future__ import annotations

from collections.abc import Sequence

import structlog

from shardline.errors import ShardlineError

log = structlog.get_logger(__name__)
RETRY_AFTER_S = 2
_FOR_CLIENTS = frozenset({"model_not_found", "model_unavailable", "capacity", "kv_exhausted", "resources_exhausted"})

_CODES_OF_SEAMS = frozenset({"seam_lost", "seam_invalid", "seam_gap", "numerical_error"})
_CODES_OF_GRAMMARS = frozenset({"grammar_invalid", "no_token_left", "unsupported_parameter"})
_FIELDS_OF_GRAMMARS = frozenset({"response_format", "grammar", "regex", "tools", "tool_choice", "pooling"})
_CODES_OF_NODES = _CODES_OF_SEAMS | {
    "architecture_unsupported",
    "capacity",
    "deadline",
    "draining",
    "engine_error",
    "engine_lost",
    "engine_out_of_memory",
    "gateway_lost",
    "grammar_invalid",
    "kv_exhausted",
    "no_token_left",
    "queue_overflow",
    "rollback_unsupported",
    "shard_unready",
    "unsupported_parameter",
}
"""What a Node may say of itself to a client. Everything else it says is told as a refusal, with its code beside it."""
_CODES_OF_CHANGE = frozenset({"ticket_invalid", "ticket_used"})
_CODES_OF_FULL = frozenset({"resources_exhausted", "too_many_connections"})
_DETAILS_OF_NODES = ("limit", "wanted", "free", "capacity", "retry_after", "reject")


def of_node(said: ShardlineError, *, node: str, nodes: Sequence[str], opened: bool, fallback: str) -> ShardlineError:
    """What `node`, of the route of `nodes`, said: with a code that is a Node's to use (else `fallback`), and itself as
    the only one to blame; of a link, only its own end and a Node of this route. `opened`: the session is open there."""
    details = {k: said.details[k] for k in _DETAILS_OF_NODES if k in said.details}
    code = said.code
    if code in _CODES_OF_CHANGE:
        # Another Node, or another Tracker, than the one of the ticket: the next route knows.
        details["reject"] = code
        code = "shard_unready"
    elif code in _CODES_OF_FULL:
        # Before the session is open it may wait for its turn, as for any other want of room.
        details["reject"] = code
        code = "resources_exhausted" if opened else "capacity"
    elif code not in _CODES_OF_NODES:
        details["reject"] = code
        code = fallback
    if code in _CODES_OF_SEAMS:
        to = said.details.get("to")
        if to in nodes:
            details.update({"from": node, "to": to})
        elif code == "seam_lost":
            code = "engine_error"
    param = said.param if code in _CODES_OF_GRAMMARS and said.param in _FIELDS_OF_GRAMMARS else None
    if code == "no_token_left":
        param = param or "logit_bias"
    return ShardlineError(code, said.message, param=param, node=node, **details)


def of_tracker(error: ShardlineError, *, asked: str = "", called: str = "") -> ShardlineError:
    """What a client may hear of a Tracker's refusal: its own business, or that the cluster has a problem, but neither
    addresses nor answers that were meant for the Gateway. The Tracker was `asked` for a model that the client `called`
    otherwise, and is quoted in the client's words."""
    if error.code in _FOR_CLIENTS:
        message = error.message.replace(asked, called) if asked else error.message
        return ShardlineError(error.code, message, param=error.param, advice=error.advice, **error.details)
    if error.details.get("reason") == "expelled":
        log.warning("gateway_expelled", reason=error.message)
        return ShardlineError("gateway_expelled", "the operator of this cluster has thrown this Gateway out")
    log.warning("tracker_refused", code=error.code, reason=error.message)
    why = "does not answer" if error.code == "tracker_unreachable" else f"refused this Gateway ({error.code})"
    return ShardlineError("tracker_unreachable", f"the Tracker {why}", retry_after=RETRY_AFTER_S)
