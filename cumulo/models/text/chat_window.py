"""ChatWindow: which turns of a long chat are sent, so that the context has room for the answer. A decision on token
counts, for the console's chat and `cumulo chat`.

A turn is a question with everything that answers it. The system message and the newest turn are always sent. When
a turn no longer fits, the oldest ones are left out until those before it take three quarters of the room that it
leaves: leaving out one at a time would change the prompt's beginning with every question, and the prefix cache
would never help again. From then on an earlier turn takes half of the room at most: the longest texts of a longer
one are shortened, so that one long answer does not drive out all that was said before it.
"""

import json
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cumulo.models.text.tokenizer import Tokenizer

Messages = list[dict[str, Any]]
_BORDERS = 4  # tokens that texts may take more together than counted apart
_ASK = "Summarize our conversation for your own memory: facts, names, decisions, open questions. Be brief."
_TOLD = "Summary of the conversation before this message:\n{}\n\n"


@dataclass(frozen=True, slots=True)
class ChatWindow:
    first: int = 0  # turn that is sent; the ones before it are left out
    prompt_tokens: int = 0  # of what is sent, all in all
    answer_tokens: int = 0  # kept free for the answer
    shares: Mapping[int, float] = field(default_factory=dict)  # of turns that are sent shortened


def choose_window(
    fixed_tokens: int, turn_tokens: Sequence[int], context: int, max_tokens: int | None
) -> ChatWindow:
    """`fixed_tokens`: of the system message and what else stands before the turns. `max_tokens`: of the answer,
    which is promised a quarter of the context at most."""
    answer = min(max_tokens or context, context // 4)
    room = context - answer - fixed_tokens
    if (whole := sum(turn_tokens)) <= room:
        return ChatWindow(0, fixed_tokens + whole, answer)
    most, last = max(1, room // 2), len(turn_tokens) - 1
    first = older = 0
    for index, tokens in enumerate(turn_tokens):
        sent = tokens if index == last else min(tokens, most)
        if older + sent > room:
            while first < index and older > (room - sent) * 3 // 4:
                older -= min(turn_tokens[first], most)
                first += 1
        older += sent
    shares = {n: most / turn_tokens[n] for n in range(first, last) if turn_tokens[n] > most}
    return ChatWindow(first, fixed_tokens + older, answer, shares)


def turns_of(messages: Sequence[Mapping[str, Any]]) -> list[Messages]:
    """The messages by turns: each user's message begins one."""
    turns: list[Messages] = []
    for message in messages:
        if message["role"] == "user" or not turns:
            turns.append([])
        turns[-1].append(dict(message))
    return turns


class ChatCounter:
    """Counts the tokens of a chat's parts. Each text is counted once, so that a long chat is not read again with
    every question; what the chat template writes around a turn is measured."""

    def __init__(self, tokenizer: "Tokenizer") -> None:
        self._tokenizer = tokenizer
        self._counted: dict[str, int] = {}
        self._fixed: dict[str | None, int] = {}  # by system message
        self._turn_frame: int | None = None

    def window(
        self,
        messages: Sequence[Mapping[str, Any]],
        context: int,
        max_tokens: int | None,
        *,
        system: str | None = None,
        summary: str = "",
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> ChatWindow:
        """Which turns of the messages (without system message) are sent. `summary`: of what came before them."""
        if system not in self._fixed:
            first = [{"role": "system", "content": system}] if system else []
            self._fixed[system] = len(self._prompt([*first, {"role": "user", "content": ""}]))
        fixed = self._fixed[system] + _BORDERS
        fixed += self.count(json.dumps(list(tools))) if tools else 0
        fixed += self.count(told(summary)) if summary else 0
        turns = turns_of(messages)
        counted = list(map(self._turn, turns))
        window = choose_window(fixed, counted, context, max_tokens)
        shares = {}
        for number, share in window.shares.items():
            most = share * counted[number]
            while share > 0.001 and self._turn(_shortened(turns[number], share)) > most:
                share *= 0.8  # its beginning has more tokens than its end
            shares[number] = share
        return replace(window, shares=shares)

    def count(self, text: str) -> int:
        found = self._counted.get(text)
        if found is None:
            found = self._counted[text] = len(self._tokenizer.encode(text, False, False))
        return found

    def _turn(self, turn: Messages) -> int:
        if self._turn_frame is None:
            user, assistant = {"role": "user", "content": ""}, {"role": "assistant", "content": ""}
            self._turn_frame = len(self._prompt([user, assistant, user])) - len(self._prompt([user]))
        calls = [json.dumps(message["tool_calls"]) for message in turn if message.get("tool_calls")]
        texts = [*(str(message.get("content") or "") for message in turn), *calls]
        # The frame of an unanswered question is among the fixed tokens.
        return len(turn) // 2 * self._turn_frame + sum(map(self.count, texts))

    def _prompt(self, messages: Messages) -> list[int]:
        return self._tokenizer.render_chat(messages)[1]


def sent_messages(
    messages: Sequence[Mapping[str, Any]], window: ChatWindow, system: str | None = None, summary: str = ""
) -> Messages:
    """What of the messages goes to the model: those of the window, below the system message."""
    kept: Messages = []
    for number, turn in enumerate(turns_of(messages)):
        if number >= window.first:
            kept += _shortened(turn, window.shares.get(number, 1.0))
    if summary and kept:
        kept[0]["content"] = told(summary) + (kept[0].get("content") or "")
    return [{"role": "system", "content": system}, *kept] if system else kept


def told(summary: str) -> str:
    """The summary as it stands before the first question that is sent; not every template takes it elsewhere."""
    return _TOLD.format(summary.strip())


def summary_tokens(context: int) -> int:
    """The most that a summary takes."""
    return min(256, context // 4)


def summary_requests(
    counter: ChatCounter, messages: Sequence[Mapping[str, Any]], context: int, summary: str = ""
) -> Generator[Messages, str, str]:
    """Asks for a summary of the messages: yields what to send, is sent the model's answer, and returns the last.
    As many turns as fit go into one request; the next one begins with the summary so far. A single turn that does
    not fit is cut."""
    rest = turns_of(messages)
    while rest:
        count, kept = len(rest), 1.0
        while True:
            asked = [_cut(message, kept) for turn in rest[:count] for message in turn]
            asked.append({"role": "user", "content": _ASK})
            before = summary[: int(len(summary) * kept)]
            window = counter.window(asked, context, summary_tokens(context), summary=before)
            if not (window.first or window.shares) or kept < 0.01:
                break
            count, kept = (count - 1, kept) if count > 1 else (count, kept / 2)
        summary = (yield sent_messages(asked, ChatWindow(), None, before)).strip()
        rest = rest[count:]
    return summary


def _shortened(turn: Messages, share: float) -> Messages:
    """The turn with the given share of its text: its longest messages are cut to one length."""
    lengths = [len(message.get("content") or "") for message in turn]
    left, kept = share * sum(lengths), list(turn)
    for count, place in enumerate(sorted(range(len(turn)), key=lengths.__getitem__)):
        length = min(lengths[place], int(left / (len(turn) - count)))
        left -= length
        if length < lengths[place]:
            kept[place] = turn[place] | {"content": turn[place]["content"][:length] + " …"}
    return kept


def _cut(message: Mapping[str, Any], kept: float) -> dict[str, Any]:
    """The message with the given share of its text."""
    text = str(message.get("content") or "")
    return {**message, "content": text[: int(len(text) * kept)]}
