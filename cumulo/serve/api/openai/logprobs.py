"""Log-probabilities in the shapes clients know: OpenAI's list of objects for chats and its columns for completions,
and vLLM's list of tables for a prompt. They are worded in a thread: the event loop goes on.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from cumulo.engine.decide.plan import TokenLogprobs
from cumulo.models.text.detokenizer import IncrementalDetokenizer
from cumulo.serve.model_text import ModelText

_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="word-logprobs")
_to_json = msgspec.json.Encoder().encode
_LOWEST = -9999.0  # what OpenAI's API says of impossible tokens; JSON has no minus infinity


# -- chats ------------------------------------------------------------------------------------------------
def chat_logprobs(text: ModelText, entries: Iterable[TokenLogprobs], top: int) -> dict[str, Any]:
    return {
        "content": [
            {
                **_spelled(text, entry.token, entry.logprob),
                "top_logprobs": [_spelled(text, token, logprob) for token, logprob in entry.top[:top]],
            }
            for entry in entries
        ],
        "refusal": None,
    }


def _spelled(text: ModelText, token: int, logprob: float) -> dict[str, Any]:
    spelling, spelled_bytes = text.token_text(token)
    return {"token": spelling, "logprob": max(logprob, _LOWEST), "bytes": spelled_bytes}


# -- prompts ----------------------------------------------------------------------------------------------
def prompt_logprobs(
    text: ModelText, entries: Iterable[TokenLogprobs], top: int
) -> list[dict[str, dict[str, Any]] | None]:
    """One table per token of the prompt, by token id: the likeliest `top` and the token itself. None for the first:
    nothing stands before it."""
    tables: list[dict[str, dict[str, Any]] | None] = [None]
    for entry in entries:
        ranked = [(token, logprob, rank) for rank, (token, logprob) in enumerate(entry.top[:top], 1)]
        ranked.append((entry.token, entry.logprob, entry.rank))
        tables.append(
            {
                str(token): {
                    "logprob": max(logprob, _LOWEST), "rank": rank, "decoded_token": text.token_text(token)[0],
                }
                for token, logprob, rank in ranked
            }
        )  # fmt: skip
    return tables


# -- completions ------------------------------------------------------------------------------------------
def completion_spelling(text: ModelText, token: int) -> str:
    """A token as columns show it. One that is a part of a character has no text: its bytes are written out, as
    OpenAI does, so that two such tokens are never taken for the same."""
    spelled = text.tokenizer.token_bytes(token)
    if not spelled:
        return f"token_id:{token}"
    try:
        return spelled.decode("utf-8")
    except UnicodeDecodeError:
        shown = (chr(byte) if 0x20 <= byte < 0x7F and byte != 0x5C else f"\\x{byte:02x}" for byte in spelled)
        return "bytes:" + "".join(shown)


class CompletionColumns:
    """Tokens, their log-probabilities and where they begin in the text, growing as an answer does.

    A token is told when all of its text has been: until then a stop string may still cut it off. A character that
    is spread over several tokens begins where its first token does, for all of them.
    """

    def __init__(self, text: ModelText, top: int, *, skip_special: bool = True, start: int = 0) -> None:
        """`start`: where the answer begins in the returned text."""
        self._text, self._top = text, top
        self._detokenizer = IncrementalDetokenizer(text.tokenizer, skip_special, continues=True)
        self._position = start  # in characters, behind all that is certain
        self._untold: list[tuple[TokenLogprobs, int, int]] = []  # with the first character and the one behind

    def push(self, entries: Iterable[TokenLogprobs]) -> None:
        for entry in entries:
            begin = self._position
            self._position += len(self._detokenizer.push(entry.token))
            own = self._text.tokenizer.token_bytes(entry.token).decode("utf-8", "ignore")
            if self._position - begin > len(own) > 0 and completion_spelling(self._text, entry.token) == own:
                begin = self._position - len(own)  # bytes before it never became a character
            self._untold.append((entry, begin, self._position))

    def next_columns(self, shown: int) -> dict[str, Any] | None:
        """The columns of tokens whose text is within the first `shown` characters; None if there are none."""
        ready = 0
        while ready < len(self._untold) and self._untold[ready][2] <= shown:
            ready += 1
        told, self._untold = self._untold[:ready], self._untold[ready:]
        return _columns(self._text, self._top, [(entry, begin) for entry, begin, _ in told]) if told else None

    def finish(self, length: int) -> dict[str, Any]:
        """The columns of what is left when the text ends at `length`: without the tokens of a stop string that was
        cut off."""
        told = [
            (entry, min(begin, length))
            for entry, begin, end in self._untold
            if begin < length or (begin == end == length)
        ]
        self._untold = []
        return _columns(self._text, self._top, told)


def echoed_columns(
    text: ModelText,
    top: int,
    prompt: Sequence[int],
    entries: Sequence[TokenLogprobs],
    length: int,
    skip_special: bool = True,
) -> dict[str, Any]:
    """The columns of a prompt that is shown as the first `length` characters; its first token has no
    log-probability."""
    detokenizer = IncrementalDetokenizer(text.tokenizer, skip_special)
    position, begins = 0, []
    for token in prompt:
        begins.append(min(position, length))
        position += len(detokenizer.push(token))
    columns = _columns(text, top, list(zip(entries, begins[1:], strict=True)))
    first = {"tokens": completion_spelling(text, prompt[0]), "text_offset": 0}
    return {name: [first.get(name), *column] for name, column in columns.items()}


def joined_columns(*parts: dict[str, Any]) -> dict[str, Any]:
    return {name: [value for part in parts for value in part[name]] for name in parts[0]}


def _columns(text: ModelText, top: int, told: Sequence[tuple[TokenLogprobs, int]]) -> dict[str, Any]:
    return {
        "tokens": [completion_spelling(text, entry.token) for entry, _ in told],
        "token_logprobs": [max(entry.logprob, _LOWEST) for entry, _ in told],
        "top_logprobs": [_alternatives(text, top, entry) for entry, _ in told],
        "text_offset": [begin for _, begin in told],
    }


def _alternatives(text: ModelText, top: int, entry: TokenLogprobs) -> dict[str, float]:
    """The likeliest tokens and always the one that was drawn, so up to `top` + 1."""
    found: dict[str, float] = {}
    for token, logprob in entry.top[:top]:
        found.setdefault(completion_spelling(text, token), max(logprob, _LOWEST))
    found[completion_spelling(text, entry.token)] = max(entry.logprob, _LOWEST)
    return found


# -- many of them -----------------------------------------------------------------------------------------
async def worded(with_logprobs: bool | None, word: Callable[[], Any]) -> Any:
    """What `word` makes of an answer, as something `json_response` can send. There may be many log-probabilities:
    with them it is made, and turned into JSON, in a thread."""
    if not with_logprobs:
        return word()
    return await asyncio.get_running_loop().run_in_executor(_thread, lambda: msgspec.Raw(_to_json(word())))
