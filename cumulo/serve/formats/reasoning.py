"""ReasoningParser: separates `<think> ... </think>` from the answer. The chat endpoints run it before a
tool-call parser: what a model only thinks about calling is not called.
"""

from dataclasses import dataclass

from cumulo.serve.formats.events import Text, partial_marker

OPEN, CLOSE = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


class ReasoningParser:
    """Reasoning stands at the beginning of an answer or nowhere. White space around it is dropped."""

    def __init__(self, *, opened: bool = False) -> None:
        """`opened`: the prompt ends with `<think>` already (see `opens_reasoning`)."""
        self._pending = ""
        self._state = "reasoning" if opened else "start"
        self._bare = True  # nothing but white space came in this state so far

    def push(self, text: str) -> list[Reasoning | Text]:
        self._pending += text
        events: list[Reasoning | Text] = []
        if self._state == "start":
            self._look_for_opening()
        if self._state == "reasoning":
            self._read_reasoning(events)
        if self._state == "answer" and self._pending:
            self._read_answer(events)
        return events

    def finish(self) -> list[Reasoning | Text]:
        rest, self._pending = self._pending, ""
        if self._state == "reasoning":
            rest = (rest.lstrip() if self._bare else rest).rstrip()
            return [Reasoning(rest)] if rest else []
        return [Text(rest)] if rest else []

    def _look_for_opening(self) -> None:
        begun = self._pending.lstrip()
        if begun.startswith(OPEN):
            self._pending, self._state = begun[len(OPEN) :], "reasoning"
        elif not OPEN.startswith(begun):
            self._state, self._bare = "answer", False

    def _read_reasoning(self, events: list[Reasoning | Text]) -> None:
        if self._bare:
            self._pending = self._pending.lstrip()
        thought, closing, answer = self._pending.partition(CLOSE)
        if not closing:
            thought = thought[: len(thought) - partial_marker(thought, CLOSE)]
        shown = thought.rstrip()  # what follows may be the end: white space waits
        if shown:
            events.append(Reasoning(shown))
            self._bare = False
        if closing:
            self._pending, self._state, self._bare = answer, "answer", True
        else:
            self._pending = self._pending[len(shown) :]

    def _read_answer(self, events: list[Reasoning | Text]) -> None:
        answer = self._pending.lstrip() if self._bare else self._pending
        self._pending = ""
        if answer:
            self._bare = False
            events.append(Text(answer))


def detect_reasoning(template: str | None) -> bool:
    """Whether a model with this chat template thinks between <think> and </think>."""
    return template is not None and CLOSE in template


def opens_reasoning(prompt: str) -> bool:
    """Whether the template has written the opening tag already, so that the answer begins as reasoning."""
    return prompt.rstrip().endswith(OPEN)
