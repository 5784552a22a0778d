"""Tokenizer: text to token ids and back, and messages to prompts. Made by `load_tokenizer` from a Hugging
Face folder or by `tokenizer_gguf`; used by the engine's front, the command line and guided decoding.

Encoding is the `tokenizers` library's. Decoding is not: every token *is* a byte string (`token_bytes`), and
a text is the UTF-8 reading of the joined bytes. That holds for byte-level BPE and for SentencePiece with
byte fallback alike, so whole, incremental and guided decoding cannot disagree.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import tokenizers

from cumulo.errors import InvalidRequest, ModelError, PromptTooLong
from cumulo.models.files.json_file import read_json, token_ids
from cumulo.models.text.caller_text import CallerText, Sought, sought_texts
from cumulo.models.text.chat_template import ChatTemplate, Message
from cumulo.models.text.control_tokens import ControlTokens, backend_ids
from cumulo.models.text.tokenizer_file import is_failure, open_tokenizer_file

Kind = Literal["byte_level", "sentencepiece"]
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_alphabet() -> dict[str, int]:
    """The printable character that stands for each byte in a byte-level vocabulary (Radford et al. 2019).

    Printable Latin-1 bytes stand for themselves; the others are numbered from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)).difference(printable))
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + index): byte for index, byte in enumerate(others)
    }


_BYTE_OF_CHARACTER = byte_alphabet()


class Tokenizer:
    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        kind: Kind,
        pieces: Sequence[str | None],  # by token id, as the vocabulary spells them; None: no such token
        added_ids: Iterable[int] = (),  # tokens spelled as plain text, whatever the kind
        special_ids: Iterable[int] = (),  # of these, the ones that are not part of the text
        bos_id: int | None = None,
        eos_ids: Iterable[int] = (),
        always_bos: bool = False,  # add_special begins with bos_id even if the backend does not do it
        space_prefix: bool = False,  # encoding puts a space before the text; decoding takes it off
        special_texts: Mapping[str, str] | None = None,  # bos_token, eos_token, ...: for chat templates
        chat_template: str | None = None,
    ) -> None:
        self.backend, self.kind = backend, kind
        self.special_ids = frozenset(special_ids)
        self.bos_id = bos_id
        self.eos_ids = tuple(dict.fromkeys(eos_ids))
        self.space_prefix = space_prefix
        self.special_texts = dict(special_texts or {})
        self.chat_template: ChatTemplate | None = None
        if chat_template is not None:
            self.use_chat_template(chat_template)
        self._pieces = list(pieces)
        self._added_ids = frozenset(added_ids) | self.special_ids
        self._always_bos = always_bos
        self._bytes: list[bytes | None] = [None] * len(self._pieces)

    @property
    def vocab_size(self) -> int:
        """Ids are below this. A model's embedding may have more rows, which stand for no text."""
        return len(self._pieces)

    # -- text to ids ---------------------------------------------------------------------------------------
    def encode(
        self,
        text: str | bytes,
        add_special: bool = False,
        parse_special_tokens: bool = True,
        most_tokens: int | None = None,
    ) -> list[int]:
        """Special tokens written out in the text are recognised, unless `parse_special_tokens` is False: then they
        are text. `add_special` puts those around it that the model was trained with (usually a begin-of-sequence
        token). `most_tokens`: a text whose beginning has more is refused, and the rest is not read."""
        text = _valid_text(text)
        try:
            if most_tokens is not None:
                self._refuse_longer(text, most_tokens)
            if not parse_special_tokens and self.control.occur_in(text):
                before, after = self.control.around if add_special else ([], [])
                ids = [*before, *self.control.encode(text), *after]
            else:
                ids = backend_ids(self.backend, text, add_special)
        except BaseException as error:
            raise _refusal(error) from error
        if add_special and self._always_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            return [self.bos_id, *ids]
        return ids

    def _refuse_longer(self, text: str, most_tokens: int) -> None:
        """Encodes longer and longer beginnings until one has too many tokens or most of the text is read. A cut
        changes only the last tokens of a beginning, so a sixteenth more than `most_tokens` proves that the whole
        text has too many, too."""
        characters = 2 * most_tokens
        while characters < len(text):
            if len(backend_ids(self.backend, text[:characters])) > most_tokens + most_tokens // 16 + 64:
                raise PromptTooLong(
                    f"the prompt has more than {most_tokens:,} tokens; this model's context holds at most as many: "
                    "shorten the prompt"
                )
            characters *= 4

    @cached_property
    def control(self) -> ControlTokens:
        """The tokens that callers' texts must not become."""
        return ControlTokens(self.backend)

    @cached_property
    def _caller_text(self) -> CallerText:
        template = self.chat_template
        return CallerText(self.control, Sought() if template is None else sought_texts(template.source))

    def prepare_chats(self) -> None:
        """Compile the chat template and tokenise what it puts around every message: now, not in the first request.
        Raises what `apply_chat_template` does."""
        self.control.prepare()
        self.apply_chat_template([{"role": "user", "content": ""}])

    # -- ids to text ---------------------------------------------------------------------------------------
    def token_bytes(self, token_id: int) -> bytes:
        """What a token adds to the text. A multi-byte character may be spread over several tokens."""
        if not 0 <= token_id < len(self._bytes):
            return b""
        found = self._bytes[token_id]
        if found is None:
            found = self._bytes[token_id] = self._spell(token_id)
        return found

    def decode(self, ids: Iterable[int], skip_special: bool = True, continues: bool = False) -> str:
        """The text of `ids`. `continues`: text stands before it, so a leading space is part of it."""
        skipped = self.special_ids if skip_special else frozenset()
        text = b"".join(self.token_bytes(token) for token in ids if token not in skipped)
        if self.space_prefix and not continues and text.startswith(b" "):
            text = text[1:]
        return text.decode("utf-8", "replace")

    def _spell(self, token_id: int) -> bytes:
        piece = self._pieces[token_id]
        if piece is None:
            return b""
        if self.kind == "sentencepiece":
            if (match := _BYTE_PIECE.fullmatch(piece)) and token_id not in self._added_ids:
                return bytes.fromhex(match[1])
            return piece.replace("▁", " ").encode()
        if token_id not in self._added_ids:
            try:
                return bytes([_BYTE_OF_CHARACTER[character] for character in piece])
            except KeyError:
                pass  # some files leave added tokens unmarked: they are spelled as plain text
        return piece.encode()

    # -- conversations -------------------------------------------------------------------------------------
    def use_chat_template(self, source: str) -> None:
        """Take this jinja2 template instead of the model's own."""
        self.chat_template = ChatTemplate(source, self.special_texts)
        self.__dict__.pop("_caller_text", None)  # what was derived from the one before

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        if self.chat_template is None:
            raise InvalidRequest(
                "this model has no chat template, so messages cannot be turned into a prompt; use `generate` "
                "with a plain prompt, or give a template with --chat-template"
            )
        return self.chat_template.render(
            messages, add_generation_prompt=add_generation_prompt, tools=tools, **variables
        )

    def encode_chat(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> list[int]:
        return self.render_chat(messages, add_generation_prompt, tools, variables)[1]

    def render_chat(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        cut: Callable[[str], str] | None = None,
        parse_special_tokens: bool = False,
        most_tokens: int | None = None,
    ) -> tuple[str, list[int]]:
        """The prompt of a conversation and its tokens. A template writes its special tokens itself, so none are
        added; what callers write stays text, unless `parse_special_tokens`. `cut` shortens what the template wrote.
        """
        variables = variables or {}
        try:
            guarded = None if parse_special_tokens else self._caller_text.guard(messages, tools, variables)
        except RecursionError:
            raise InvalidRequest("the messages or tools are nested too deeply") from None
        if guarded is not None:
            messages, tools, variables = guarded.messages, guarded.tools, guarded.variables
        rendered = self.apply_chat_template(messages, add_generation_prompt, tools, **variables)
        if cut is not None:
            rendered = cut(rendered)
        text = rendered if guarded is None else guarded.restored(rendered)
        control = self.control
        if not parse_special_tokens and control.of_normalised and not text.isascii():
            unlike = True  # normalising may turn other characters into a token's
        else:
            unlike = guarded is not None and control.places(rendered) != control.places(text)
        if not unlike:
            return text, self.encode(text, most_tokens=most_tokens)
        _valid_text(text)
        if most_tokens is not None:
            self._refuse_longer(text, most_tokens)
        named = control.renamed(rendered)
        try:
            return text, control.encode(named if guarded is None else guarded.restored(named))
        except BaseException as error:
            raise _refusal(error) from error


def _refusal(error: BaseException) -> BaseException:
    """What to raise when the library cannot encode a text: its word rules gave up, or it panicked."""
    if isinstance(error, PromptTooLong) or not is_failure(error):
        return error
    return InvalidRequest(f"the model's tokenizer fails on this text ({' '.join(str(error).split())[:200]})")


def _valid_text(text: str | bytes) -> str:
    if isinstance(text, bytes):
        try:
            return text.decode("utf-8")
        except UnicodeDecodeError as error:
            raise InvalidRequest(f"the prompt is not valid UTF-8 (byte {error.start})") from error
    if not isinstance(text, str):
        raise InvalidRequest(f"a prompt must be text, got {type(text).__name__}")
    if text.isascii():
        return text
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"the prompt holds a lone surrogate (character {error.start}: {text[error.start]!r}), which is "
            "no valid Unicode text; it usually comes from bytes decoded wrongly"
        ) from error
    return text


# -- from a Hugging Face folder -----------------------------------------------------------------------------


def load_tokenizer(folder: Path) -> Tokenizer:
    """From tokenizer.json, with what tokenizer_config.json, generation_config.json and chat_template.jinja
    say about special tokens, ends and conversations."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelError(
            f"{folder} has no tokenizer.json; if it has another tokenizer file, convert it with "
            "transformers' AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
        )
    backend, description = open_tokenizer_file(path)
    config = read_json(folder / "tokenizer_config.json")
    generation = read_json(folder / "generation_config.json")
    model = read_json(folder / "config.json")
    added = backend.get_added_tokens_decoder()
    vocabulary = backend.get_vocab(with_added_tokens=True)
    pieces: list[str | None] = [None] * (max(vocabulary.values(), default=-1) + 1)
    for piece, token_id in vocabulary.items():
        pieces[token_id] = piece
    special_texts = _special_tokens(config)
    rows = model.get("vocab_size")
    known = max(len(pieces), rows if type(rows) is int else 0)  # an embedding may have more rows than tokens
    ends: list[int] = []
    for source, name in ((generation, "generation_config.json"), (model, "config.json")):
        for field in ("eos_token_id", "bos_token_id", "pad_token_id"):
            if source.get(field) == -1 and field == "pad_token_id":
                continue  # how some releases say that there is none
            found = token_ids(source.get(field), f"{folder / name}: {field}", known)
            ends += found if field == "eos_token_id" else ()
    if special_texts.get("eos_token") in vocabulary:
        ends.append(vocabulary[special_texts["eos_token"]])
    bos_text = special_texts.get("bos_token")
    bos_id = vocabulary.get(bos_text) if bos_text else None
    kind, space_prefix = _decoder_kind(path, description)
    return Tokenizer(
        backend,
        kind=kind,
        pieces=pieces,
        added_ids=added,
        special_ids=[token_id for token_id, token in added.items() if token.special],
        bos_id=bos_id,
        eos_ids=ends,
        always_bos=config.get("add_bos_token") is True,
        space_prefix=space_prefix,
        special_texts=special_texts,
        chat_template=_chat_template(folder, config),
    )


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """bos_token, eos_token, ... by name: plain strings, or objects with their text under "content"."""
    result = {}
    for name, value in config.items():
        if name.endswith("_token"):
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                result[name] = text
    return result


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text("utf-8")
        except (OSError, ValueError) as error:
            raise ModelError(f"{path} cannot be read: {error}") from error
    template = config.get("chat_template")
    if isinstance(template, list):  # several by name; the one called "default" is for conversations
        named = {item.get("name"): item.get("template") for item in template if isinstance(item, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _decoder_kind(path: Path, description: Mapping[str, Any]) -> tuple[Kind, bool]:
    """How the vocabulary spells bytes, and whether decoding takes a leading space off."""
    decoder = description.get("decoder") or {}
    steps = decoder.get("decoders", []) if decoder.get("type") == "Sequence" else [decoder]
    types = [step.get("type") for step in steps]
    if "ByteLevel" in types:
        return "byte_level", False
    model = description.get("model") or {}
    if "Metaspace" in types or "ByteFallback" in types or model.get("byte_fallback"):
        strips = any(step.get("type") == "Strip" and step.get("start", 0) >= 1 for step in steps)
        prefixes = any(
            step.get("type") == "Metaspace" and step.get("prepend_scheme", "always") != "never"
            for step in steps
        )
        return "sentencepiece", strips or prefixes
    raise ModelError(
        f"{path}: its decoder is {' + '.join(map(str, types)) or 'missing'}; byte-level BPE and "
        "SentencePiece tokenizers are known"
    )
