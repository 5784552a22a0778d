"""What a gateway reads of a request before it is routed: its model, its session, and hashes of its prompt's text.

The gateway has no tokenizer. The text that a prompt is made of is the raw JSON of its messages (or prompt, or
input): two requests of one conversation begin with the same bytes. What changes the whole prompt (tools, system
text, the caller's cache scope) is hashed first.
"""

from hashlib import blake2b

import msgspec

TEXT_BLOCK = 256  # bytes; about 64 tokens of English
_MOST_BYTES = 1 << 20  # of a text that is hashed: two that agree so far go to one replica
_EMPTY = msgspec.Raw(b"")


class Peek(msgspec.Struct, frozen=True):
    """The fields of a request that the gateway looks at; servers check them all."""

    model: str | None = None
    stream: bool | None = None
    messages: msgspec.Raw = _EMPTY
    prompt: msgspec.Raw = _EMPTY
    input: msgspec.Raw = _EMPTY
    system: msgspec.Raw = _EMPTY
    instructions: msgspec.Raw = _EMPTY
    tools: msgspec.Raw = _EMPTY
    user: str | None = None
    prompt_cache_key: str | None = None
    cache_salt: str | None = None
    previous_response_id: str | None = None
    priority: int | None = None

    @property
    def text(self) -> bytes:
        return bytes(self.messages or self.prompt or self.input)

    @property
    def session(self) -> str:
        return self.prompt_cache_key or self.user or ""

    def chain(self, scope: str) -> list[bytes]:
        """Hashes of the prompt's text blocks, each of everything before its end. `scope`: who shares caches."""
        before = (
            scope,
            self.model,
            self.cache_salt,
            bytes(self.system),
            bytes(self.instructions),
            bytes(self.tools),
        )
        return text_chain(repr(before).encode("utf-8", "surrogatepass"), self.text[:_MOST_BYTES])


_NOTHING = Peek()
_read = msgspec.json.Decoder(Peek).decode


def peek(body: bytes) -> Peek:
    """What cannot be read is not the gateway's to word: a server says what is wrong with it."""
    try:
        found: Peek = _read(body)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return _NOTHING
    return found


def text_chain(before: bytes, text: bytes) -> list[bytes]:
    parent, found = blake2b(before, digest_size=8).digest(), []
    for start in range(0, len(text) - TEXT_BLOCK + 1, TEXT_BLOCK):
        parent = blake2b(parent + text[start : start + TEXT_BLOCK], digest_size=8).digest()
        found.append(parent)
    return found
