"""ModelText: text to tokens and back in the API process, which loads the model's tokenizer but not its weights.

Short texts are tokenised where they arrive. Long ones go to a thread (the tokenizer lets go of the
interpreter's lock), and very long ones to another, one at a time, so that nobody else waits for them. A text
that cannot fit the context whatever its tokens are is refused before that, others when their beginning is too long.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from cumulo.errors import CumuloError, InvalidRequest, ModelError, PromptTooLong
from cumulo.models.files.gguf_file import open_gguf
from cumulo.models.files.hub import resolve
from cumulo.models.text.tokenizer import Tokenizer, load_tokenizer
from cumulo.models.text.tokenizer_gguf import tokenizer_from_gguf
from cumulo.serve.bodies.warnings import warn
from cumulo.serve.formats.reasoning import CLOSE, OPEN, detect_reasoning
from cumulo.serve.formats.tool_calls import ToolFormat, detect_tool_format, hides_markers, special_token

_PROBE = "probe_of_the_template"


@dataclass(frozen=True, slots=True)
class ModelFormats:
    """How the served model is told of tools, calls them, and thinks. Read off its chat template once."""

    tools: ToolFormat
    template_shows_tools: bool  # False: a system message describes them, and conversations are rewritten
    tool_markers_special: bool  # markers that are special tokens vanish unless the answer shows those
    thinks: bool  # <think> ... </think> comes before its answers
    thought_markers_special: bool

    @classmethod
    def for_tokenizer(cls, tokenizer: Tokenizer) -> "ModelFormats":
        template = tokenizer.chat_template.source if tokenizer.chat_template is not None else None
        own = detect_tool_format(template)
        native = own is not None and _shows_tools(tokenizer)
        tools = own if own is not None and native else "hermes"
        return cls(
            tools=tools,
            template_shows_tools=native,
            tool_markers_special=hides_markers(tools, tokenizer),
            thinks=detect_reasoning(template),
            thought_markers_special=any(special_token(text, tokenizer) is not None for text in (OPEN, CLOSE)),
        )


def _shows_tools(tokenizer: Tokenizer) -> bool:
    """Tried out, not guessed: a template may name `tools` and never write them."""
    tool: dict[str, Any] = {
        "type": "function",
        "function": {
            "name": _PROBE,
            "description": "",
            "parameters": {"type": "object", "properties": {}, "required": []},
        },
    }
    try:
        return _PROBE in tokenizer.apply_chat_template([{"role": "user", "content": ""}], True, [tool])
    except CumuloError:
        return False


# `continue_final_message`: a template closes every message with its end-of-turn tokens. A mark is put at the end
# of the last message before the template runs, and what the template writes is cut there, as transformers does.
_MARK = "cumulo-continues-this-message-here"
# Behind the mark stands a space: where that is gone, the template trims contents, and the text's end goes likewise.
_MARK_AND_SPACE = f"{_MARK} "


def with_open_end(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    *earlier, last = messages
    return [*earlier, {**last, "content": (last.get("content") or "") + _MARK_AND_SPACE}]


def up_to_open_end(rendered: str) -> str:
    place = rendered.rfind(_MARK)
    if place < 0:
        raise InvalidRequest(
            "continue_final_message: the model's chat template does not write the last message's content, so it "
            "cannot be continued; leave continue_final_message out"
        )
    kept = rendered[:place]
    return kept if rendered.startswith(_MARK_AND_SPACE, place) else kept.rstrip()


Result = TypeVar("Result")
log = logging.getLogger(__name__)
_TAKEN_AS_TEXT = (
    "the text spells special tokens of this model, and they were taken as plain text; "
    "parse_special_tokens: true recognises them"
)
_LONG_CHARACTERS = 8_000  # a few milliseconds of work: more would hold up everybody's streams
_VERY_LONG_CHARACTERS = 100_000  # a tenth of a second: more would hold up other long texts
COUNTED_CONTEXTS = 4  # a text that is counted, not answered, may be so many times as long as the context


class ModelText:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.formats = ModelFormats.for_tokenizer(tokenizer)
        self.parse_special_tokens = False  # whether callers' texts may contain special tokens
        self.max_context = 0  # set when the engine has said it; 0: not known yet
        # A token is so many bytes of the text, or, where a normaliser may join characters, so many characters.
        self._counts_bytes = tokenizer.kind == "byte_level" and tokenizer.backend.normalizer is None
        self._longest_token_bytes = max(
            1, max((len(tokenizer.token_bytes(token)) for token in range(tokenizer.vocab_size)), default=1)
        )
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="tokenise")
        self._thread_of_very_long = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenise-long")

    @classmethod
    def load(
        cls, model: str | None, chat_template: Path | None = None, parse_special_tokens: bool = False
    ) -> "ModelText":
        source = resolve(model)
        tokenizer = (
            tokenizer_from_gguf(open_gguf(source.path).metadata)
            if source.format == "gguf"
            else load_tokenizer(source.path)
        )
        if chat_template is not None:
            try:
                tokenizer.use_chat_template(chat_template.read_text("utf-8"))
            except (OSError, ValueError) as error:
                raise CumuloError(f"the chat template {chat_template} cannot be read: {error}") from error
        text = cls(tokenizer)
        text.parse_special_tokens = parse_special_tokens
        try:
            tokenizer.prepare_chats()
        except ModelError as error:  # it serves completions
            log.warning("chats will be refused: %s", error)
        except CumuloError:
            pass  # no template, or one that refuses an empty message: requests are told
        return text

    async def encode(
        self,
        text: str,
        add_special: bool = True,
        parse_special_tokens: bool | None = None,
        most_contexts: int = 1,
    ) -> list[int]:
        """`parse_special_tokens`: the text's own special tokens are recognised; None: as the server was started.
        `most_contexts`: a text with more tokens than so many contexts is refused."""
        return (await self.encode_many([text], add_special, parse_special_tokens, most_contexts))[0]

    async def encode_many(
        self,
        texts: Sequence[str],
        add_special: bool = True,
        parse_special_tokens: bool | None = None,
        most_contexts: int = 1,
    ) -> list[list[int]]:
        for text in texts:
            self._refuse_hopeless([text], most_contexts)
        most_tokens = self.max_context * most_contexts or None
        parse = self.parse_special_tokens if parse_special_tokens is None else parse_special_tokens

        def encode_all() -> tuple[list[list[int]], bool]:
            taken_as_text = not parse and any(map(self.tokenizer.control.occur_in, texts))
            encoded = [self.tokenizer.encode(text, add_special, parse, most_tokens) for text in texts]
            return encoded, taken_as_text

        tokens, taken_as_text = await self._apart(sum(map(len, texts)), encode_all)
        if taken_as_text:
            warn(_TAKEN_AS_TEXT)
        return tokens

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] = {},
        continue_final_message: bool = False,
        most_contexts: int = 1,
    ) -> tuple[str, list[int]]:
        """The prompt the model's chat template makes of messages and tools, and its tokens. `variables`: further
        ones for the template. `continue_final_message`: the prompt ends inside the last message."""
        contents = [message.get("content") or "" for message in messages]
        self._refuse_hopeless(contents, most_contexts)
        # Never here: the template's worker may be busy, and schemas and arguments may be of any size.
        return await self._apart(
            max(_LONG_CHARACTERS, sum(map(len, contents))),
            self.tokenizer.render_chat,
            with_open_end(messages) if continue_final_message else messages,
            add_generation_prompt,
            tools,
            variables,
            up_to_open_end if continue_final_message else None,
            self.parse_special_tokens,
            self.max_context * most_contexts or None,
        )

    async def decode(self, tokens: list[int]) -> str:
        return await self._apart(len(tokens), self.tokenizer.decode, tokens, False)

    def token_text(self, token: int) -> tuple[str, list[int]]:
        """A token as log-probabilities show it: text (with U+FFFD where a character is cut) and its bytes."""
        spelled = self.tokenizer.token_bytes(token)
        return spelled.decode("utf-8", "replace"), list(spelled)

    def _refuse_hopeless(self, texts: Sequence[str], most_contexts: int) -> None:
        """Texts longer than the context filled with the longest tokens need no tokenising to be refused."""
        most = self.max_context * most_contexts * self._longest_token_bytes
        size = sum(
            len(text.encode("utf-8", "surrogatepass")) if self._counts_bytes else len(text) for text in texts
        )
        if self.max_context and size > most:
            unit = "bytes" if self._counts_bytes else "characters"
            raise PromptTooLong(
                f"the prompt has {size:,} {unit}; the context holds {self.max_context:,} tokens including the "
                f"answer, and no prompt of more than {most:,} {unit} is read: shorten the prompt"
            )

    async def _apart(self, size: int, work: Callable[..., Result], *arguments: Any) -> Result:
        if size < _LONG_CHARACTERS:
            return work(*arguments)
        threads = self._threads if size < _VERY_LONG_CHARACTERS else self._thread_of_very_long
        return await asyncio.get_running_loop().run_in_executor(threads, work, *arguments)

    def close(self) -> None:
        for threads in (self._threads, self._thread_of_very_long):
            threads.shutdown(wait=False, cancel_futures=True)
