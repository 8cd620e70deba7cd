// The search of the documentation, in place of MkDocs' own, which needs a worker: a page that was opened as a file may
// start none, and may not read JSON either. So lunr and the index come as scripts, on the first search.
// scripts/site.py writes the index; tests/docs/test_site.py shows this.
(function () {
  "use strict";

  function loadScript(path) {
    return new Promise(function (resolve, reject) {
      const script = document.createElement("script");
      script.src = base_url.replace(/\/$/, "") + "/" + path;
      script.onload = resolve;
      script.onerror = function () { reject(new Error(path + " was not loaded")); };
      document.head.append(script);
    });
  }

  async function loadIndex() {
    await loadScript("search/lunr.js");
    await loadScript("search/search_index.js");
    const { config, docs } = window.searchIndex;
    if (config.separator) lunr.tokenizer.separator = new RegExp(config.separator);
    const index = lunr(function () {
      this.ref("location");
      this.field("title", { boost: 10 });
      this.field("text");
      docs.forEach(function (page) { this.add(page); }, this);
    });
    const pages = new Map(docs.map(function (page) { return [page.location, page]; }));
    return function (words) {
      // What means something to lunr's own language is no part of a word.
      const asked = words.replace(/[:^~*+-]/g, " ");
      return index.search(asked).map(function (hit) { return pages.get(hit.ref); });
    };
  }

  function article(page) {
    const made = document.createElement("article");
    const heading = document.createElement("h3");
    const link = document.createElement("a");
    link.href = base_url.replace(/\/$/, "") + "/" + page.location;
    link.textContent = page.title;
    heading.append(link);
    const summary = document.createElement("p");
    summary.textContent = page.text.slice(0, 200);
    made.append(heading, summary);
    return made;
  }

  function sentence(text) {
    const made = document.createElement("p");
    made.textContent = text;
    return made;
  }

  document.addEventListener("DOMContentLoaded", function () {
    const input = document.getElementById("mkdocs-search-query");
    const results = document.getElementById("mkdocs-search-results");
    if (!input || !results) return;
    let loading = null;

    async function show() {
      const words = input.value.trim();
      if (words.length < 3) {
        results.replaceChildren();
        return;
      }
      loading ??= loadIndex();
      try {
        const search = await loading;
        if (words !== input.value.trim()) return;
        const found = search(words);
        results.replaceChildren(...(found.length ? found.map(article) : [sentence(results.dataset.noResultsText || "Nothing found.")]));
      } catch (error) {
        loading = null;
        results.replaceChildren(sentence("The search does not work: " + error.message));
      }
    }

    input.addEventListener("input", show);
    input.form?.addEventListener("submit", function (event) { event.preventDefault(); });
    const asked = new URLSearchParams(window.location.search).get("q");
    if (asked) {
      input.value = asked;
      show();
    }
  });
})();
