"""`cumulo chat`: a streaming conversation in the terminal, or one question from a pipe.

A conversation has turns and slash commands, and Ctrl-C stops only the answer.
"""

import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from math import inf
from types import FrameType
from typing import TYPE_CHECKING, Any

from cumulo.base.nearest import did_you_mean
from cumulo.cli.shared import options
from cumulo.cli.shared.declare import group, option, takes_options
from cumulo.cli.shared.terminal import WordWrap, load_llm, marked, note, out, print_error, read_stdin
from cumulo.errors import CumuloError, InvalidRequest
from cumulo.models.text.chat_window import (
    ChatCounter,
    Messages,
    sent_messages,
    summary_requests,
    summary_tokens,
    turns_of,
)

if TYPE_CHECKING:
    from cumulo.engine.decide.params import SamplingParams
    from cumulo.engine.llm import LLM
    from cumulo.engine.outputs import RequestOutput

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
/summarize         replace all turns but the last by a summary that the model writes
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
        messages = [{"role": "system", "content": chosen.system}] if chosen.system else []
        messages.append({"role": "user", "content": question})
        output = streamed(llm, messages, llm.sampling(**sampling), partial(print, end="", flush=True))
        print(flush=True)
        if output.error:
            raise CumuloError(output.error)
        note(summary(output, llm.max_context))


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


class Interrupted:
    """Whether Ctrl-C was pressed: inside its `with`, the first one only sets a flag (the engine is never cut in
    half); a second raises."""

    def __init__(self) -> None:
        self.set = False

    def __enter__(self) -> "Interrupted":
        self._previous = signal.signal(signal.SIGINT, self._heard)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._previous)

    def _heard(self, signum: int, frame: FrameType | None) -> None:
        if self.set:
            raise KeyboardInterrupt
        self.set = True


def streamed(
    llm: "LLM", messages: Messages, params: "SamplingParams", show: Callable[[str], object]
) -> "RequestOutput":
    """The answer, shown as it comes. Ctrl-C ends it where it is."""
    with llm.stream(messages, params) as stream, Interrupted() as interrupted:
        for delta in stream:
            show(delta.text)
            if interrupted.set:
                break
    assert stream.output is not None
    return stream.output


def summary(output: "RequestOutput", context: int) -> str:
    """`context`: how many tokens it holds."""
    story = output.story
    parts = [f"{story.output_tokens} token{'' if story.output_tokens == 1 else 's'}"]
    if story.decode_tok_s is not None:
        parts.append(f"{story.decode_tok_s:.1f} tok/s")
    if story.ttft_s is not None:
        parts.append(f"TTFT {story.ttft_s:.2f} s")
    if story.cached_tokens:
        parts.append(f"{story.cached_tokens} of {story.prompt_tokens} prompt tokens cached")
    if any(sample.finish_reason == "abort" for sample in output.samples):
        parts.append("stopped")
    if any(sample.finish_reason == "length" for sample in output.samples):
        parts.append(story.length_words)
    parts.append(f"context {story.prompt_tokens + story.output_tokens:,} of {context:,}")
    return " · ".join(parts)


@dataclass
class Session:
    """A terminal session: the turns so far and the slash commands."""

    llm: "LLM"
    params: "SamplingParams"
    system: str | None
    history: Messages = field(default_factory=list)
    answers: list["RequestOutput"] = field(default_factory=list)
    told: str = ""  # a summary of what came before the history
    left_out: tuple[int, int] = (0, 0)  # turns of the history that are no longer sent, and that are shortened

    @cached_property
    def counter(self) -> ChatCounter:
        return ChatCounter(self.llm.tokenizer)

    def ask(self, question: str) -> None:
        """Stream one answer; a failed one leaves the conversation as it was."""
        asked = [*self.history, {"role": "user", "content": question}]
        try:
            messages = self._sent(asked)
            wrap = WordWrap(out.width if out.is_terminal else inf)
            show = partial(out.print, end="", soft_wrap=True)
            output = streamed(self.llm, messages, self.params, lambda text: show(wrap.add(text)))
            out.print(wrap.end(), soft_wrap=True)
            if output.error:
                raise CumuloError(output.error)
        except CumuloError as error:
            print_error(error)
            return
        self.answers.append(output)
        self.history = [*asked, {"role": "assistant", "content": output.text}]
        note(summary(output, self.llm.max_context))

    def _sent(self, asked: Messages) -> Messages:
        """What of the conversation fits the context; says so where the oldest turns no longer do."""
        context = self.llm.max_context
        window = self.counter.window(
            asked, context, self.params.max_tokens, system=self.system, summary=self.told
        )
        now = (window.first, len(window.shares))
        if now > self.left_out:
            turns = "turn is" if window.first == 1 else f"{window.first} turns are"
            told = [f"the oldest {turns} left out"] * (window.first > 0)
            told += ["long answers of earlier turns are shortened"] * bool(window.shares)
            note(
                f"{' and '.join(told)}: the context holds {context:,} tokens; /summarize replaces older turns by a "
                "summary, /clear deletes all"
            )
        self.left_out = now
        return sent_messages(asked, window, self.system, self.told)

    def command(self, line: str) -> bool:
        """Carry out a slash command; False ends the session."""
        word, _, rest = line.partition(" ")
        if word in ("/exit", "/quit", "/bye"):
            return False
        known: dict[str, Callable[[str], object]] = {
            "/help": lambda _: out.print(HELP),
            "/summarize": self._summarize,
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

    def _summarize(self, _: str) -> None:
        *older, newest = turns_of(self.history) or [[]]
        if not older:
            note("there is no older turn to summarize")
            return
        context = self.llm.max_context
        requests = summary_requests(
            self.counter, [message for turn in older for message in turn], context, self.told
        )
        params = replace(self.params, max_tokens=summary_tokens(context))
        text = ""
        try:
            messages = next(requests)
            while True:
                output = streamed(self.llm, messages, params, lambda _: None)
                if output.error or not output.text.strip() or output.samples[0].finish_reason == "abort":
                    note(output.error or "the turns stay as they are: there is no summary of them")
                    return
                messages = requests.send(output.text)
        except StopIteration as end:
            text = str(end.value)
        except CumuloError as error:
            print_error(error)
            return
        self.told, self.history, self.left_out = text, newest, (0, 0)
        out.print(text)
        cut = f", which was cut at {summary_tokens(context)} tokens"
        ends = cut if output.samples[0].finish_reason == "length" else ""
        note(f"{len(older)} turn{'' if len(older) == 1 else 's'} replaced by this summary{ends}")

    def _clear(self, _: str) -> None:
        self._forget()
        note("conversation deleted")

    def _forget(self) -> None:
        self.history, self.told, self.left_out = [], "", (0, 0)

    def _set_system(self, text: str) -> None:
        if not text:
            note(f"system message: {self.system or '(the model’s own default)'}")
            return
        self.system = text
        self._forget()
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
        stories = [answer.story for answer in self.answers]
        timed = [story for story in stories if story.decode_tok_s]
        decode_s = sum((story.output_tokens - 1) / (story.decode_tok_s or 1.0) for story in timed)
        decoded = sum(story.output_tokens - 1 for story in timed)
        speed = f", {decoded / decode_s:.1f} tok/s while decoding" if timed else ""
        answers = "1 answer" if len(stories) == 1 else f"{len(stories)} answers"
        out.print(f"{answers}, {sum(story.output_tokens for story in stories)} tokens{speed}")
        out.print(self.llm.ledger)

    def _show_why(self, _: str) -> None:
        if self.answers:
            out.print(self.answers[-1].story.describe())
        else:
            note("there is no answer yet")


def _number(text: str) -> int | float:
    return int(text) if text.removeprefix("-").isdecimal() else float(text)
