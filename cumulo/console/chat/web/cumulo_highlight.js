// highlight(code, language): [class, start, end] ranges of source code, in order. Used by cumulo_markdown.js.
// One scanner for all languages: comments, strings, numbers and keywords are what helps the eye; nothing is parsed.

const C_LIKE =
  "if else for while do switch case default break continue return struct enum class interface public private " +
  "protected static const void int long short char float double bool boolean unsigned signed new delete try catch " +
  "finally throw throws import package namespace using template typename virtual override extends implements this " +
  "super null nullptr true false sizeof auto inline final abstract synchronized goto typedef union extern volatile";
const WORDS = {
  python:
    "and as assert async await break class continue def del elif else except finally for from global if import in is " +
    "lambda match case nonlocal not or pass raise return try while with yield None True False self",
  javascript:
    "async await break case catch class const continue debugger default delete do else export extends false finally " +
    "for from function if implements import in instanceof interface let new null of return static super switch this " +
    "throw true try type typeof undefined var void while yield",
  c: C_LIKE,
  rust:
    "as async await break const continue crate dyn else enum extern false fn for if impl in let loop match mod move " +
    "mut pub ref return self Self static struct super trait true type unsafe use where while",
  go:
    "break case chan const continue default defer else fallthrough false for func go goto if import interface map nil " +
    "package range return select struct switch true type var",
  shell:
    "if then else elif fi for while do done case esac in function return export local set unset echo cd exit source",
  sql:
    "select from where insert into values update set delete create table drop alter join left right inner outer on " +
    "group by order having limit as and or not null primary key distinct union all case when then else end in like",
  data: "true false null yes no",
};
const FAMILIES = {
  python: "py python3 python", javascript: "js jsx ts tsx typescript javascript mjs", rust: "rs rust", go: "go golang",
  c: "c h cpp c++ cc hpp java cs csharp kotlin kt swift scala php dart cuda objc",
  shell: "sh bash shell zsh console fish powershell", sql: "sql sqlite postgresql mysql",
  data: "json yaml yml toml ini jsonc",
}; // prettier-ignore
const FAMILY_OF = Object.fromEntries(
  Object.entries(FAMILIES).flatMap(([family, names]) => names.split(" ").map((name) => [name, family])),
);
const HASH = "#[^\\n]*", SLASHES = "//[^\\n]*|/\\*[\\s\\S]*?(?:\\*/|$)", DASHES = "--[^\\n]*|/\\*[\\s\\S]*?(?:\\*/|$)";
const COMMENTS = {
  python: HASH, shell: "(?<![^\\s])#[^\\n]*", data: "(?<![^\\s])#[^\\n]*|//[^\\n]*", sql: DASHES, javascript: SLASHES,
  c: SLASHES, rust: SLASHES, go: SLASHES,
}; // prettier-ignore
const STRINGS =
  '"""[\\s\\S]*?(?:"""|$)|\'\'\'[\\s\\S]*?(?:\'\'\'|$)|"(?:\\\\.|[^"\\\\\\n])*"?|\'(?:\\\\.|[^\'\\\\\\n])*\'?';
const TEMPLATE = "`(?:\\\\[\\s\\S]|[^`\\\\])*`?";
const NUMBERS = "\\b(?:0[xX][0-9a-fA-F_]+|0[bB][01_]+|\\d[\\d_]*(?:\\.\\d+)?(?:[eE][+-]?\\d+)?)\\b";
const _LONGEST = 100_000; // beyond, code is shown plain: nobody reads it, and the page stays quick

function rules(family) {
  const strings = family === "javascript" || family === "go" || family === "shell" ? `${STRINGS}|${TEMPLATE}` : STRINGS;
  const flags = family === "sql" ? "gi" : "g";
  const words = WORDS[family].split(" ").join("|");
  return new RegExp(
    `(?<comment>${COMMENTS[family]})|(?<string>${strings})|(?<number>${NUMBERS})|(?<keyword>\\b(?:${words})\\b)|` +
      "(?<call>\\b[A-Za-z_]\\w*(?=\\())",
    flags,
  );
}

const MARKUP = /(?<comment><!--[\s\S]*?(?:-->|$))|(?<keyword><\/?[A-Za-z][\w:-]*|\/?>)|(?<string>"[^"\n]*"?)/g;
const made = {};

export function highlight(code, language) {
  const name = language.toLowerCase();
  if (code.length > _LONGEST) return [];
  if (["html", "xml", "svg", "vue"].includes(name)) return ranges(code, MARKUP);
  const family = FAMILY_OF[name];
  if (family === undefined) return [];
  made[family] ??= rules(family);
  return ranges(code, made[family]);
}

function ranges(code, pattern) {
  const found = [];
  for (const match of code.matchAll(pattern)) {
    const kind = Object.keys(match.groups).find((group) => match.groups[group] !== undefined);
    if (match[0].length) found.push([kind, match.index, match.index + match[0].length]);
  }
  return found;
}
