// The view Cluster: which layers are where, the Nodes, who reaches whom, the pieces of Model Artifacts, and why the route
// is what it is. All of it in the words of the Tracker; what is old is grey.

import { h } from "./dom.js";
import { bytes, count, counted, layers, layersWords, machine, ms, percent, rate, seconds, share } from "./format.js";
import { isLogOpen, logView } from "./log_view.js";
import { meter, nodeName, pill } from "./parts.js";
import { isLive, isOld, may, now, state } from "./store.js";
import { lackOf } from "./words.js";

const KIND = { ready: "good", loading: "busy", testing: "busy", draining: "busy", leaving: "busy", failed: "bad", out: "bad", expired: "bad", expelled: "bad", left: "quiet" };

export function clusterView() {
  const { nodes, tracker } = state.cluster;
  return [h("h1", { key: "title" }, "Cluster"), oldNotice(tracker), nodes === null || !may("look") ? nothingYet() : all()];
}

function nothingYet() {
  if (may("look")) return h("p", { class: "empty", key: "wait" }, "Asking the Tracker …");
  return h("p", { class: "notice", key: "no" }, `The key ${state.hello.key} does not have the scope "look", which shows the cluster.`);
}

function all() {
  const { models, nodes, artifacts, routes } = state.cluster;
  const why = routes?.length ? routes.map(explanation) : h("p", { class: "empty" }, "No model is served, so there is nothing to explain.");
  return h(
    "div",
    { class: isOld() ? "old" : "", key: "all" },
    summary(models ?? [], nodes),
    panel("layers", "Layers", layerMaps(models ?? [], nodes)),
    panel("nodes", "Nodes", [nodeCards(nodes), goneLogs(nodes)]),
    panel("reach", "Who reaches whom", reach(nodes)),
    panel("artifacts", "Model Artifacts", artifactViews(artifacts)),
    panel("why", "Why this route", why),
  );
}

const panel = (name, title, content) => h("section", { class: "panel", key: name, "aria-labelledby": `h-${name}` }, h("h2", { id: `h-${name}` }, title), content);

function oldNotice(tracker) {
  if (!isOld()) return null;
  const error = state.link.state === "live" ? tracker?.error : state.link.error;
  const since = tracker?.answered ? ` What you see was true ${seconds(Math.max(0, now() - tracker.answered))} ago.` : "";
  return h("p", { class: "notice bad", role: "status", key: "old" }, `${error?.message ?? "The connection to the Gateway is lost"}.${since} `, error?.advice);
}

function summary(models, nodes) {
  const ready = nodes.filter((node) => node.state === "ready").length;
  const there = nodes.filter((node) => node.state !== "left" && node.state !== "expired");
  const whole = models.filter((model) => model.ready).length;
  const live = [...state.sessions.values()].filter(isLive).length;
  const kv = there.reduce((sum, { kv }) => ({ used: sum.used + (kv?.reserved_tokens ?? 0), all: sum.all + (kv?.capacity_tokens ?? 0) }), { used: 0, all: 0 });
  const tile = (name, value, note, bad) => h("div", { class: `figure${bad ? " bad" : ""}` }, h("dt", {}, name), h("dd", {}, value), h("dd", { class: "note" }, note));
  const gap = models.find((model) => !model.ready);
  return h(
    "dl",
    { class: "figures summary" },
    tile("Nodes", `${ready} of ${nodes.length}`, "ready", ready < there.length),
    tile("Models", `${whole} of ${models.length}`, gap ? lackOf(gap) : "whole", Boolean(gap)),
    tile("KV promised", percent(kv.used, kv.all), `${count(kv.used)} of ${counted(kv.all, "token")}`),
    tile("Sessions", count(live), state.hello?.key === "anybody" ? "running" : "of this key, running"),
  );
}

// ---- layers over the axis --------------------------------------------------------------------------------------

/** One map for each model and engine class: only Shards of one engine class share a route. */
function layerMaps(models, nodes) {
  const groups = new Map();
  for (const node of nodes) {
    for (const shard of node.shards ?? []) {
      const engine = node.engine?.engine_class?.endsWith("/loading") ? "" : (node.engine?.engine_class ?? "");
      const id = `${shard.content_id}|${engine}`;
      if (!groups.has(id)) groups.set(id, { shard, engine, rows: [] });
      groups.get(id).rows.push({ node, shard });
    }
  }
  if (!groups.size) return h("p", { class: "empty" }, "No Node holds layers. The view Join says how one comes.");
  const shown = [...groups.values()].filter((group) => group.rows.some(({ node }) => node.state !== "left") || groups.size === 1);
  return shown.map(({ shard, engine, rows }) => {
    const model = models.find((known) => known.content_id === shard.content_id && known.engine_class === engine);
    if (shard.composite) return serverMap(shard, engine, rows);
    return layerMap(shard, engine, rows, model?.missing ?? missingOf(rows, shard.n_layers), model);
  });
}

/** Layers that no ready Shard of these rows has. */
function missingOf(rows, n) {
  const held = new Set();
  for (const { node, shard } of rows) if (isServing(node, shard)) for (let i = shard.first; i < shard.last; i += 1) held.add(i);
  const gaps = [];
  for (let i = 0; i < n; i += 1) {
    if (held.has(i)) continue;
    if (gaps.length && gaps.at(-1)[1] === i) gaps.at(-1)[1] = i + 1;
    else gaps.push([i, i + 1]);
  }
  return gaps;
}

const isServing = (node, shard) => node.state === "ready" && shard.state === "ready";

function layerMap(shard, engine, rows, missing, model) {
  const n = shard.n_layers || 1;
  const place = (range) => ({ left: `${(100 * range[0]) / n}%`, width: `${(100 * (range[1] - range[0])) / n}%` });
  const sorted = rows.toSorted((a, b) => a.shard.first - b.shard.first || a.shard.last - b.shard.last || a.node.id.localeCompare(b.node.id));
  const words = missing.length ? `layers ${missing.map(layers).join(", ")} are missing` : "whole";
  return h(
    "figure",
    { class: "layer-map", key: `${shard.content_id}|${engine}` },
    h("figcaption", {}, h("strong", {}, shard.model), " ", pill(missing.length ? (model?.returning ? "busy" : "bad") : "good", missing.length && model?.returning ? `${words}, they come back by themselves` : words), h("span", { class: "dim" }, `${counted(n, "layer")}, ${engine || "engine not known yet"}`)),
    h(
      "div",
      { class: "rows" },
      missing.length > 0 && h("div", { class: "row" }, h("span", { class: "row-name bad-text" }, "missing"), h("div", { class: "lane" }, missing.map((range) => h("span", { class: "block gap", style: place(range), title: `Layers ${layers(range)}: no ready Node has them` }, h("b", {}, layers(range)))))),
      sorted.map((row) => layerRow(row, place)),
      h("div", { class: "row axis", "aria-hidden": "true" }, h("span", { class: "row-name" }), h("div", { class: "lane" }, ticks(n).map((at) => h("span", { class: "tick", style: { left: `${(100 * at) / n}%` } }, at)))),
    ),
  );
}

/** Of a model behind other servers: each Node has all of it, and nobody knows how many layers that are. */
function serverMap(shard, engine, rows) {
  const served = rows.some(({ node, shard: own }) => isServing(node, own));
  const whole = () => ({ left: "0%", width: "100%" });
  return h(
    "figure",
    { class: "layer-map", key: `${shard.content_id}|${engine}` },
    h("figcaption", {}, h("strong", {}, shard.model), " ", pill(served ? "good" : "bad", served ? "whole" : "no Node serves it now"), h("span", { class: "dim" }, "all layers, behind another server")),
    h("div", { class: "rows" }, rows.toSorted((a, b) => a.node.id.localeCompare(b.node.id)).map((row) => layerRow(row, whole))),
  );
}

const rangeOf = (shard) => (shard.composite ? null : [shard.first, shard.last]);

function layerRow({ node, shard }, place) {
  const [shownState, reason] = stateOf(node, shard);
  const range = rangeOf(shard);
  const words = `${layers(range)}${shownState === "ready" ? "" : ` ${shownState}`}`;
  return h("div", { class: "row", key: node.id }, h("span", { class: "row-name" }, nodeName(node.id)), h("div", { class: "lane" }, h("span", { class: `block ${KIND[shownState] ?? "quiet"}`, style: place(range), title: `${node.id}, layers ${words}${reason ? `: ${reason}` : ""}` }, words)));
}

function ticks(n) {
  const step = [1, 2, 4, 5, 8, 10, 16, 20, 25, 32, 40, 64].find((size) => n / size <= 8) ?? Math.ceil(n / 8);
  const found = [];
  for (let at = 0; at < n - step / 2; at += step) found.push(at);
  return [...found, n];
}

/** The Tracker's word on a Node where it is in no route, else the Shard's own. */
function stateOf(node, shard) {
  const loads = node.state === "out" && shard?.state === "loading" && shard.reason;
  const of = node.state !== "ready" && !loads ? node : (shard ?? node);
  return [of.state ?? "–", of.reason ?? ""];
}

// ---- Nodes -----------------------------------------------------------------------------------------------------

function nodeCards(nodes) {
  if (!nodes.length) return h("p", { class: "empty" }, "No Nodes. The view Join says how one comes.");
  return h("ul", { class: "cards" }, inOrder(nodes).map(nodeCard));
}

/** Heads first, tails last; Nodes without layers behind them. */
function inOrder(nodes) {
  const first = (node) => Math.min(...(node.shards?.map((shard) => shard.first) ?? []), 1e9);
  return nodes.toSorted((a, b) => first(a) - first(b) || a.id.localeCompare(b.id));
}

/** Logs of Nodes that the Tracker does not list any more. */
function goneLogs(nodes) {
  const listed = new Set(nodes.map((node) => node.id));
  const gone = [...state.logs.keys()].filter((id) => !listed.has(id));
  if (!gone.length) return null;
  return h("ul", { class: "cards gone", key: "gone", "aria-label": "Nodes that are no longer listed" }, gone.map((id) => h("li", { class: `card quiet${isLogOpen(id) ? " wide" : ""}`, key: id }, h("div", { class: "card-head" }, h("code", { class: "node", title: id }, id), pill("quiet", "no longer listed")), logView(id))));
}

function nodeCard(node) {
  const shard = node.shards?.[0];
  const [shownState, reason] = stateOf(node, shard);
  const { kv, engine, health } = node;
  const seeds = engine?.backend === "none";
  return h(
    "li",
    { class: `card ${KIND[shownState] ?? "quiet"}${isLogOpen(node.id) ? " wide" : ""}`, key: node.id },
    h("div", { class: "card-head" }, h("code", { class: "node", title: node.id }, node.id), pill(KIND[shownState] ?? "quiet", shownState, reason)),
    reason && h("p", { class: "reason" }, reason),
    h("p", { class: "dim" }, [machine(node.host), (node.url ?? "").replace(/^https?:\/\/([^/@]*@)?/, ""), `heard ${seconds(node.last_seen_s)} ago`, kv?.sessions ? counted(kv.sessions, "session") : ""].filter(Boolean).join(" · ")),
    h("p", {}, seeds ? "Seeder: computes nothing, gives pieces of models to Nodes." : shard ? [h("strong", {}, layersWords(rangeOf(shard))), shard.composite ? ", by the server behind it" : ` of ${shard.n_layers}`] : "no layers yet"),
    shard && h("p", { class: "dim one-line", title: shard.model }, shard.model),
    !seeds && h("p", { class: "dim" }, h("code", {}, engine?.engine_class), !shard?.composite && ` on ${engine?.device ?? "?"}, ${counted(engine?.threads ?? 0, "thread")}`, health?.restarts ? `, ${shard?.composite ? "server lost" : "engine restarted"} ${counted(health.restarts, "time")}` : "", ` · version ${node.version}`),
    meter("Memory", node.memory_bytes, [["fill", node.rss_bytes, "this Node"]], `${bytes(node.rss_bytes)} of the machine's ${bytes(node.memory_bytes)}`),
    !seeds && kv && kvMeter(kv),
    shard?.times && h("p", { class: "dim" }, `${ms(shard.times.decode_ms)} a token, ${ms(shard.times.prefill_ms_per_row)} a token of a prompt`),
    seeds && h("p", { class: "dim" }, `version ${node.version}`),
    logView(node.id),
  );
}

function kvMeter(kv) {
  const text = kv.capacity_tokens
    ? `${count(kv.reserved_tokens)} of ${counted(kv.capacity_tokens, "token")} promised${kv.cached_tokens ? `, ${count(kv.cached_tokens)} kept` : ""}`
    : "no room yet";
  const promised = Math.max(0, kv.reserved_tokens - kv.used_tokens);
  return meter("KV", kv.capacity_tokens, [["kv-used", Math.min(kv.used_tokens, kv.reserved_tokens || kv.used_tokens), `${count(kv.used_tokens)} used`], ["kv-promised", promised, `${count(promised)} promised, not used yet`], ["kv-kept", kv.cached_tokens, `${count(kv.cached_tokens)} kept of earlier prompts`]], text);
}

// ---- who reaches whom ------------------------------------------------------------------------------------------

function reach(nodes) {
  const there = inOrder(nodes.filter((node) => node.state !== "left"));
  if (there.length < 2) return h("p", { class: "empty" }, "There is one Node, or none: nothing to reach.");
  const known = there.flatMap((node) => node.peers ?? []).map((peer) => peer.rtt_ms).filter((rtt) => rtt !== null);
  const slowest = Math.max(...known, 1);
  return [
    h("p", { class: "dim" }, "Round trip from the Node of the row to that of the column, median of the last probes. Nodes probe those that can be next to them in a route."),
    h(
      "div",
      { class: "scroll", tabindex: "0", role: "region", "aria-label": "Round-trip times between Nodes" },
      matrix(there, slowest),
    ),
  ];
}

function matrix(there, slowest) {
  return h(
    "table",
    { class: "matrix" },
    h("caption", { class: "unseen" }, "Round-trip times between Nodes"),
    h("thead", {}, h("tr", {}, h("td", {}), there.map((node) => h("th", { scope: "col" }, nodeName(node.id))))),
    h("tbody", {}, there.map((from) => h("tr", {}, h("th", { scope: "row" }, nodeName(from.id)), there.map((to) => cell(from, to, slowest))))),
  );
}

function cell(from, to, slowest) {
  if (from.id === to.id) return h("td", { class: "self" }, h("span", { "aria-label": "itself" }, "·"));
  const peer = from.peers?.find((known) => known.peer === to.id);
  if (!peer) return h("td", { class: "dim", title: "not asked to probe it" }, h("span", { "aria-label": "not measured" }, "–"));
  if (!peer.ok || peer.out) return h("td", { class: "cut", title: peer.out ?? "the last probe failed" }, "✕ not reached");
  return h("td", { style: { "--heat": `${Math.round(32 * share(peer.rtt_ms ?? 0, slowest))}%` } }, ms(peer.rtt_ms));
}

// ---- artifacts -------------------------------------------------------------------------------------------------

function artifactViews(artifacts) {
  if (artifacts === null) return h("p", { class: "empty" }, "This Tracker tells nothing of Model Artifacts.");
  if (!artifacts.length) return h("p", { class: "empty" }, "None. Nodes are started with a model file of their own.");
  return artifacts.map((artifact) =>
    h(
      "figure",
      { class: "artifact", key: artifact.content_id },
      h("figcaption", {}, h("strong", {}, artifact.name), " ", pill(artifact.offered ? "good" : "quiet", artifact.offered ? "offered to Nodes" : "from files only", artifact.offered ? "A Node without a file fetches its layers" : "Nodes need the file"), h("span", { class: "dim" }, [artifact.architecture, artifact.quantisation, artifact.total_bytes && bytes(artifact.total_bytes), artifact.publisher ? "signed" : null].filter(Boolean).join(", "), " ", h("code", { title: artifact.content_id }, artifact.content_id.slice(0, 16)))),
      strip("Served by ready Nodes", artifact.served),
      artifact.offered && strip("Can be fetched from", artifact.coverage),
      artifact.seeders.length > 0 && h("ul", { class: "seeders" }, artifact.seeders.map((seeder) => seederView(seeder, artifact))),
    ),
  );
}

/** For each layer, how many have it. */
function strip(label, counts) {
  const lacks = counts.filter((number) => number === 0).length;
  const words = lacks ? `${counted(lacks, "layer")} nowhere` : `each layer ${Math.min(...counts)} to ${Math.max(...counts)} times`;
  return h(
    "div",
    { class: "strip" },
    h("span", { class: "meter-label" }, label),
    h("span", { class: "meter-text" }, words),
    h("div", { class: "cells", role: "img", "aria-label": `${label}: ${words}` }, counts.map((number, i) => h("i", { class: number ? `has-${Math.min(number, 3)}` : "none", title: `layer ${i}: ${number}` }))),
  );
}

function seederView(seeder, artifact) {
  const { fetching } = seeder;
  const proven = seeder.proven === null ? pill("quiet", "not asked yet", "It was not asked to show pieces at random yet") : seeder.proven ? pill("good", "proven", "It has shown pieces that were asked of it at random") : pill("bad", "not proven", seeder.reason);
  const left = fetching && fetching.bytes_per_s > 0 ? `, ${seconds((fetching.total_bytes - fetching.done_bytes) / fetching.bytes_per_s)} left` : "";
  return h(
    "li",
    { key: seeder.node },
    h("div", { class: "card-head" }, nodeName(seeder.node), h("span", { class: "dim" }, machine(seeder.host)), proven, seeder.bittorrent && pill("quiet", "BitTorrent")),
    meter("Holds", artifact.total_bytes, [["fill", seeder.held_bytes, "held"]], `${bytes(seeder.held_bytes)}${artifact.total_bytes ? ` of ${bytes(artifact.total_bytes)}` : ""}${seeder.servable.length ? `, whole layers ${seeder.servable.map(layers).join(", ")}` : ""}`),
    fetching && meter(`Fetches ${layers([fetching.first, fetching.last])}`, fetching.total_bytes, [["busy-fill", fetching.done_bytes, "there"]], `${bytes(fetching.done_bytes)} of ${bytes(fetching.total_bytes)}, ${bytes(fetching.bytes_per_s)}/s${left}`),
  );
}

// ---- routes ----------------------------------------------------------------------------------------------------

function explanation({ model, groups, taken }) {
  return h(
    "div",
    { class: "why", key: model },
    h("p", {}, h("strong", {}, model), ": ", taken ? ["a request now takes ", taken.map((node, i) => [i > 0 && " → ", nodeName(node)])] : "a request gets no route now."),
    groups.map((group) =>
      h(
        "div",
        { class: "group", key: `${group.content_id}|${group.engine_class}` },
        groups.length > 1 && h("p", { class: "dim" }, h("code", {}, group.engine_class)),
        group.missing.length > 0 && h("p", { class: "bad-text" }, `No ready Node has layers ${group.missing.map(layers).join(", ")}.`),
        group.routes.length > 0 && routeTable(group),
        group.blocked.length > 0 && h("ul", {}, group.blocked.map((link) => h("li", {}, "Not over ", nodeName(link.from), " → ", nodeName(link.to), `: ${link.reason}`))),
        group.shards.some((shard) => !shard.usable) && h("ul", {}, group.shards.filter((shard) => !shard.usable).map((shard) => h("li", {}, nodeName(shard.node), ` (${layers(group.composite ? null : shard.layers)}) is in no route: ${shard.reason}`))),
      ),
    ),
  );
}

function routeTable(group) {
  const shown = group.routes.slice(0, 8);
  const rest = group.routes.length - shown.length;
  return h(
    "div",
    { class: "scroll", tabindex: "0", role: "region", "aria-label": `Routes of ${group.model}` },
    h(
      "table",
      {},
      h("thead", {}, h("tr", {}, ["Route", "Layers", "Compute", "Hops", "Return", "Tokens/s at most", "Why"].map((name) => h("th", { scope: "col" }, name)))),
      h("tbody", {}, shown.map((route) => h("tr", { class: route.taken ? "taken" : "" }, h("td", {}, route.nodes.map((node, i) => [i > 0 && " → ", nodeName(node)])), h("td", {}, group.composite ? layers(null) : route.layers.map(layers).join(" ")), h("td", {}, group.composite ? "–" : ms(route.compute_ms)), h("td", {}, ms(route.hop_ms)), h("td", {}, ms(route.return_ms)), h("td", {}, route.estimate_ms > 0 && !group.composite ? rate(1000 / route.estimate_ms) : "–"), h("td", {}, route.taken ? pill("good", "taken", route.reason) : route.reason)))),
    ),
    (rest > 0 || !group.complete) && h("p", { class: "dim" }, "… and dearer ones"),
  );
}
