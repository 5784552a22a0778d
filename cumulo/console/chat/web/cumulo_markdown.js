// Markdown to DOM nodes, for the answers of a model, by markdown-it and highlight.js (vendor/, with their licences).
// The text is not trusted: HTML in it stays text, images are shown as links, links lead to http, https or mailto.
// Called by answer_text.js, which gives it the text from the last block on.
import MarkdownIt from "markdown_it";
import hljs from "highlight_js";

const MOST_HIGHLIGHTED = 100_000; // longer code is shown plain: nobody reads it, and the page stays quick
hljs.configure({ classPrefix: "hl-" });
const markdown = new MarkdownIt({ html: false, linkify: true, breaks: true, maxNesting: 24 });
const { escapeHtml } = markdown.utils;
markdown.validateLink = (address) => /^(https?:\/\/|mailto:)/i.test(address.trim());
markdown.linkify.set({ fuzzyLink: false, fuzzyEmail: false });
markdown.renderer.rules.image = (tokens, index) => {
  const address = escapeHtml(tokens[index].attrGet("src"));
  return `<a href="${address}">Image: ${escapeHtml(tokens[index].content)}</a>`;
};
markdown.renderer.rules.fence = markdown.renderer.rules.code_block = (tokens, index) => {
  const language = tokens[index].info.trim().split(/\s/)[0];
  const bar = `<span>${escapeHtml(language)}</span><button type="button" class="copy-code">Copy</button>`;
  const code = highlighted(tokens[index].content.replace(/\n$/, ""), language);
  return `<div class="code-block"><div class="code-bar">${bar}</div><pre><code>${code}</code></pre></div>`;
};

markdown.renderer.rules.table_open = () => '<div class="table-frame"><table>';
markdown.renderer.rules.table_close = () => "</table></div>";

function highlighted(code, language) {
  if (code.length > MOST_HIGHLIGHTED || !hljs.getLanguage(language)) return escapeHtml(code);
  return hljs.highlight(code, { language, ignoreIllegals: true }).value;
}

/** Top-level blocks of the source from a place on, as {at, node}: where the block begins, and an element with it. */
export function blocks(source, from) {
  const starts = [from];
  for (const end of source.slice(from).matchAll(/\r\n?|\n/g)) starts.push(from + end.index + end[0].length);
  const tokens = markdown.parse(source.slice(from), {});
  const made = [];
  for (let first = 0, last; first < tokens.length; first = last + 1) {
    last = first;
    while (tokens[last].level > 0 || tokens[last].nesting > 0) last += 1;
    const block = tokens.slice(first, last + 1);
    for (const one of block) {
      if (one.type.startsWith("heading")) one.tag = `h${Math.min(6, Number(one.tag[1]) + 1)}`; // h1 is the page's
    }
    const node = document.createElement("div");
    node.className = "block";
    node.innerHTML = markdown.renderer.render(block, markdown.options, {});
    finish(node);
    made.push({ at: starts[block[0].map[0]], node });
  }
  return made;
}

/** Links open elsewhere and show their host; cells are aligned by a class. */
function finish(node) {
  for (const cell of node.querySelectorAll("[style]")) {
    cell.className = `align-${cell.style.textAlign}`;
    cell.removeAttribute("style");
  }
  for (const link of node.querySelectorAll("a")) {
    link.target = "_blank";
    link.rel = "noopener noreferrer nofollow";
    link.title = link.href;
    if (link.textContent === link.getAttribute("href")) continue;
    const target = document.createElement("span");
    target.className = "link-target";
    target.textContent = ` (${link.host || link.pathname})`;
    link.after(target);
  }
}

/** Each text of a drawn block with the places of its characters in the source, which stands there in the same order
 * with marks in between. `draw(text, places)` gives the node that takes its place. */
export function replaceTexts(node, source, at, draw) {
  const walker = document.createTreeWalker(node, NodeFilter.SHOW_TEXT);
  const texts = [];
  while (walker.nextNode()) {
    if (!walker.currentNode.parentElement.closest(".code-bar, .link-target")) texts.push(walker.currentNode);
  }
  if (node.querySelector(":scope > .code-block")) at = source.indexOf("\n", at) + 1;
  for (const text of texts) {
    const whole = source.indexOf(text.data, at);
    const places = [];
    if (whole >= 0) at = whole;
    for (const character of text.data) {
      const found = source.indexOf(character, at);
      if (found >= 0 && found - at < 16) at = found + character.length; // an entity is longer than what it stands for
      for (let unit = 0; unit < character.length; unit += 1) places.push(Math.max(0, at - character.length + unit));
    }
    text.replaceWith(draw(text.data, places));
  }
}
