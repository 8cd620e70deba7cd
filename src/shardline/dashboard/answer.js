// The text of a model as elements: paragraphs as they are, fenced code in a box. Never as markup: what a model writes is
// a stranger's text.

import { h } from "./dom.js";
import { copyButton } from "./parts.js";

const FENCE = /^(?:```|~~~)[ \t]*([\w+#.-]*)[^\n]*\n([\s\S]*?)(?:^(?:```|~~~)[ \t]*$|$(?![\s\S]))/gm;

export function answerBlocks(written) {
  const text = written.trimStart();
  const blocks = [];
  let last = 0;
  for (const found of text.matchAll(FENCE)) {
    blocks.push(...prose(text.slice(last, found.index)), code(found[1], found[2].replace(/\n$/, "")));
    last = found.index + found[0].length;
  }
  return [...blocks, ...prose(text.slice(last))];
}

function prose(text) {
  const shown = text.replace(/^\n+|\s+$/g, "");
  return shown ? [h("div", { class: "prose" }, shown.split(/(`[^`\n]+`)/).map(inline))] : [];
}

const inline = (piece) => (piece.length > 2 && piece.startsWith("`") && piece.endsWith("`") ? h("code", {}, piece.slice(1, -1)) : piece);

function code(language, text) {
  return h(
    "figure",
    { class: "code" },
    h("figcaption", {}, h("span", {}, language || "code"), copyButton(text)),
    h("pre", { tabindex: "0", "aria-label": `${language || "Code"}` }, h("code", {}, text)),
  );
}
