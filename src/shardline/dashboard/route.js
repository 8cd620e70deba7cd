// The Inference Route as a line with stops: each stop is a Node with its layers, what has passed it of the prompt, and
// where its share of the last token's time went. While an answer is written, a dot goes round: rows forward along the
// line, one token id back.

import { h } from "./dom.js";
import { count, counted, layersWords, machine, ms, rate, short } from "./format.js";
import { ENDED, may, nodeOf, state } from "./store.js";
import { lackOf, longestOf, longestSentence, piecesOf } from "./words.js";

const LAP_MS = 1200; // faster would be a flicker

/** What is drawn: the route of a session, else the one that the next request takes. */
export function shownRoute(session, model) {
  if (session?.route) return { hops: session.route.hops, n_layers: session.route.n_layers, session, planned: false };
  const groups = state.cluster.routes?.find((known) => known.model === model)?.groups ?? [];
  for (const group of groups) {
    const taken = group.routes.find((route) => route.taken);
    if (!taken) continue;
    const hops = taken.nodes.map((node, i) => ({ node, layers: group.composite ? null : taken.layers[i], health: "ok", engine_class: group.engine_class, rtt_ms: taken.edges[i]?.measured ? taken.edges[i].ms : null }));
    return { hops, n_layers: group.n_layers, session: null, planned: true, estimate_ms: group.composite ? null : taken.estimate_ms };
  }
  return null;
}

/** Why no route is drawn. What was not heard yet is not missing. */
function noRoute(model) {
  const { models, routes, tracker } = state.cluster;
  if (models === null) return tracker?.error ? `${tracker.error.message}.` : "Asking the Tracker …";
  const named = models.filter((known) => known.model === model);
  if (!named.length) return "No model is served yet. The view Join says how a Node comes.";
  if (!named.some((known) => known.ready)) return `No whole route now: ${lackOf(named[0])}.`;
  return may("look") && routes === null ? "Asking which route the next request takes …" : "The route stands here once a request takes it.";
}

export function routeView(shown, model) {
  if (!shown) return h("p", { class: "empty", key: "none" }, noRoute(model));
  const { hops, session, planned } = shown;
  const phase = session?.phase ?? "idle";
  const moves = phase === "decode" && hops.length > 0;
  return h(
    "div",
    { class: `route phase-is-${phase}${planned ? " planned" : ""}`, key: "route", style: { "--hops": hops.length } },
    h("div", { class: "ring", "aria-hidden": "true" }),
    h("ol", { class: "hops", tabindex: hops.length > 4 ? "0" : null, "aria-label": `Inference Route of ${counted(hops.length, "Node")}` }, hopViews(shown)),
    h("p", { class: "back" }, back(shown)),
    h("div", { class: `ring token${moves ? " moves" : ""}`, "aria-hidden": "true", style: { "--lap": `${LAP_MS}ms` } }),
  );
}

function hopViews({ hops, session }) {
  const measured = piecesOf(hops);
  const most = Math.max(...measured.map((one) => one.ms), 0);
  const longest = longestOf(measured);
  return measured.map((one, i) => hopView(one, { i, last: i === hops.length - 1, most, longest, session }));
}

function hopView({ hop, pieces, ms: total }, { i, last, most, longest, session }) {
  const node = nodeOf(hop.node);
  const lost = hop.health === "lost" || (session?.failure?.node === hop.node && session.phase === "failed");
  const health = lost ? "lost" : hop.health;
  return h(
    "li",
    { class: `hop ${health}`, key: `${i}-${hop.node}`, style: { "--weight": hop.layers ? hop.layers[1] - hop.layers[0] : 1 } },
    h("span", { class: "station", "aria-hidden": "true" }),
    !last && hop.rtt_ms !== null && hop.rtt_ms !== undefined && h("span", { class: "rtt", title: "Round trip to the next Node" }, `⇄ ${ms(hop.rtt_ms)}`),
    h(
      "div",
      { class: "hop-name" },
      h("code", { title: hop.node }, short(hop.node)),
      h("span", { class: "dim" }, machine(node?.host)),
      health !== "ok" && h("strong", { class: `health ${health}` }, health),
      h("span", { class: "layer-words" }, layersWords(hop.layers)),
    ),
    hop.layers && layerCells(hop, session),
    session && chunks(hop, session),
    session && pieceBar(pieces, total, most, longest?.hop === hop ? longest.name : null),
  );
}

/** A cell a layer; lit once rows have passed, brighter where they pass now. */
function layerCells(hop, session) {
  const [first, end] = hop.layers;
  const lit = session && (hop.position > 0 || session.decode.tokens > 0);
  const passing = session?.phase === "prefill" && lit && hop.position < session.prefill.total;
  const cells = Array.from({ length: Math.min(end - first, 128) }, (_, i) => h("i", { style: { "--i": i } }));
  return h("div", { class: `cells${lit ? " lit" : ""}${passing ? " passing" : ""}`, "aria-hidden": "true" }, cells);
}

/** How much of the prompt this hop has computed, in the chunks in which it comes. */
function chunks(hop, { prefill, phase, decode }) {
  const done = decode.tokens > 0 ? prefill.total : Math.min(hop.position ?? 0, prefill.total);
  const number = prefill.chunk ? Math.ceil((prefill.total - prefill.cached) / prefill.chunk) : 1;
  if (!prefill.total || (ENDED.has(phase) && !done)) return null;
  return h(
    "div",
    { class: "hop-row" },
    h("span", { class: "dim" }, "prompt"),
    h(
      "div",
      { class: "chunks", role: "progressbar", "aria-label": `Prompt on Node ${short(hop.node)}`, "aria-valuemin": 0, "aria-valuemax": prefill.total, "aria-valuenow": done, style: { "--chunks": Math.max(1, Math.min(number, 48)) } },
      prefill.cached > 0 && h("i", { class: "kept", title: `${counted(prefill.cached, "token")} kept from before`, style: { width: `${(100 * prefill.cached) / prefill.total}%` } }),
      h("i", { class: "done", style: { width: `${(100 * Math.max(0, done - prefill.cached)) / prefill.total}%` } }),
    ),
    h("span", { class: "value" }, `${count(done)}/${count(prefill.total)}`),
  );
}

function pieceBar(pieces, total, most, longest) {
  const words = pieces.filter((piece) => piece.ms !== null).map((piece) => `${piece.name} ${ms(piece.ms)}`);
  return h(
    "div",
    { class: "hop-row" },
    h("span", { class: "dim" }, "last step"),
    h(
      "div",
      { class: "track", role: "img", "aria-label": words.length ? `Last step: ${words.join(", ")}` : "Nothing measured yet" },
      pieces.map((piece) => h("i", { class: `${piece.name}${piece.name === longest ? " longest" : ""}`, title: `${piece.name} ${ms(piece.ms)}`, style: { width: `${most ? (100 * (piece.ms ?? 0)) / most : 0}%` } })),
    ),
    h("strong", { class: "value" }, total ? ms(total) : "–"),
  );
}

/** What stands on the way back from the tail to the head. */
function back({ hops, session, planned, estimate_ms }) {
  const tail = hops.at(-1);
  const longest = session && longestOf(piecesOf(hops));
  const ring = hops.length > 1 ? `one token id back${tail.rtt_ms ? `, ⇄ ${ms(tail.rtt_ms)}` : ""}` : "one Node: nothing crosses a wire";
  const speed = session?.phase === "decode" && session.decode.tokens_per_s ? Math.max(1, Math.round((session.decode.tokens_per_s * LAP_MS) / 1000)) : null;
  return [
    h("span", { class: "ring-words" }, `↩ ${ring}${speed ? ` · the dot: a lap for ${counted(speed, "token")}` : ""}`),
    planned && h("span", { class: "dim" }, `The next request takes this route${estimate_ms ? `; the Tracker expects ${rate(1000 / estimate_ms)} tokens/s at most` : ""}.`),
    longest && h("span", { class: `longest-words ${longest.name}` }, longestSentence(longest)),
  ];
}
