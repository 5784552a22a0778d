"""What a chat template looks for in messages, read off its syntax tree. Used by `Tokenizer` for `caller_text`.

Templates of models that think split answers at '</think>' and ask whether a message starts with '<tool_response>'.
They must still find it, so those texts are left as callers wrote them. What a template only writes is not sought.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from jinja2 import Environment, TemplateSyntaxError, nodes
from jinja2.ext import loopcontrols

_WRITING_METHODS = frozenset(("append", "join", "format", "update"))
_QUOTED = re.compile(r"'([^'\\\n]*)'|\"([^\"\\\n]*)\"")


@dataclass(frozen=True, slots=True)
class Sought:
    texts: frozenset[str] = frozenset()  # arguments of methods and filters, and what is compared
    ends: frozenset[str] = frozenset()  # of these, what a text is asked to start or end with
    words: frozenset[str] = frozenset()  # every name and text in the template


def sought_texts(source: str) -> Sought:
    try:
        return _read(source)
    except RecursionError:  # no honest template is nested so deeply; the worker that runs it says so
        return Sought()


def _read(source: str) -> Sought:
    try:
        tree = Environment(extensions=[loopcontrols]).parse(source)
    except (
        TemplateSyntaxError,
        RecursionError,
    ):  # a tag of its own, or damaged: everything quoted may be sought
        quoted = frozenset(first or second for first, second in _QUOTED.findall(source))
        return Sought(quoted, quoted, quoted | frozenset(re.findall(r"\w+", source)))
    set_to = {
        node.target.name: node.node.value
        for node in tree.find_all(nodes.Assign)
        if isinstance(node.target, nodes.Name) and isinstance(node.node, nodes.Const)
    }

    def values(leaves: Iterator[nodes.Const | nodes.Name]) -> frozenset[str]:
        found = (set_to.get(leaf.name) if isinstance(leaf, nodes.Name) else leaf.value for leaf in leaves)
        return frozenset(value for value in found if isinstance(value, str) and value)

    texts, ends = values(_sought(tree)), values(_asked_of_ends(tree))
    words = {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
    words |= {node.attr for node in tree.find_all(nodes.Getattr)}
    return Sought(texts, ends, frozenset(words))


def _sought(tree: nodes.Template) -> Iterator[nodes.Const | nodes.Name]:
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Getattr) and call.node.attr not in _WRITING_METHODS:
            for argument in call.args:
                yield from _leaves(argument)
    for use in tree.find_all((nodes.Filter, nodes.Test)):
        for argument in use.args or ():
            yield from _leaves(argument)
    for compare in tree.find_all(nodes.Compare):
        yield from _leaves(compare.expr)
        for operand in compare.ops:
            yield from _leaves(operand.expr)
    for item in tree.find_all(nodes.Getitem):
        yield from _leaves(item.arg)


def _asked_of_ends(tree: nodes.Template) -> Iterator[nodes.Const | nodes.Name]:
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Getattr) and call.node.attr in ("startswith", "endswith"):
            for argument in call.args:
                yield from _leaves(argument)


def _leaves(node: nodes.Node) -> Iterator[nodes.Const | nodes.Name]:
    if isinstance(node, (nodes.Const, nodes.Name)):
        yield node
    elif isinstance(node, (nodes.List, nodes.Tuple, nodes.Add, nodes.Concat, nodes.CondExpr)):
        for child in node.iter_child_nodes():
            yield from _leaves(child)
