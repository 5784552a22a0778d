"""What the tests of the parsers share: pieces of texts, events joined, calls read back."""

import itertools
import json
from collections.abc import Callable, Iterable
from typing import Any

from cumulo.serve.formats.events import Event, Text, ToolCallArguments, ToolCallStart


def counted_ids() -> Callable[[], str]:
    numbers = itertools.count()
    return lambda: f"call-{next(numbers)}"


def joined(events: Iterable[Any]) -> list[Any]:
    """Events with neighbours of one kind made one: what remains does not depend on how the text was cut."""
    result: list[Any] = []
    for event in events:
        last = result[-1] if result else None
        if isinstance(event, ToolCallStart) or type(last) is not type(event):
            result.append(event)
        elif isinstance(event, ToolCallArguments):
            assert event.index == last.index
            result[-1] = ToolCallArguments(event.index, last.fragment + event.fragment)
        else:
            result[-1] = type(event)(last.text + event.text)
    return result


def cut(text: str, places: Iterable[int]) -> list[str]:
    bounds = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[begin:end] for begin, end in itertools.pairwise(bounds)]


def parse(parser: Any, pieces: Iterable[str]) -> list[Any]:
    events = [event for piece in pieces for event in parser.push(piece)]
    return joined([*events, *parser.finish()])


def text_of(events: Iterable[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Text))


def calls_of(events: Iterable[Event]) -> list[tuple[str, Any]]:
    """(name, arguments read as JSON) of every call."""
    names: list[str] = []
    arguments: dict[int, str] = {}
    for event in events:
        if isinstance(event, ToolCallStart):
            assert event.index == len(names)
            names.append(event.name)
        elif isinstance(event, ToolCallArguments):
            arguments[event.index] = arguments.get(event.index, "") + event.fragment
    return [(name, json.loads(arguments[index])) for index, name in enumerate(names)]
