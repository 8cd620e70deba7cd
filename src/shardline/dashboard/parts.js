// Small pieces that several views draw: pills, bars, the copy button, the time line of a session.

import { h } from "./dom.js";
import { ms, share, short } from "./format.js";
import { changed, now } from "./store.js";
import { PHASES } from "./words.js";

export const pill = (kind, text, title) => h("span", { class: `pill ${kind}`, title }, text);
export const nodeName = (id) => h("code", { class: "node", title: id }, short(id));
export const legend = (...names) => h("ul", { class: "legend" }, names.map((name) => h("li", { class: name }, name)));

/** A bar of stacked parts: [class, value, words]; what it says stands beside it as text. */
export function meter(label, all, parts, text) {
  return h(
    "div",
    { class: "meter" },
    h("span", { class: "meter-label" }, label),
    h("span", { class: "meter-text" }, text),
    h(
      "span",
      { class: "track", role: "img", "aria-label": `${label}: ${text}` },
      parts.map(([kind, value, words]) =>
        h("i", { class: kind, title: words, style: { width: `${100 * share(value, all)}%` } }),
      ),
    ),
  );
}

const copied = new Map(); // text -> the timer that takes the word back

/** Copies `text`, and says for a moment that it has. */
export function copyButton(text, words = "Copy") {
  return h("button", { type: "button", class: "small", onclick: () => copy(text) }, copied.has(text) ? "Copied" : words);
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    copyBySelection(text); // not on a secure origin: the clipboard's own interface is not there
  }
  clearTimeout(copied.get(text));
  copied.set(text, setTimeout(() => (copied.delete(text), changed()), 1600));
  announce("Copied.");
  changed();
}

function copyBySelection(text) {
  const area = Object.assign(document.createElement("textarea"), { value: text, className: "unseen" });
  const focused = document.activeElement;
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
  focused?.focus();
}

/** Told to whoever listens instead of looking. */
export function announce(text) {
  document.getElementById("announcer").textContent = text;
}

const DURING = ["queued", "routing", "opening", "prefill", "decode"];

/** Phases of a session as [{ phase, begins, ms }], from its arrival to its end or to now. */
function spans(session) {
  const end = ((session.ended ?? now()) - session.created) * 1000;
  const began = session.phases.filter(([phase]) => DURING.includes(phase));
  if (!began.length || began[0][1] > 0.5) began.unshift(["queued", 0]); // it came back to the queue since
  return began.map(([phase, begins], i) => {
    const last = i + 1 < began.length ? began[i + 1][1] : Math.max(end, begins);
    return { phase, begins, ms: Math.max(0, last - begins) };
  });
}

export function timeLine(session) {
  const parts = spans(session);
  const all = parts.reduce((sum, part) => sum + part.ms, 0);
  const words = parts.filter((part) => part.ms >= 0.5).map((part) => `${PHASES[part.phase].toLowerCase()} ${ms(part.ms)}`);
  return h(
    "div",
    { class: "time-line" },
    h(
      "div",
      { class: "track tall", role: "img", "aria-label": `Time line: ${words.join(", ")}` },
      parts.map((part) =>
        h("i", {
          class: `phase-${part.phase}`,
          title: `${PHASES[part.phase]}: ${ms(part.ms)}`,
          style: { width: `${100 * share(part.ms, all)}%` },
        }),
      ),
    ),
    h(
      "div",
      { class: "spans", "aria-hidden": "true" },
      parts.filter((part) => part.ms >= 0.5).map((part) => h("span", { class: `phase-${part.phase}` }, `${PHASES[part.phase]} ${ms(part.ms)}`)),
    ),
  );
}
