// The view Join: the exact command for the next machine, for the cluster as it is.

import { h } from "./dom.js";
import { layers } from "./format.js";
import { copyButton } from "./parts.js";
import { changed, state } from "./store.js";

export function joinView() {
  const joining = state.hello?.joining;
  return [h("h1", { key: "title" }, "Join"), h("div", { key: "all", class: "join" }, joining ? [lacks(), joining.keys ? withKeys(joining) : withoutKeys(joining)] : h("p", { class: "empty" }, "Asking the Gateway …"))];
}

function lacks() {
  const gaps = (state.cluster.models ?? []).filter((model) => model.missing.length);
  if (!gaps.length) return h("p", {}, "Every model that is served is whole. One more Node takes layers that make a second way, or a shorter one: the Tracker chooses them.");
  return h("p", { class: "notice bad" }, gaps.map((model) => `${model.model} lacks layers ${model.missing.map(layers).join(", ")}. `), "The Tracker gives them to the next Node that has room.");
}

const offered = () => (state.cluster.artifacts ?? []).filter((artifact) => artifact.offered);
/** Which model a Node serves: nothing where it fetches what the cluster lacks, else a file that it has. */
const modelWords = () => (offered().length ? "" : " --model MODEL.gguf");
const quoted = (word) => (/^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", "'\\''")}'`);

function aboutTheModel() {
  const names = offered().map((artifact) => artifact.name);
  if (names.length) return h("p", {}, `No file is needed: the Node fetches its layers (${names.join(", ")}), checks every piece and gives it to others.`);
  return h("p", {}, h("code", {}, "MODEL.gguf"), " is the same model file on that machine, in any place; a safetensors folder for the PyTorch engine.");
}

function withKeys({ tracker }) {
  return [
    h("p", {}, "Each machine needs a line of its own. It works once, so this page cannot show one that is still good: a Gateway may not invite. On the machine of the Tracker:"),
    command("shardline invite"),
    h("p", {}, "It prints the command for the next machine. Paste it there, with the model behind it:"),
    command(`shardline node --join '${tracker}/#TOKEN.PIN'${modelWords()}`, "The line that was printed stands for TOKEN.PIN."),
    aboutTheModel(),
    h("p", {}, "Another Gateway, so that clients have a second door:"),
    command("shardline invite --gateway"),
    needs(),
  ];
}

function withoutKeys({ tracker, is_local, flags }) {
  const shardline = ["shardline", ...flags.map(quoted)].join(" ");
  return [
    h("h2", {}, "A Node on this machine"),
    command(`${shardline} node --tracker ${tracker}${modelWords()}`),
    aboutTheModel(),
    is_local && [
      h("h2", {}, "Another machine"),
      h("p", {}, "This cluster listens on this machine only, and has no keys: no other one can join. End it, and start one for several machines; it prints the line for the next one."),
      command(`shardline serve MODEL.gguf --listen 0.0.0.0`),
    ],
    needs(),
  ];
}

const needs = () => h("p", { class: "dim" }, "The machine needs Shardline with an engine of the same class as the Nodes that are there (view Cluster), and must be reached by the Tracker and by the other Nodes.");

function command(text, note) {
  return h("figure", { class: "code" }, h("figcaption", {}, h("span", {}, note ?? "Command"), copyButton(text)), h("pre", { tabindex: "0", "aria-label": "Command" }, h("code", {}, text)));
}
