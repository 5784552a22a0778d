"""Skeletons: prompts of simple chat templates without running the template. Used by `ChatTemplate`.

Many templates (ChatML, Zephyr and their kin) put a message's content into the prompt as it is and never look at
it. Then the prompt's other parts depend on nothing but the roles: they are rendered once per sequence of roles,
with marks for the contents, and later prompts only fill in the contents. `contents_are_opaque` proves it from the
template's syntax tree; a template with anything it does not know there is run for every prompt.
"""

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jinja2 import Environment, TemplateSyntaxError, nodes

_MOST_MESSAGES = 32
_MOST_SKELETONS = 256
_LONGEST_CONTENT = 1_000_000  # characters; what is longer is charged to the template's budget
_MARK = secrets.token_hex(16)  # nobody can have written it
_HOLE = re.compile(f"{_MARK}(\\d+);")

Render = Callable[[list[dict[str, Any]], bool], str]


class Skeletons:
    def __init__(self, render: Render) -> None:
        """`render` runs a template whose contents are opaque."""
        self._render = render
        self._known: dict[tuple[Any, ...], list[str | int]] = {}

    def knows(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool) -> bool:
        """Whether `fill` has the skeleton of these messages."""
        roles = []
        for message in messages:
            if type(message.get("content")) is not str:
                return False
            roles.append(message.get("role"))
        return (add_generation_prompt, *roles) in self._known

    def fill(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool) -> str | None:
        """The prompt; None: run the template."""
        if not 0 < len(messages) <= _MOST_MESSAGES:
            return None
        contents, roles = [], []
        for message in messages:
            content, role = message.get("content"), message.get("role")
            if type(content) is not str or type(role) is not str or len(content) > _LONGEST_CONTENT:
                return None
            contents.append(content)
            roles.append(role)
        key = (add_generation_prompt, *roles)
        skeleton = self._known.get(key)
        if skeleton is None:
            skeleton = self._make(roles, add_generation_prompt)
            if len(self._known) < _MOST_SKELETONS and sum(map(len, roles)) < 1024:
                self._known[key] = skeleton
        return "".join([contents[part] if isinstance(part, int) else part for part in skeleton])

    def _make(self, roles: list[str], add_generation_prompt: bool) -> list[str | int]:
        """Texts, and where a content goes its message's index. Raises what the template does."""
        marked = [{"role": role, "content": f"{_MARK}{index};"} for index, role in enumerate(roles)]
        parts = _HOLE.split(self._render(marked, add_generation_prompt))
        return [int(part) if position % 2 else part for position, part in enumerate(parts)]


def contents_are_opaque(source: str) -> bool:
    """Whether the template reads only roles and contents of messages, and only writes the contents out."""
    try:
        template = Environment().parse(source)
    except (TemplateSyntaxError, RecursionError):  # a tag that jinja2 does not know by itself
        return False
    loops = [loop for loop in template.find_all(nodes.For) if _is_messages(loop.iter)]
    if any(not isinstance(loop.target, nodes.Name) for loop in loops):
        return False
    items = {loop.target.name for loop in loops if isinstance(loop.target, nodes.Name)}
    return items.isdisjoint(("messages", "loop")) and all(
        _statement_is_plain(node, items) for node in template.body
    )


def _statement_is_plain(node: nodes.Node, items: set[str]) -> bool:
    if isinstance(node, nodes.Output):
        return all(_text_is_plain(part, items) for part in node.nodes)
    if isinstance(node, nodes.If):
        inner = [*node.body, *node.elif_, *node.else_]
        return _value_is_plain(node.test, items) and all(_statement_is_plain(part, items) for part in inner)
    if isinstance(node, nodes.For):
        inner = [*node.body, *node.else_]
        return (
            _is_messages(node.iter)
            and not node.recursive
            and (node.test is None or _value_is_plain(node.test, items))
            and all(_statement_is_plain(part, items) for part in inner)
        )
    return False


def _text_is_plain(node: nodes.Node, items: set[str]) -> bool:
    """What is written out: contents, joined to whatever does not depend on them."""
    if isinstance(node, nodes.Add):
        return _text_is_plain(node.left, items) and _text_is_plain(node.right, items)
    if isinstance(node, nodes.Concat):
        return all(_text_is_plain(part, items) for part in node.nodes)
    if isinstance(node, nodes.CondExpr):
        branches = [part for part in (node.expr1, node.expr2) if part is not None]
        return _value_is_plain(node.test, items) and all(_text_is_plain(part, items) for part in branches)
    return _field_of_item(node, items) == "content" or _value_is_plain(node, items)


def _value_is_plain(node: nodes.Node, items: set[str]) -> bool:
    """Whether a value is the same whatever the contents are, at any time."""
    if isinstance(node, (nodes.Const, nodes.TemplateData)):
        return True
    if isinstance(node, nodes.Name):
        return node.ctx == "load" and node.name not in {*items, "messages", "loop"}
    if isinstance(node, (nodes.Getitem, nodes.Getattr)):
        if isinstance(node, nodes.Getattr) and isinstance(node.node, nodes.Name) and node.node.name == "loop":
            return node.attr in ("first", "last", "index", "index0", "revindex", "revindex0", "length")
        return _field_of_item(node, items) == "role"
    if isinstance(node, nodes.Compare):
        return all(_value_is_plain(part, items) for part in (node.expr, *(op.expr for op in node.ops)))
    if isinstance(node, (nodes.And, nodes.Or, nodes.Add)):
        return _value_is_plain(node.left, items) and _value_is_plain(node.right, items)
    return isinstance(node, nodes.Not) and _value_is_plain(node.node, items)


def _field_of_item(node: nodes.Node, items: set[str]) -> str | None:
    """`role` or `content`, if the node is that field of a message."""
    if isinstance(node, nodes.Getitem):
        name = node.arg.value if isinstance(node.arg, nodes.Const) else None
    else:
        name = node.attr if isinstance(node, nodes.Getattr) else None
    if name not in ("role", "content") or not isinstance(node, (nodes.Getitem, nodes.Getattr)):
        return None
    owner = node.node
    is_item = isinstance(owner, nodes.Name) and owner.name in items
    is_numbered = (
        isinstance(owner, nodes.Getitem)
        and _is_messages(owner.node)
        and isinstance(owner.arg, nodes.Const)
        and type(owner.arg.value) is int
    )
    return str(name) if is_item or is_numbered else None


def _is_messages(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Name) and node.name == "messages"
