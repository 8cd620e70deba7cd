// The log tail of a Node: its last lines, which stay when the Node is gone. Shown to whoever opens it.

import { h } from "./dom.js";
import { clock24, counted } from "./format.js";
import { copyButton } from "./parts.js";
import { changed, state } from "./store.js";

const open = new Set();
const above = new Set(); // Nodes in whose log the reader has gone up to read

export const isLogOpen = (id) => open.has(id);

export function logView(id) {
  const lines = state.logs.get(id) ?? [];
  if (!lines.length) return null;
  const isOpen = open.has(id);
  const troubles = lines.filter(isTrouble).length;
  return h(
    "div",
    { class: "log", key: "log" },
    h(
      "div",
      { class: "log-head" },
      h("button", { type: "button", class: "plain", "aria-expanded": String(isOpen), "aria-controls": isOpen ? `log-${id}` : null, onclick: () => toggle(id) }, h("span", { class: "twist", "aria-hidden": "true" }, isOpen ? "▾" : "▸"), "Log", h("span", { class: "unseen" }, ` of Node ${id}`)),
      h("span", { class: "dim" }, `last ${counted(lines.length, "line")}${troubles ? `, ${counted(troubles, "warning")}` : ""}`),
      isOpen && copyButton(lines.map(asText).join("\n")),
    ),
    isOpen && h("ol", { class: "log-lines", id: `log-${id}`, tabindex: "0", role: "log", "aria-live": "off", "aria-label": `Log of Node ${id}`, onscroll: (event) => watch(id, event.target), each: (list) => follow(id, list) }, lines.map(line)),
  );
}

const isTrouble = ({ level }) => level === "warning" || level === "error" || level === "critical";
const asText = ({ time, level, text }) => `${new Date(time * 1000).toISOString()} ${level} ${text}`;

function line({ n, time, level, text }) {
  return h("li", { key: n, class: isTrouble({ level }) ? level : "" }, h("time", { title: new Date(time * 1000).toISOString() }, clock24(time)), h("span", { class: "level" }, level), h("span", { class: "words" }, text));
}

function toggle(id) {
  open.has(id) ? open.delete(id) : open.add(id);
  above.delete(id);
  changed();
}

function watch(id, list) {
  const isAtEnd = list.scrollHeight - list.scrollTop - list.clientHeight < 24;
  isAtEnd ? above.delete(id) : above.add(id);
}

/** The newest line stays in view, unless the reader has gone up. */
function follow(id, list) {
  if (!above.has(id)) list.scrollTop = list.scrollHeight;
}
