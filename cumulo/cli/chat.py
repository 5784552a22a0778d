"""`cumulo chat`: a streaming conversation in the terminal, or one question from a pipe.

A conversation has turns and slash commands, and Ctrl-C stops only the answer.
"""

import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import TYPE_CHECKING, Any

from cumulo.base.nearest import did_you_mean
from cumulo.cli.shared import options
from cumulo.cli.shared.declare import group, option, takes_options
from cumulo.cli.shared.terminal import load_llm, marked, note, out, print_error, read_stdin
from cumulo.errors import CumuloError, InvalidRequest

if TYPE_CHECKING:
    from cumulo.engine.decide.params import SamplingParams
    from cumulo.engine.decide.story import Story
    from cumulo.engine.llm import LLM

EXAMPLE = 'Example: [bold]echo "What is the capital of France?" | cumulo chat[/bold]'


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    model: options.ModelArgument = None
    lora: options.LoraOption = None
    system: str | None = option("System message.", None)
    sampling: options.SamplingOptions = group(
        options.SamplingOptions(top_k=None, top_p=None, min_p=None, repetition_penalty=None, max_tokens=512),
        without=(
            "presence_penalty", "frequency_penalty", "min_tokens", "ignore_eos", "n", "best_of", "beam_width",
            "logprobs",
        ),
    )  # fmt: skip
    engine: options.EngineOptions = options.EngineOptions()


@takes_options
def chat(chosen: ChatOptions) -> None:
    """Chat with a model. In a pipe, it reads the question from stdin and prints only the answer.

    In a terminal, /help lists the commands. Sampling options that you do not give have the values that the authors
    of the model recommend, as in the API. In a pipe, the default temperature is 0, so that the same question gets
    the same answer.
    """
    from cumulo.engine.decide.params import SamplingParams

    interactive = sys.stdin.isatty()
    sampling = chosen.sampling.given()
    if not interactive:
        sampling.setdefault("temperature", 0.0)
    SamplingParams(**sampling)  # a wrong one is told before the model is loaded
    (talk if interactive else answer_stdin)(chosen, sampling)


_FENCE = '"""'


def typed_messages() -> Iterator[str]:
    """Messages and commands, until the person leaves. Ctrl-C throws away what is being typed; twice in a row, it
    leaves.

    A line that ends in a backslash continues on the next one; three double quotes begin a text of several lines,
    and three more end it."""
    interrupted = False
    while True:
        try:
            text = _typed_lines()
        except EOFError:
            out.print()
            return
        except KeyboardInterrupt:
            out.print()
            if interrupted:
                return
            interrupted = True
            note("press Ctrl-C again to exit (or Ctrl-D, or type /exit)")
        else:
            interrupted = False
            yield text


def _typed_lines() -> str:
    line = input("\n> ")
    if line.lstrip().startswith(_FENCE):
        return _fenced(line.lstrip().removeprefix(_FENCE))
    lines = []
    while line.endswith("\\"):
        lines.append(line[:-1])
        line = input("... ")
    return "\n".join([*lines, line]).strip()


def _fenced(line: str) -> str:
    lines = []
    while _FENCE not in line:
        lines.append(line)
        line = input("... ")
    return "\n".join([*lines, line.partition(_FENCE)[0]]).strip()


HELP = """\
/clear             delete the conversation (the system message stays)
/system [TEXT]     set the system message and start a new conversation; without TEXT: show it
/set [NAME VALUE]  change a sampling option, for example /set temperature 0.7; without them: show all
/stats             show tokens and speed so far, and the memory ledger
/why               show the story of the last answer: queueing, cache hits, chunks, timing
/help              show this list
/exit              exit (also Ctrl-D, or Ctrl-C twice); Ctrl-C stops an answer

A line that ends in \\ continues on the next one. \"\"\" begins a message of several lines, and \"\"\" ends it."""
_SETTABLE = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_tokens", "seed")
_WITHOUT = {"seed": "random", "max_tokens": "none"}  # what applies where an option has no value


def answer_stdin(chosen: ChatOptions, sampling: Mapping[str, Any]) -> None:
    """One question from stdin; only the answer goes to stdout. What `sampling` does not say is the model's."""
    question = read_stdin().strip()
    if not question:
        raise InvalidRequest(
            'standard input contains no question; try: echo "What is the capital of France?" | cumulo chat'
        )
    with load_llm(chosen.model, chosen.engine.config(), chosen.lora) as llm:
        turn = ChatTurn()
        for text in turn.run(llm, _messages(chosen.system, [], question), llm.sampling(**sampling)):
            sys.stdout.write(text)
            sys.stdout.flush()
        print(flush=True)
        if turn.error:
            raise CumuloError(turn.error)
        note(turn.summary())


def talk(chosen: ChatOptions, sampling: Mapping[str, Any]) -> None:
    """The loop of a terminal session."""
    with suppress(ImportError):
        import readline  # noqa: F401  (line editing and history for input())

    with load_llm(chosen.model, chosen.engine.config(), chosen.lora) as llm:
        session = Session(llm, llm.sampling(**sampling), chosen.system)
        out.print(marked("[bold]{}[/bold] [dim]· /help lists the commands[/dim]", llm.model_name))
        for line in typed_messages():
            if line.startswith("/"):
                if not session.command(line):
                    break
            elif line:
                session.ask(line)


@dataclass(slots=True)
class ChatTurn:
    """One answer while it streams: its text, its times, and its story at the end."""

    text: str = ""
    tokens: int = 0
    ttft_s: float | None = None
    decode_s: float = 0.0
    interrupted: bool = False
    error: str | None = None
    story: "Story | None" = None

    def run(self, llm: "LLM", messages: list[dict[str, str]], params: "SamplingParams") -> Iterator[str]:
        """Yield the answer's text as it arrives; closing early aborts the request."""
        began_s = time.perf_counter()
        stream = llm.stream(messages, params)
        with _interruptible(self):
            for delta in stream:
                now_s = time.perf_counter()
                if delta.token_ids and self.ttft_s is None:
                    self.ttft_s = now_s - began_s
                self.tokens += len(delta.token_ids)
                if self.ttft_s is not None:
                    self.decode_s = now_s - began_s - self.ttft_s
                self.text += delta.text
                yield delta.text
                if self.interrupted:
                    break
        stream.close()
        output: Any = getattr(stream, "output", None)
        if output is not None:
            self.story, self.error = output.story, output.error

    @property
    def tok_s(self) -> float | None:
        """Decoding speed: the first token is the prompt's doing, so it does not count."""
        return (self.tokens - 1) / self.decode_s if self.tokens > 1 and self.decode_s > 0 else None

    def summary(self) -> str:
        parts = [f"{self.tokens} token{'' if self.tokens == 1 else 's'}"]
        if self.tok_s is not None:
            parts.append(f"{self.tok_s:.1f} tok/s")
        if self.ttft_s is not None:
            parts.append(f"TTFT {self.ttft_s:.2f} s")
        if self.story is not None and self.story.cached_tokens:
            parts.append(f"{self.story.cached_tokens} of {self.story.prompt_tokens} prompt tokens cached")
        if self.interrupted:
            parts.append("stopped")
        return " · ".join(parts)


@dataclass(slots=True)
class Session:
    """A terminal session: the turns so far and the slash commands."""

    llm: "LLM"
    params: "SamplingParams"
    system: str | None
    history: list[dict[str, str]] = field(default_factory=list)
    turns: list[ChatTurn] = field(default_factory=list)

    def ask(self, question: str) -> None:
        """Stream one answer; a failed one leaves the conversation as it was."""
        turn = ChatTurn()
        try:
            for text in turn.run(self.llm, _messages(self.system, self.history, question), self.params):
                out.print(text, end="", soft_wrap=True)
            out.print()
            if turn.error:
                raise CumuloError(turn.error)
        except CumuloError as error:
            print_error(error)
            if self.history:
                note("the conversation so far counts towards the context; /clear deletes it")
            return
        self.turns.append(turn)
        self.history += [
            {"role": "user", "content": question},
            {"role": "assistant", "content": turn.text},
        ]
        note(turn.summary())

    def command(self, line: str) -> bool:
        """Carry out a slash command; False ends the session."""
        word, _, rest = line.partition(" ")
        if word in ("/exit", "/quit", "/bye"):
            return False
        known: dict[str, Callable[[str], object]] = {
            "/help": lambda _: out.print(HELP),
            "/clear": self._clear,
            "/system": self._set_system,
            "/set": self._set_option,
            "/stats": self._show_stats,
            "/why": self._show_why,
        }
        if word in known:
            known[word](rest.strip())
        else:
            note(f"there is no command {word}; /help lists the commands")
        return True

    def _clear(self, _: str) -> None:
        self.history.clear()
        note("conversation deleted")

    def _set_system(self, text: str) -> None:
        if not text:
            note(f"system message: {self.system or '(the model’s own default)'}")
            return
        self.system = text
        self.history.clear()
        note("system message set; a new conversation starts")

    def _set_option(self, text: str) -> None:
        name, _, value = text.replace("=", " ").partition(" ")
        name, value = name.strip().replace("-", "_"), value.strip()
        if not name:
            note(" · ".join(f"{one} {self._value(one)}" for one in _SETTABLE))
            return
        if name not in _SETTABLE:
            options = f"; the options are {', '.join(_SETTABLE)}"
            note(f"there is no option {name}{did_you_mean(name, _SETTABLE, otherwise=options)}")
            return
        if not value:
            note(f"{name} is {self._value(name)}")
            return
        try:
            number = None if name in _WITHOUT and value in ("none", _WITHOUT[name]) else _number(value)
            changed: dict[str, Any] = {name: number}
            self.params = replace(self.params, **changed)
        except ValueError:
            note(f"/set {name} takes a number, got {value!r}")
        except CumuloError as error:
            print_error(error)
        else:
            note(f"{name} is now {self._value(name)}")

    def _value(self, name: str) -> str:
        """A sampling option as people write it."""
        value = getattr(self.params, name)
        return _WITHOUT.get(name, "none") if value is None else f"{value:g}" if name != "seed" else str(value)

    def _show_stats(self, _: str) -> None:
        tokens, decode_s = sum(t.tokens for t in self.turns), sum(t.decode_s for t in self.turns)
        decoded = sum(max(t.tokens - 1, 0) for t in self.turns)
        speed = f", {decoded / decode_s:.1f} tok/s while decoding" if decode_s > 0 else ""
        answers = "1 answer" if len(self.turns) == 1 else f"{len(self.turns)} answers"
        out.print(f"{answers}, {tokens} tokens{speed}")
        out.print(self.llm.ledger)

    def _show_why(self, _: str) -> None:
        if not self.turns:
            note("there is no answer yet")
            return
        story = self.turns[-1].story
        out.print(story.describe() if story else "there is no story of the last answer")


def _number(text: str) -> int | float:
    return int(text) if text.removeprefix("-").isdecimal() else float(text)


@contextmanager
def _interruptible(turn: ChatTurn) -> Iterator[None]:
    """While inside, the first Ctrl-C only sets a flag (the engine is never cut in half); a second raises."""

    def on_interrupt(signum: int, frame: FrameType | None) -> None:
        if turn.interrupted:
            raise KeyboardInterrupt
        turn.interrupted = True

    previous = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def _messages(system: str | None, history: list[dict[str, str]], question: str) -> list[dict[str, str]]:
    first = [{"role": "system", "content": system}] if system else []
    return [*first, *history, {"role": "user", "content": question}]
