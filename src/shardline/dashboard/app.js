// The page: which view is shown, the tabs, the link to the Gateway, and the one place where anything is drawn.

import { chatView, followAnswer, watchScroll } from "./chat_view.js";
import { clusterView } from "./cluster_view.js";
import { h, patch } from "./dom.js";
import { joinView } from "./join_view.js";
import { key, start, useKey } from "./live.js";
import { pill } from "./parts.js";
import { sessionsView } from "./sessions_view.js";
import { changed, isLive, onChange, state } from "./store.js";

const VIEWS = { chat: ["Chat", chatView], cluster: ["Cluster", clusterView], sessions: ["Sessions", sessionsView], join: ["Join", joinView] };
const main = document.getElementById("main");
const tabs = document.getElementById("tabs");
const link = document.getElementById("link");
let shown = "";
let due = false;
let entered = "";

const wanted = () => (location.hash.slice(2) in VIEWS ? location.hash.slice(2) : "chat");

function draw() {
  due = false;
  const view = wanted();
  patch(tabs, Object.entries(VIEWS).map(([name, [title]]) => tab(name, title, view)));
  patch(link, linkState());
  main.className = `view-${view}`;
  patch(main, state.link.state === "locked" ? keyForm() : VIEWS[view][1]());
  if (view !== shown) {
    document.title = `${VIEWS[view][0]} – Shardline`;
    main.scrollTop = 0;
    if (shown) main.focus({ preventScroll: true });
    shown = view;
  }
  if (view === "chat") followAnswer();
}

function tab(name, title, view) {
  const live = name === "sessions" ? [...state.sessions.values()].filter(isLive).length : 0;
  const gaps = name === "cluster" && (state.cluster.models ?? []).some((model) => !model.ready);
  return h(
    "a",
    { href: `#/${name}`, key: name, "aria-current": name === view ? "page" : null },
    title,
    live > 0 && h("span", { class: "badge", "aria-label": `${live} running` }, live),
    gaps && h("span", { class: "badge bad", "aria-label": "a model is not whole" }, "!"),
  );
}

function linkState() {
  const { state: now, error } = state.link;
  const words = { connecting: "connecting", live: "live", lost: "not connected", locked: "locked" }[now];
  const kind = { connecting: "busy", live: "good", lost: "bad", locked: "busy" }[now];
  return [
    pill(`${kind} dot`, words, error?.message ?? (state.hello ? `Shardline ${state.hello.version}` : "")),
    key() && now === "live" && h("button", { type: "button", class: "small", onclick: () => useKey("") }, "Forget key"),
  ];
}

function keyForm() {
  return h(
    "form",
    { class: "key-form panel", key: "key", onsubmit: (event) => (event.preventDefault(), useKey(entered.trim()), (entered = "")) },
    h("h1", {}, "API key"),
    h("p", {}, "This Gateway asks for an API key. It is kept in this tab only, and sent to this Gateway only."),
    state.link.error && h("p", { class: "bad-text", role: "alert" }, `${state.link.error.message}.`),
    h("label", { for: "key" }, "API key"),
    h("input", { id: "key", type: "password", autocomplete: "off", spellcheck: "false", value: entered, oninput: (event) => (entered = event.target.value), ref: (field) => field.focus() }),
    h("button", { type: "submit", class: "send" }, "Use it"),
  );
}

function soon() {
  if (due) return;
  due = true;
  requestAnimationFrame(draw);
}

onChange(soon);
addEventListener("hashchange", soon);
// What counts seconds goes on counting, also where nothing is heard.
setInterval(() => document.visibilityState === "visible" && changed(), 1000);
document.getElementById("skip").onclick = (event) => (event.preventDefault(), main.focus());
watchScroll(main);
draw();
start();
