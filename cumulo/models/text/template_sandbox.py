"""The jinja2 environment in which a model's chat template runs. Used by `template_worker`.

A template comes with the model's files, so it is someone else's program. jinja2's immutable sandbox keeps it
from reaching Python's internals and from changing what it is given. It does not keep it from looping for
hours or filling the memory, so here every loop round, call and built text is charged to a budget. What gets past
that meets the limits of the worker's process; this is the line before it, which can say what the template did.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from functools import wraps
from itertools import islice
from typing import Any, cast

from jinja2 import Environment, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import EvalContext
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_STEPS = 2_000_000  # loop rounds and calls in one rendering
STEPS_PER_CALL = 20  # a macro call costs about this many empty loop rounds
CHARACTERS_PER_STEP = 64  # so all texts made in one rendering stay under 128 MB
MAX_TEXT = 32_000_000  # characters in any string a template builds
MAX_WIDTH = 1_000_000  # of padding and repetition
MAX_BITS = 4096  # of a number
_WIDE_FORMAT = re.compile(r"\d{7,}")

_steps_left: ContextVar[list[int]] = ContextVar("steps_left")


class TemplateRefusal(Exception):
    """raise_exception('...') inside a template."""


@contextmanager
def budget() -> Iterator[None]:
    """Rendering and compiling happen inside this; each gets MAX_STEPS anew."""
    token = _steps_left.set([MAX_STEPS])
    try:
        yield
    finally:
        _steps_left.reset(token)


def _spend(steps: int) -> None:
    left = _steps_left.get(None)
    if left is None:
        return
    left[0] -= steps
    if left[0] < 0:
        raise SecurityError(f"it took more than {MAX_STEPS:,} steps")


def _check_size(length: int) -> None:
    if length > MAX_TEXT:
        raise SecurityError(f"it built a value of more than {MAX_TEXT:,} characters")


def _bounded(value: Any) -> Any:
    """Charge a new value's size: many values of a legal size fill the memory just as well as one giant."""
    if isinstance(value, (str, bytes, list, tuple)):
        _check_size(len(value))
        _spend(len(value) // CHARACTERS_PER_STEP)
    return value


def text_length(value: Any) -> int:
    """How long a value is as text, about. A list that holds itself twice over, forty times, is counted without
    being walked: each object's length is computed once."""
    if isinstance(value, (str, bytes)):
        return len(value)
    if not isinstance(value, (list, tuple, dict)):
        return 20
    lengths: dict[int, int] = {}
    pending: list[tuple[Any, bool]] = [(value, False)]
    while pending:
        holder, inner_known = pending.pop()
        if id(holder) in lengths:
            continue
        items = [*holder.keys(), *holder.values()] if isinstance(holder, dict) else holder
        nested = [item for item in items if isinstance(item, (list, tuple, dict))]
        if inner_known or not nested:
            plain = sum(len(item) if isinstance(item, (str, bytes)) else 8 for item in items)
            lengths[id(holder)] = (
                2 + 2 * len(items) + plain + sum(lengths.get(id(item), 0) for item in nested)
            )
        else:
            pending.append((holder, True))
            pending.extend((item, False) for item in nested)
            _spend(len(items))
    return lengths[id(value)]


def _check_output(value: Any) -> Any:
    """Before a list or dictionary is written out as text."""
    if isinstance(value, (list, tuple, dict)):
        _check_size(text_length(value))
    return value


def _check_join(separator: Any, items: Any) -> Any:
    """The items, drawn up front where they are not a list."""
    drawn = items if isinstance(items, (list, tuple, str, dict)) else _loop_items(items)
    between = len(separator) if isinstance(separator, str) else 0
    _check_size(sum(text_length(item) for item in drawn) + between * len(drawn))
    return drawn


def _check_insertions(layout: str, values: Iterable[Any], marks: str) -> None:
    """For % and format: each mark may write the longest value."""
    longest = max((text_length(value) for value in values), default=0)
    _check_size(len(layout) + layout.count(marks) * longest)


def _inserted(values: Any) -> list[Any]:
    if isinstance(values, dict):
        return list(values.values())
    return list(values) if isinstance(values, tuple) else [values]


def _check_lines(text: Any, width: Any) -> None:
    """Something `width` wide is put before every line, or in place of every tab."""
    if isinstance(text, str):
        wide = len(width) if isinstance(width, str) else width if isinstance(width, int) else 8
        _check_size(len(text) + (text.count("\n") + text.count("\t") + 1) * wide)


def _check_widths(arguments: Iterable[Any]) -> None:
    """Numbers given to string methods and filters are widths and counts: no honest template pads so far."""
    for argument in arguments:
        if isinstance(argument, int) and argument > MAX_WIDTH:
            raise SecurityError(f"it asked for a text {argument:,} characters wide")


def _check_format(layout: str) -> None:
    if _WIDE_FORMAT.search(layout) or "%*" in layout:
        raise SecurityError(f"it asked for a text more than {MAX_WIDTH:,} characters wide")


def _check_replacement(text: Any, arguments: Sequence[Any]) -> None:
    if len(arguments) >= 2 and all(isinstance(item, str) for item in (text, *arguments[:2])):
        old, new = arguments[0], arguments[1]
        _check_size(len(text) + (text.count(old) if old else len(text) + 1) * len(new))


def _bounded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)  # keeps jinja2's pass_environment and pass_context marks
    def limited(*arguments: Any, **named: Any) -> Any:
        _spend(1)
        plain = [argument for argument in arguments if isinstance(argument, (str, int))]
        if name == "join":
            at = next((at for at, one in enumerate(arguments) if not _is_context(one)), None)
            if at is not None:
                rest = [*arguments[at + 1 :], named.get("d", "")]
                arguments = (*arguments[:at], _check_join(rest[0], arguments[at]), *arguments[at + 1 :])
        elif name in (
            "string",
            "tojson",
            "pprint",
            "escape",
            "e",
            "forceescape",
            "safe",
            "urlencode",
            "xmlattr",
        ):
            for argument in arguments:
                _check_output(argument)
        elif name == "replace" and plain:
            _check_replacement(plain[0], plain[1:])
        elif name == "format" and plain:
            _check_format(str(plain[0]))
            _check_insertions(str(plain[0]), [*arguments, *named.values()], "%")
        elif name in ("center", "indent", "batch", "slice", "wordwrap", "truncate"):
            _check_widths([*plain, *named.values()])
            if name == "indent" and plain:
                _check_lines(plain[0], named.get("width", plain[1] if len(plain) > 1 else 4))
        return _bounded(function(*arguments, **named))

    return limited


def _loop_items(value: Any) -> list[Any]:
    """What a `for` iterates over, drawn up front so that it can be counted."""
    left = _steps_left.get([MAX_STEPS])[0]
    items = list(islice(iter(value), left + 1))
    _spend(len(items))
    return items


def _concatenate(parts: Iterable[Any]) -> str:
    """For the ~ operator, macros, blocks and the whole output: stops before the parts become too long."""
    texts: list[str] = []
    length = 0
    for part in parts:
        texts.append(str(_check_output(part)))
        length += len(texts[-1])
        _check_size(length)
    _spend(length // CHARACTERS_PER_STEP)
    return "".join(texts)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(["*", "**", "+", "%"])
    concat = staticmethod(_concatenate)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            loop.iter = _as_filter("cumulo_loop_items", loop.iter)
        for output in list(tree.find_all(nodes.Node)):
            for field, value in output.iter_fields():
                if isinstance(value, nodes.Concat):
                    setattr(output, field, _concat_filter(value))
                elif isinstance(value, list):
                    value[:] = [
                        _concat_filter(item) if isinstance(item, nodes.Concat) else item for item in value
                    ]
        tree.set_environment(self)
        return tree

    def call(self, context: Any, function: Any, /, *arguments: Any, **named: Any) -> Any:
        _spend(STEPS_PER_CALL)
        owner = getattr(function, "__self__", None)
        if isinstance(function, LoopContext) and arguments:  # loop(...) in a recursive loop
            arguments = (_loop_items(arguments[0]), *arguments[1:])
        elif isinstance(owner, str):
            _check_widths([*arguments, *named.values()])
            if function.__name__ == "replace":
                _check_replacement(owner, arguments)
            elif function.__name__ == "join" and arguments:
                arguments = (_check_join(owner, arguments[0]), *arguments[1:])
            elif function.__name__ == "expandtabs":
                _check_lines(owner, next(iter([*arguments, *named.values()]), 8))
        return _bounded(super().call(context, function, *arguments, **named))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapper = super().wrap_str_format(value)
        if wrapper is None:
            return None

        def limited(*arguments: Any, **named: Any) -> str:
            _check_format(value.__self__)
            if "{" in value.__self__.replace("{", "", 1):  # a width may itself be an argument: "{:>{}}"
                _check_widths([*arguments, *named.values()])
            _check_insertions(value.__self__, [*arguments, *named.values()], "{")
            return wrapper(*arguments, **named)

        return limited

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        _spend(1)
        if operator == "%" and isinstance(left, str):
            _check_format(left)
            _check_insertions(left, _inserted(right), "%")
        elif operator == "**" and _bits(left) * (abs(right) if isinstance(right, int) else 1) > MAX_BITS:
            raise SecurityError("it computed a number of thousands of digits")
        elif operator == "*":
            if _bits(left) + _bits(right) > MAX_BITS:
                raise SecurityError("it computed a number of thousands of digits")
            for sequence, times in ((left, right), (right, left)):
                if isinstance(sequence, (str, list, tuple)) and isinstance(times, int):
                    _check_size(len(sequence) * times)
        return _bounded(super().call_binop(context, operator, left, right))


def _is_context(value: Any) -> bool:
    """What jinja2 itself gives some filters first."""
    return isinstance(value, (Environment, Context, EvalContext))


def _bits(value: Any) -> int:
    return value.bit_length() if isinstance(value, int) else 0


def _as_filter(name: str, node: nodes.Node) -> nodes.Filter:
    return nodes.Filter(cast(nodes.Expr, node), name, [], [], None, None, lineno=node.lineno)


def _concat_filter(node: nodes.Concat) -> nodes.Filter:
    return _as_filter("cumulo_concatenate", nodes.List(node.nodes, lineno=node.lineno))


class _GenerationTag(Extension):
    """{% generation %} ... {% endgeneration %} marks the assistant's text for training; here it is text."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def template_environment() -> TemplateEnvironment:
    environment = TemplateEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[loopcontrols, _GenerationTag],
        finalize=_check_output,
    )
    environment.filters = {name: _bounded_filter(name, f) for name, f in environment.filters.items()}
    environment.filters["tojson"] = _bounded_filter("tojson", _to_json)
    environment.filters["cumulo_loop_items"] = _loop_items
    environment.filters["cumulo_concatenate"] = _concatenate
    del environment.globals["lipsum"]  # makes as much text as it is asked for
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As transformers does: jinja2's own filter would escape characters for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise TemplateRefusal(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)
