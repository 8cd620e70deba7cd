// A session in sentences: what it does now, where its time goes, and how it failed.

import { count, counted, layers, layersWords, ms, percent, rate, seconds, short } from "./format.js";
import { now } from "./store.js";

export const PHASES = {
  queued: "Waiting",
  routing: "Finding a route",
  opening: "Opening",
  prefill: "Reading the prompt",
  decode: "Writing",
  completed: "Done",
  failed: "Failed",
  cancelled: "Stopped",
};

const TITLES = {
  node_lost: "A Node was lost",
  seam_lost: "Two Nodes do not reach each other",
  engine_lost: "The engine of a Node died",
  engine_error: "The engine of a Node failed",
  engine_out_of_memory: "A Node ran out of memory",
  model_unavailable: "Layers of the model are missing",
  model_not_found: "This model is not served here",
  capacity: "All routes are full",
  kv_exhausted: "No room for this conversation",
  queue_full: "Too many wait already",
  context_length_exceeded: "The conversation is too long for the model",
  deadline: "It took too long",
  tracker_unreachable: "The Tracker does not answer",
  gateway_ended: "The Gateway has ended",
  unreachable: "The Gateway is not reached",
  stream_cut: "The answer was cut off",
  unauthorized: "The API key is not valid here",
};

/** Why a model is not whole. */
export function lackOf(model) {
  if (model.composite) return `${model.model} has no Node that passes requests on to its server`;
  return `${model.model} lacks ${model.missing.length ? `layers ${model.missing.map(layers).join(", ")}` : "a way through its Nodes"}`;
}

/** What of an answer is there: its tokens, where it has some and they are known. */
export function written({ output, decode }) {
  if (output === "vector") return "a vector";
  return decode.tokens === null ? "tokens unknown" : counted(decode.tokens, "token");
}

export const titleOf = (error) => TITLES[error.code] ?? "The answer ended with an error";

/** What the session does, in one sentence. */
export function sentence(session) {
  const { phase, prefill, decode, queue } = session;
  const speed = decode.tokens_per_s === null ? "" : `, ${rate(decode.tokens_per_s)} tokens/s`;
  switch (phase) {
    case "queued":
      return queue.position ? `place ${queue.position} in the queue, for ${seconds(now() - session.created)}` : "for its turn";
    case "routing":
      return "the Tracker picks the Nodes";
    case "opening":
      return `on ${counted(session.route?.hops.length ?? 0, "Node")}`;
    case "prefill":
      if (prefill.total === null) return "by the server behind its Node";
      return `${count(prefill.done)} of ${counted(prefill.total, "token")} (${percent(prefill.done, prefill.total)})${reused(prefill)}`;
    case "decode":
      return decode.tokens === null ? "its server counts the tokens, at the end" : `${written(session)}${speed}`;
    default: {
      const took = session.ended === null ? "" : ` in ${seconds(session.ended - session.created)}`;
      return `${written(session)}${took}${speed}`;
    }
  }
}

const reused = (prefill) => (prefill.cached ? `, ${count(prefill.cached)} of them kept from before` : "");

const PIECES = [
  ["compute_ms", "compute"],
  ["send_ms", "wire"],
  ["queue_ms", "queue"],
];

/** The pieces of each hop's last step: [{ hop, pieces: [{ name, ms }], ms }]. */
export function piecesOf(hops) {
  return hops.map((hop) => {
    const pieces = PIECES.map(([field, name]) => ({ name, ms: hop[field] ?? null }));
    return { hop, pieces, ms: pieces.reduce((sum, piece) => sum + (piece.ms ?? 0), 0) };
  });
}

/** Where the last step took longest: { node, layers, name, ms, all }, or null where nothing was measured. */
export function longestOf(measured) {
  const all = measured.reduce((sum, one) => sum + one.ms, 0);
  const pieces = measured.flatMap(({ hop, pieces }) => pieces.map((piece) => ({ ...piece, hop })));
  const longest = pieces.reduce((most, piece) => ((piece.ms ?? 0) > (most?.ms ?? 0) ? piece : most), null);
  return longest && { ...longest, all };
}

export function longestSentence(longest) {
  const { hop, name, all } = longest;
  const what = name === "wire" ? `the wire behind Node ${short(hop.node)}` : `${name} on Node ${short(hop.node)} (${layersWords(hop.layers)})`;
  return `Longest piece: ${what}, ${ms(longest.ms)} of ${ms(all)}.`;
}

/** Where and when it failed, of what the error says: "Node n-1234, layers 2:4, while writing, after 12 tokens". */
export function circumstances(error) {
  const said = [];
  if (error.from && error.to) said.push(`from ${short(error.from)} to ${short(error.to)}`);
  else if (error.node && !error.message.includes(error.node)) said.push(`Node ${error.node}`);
  if (error.layers) said.push(layersWords(error.layers));
  if (error.phase && PHASES[error.phase]) said.push(`while ${PHASES[error.phase].toLowerCase()}`);
  if (typeof error.tokens_delivered === "number") said.push(`after ${counted(error.tokens_delivered, "token")}`);
  return said.join(", ");
}
