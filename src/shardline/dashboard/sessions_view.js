// The view Sessions: the Route Sessions of this key, live ones and those of the last hour, each with its time line.

import { speedChart } from "./chart.js";
import { h } from "./dom.js";
import { bytes, clock, count, counted, layers, ms, rate, seconds, short } from "./format.js";
import { cancelSession } from "./live.js";
import { legend, nodeName, pill, timeLine } from "./parts.js";
import { changed, isLive, state } from "./store.js";
import { PHASES, circumstances, sentence, titleOf } from "./words.js";

const KIND = { completed: "good", failed: "bad", cancelled: "quiet" };
const open = new Set();

export function sessionsView() {
  const all = [...state.sessions.values()].toSorted((a, b) => b.created - a.created);
  const live = all.filter(isLive);
  const ended = all.filter((session) => !isLive(session));
  return [
    h("h1", { key: "title" }, "Sessions"),
    h("div", { class: "line", key: "legend" }, h("p", { class: "dim" }, `${whose()} One whole bar is the life of one session.`), legend("queued", "routing", "opening", "prefill", "decode")),
    h("section", { class: "panel", key: "live", "aria-labelledby": "h-live" }, h("h2", { id: "h-live" }, `Running (${live.length})`), list(live, "None now.")),
    h("section", { class: "panel", key: "ended", "aria-labelledby": "h-ended" }, h("h2", { id: "h-ended" }, `Ended within the hour (${ended.length})`), list(ended, "None.")),
  ];
}

const whose = () => (state.hello?.key === "anybody" ? "Of everybody: this Gateway asks for no API key." : `Of the API key ${state.hello?.key ?? ""}.`);
const list = (sessions, none) => (sessions.length ? h("ul", { class: "sessions" }, sessions.map(sessionView)) : h("p", { class: "empty" }, none));

function sessionView(session) {
  const { id, phase, model, created, prefill, decode, failure } = session;
  const isOpen = open.has(id);
  return h(
    "li",
    { key: id, class: `session ${KIND[phase] ?? "busy"}` },
    h(
      "div",
      { class: "session-head" },
      h("button", { type: "button", class: "plain", "aria-expanded": String(isOpen), onclick: () => (isOpen ? open.delete(id) : open.add(id), changed()) }, h("span", { class: "twist", "aria-hidden": "true" }, isOpen ? "▾" : "▸"), h("code", { title: id }, id.slice(0, 11)), h("span", { class: "unseen" }, " details")),
      pill(KIND[phase] ?? "busy", PHASES[phase]),
      h("span", {}, model),
      h("span", { class: "dim" }, clock(created)),
      h("span", { class: "numbers" }, session.output === "vector" ? `${count(prefill.total)} in, a vector out` : `${count(prefill.total)} in, ${count(decode.tokens)} out, ${rate(decode.tokens_per_s)} tokens/s`),
      isLive(session) && h("button", { type: "button", class: "small", onclick: () => cancelSession(id) }, "Cancel"),
    ),
    timeLine(session),
    failure && h("p", { class: "bad-text" }, `${titleOf(failure)}: ${failure.message}`),
    isOpen && details(session),
  );
}

function details(session) {
  const { id, decode, failure, route, seams } = session;
  const samples = state.samples.get(id) ?? [];
  return h(
    "div",
    { class: "details" },
    h("p", {}, `${PHASES[session.phase]}: ${sentence(session)}.${session.output === "vector" ? "" : ` First token after ${ms(decode.ttft_ms)}.`}`),
    failure && h("p", {}, [circumstances(failure), h("br", {}), h("strong", {}, "What to do: "), failure.advice]),
    samples.length > 1 && h("div", { class: "chart-box" }, h("h3", {}, "tokens/s, as seen from this page"), speedChart(samples, { height: 140, axes: true, label: "tokens/s over the life of the session" })),
    route &&
      h(
        "div",
        { class: "scroll", tabindex: "0", role: "region", "aria-label": "Hops" },
        h(
          "table",
          {},
          h("thead", {}, h("tr", {}, ["Node", "Layers", "Health", "Compute", "Queue", "Wire", "Over its Seam: prefill", "decode"].map((name) => h("th", { scope: "col" }, name)))),
          h("tbody", {}, route.hops.map((hop, i) => h("tr", {}, h("td", {}, nodeName(hop.node)), h("td", {}, layers(hop.layers)), h("td", { class: hop.health === "ok" ? "" : "bad-text" }, hop.health), h("td", {}, ms(hop.compute_ms)), h("td", {}, ms(hop.queue_ms)), h("td", {}, ms(hop.send_ms)), h("td", {}, seam(seams[i]?.prefill)), h("td", {}, seam(seams[i]?.decode))))),
        ),
      ),
    h("p", { class: "dim" }, h("code", {}, id), route ? `, route ${short(route.id)}, ${route.engine_class}` : "", session.ended === null ? "" : `, took ${seconds(session.ended - session.created)}`),
  );
}

const seam = (lane) => (lane?.steps ? `${counted(lane.steps, "step")}, ${bytes(lane.bytes)}` : "–");
