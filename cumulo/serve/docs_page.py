"""The page `/docs`: the API's description for people, made from the same OpenAPI document. Used by `create_app`.

Plain HTML without a script and without anything from another host: FastAPI's own page loads its scripts from a CDN.
"""

import json
from collections.abc import Mapping
from html import escape
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse

# No scripts, nothing from elsewhere, in nobody's frame.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'; base-uri 'none'"
_DEEPEST = 3  # schemas inside schemas are laid out so far; what lies deeper is named
_STYLE = """
:root { color-scheme: light dark; --ink: #1d2526; --soft: #5d6a6c; --line: #dfe4e4; --card: #fff; --ground: #f6f7f7;
  --accent: #2b756c; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4eaea; --soft: #98a6a8; --line: #2e3839; --card: #1c2324;
  --ground: #14191a; --accent: #55b3a7; } }
body { margin: 0; background: var(--ground); color: var(--ink); font: 15px/1.55 system-ui, sans-serif; }
main { max-width: 880px; margin: 0 auto; padding: 24px 16px 48px; }
h1 { font-size: 22px; margin: 0; } h2 { font-size: 15px; margin: 28px 0 10px; text-transform: capitalize; }
h3 { font-size: 13px; color: var(--soft); font-weight: 500; margin: 14px 0 4px; }
a { color: var(--accent); } .soft { color: var(--soft); }
details.operation { background: var(--card); border: 1px solid var(--line); border-radius: 10px; margin: 8px 0; }
details.operation > summary { padding: 10px 14px; cursor: pointer; overflow-wrap: anywhere; }
.inside { padding: 0 14px 14px; overflow-x: auto; }
code, pre { font: 13px/1.5 ui-monospace, Menlo, Consolas, monospace; }
.method { color: var(--accent); font-weight: 600; }
pre { background: var(--ground); border-radius: 8px; padding: 10px 12px; overflow-x: auto; }
table { width: 100%; border-collapse: collapse; font-size: 14px; }
td { padding: 5px 10px 5px 0; border-top: 1px solid var(--line); vertical-align: top; }
td:first-child { white-space: nowrap; } td p { margin: 0; }
td details { margin-top: 4px; } td summary { color: var(--soft); cursor: pointer; }
@media (max-width: 600px) { td { display: block; overflow-wrap: anywhere; }
  td + td { border-top: 0; padding-top: 0; } td:first-child { padding-bottom: 2px; } }
"""


def install(app: FastAPI) -> None:
    """Both in threads: the description takes long to make, and nobody's stream waits for it."""

    @app.get("/openapi.json", include_in_schema=False)
    def description() -> JSONResponse:
        return JSONResponse(app.openapi())

    @app.get("/docs", include_in_schema=False)
    def docs(request: Request) -> HTMLResponse:
        page = render(app.openapi(), str(request.base_url).rstrip("/"))
        return HTMLResponse(
            page, headers={"Content-Security-Policy": _POLICY, "X-Content-Type-Options": "nosniff"}
        )


def render(description: Mapping[str, Any], address: str) -> str:
    """The whole page of an OpenAPI document; `address` is where the server was reached."""
    groups: dict[str, list[str]] = {}
    for path, operations in description["paths"].items():
        for method, operation in operations.items():
            group = (operation.get("tags") or [_group(path)])[0]
            groups.setdefault(group, []).append(_operation(description, address, path, method, operation))
    body = "".join(f"<h2>{escape(name)}</h2>{''.join(parts)}" for name, parts in groups.items())
    info = description["info"]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" '
        f'content="width=device-width, initial-scale=1"><title>API · {escape(info["title"])}</title>'
        f"<style>{_STYLE}</style></head><body><main><h1>{escape(info['title'])} {escape(info['version'])}</h1>"
        f'<p class="soft">{escape(info.get("summary") or "")}. Any OpenAI client works with <code>base_url='
        f'"{escape(address)}/v1"</code>. For programs: <a href="/openapi.json">openapi.json</a>.</p>{body}</main>'
        "</body></html>"
    )


def _group(path: str) -> str:
    return "the API" if path.startswith("/v1/") else "operation"


def _operation(
    description: Mapping[str, Any], address: str, path: str, method: str, operation: Mapping[str, Any]
) -> str:
    parts = []
    if text := operation.get("description"):
        parts.append(f"<p>{escape(text)}</p>")
    if parameters := operation.get("parameters"):
        rows = "".join(
            _row(
                p["name"],
                p.get("schema", {}),
                description,
                p.get("description", ""),
                p.get("required", False),
                0,
            )
            for p in parameters
        )
        parts.append(f"<h3>parameters</h3><table>{rows}</table>")
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
    if body is not None:
        parts.append(f"<h3>body</h3>{_fields(body, description, 0)}")
        parts.append(f"<h3>example</h3><pre>{escape(_example(address, path, body, description))}</pre>")
    answers = "".join(
        f"<tr><td><code>{escape(status)}</code></td><td>{escape(answer.get('description', ''))}</td></tr>"
        for status, answer in operation["responses"].items()
    )
    parts.append(f"<h3>answers</h3><table>{answers}</table>")
    return (
        f'<details class="operation"><summary><code><span class="method">{method.upper()}</span> {escape(path)}'
        f'</code> <span class="soft">{escape(operation.get("summary", ""))}</span></summary>'
        f'<div class="inside">{"".join(parts)}</div></details>'
    )


def _example(address: str, path: str, body: Mapping[str, Any], description: Mapping[str, Any]) -> str:
    """A command that works when pasted: the required fields, with the values the description suggests."""
    schema = _resolved(body, description)
    values: dict[str, Any] = {}
    for name in schema.get("required", ()):
        known = _resolved(schema["properties"][name], description)
        values[name] = (known.get("examples") or known.get("enum") or [None])[0]
    if "messages" in values:
        values["messages"] = [{"role": "user", "content": "Hello!"}]
    for name in ("prompt", "input"):
        if name in values:
            values[name] = "Hello!"
    sent = json.dumps({name: value for name, value in values.items() if value is not None})
    return f"curl {address}{path} -H 'Content-Type: application/json' -d '{sent}'"


def _fields(schema: Mapping[str, Any], description: Mapping[str, Any], depth: int) -> str:
    resolved = _resolved(schema, description)
    properties = resolved.get("properties")
    if not properties:
        return f"<p><code>{escape(_type(schema, description))}</code></p>"
    required = resolved.get("required", ())
    rows = "".join(
        _row(name, inner, description, inner.get("description", ""), name in required, depth)
        for name, inner in properties.items()
    )
    return f"<table>{rows}</table>"


def _row(
    name: str,
    schema: Mapping[str, Any],
    description: Mapping[str, Any],
    text: str,
    required: bool,
    depth: int,
) -> str:
    kind = _type(schema, description)
    facts = [f"<code>{escape(kind)}</code>", "required" if required else "", _bounds(schema)]
    line = " · ".join(fact for fact in facts if fact)
    inner = ""
    if depth < _DEEPEST:
        for part in _objects(schema, description):
            title = escape(part.get("title", "fields"))
            inner += f"<details><summary>{title}</summary>{_fields(part, description, depth + 1)}</details>"
    return (
        f"<tr><td><code>{escape(name)}</code></td><td><span class=soft>{line}</span>"
        f"<p>{escape(text)}</p>{inner}</td></tr>"
    )


def _resolved(schema: Mapping[str, Any], description: Mapping[str, Any]) -> Mapping[str, Any]:
    while "$ref" in schema:
        schema = description["components"]["schemas"][schema["$ref"].rsplit("/", 1)[-1]]
    return schema


def _objects(schema: Mapping[str, Any], description: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The objects with fields that a value may be, or hold in a list."""
    resolved = _resolved(schema, description)
    if resolved.get("properties"):
        return [resolved]
    inner = [*resolved.get("anyOf", ()), *resolved.get("oneOf", ())]
    if "items" in resolved:
        inner.append(resolved["items"])
    return [found for part in inner for found in _objects(part, description)]


def _type(schema: Mapping[str, Any], description: Mapping[str, Any]) -> str:
    if "$ref" in schema:
        resolved = _resolved(schema, description)
        return "object" if resolved.get("properties") else _type(resolved, description)
    options = [*schema.get("anyOf", ()), *schema.get("oneOf", ())]
    if options:
        kinds = dict.fromkeys(_type(option, description) for option in options)
        kinds.pop("null", None)  # every field may be null, which is as if it were left out
        return " or ".join(kinds)
    if "const" in schema:
        return json.dumps(schema["const"])
    if "enum" in schema:
        return " or ".join(json.dumps(value) for value in schema["enum"])
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}), description)}"
    return str(schema.get("type", "anything"))


def _bounds(schema: Mapping[str, Any]) -> str:
    words = {
        "minimum": "at least", "maximum": "at most", "exclusiveMinimum": "more than",
        "exclusiveMaximum": "less than", "maxLength": "at most", "default": "default",
    }  # fmt: skip
    units = {"maxLength": " characters"}
    found = {**schema}
    for option in schema.get("anyOf", ()):
        found = {**option, **found}
    return ", ".join(
        f"{word} {escape(_plain(found[key]))}{units.get(key, '')}"
        for key, word in words.items()
        if key in found and found[key] is not None
    )


def _plain(value: Any) -> str:
    """JSON, with whole numbers as one writes them; the description has them all with a decimal point."""
    if isinstance(value, float) and value.is_integer():
        return f"{value:,.0f}"
    return json.dumps(value)
