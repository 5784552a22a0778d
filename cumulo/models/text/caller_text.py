"""CallerText: keeps what callers write in messages and tools from becoming control tokens. Used by `Tokenizer`.

A chat template mixes its own markers with the callers' texts, and may trim, cut and join them on the way. So before
it runs, every character of a caller's text that could begin or end a control token is exchanged for a stand-in from
Unicode's private use area, one for one. In the prompt, a control token without stand-ins is the template's own.
Then the characters are put back. Templates also look for texts of their own in messages ('</think>'): those are
read off the template's syntax tree (`sought_texts`) and left as they are.
"""

import json
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import Environment, TemplateSyntaxError, nodes
from jinja2.ext import loopcontrols

from cumulo.errors import InvalidRequest
from cumulo.models.text.control_tokens import ControlTokens, alternatives

_WRITING_METHODS = frozenset(("append", "join", "format", "update"))
_ASKING_ENDS = ("startswith", "endswith")
_QUOTED = re.compile(r"'([^'\\\n]*)'|\"([^\"\\\n]*)\"")


@dataclass(frozen=True, slots=True)
class Sought:
    texts: frozenset[str] = frozenset()  # arguments of methods and filters, and what is compared
    ends: frozenset[str] = frozenset()  # of these, what a text is asked to start or end with
    words: frozenset[str] = frozenset()  # every name and text in the template


def sought_texts(source: str) -> Sought:
    try:
        return _sought_in(Environment(extensions=[loopcontrols]).parse(source))
    # A tag of its own, or damaged: everything quoted may be sought.
    except (TemplateSyntaxError, RecursionError):
        quoted = frozenset(first or second for first, second in _QUOTED.findall(source))
        return Sought(quoted, quoted, quoted | frozenset(re.findall(r"\w+", source)))


def _sought_in(tree: nodes.Template) -> Sought:
    set_to = {
        node.target.name: node.node.value
        for node in tree.find_all(nodes.Assign)
        if isinstance(node.target, nodes.Name) and isinstance(node.node, nodes.Const)
    }
    texts, ends = set[str](), set[str]()
    for asked, at_end in _asked(tree):
        for leaf in _leaves(asked):
            value = set_to.get(leaf.name) if isinstance(leaf, nodes.Name) else leaf.value
            if isinstance(value, str) and value:
                texts.add(value)
                ends |= {value} if at_end else set()
    words = {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
    words |= {node.attr for node in tree.find_all(nodes.Getattr)}
    return Sought(frozenset(texts), frozenset(ends), frozenset(words))


def _asked(tree: nodes.Template) -> Iterator[tuple[nodes.Node, bool]]:
    """What texts are searched for or compared with, and whether at one of their ends."""
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Getattr) and call.node.attr not in _WRITING_METHODS:
            yield from ((argument, call.node.attr in _ASKING_ENDS) for argument in call.args)
    for use in tree.find_all((nodes.Filter, nodes.Test)):
        yield from ((argument, False) for argument in use.args or ())
    for compare in tree.find_all(nodes.Compare):
        yield from ((side, False) for side in (compare.expr, *(operand.expr for operand in compare.ops)))
    for item in tree.find_all(nodes.Getitem):
        yield item.arg, False


def _leaves(node: nodes.Node) -> Iterator[nodes.Const | nodes.Name]:
    if isinstance(node, (nodes.Const, nodes.Name)):
        yield node
    elif isinstance(node, (nodes.List, nodes.Tuple, nodes.Add, nodes.Concat, nodes.CondExpr)):
        for child in node.iter_child_nodes():
            yield from _leaves(child)


_FIRST, _LAST = 0x100000, 0x10FFFD  # plane 16: for private use, and no icon font has characters there
_PRIVATE = re.compile(f"[{chr(_FIRST)}-{chr(_LAST)}]")
_ESCAPED = re.compile(r"\\ud[b-f][0-9a-f]{2}\\ud[c-f][0-9a-f]{2}", re.IGNORECASE)
_PLAIN_ROLE = re.compile(r"[A-Za-z0-9_-]*")
# Keys that templates and we look up: never exchanged.
_STRUCTURE = frozenset(
    ("type", "text", "role", "content", "name", "id", "function", "arguments", "parameters", "description",
     "properties", "required", "items", "enum", "tool_calls", "tool_call_id", "reasoning_content")
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Guarded:
    """What a template is given instead, and how to take the stand-ins out of what it wrote."""

    messages: list[Any]
    tools: list[Any] | None
    variables: dict[str, Any]
    originals: Mapping[str, str]  # stand-in to character

    def restored(self, text: str) -> str:
        for private, character in self.originals.items():  # few, and faster than str.translate
            text = text.replace(private, character)
        if "\\ud" in text:  # a template that writes JSON in ASCII has escaped the stand-ins
            text = _ESCAPED.sub(self._unescaped, text)
        return text

    def _unescaped(self, match: re.Match[str]) -> str:
        character: str = json.loads(f'"{match[0]}"')
        return self.originals.get(character, match[0])


@dataclass(frozen=True, slots=True)
class _Keeping:
    """Texts that are not exchanged, because a template looks for them."""

    texts: tuple[str, ...]
    others: re.Pattern[str]  # the control tokens that are not among them
    found: re.Pattern[str]  # all that is exchanged, and as group `kept` what is not


StandIns = Mapping[str, str]  # character of a control token to private character


class CallerText:
    def __init__(self, control: ControlTokens, sought: Sought) -> None:
        """`sought`: what the template looks for in texts, and must still find."""
        spellings = list(control.ids)
        self._alphabet = sorted({*"".join(spellings)})
        edges = {character for text in spellings for character in (text[0], text[-1])}
        edges |= {c for text in spellings for c in (text[1:2], text[-2:-1]) if c and c not in "/_-. "}
        self._edges = tuple(sorted(c for c in edges if not c.isalnum() and not c.isspace()))
        # Letters cannot all be exchanged: a token that begins or ends with one is looked for as a whole.
        self._wordy = tuple(text for text in spellings if text[0].isalnum() or text[-1].isalnum())
        # A template may write `<`, a name and `>`: these names would complete a control token.
        sides = [(begin, end) for begin in (1, 2, 3) for end in (1, 2, 3)]
        insides = {text[begin : len(text) - end] for text in spellings for begin, end in sides}
        self._insides = frozenset(t for t in insides if any(map(str.isalpha, t))) - sought.words - _STRUCTURE
        self._longest_inside = max(map(len, self._insides), default=0)
        # What the template looks for stays readable: in the model's own answers everything, elsewhere what a text
        # is asked to start or end with.
        self._in_answers = self._keeping(control, sought.texts)
        self._elsewhere = self._keeping(control, sought.ends)
        self._windows = range(_FIRST, _LAST - len(self._alphabet), max(1, len(self._alphabet)))
        self._usual: int = self._windows[secrets.randbelow(len(self._windows))]

    def guard(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
    ) -> Guarded | None:
        """None: nothing in these texts is, or can become part of, a control token."""
        if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
            return None  # the template's check refuses them
        texts = list(_texts([*messages, tools, variables]))
        if not any(map(self.suspect, texts)):
            return None
        first = self._unused(texts)
        stand_ins = {character: chr(first + place) for place, character in enumerate(self._alphabet)}
        return Guarded(
            [self._message(message, stand_ins) for message in messages],
            None if tools is None else [self._value(tool, stand_ins) for tool in tools],
            {name: self._value(value, stand_ins) for name, value in variables.items()},
            {private: character for character, private in stand_ins.items()},
        )

    def _message(self, message: Any, stand_ins: StandIns) -> Any:
        """Its own keys stay, and a role that is a plain word: templates write `<|` + role + `|>`."""
        if not isinstance(message, Mapping):
            return message
        in_answer = message.get("role") == "assistant"
        return {
            key: value
            if key == "role" and isinstance(value, str) and _PLAIN_ROLE.fullmatch(value)
            else self._value(value, stand_ins, in_answer)
            for key, value in message.items()
        }

    def _value(self, value: Any, stand_ins: StandIns, in_answer: bool = False) -> Any:
        if isinstance(value, str):
            return self._text(value, stand_ins, in_answer)
        if isinstance(value, Mapping):
            return {
                self._text(key, stand_ins, in_answer)
                if isinstance(key, str) and key not in _STRUCTURE
                else key: self._value(item, stand_ins, in_answer)
                for key, item in value.items()
            }
        if isinstance(value, (list, tuple)):
            return [self._value(item, stand_ins, in_answer) for item in value]
        return value

    def suspect(self, text: str) -> bool:
        for edge in self._edges:
            if edge in text:
                return True
        if len(text) <= self._longest_inside and text.strip() in self._insides:
            return True
        return bool(self._wordy) and any(map(text.__contains__, self._wordy))

    def _keeping(self, control: ControlTokens, texts: Iterable[str]) -> "_Keeping":
        special = alternatives(control.special)
        kept = [t for t in texts if any(edge in t for edge in self._edges) and not special.search(t)]
        others = alternatives(control.ids.keys() - kept)
        edge = f"[{''.join(map(re.escape, self._edges))}]" if self._edges else "(?!)"
        found = re.compile(f"(?:{others.pattern})|(?P<kept>{alternatives(kept).pattern})|{edge}")
        return _Keeping(tuple(kept), others, found)

    def _text(self, text: str, stand_ins: StandIns, in_answer: bool) -> str:
        if not self.suspect(text):
            return text

        def without_edges(text: str) -> str:
            for edge in self._edges:
                text = text.replace(edge, stand_ins[edge])
            return text

        keeping = self._in_answers if in_answer else self._elsewhere
        if any(map(text.__contains__, keeping.texts)):
            careful = keeping.found.sub(
                lambda match: match[0] if match["kept"] is not None else without_edges(match[0]), text
            )
            text = careful if keeping.others.search(careful) is None else without_edges(text)
        else:
            text = without_edges(text)
        for word in self._wordy:
            text = text.replace(word, stand_ins[word[0]] + word[1:])
        if len(text) <= self._longest_inside and text.strip() in self._insides:
            bare = text.lstrip()
            text = text[: len(text) - len(bare)] + stand_ins[bare[0]] + bare[1:]
        return text

    def _unused(self, texts: Iterable[str]) -> int:
        """Where a row of private characters begins that no caller uses."""
        used = {ord(found) for text in texts if not text.isascii() for found in _PRIVATE.findall(text)}
        size = len(self._alphabet)
        windows: list[int] = [self._usual, *(self._windows if used else ())]
        for first in windows:
            if used.isdisjoint(range(first, first + size)):
                return first
        raise InvalidRequest(
            "the messages use private characters from all over Unicode's plane 16 (U+100000 to U+10FFFD); "
            "take some of them out"
        )


def _texts(value: Any) -> Iterator[str]:
    """Every text in a nested value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _texts(key)
            yield from _texts(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _texts(item)
