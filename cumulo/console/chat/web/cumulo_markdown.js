// Markdown to DOM nodes, for the answers of a model: whatever the text contains, only the tags named here are made.
// HTML in the text stays text, images are shown as links, links lead to http, https or mailto. Called by
// answer_text.js, which gives it the lines that are new.
//
// Every piece of text knows where it stood in the source, so that `mark` can split it at the tokens' borders.
import { highlight } from "cumulo_highlight";

const FENCE = /^( {0,3})(`{3,}|~{3,})\s*([^`\s]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*\s*$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])(\s+|$)/;
const QUOTE = /^ {0,3}> ?/;
const TABLE_RULE = /^ {0,3}\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;
const MOST_DEEP = 12; // lists in quotes in lists ...: deeper ones are shown as text

/** The lines of a text, each with the place of its first character. */
export function linesOf(source, from) {
  const lines = [];
  let at = from;
  for (const text of source.slice(from).split("\n")) {
    lines.push({ text, at });
    at += text.length + 1;
  }
  return lines;
}

/** Top-level blocks as {at, node}; `mark(parent, text, places)` adds a text to a node. */
export function blocks(lines, mark, depth = 0) {
  const made = [];
  let index = 0;
  while (index < lines.length) {
    if (!lines[index].text.trim()) {
      index += 1;
      continue;
    }
    const at = lines[index].at;
    const [node, next] = block(lines, index, mark, depth);
    made.push({ at, node });
    index = next;
  }
  return made;
}

function block(lines, index, mark, depth) {
  const { text } = lines[index];
  let match;
  if ((match = FENCE.exec(text))) return fenced(lines, index, match, mark);
  if ((match = HEADING.exec(text))) {
    const node = element("h" + Math.min(6, match[1].length + 1));
    const begin = text.indexOf(match[2], match[0].indexOf(match[1]) + match[1].length);
    inline(node, [cut(lines[index], begin, begin + match[2].length)], mark);
    return [node, index + 1];
  }
  if (RULE.test(text)) return [element("hr"), index + 1];
  if (depth < MOST_DEEP && QUOTE.test(text)) return quoted(lines, index, mark, depth);
  if (depth < MOST_DEEP && ITEM.test(text)) return listed(lines, index, mark, depth);
  if (text.includes("|") && index + 1 < lines.length && isTable(lines, index)) return table(lines, index, mark);
  let end = index + 1;
  while (end < lines.length && !interrupts(lines, end)) end += 1;
  const node = element("p");
  inline(node, lines.slice(index, end).map(trimmed), mark);
  return [node, end];
}

function interrupts(lines, index) {
  const { text } = lines[index];
  return (
    !text.trim() || FENCE.test(text) || HEADING.test(text) || RULE.test(text) || QUOTE.test(text) || ITEM.test(text) ||
    (text.includes("|") && index + 1 < lines.length && isTable(lines, index))
  ); // prettier-ignore
}

function fenced(lines, index, [, indent, fence, language], mark) {
  const inside = [];
  let end = index + 1;
  const closing = new RegExp(`^ {0,3}${fence[0] === "`" ? "`" : "~"}{${fence.length},}\\s*$`);
  while (end < lines.length && !closing.test(lines[end].text)) {
    const line = lines[end];
    const drop = Math.min(indent.length, line.text.length - line.text.trimStart().length);
    inside.push(cut(line, drop, line.text.length));
    end += 1;
  }
  const { text, places } = joined(inside);
  const frame = element("div", "code-block");
  const bar = frame.appendChild(element("div", "code-bar"));
  bar.appendChild(element("span")).textContent = language;
  const copy = bar.appendChild(element("button", "copy-code"));
  copy.type = "button";
  copy.textContent = "Copy";
  copy.onclick = () => {
    window.cumuloCopy(text);
    copy.textContent = "Copied";
    setTimeout(() => (copy.textContent = "Copy"), 1200);
  };
  const code = frame.appendChild(element("pre")).appendChild(element("code"));
  let done = 0;
  for (const [kind, start, stop] of highlight(text, language)) {
    mark(code, text.slice(done, start), places.slice(done, start));
    mark(code.appendChild(element("span", "hl-" + kind)), text.slice(start, stop), places.slice(start, stop));
    done = stop;
  }
  mark(code, text.slice(done), places.slice(done));
  return [frame, Math.min(lines.length, end + 1)];
}

function quoted(lines, index, mark, depth) {
  const inside = [];
  let end = index;
  for (; end < lines.length && QUOTE.test(lines[end].text); end += 1) {
    inside.push(cut(lines[end], QUOTE.exec(lines[end].text)[0].length, lines[end].text.length));
  }
  const node = element("blockquote");
  for (const child of blocks(inside, mark, depth + 1)) node.append(child.node);
  return [node, end];
}

function listed(lines, index, mark, depth) {
  const ordered = /\d/.test(ITEM.exec(lines[index].text)[2]);
  const node = element(ordered ? "ol" : "ul");
  if (ordered) node.start = parseInt(ITEM.exec(lines[index].text)[2], 10);
  let end = index;
  while (end < lines.length) {
    const match = ITEM.exec(lines[end].text);
    if (!match || RULE.test(lines[end].text) || /\d/.test(match[2]) !== ordered) break;
    const width = Math.min(match[0].length, match[1].length + match[2].length + 4);
    const inside = [cut(lines[end], Math.min(width, lines[end].text.length), lines[end].text.length)];
    end += 1;
    for (; end < lines.length; end += 1) {
      const { text } = lines[end];
      const indent = text.length - text.trimStart().length;
      const following = lines[end + 1];
      const goesOn = following && /^\s{2,}\S/.test(following.text);
      if (!text.trim() ? !goesOn : indent < 2 && interrupts(lines, end)) break;
      inside.push(cut(lines[end], Math.min(indent, width), text.length));
    }
    const item = node.appendChild(element("li"));
    for (const child of blocks(inside, mark, depth + 1)) item.append(child.node);
    // A blank line between two items does not end the list.
    if (end + 1 < lines.length && !lines[end].text.trim() && ITEM.test(lines[end + 1].text)) {
      const next = ITEM.exec(lines[end + 1].text);
      if (/\d/.test(next[2]) === ordered) end += 1;
    }
  }
  return [node, end];
}

function isTable(lines, index) {
  return (
    TABLE_RULE.test(lines[index + 1].text) && lines[index + 1].text.includes("-") &&
    cells(lines[index]).length === cells(lines[index + 1]).length
  ); // prettier-ignore
}

function cells(line) {
  const found = [];
  let begin = line.text.trimStart().startsWith("|") ? line.text.indexOf("|") + 1 : 0;
  const last = line.text.trimEnd();
  const stop = last.endsWith("|") && !last.endsWith("\\|") ? last.length - 1 : last.length;
  for (let at = begin; at <= stop; at += 1) {
    if (at === stop || (line.text[at] === "|" && line.text[at - 1] !== "\\")) {
      if (at >= begin) found.push(trimmed(cut(line, begin, at)));
      begin = at + 1;
    }
  }
  return found;
}

function table(lines, index, mark) {
  const align = cells(lines[index + 1]).map(({ text }) =>
    text.endsWith(":") ? (text.startsWith(":") ? "middle" : "end") : "",
  );
  const frame = element("div", "table-frame");
  const node = frame.appendChild(element("table"));
  const row = (line, tag) => {
    const made = node.appendChild(element("tr"));
    cells(line).slice(0, align.length).forEach((cell, column) => {
      inline(made.appendChild(element(tag, align[column] && "align-" + align[column])), [cell], mark);
    });
  };
  row(lines[index], "th");
  let end = index + 2;
  for (; end < lines.length && lines[end].text.trim() && lines[end].text.includes("|"); end += 1) row(lines[end], "td");
  return [frame, end];
}

// -- inside a paragraph ----------------------------------------------------------------------------------------
const ESCAPED = /^\\[!-/:-@[-`{-~]/;
const ADDRESS = /^https?:\/\/[^\s<>"')\]}]*[^\s<>"')\]}.,;:!?*_]/;
const LINK = /^(!?)\[((?:\\.|[^[\]\\])*)\]\(\s*<?([^\s<>()]*(?:\([^\s<>()]*\)[^\s<>()]*)*)>?(?:\s+["'][^"']*["'])?\s*\)/;
const ANGLE_LINK = /^<(https?:\/\/[^\s<>]+)>/;
const PAIRS = ["**", "__", "~~", "*", "_"];
const TAG_OF = { "**": "strong", __: "strong", "~~": "del", "*": "em", _: "em" };

function inline(parent, lines, mark) {
  const { text, places } = joined(lines);
  spans(parent, text, 0, text.length, places, mark, 0);
}

function spans(parent, text, from, to, places, mark, depth) {
  let plain = from;
  const flush = (end) => {
    if (end > plain) mark(parent, text.slice(plain, end), places.slice(plain, end));
  };
  let at = from;
  while (at < to) {
    const char = text[at];
    const rest = () => text.slice(at, to);
    let match;
    if (char === "\n") {
      flush(at);
      parent.append(element("br"));
      plain = at += 1;
    } else if (char === "\\" && ESCAPED.test(text.slice(at, at + 2))) {
      flush(at);
      plain = at + 1;
      at += 2;
    } else if (char === "`" && (match = /^(`+)([^]*?[^`])\1(?!`)/.exec(rest()))) {
      flush(at);
      const begin = at + match[1].length;
      const node = parent.appendChild(element("code"));
      mark(node, match[2], places.slice(begin, begin + match[2].length));
      plain = at += match[0].length;
    } else if ((char === "[" || char === "!") && (match = LINK.exec(rest()))) {
      flush(at);
      const begin = at + match[1].length + 1;
      link(parent, match[3], match[1], (node) => {
        if (depth < MOST_DEEP) spans(node, text, begin, begin + match[2].length, places, mark, depth + 1);
      });
      plain = at += match[0].length;
    } else if (char === "<" && (match = ANGLE_LINK.exec(rest()))) {
      flush(at);
      const begin = at + 1;
      link(parent, match[1], "", (node) => mark(node, match[1], places.slice(begin, begin + match[1].length)));
      plain = at += match[0].length;
    } else if (char === "h" && !/\w/.test(text[at - 1] ?? "") && (match = ADDRESS.exec(rest()))) {
      flush(at);
      const begin = at;
      link(parent, match[0], "", (node) => mark(node, match[0], places.slice(begin, begin + match[0].length)));
      plain = at += match[0].length;
    } else {
      const pair = depth < MOST_DEEP && (char === "*" || char === "_" || char === "~") ? paired(text, at, to) : null;
      if (pair === null) {
        at += 1;
        continue;
      }
      flush(at);
      const [opening, close] = pair;
      const node = parent.appendChild(element(TAG_OF[opening]));
      spans(node, text, at + opening.length, close, places, mark, depth + 1);
      plain = at = close + opening.length;
    }
  }
  flush(to);
}

/** [delimiter, where it closes] if what stands here opens an emphasis. */
function paired(text, at, to) {
  const opening = PAIRS.find((pair) => text.startsWith(pair, at));
  if (opening === undefined || at + opening.length >= to || /\s/.test(text[at + opening.length])) return null;
  if (opening[0] === "_" && /\w/.test(text[at - 1] ?? "")) return null;
  let close = at + opening.length;
  while ((close = text.indexOf(opening, close)) >= 0 && close < to) {
    const after = text[close + opening.length] ?? "";
    const single = opening.length === 2 || (text[close - 1] !== opening && after !== opening);
    const closes = !/\s/.test(text[close - 1]) && (opening[0] !== "_" || !/\w/.test(after));
    if (single && closes && close > at + opening.length) return [opening, close];
    close += opening.length;
  }
  return null;
}

/** Only addresses a person can judge before following them: the host is shown behind other words. */
function link(parent, address, image, fill) {
  let url = null;
  try {
    url = new URL(address);
  } catch {
    // not an address
  }
  if (url === null || !["http:", "https:", "mailto:"].includes(url.protocol)) {
    fill(parent.appendChild(element("span", "no-link")));
    return;
  }
  const node = parent.appendChild(element("a"));
  node.href = url.href;
  node.target = "_blank";
  node.rel = "noopener noreferrer nofollow";
  node.title = url.href;
  if (image) node.append("Image: ");
  fill(node);
  if (node.textContent !== address) {
    parent.appendChild(element("span", "link-target")).textContent = ` (${url.host || url.pathname})`;
  }
}

// -- pieces ----------------------------------------------------------------------------------------------------
function element(tag, classes) {
  const node = document.createElement(tag);
  if (classes) node.className = classes;
  return node;
}

const cut = (line, from, to) => ({ text: line.text.slice(from, to), at: line.at + from });

function trimmed(line) {
  const begin = line.text.length - line.text.trimStart().length;
  return cut(line, begin, Math.max(begin, line.text.trimEnd().length));
}

function joined(lines) {
  const places = [];
  for (const [number, { text, at }] of lines.entries()) {
    if (number) places.push(at - 1);
    for (let index = 0; index < text.length; index += 1) places.push(at + index);
  }
  return { text: lines.map(({ text }) => text).join("\n"), places };
}
