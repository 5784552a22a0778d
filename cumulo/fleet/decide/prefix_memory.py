"""PrefixMemory: which KV blocks a prompt has, known by its text. Asked before a request is routed, taught after.

The gateway has no tokenizer. The text that a prompt is made of is the raw JSON of its messages (or prompt, or
input): two requests of one conversation begin with the same bytes. What changes the whole prompt (tools, system
text, the caller's cache scope) is hashed first.

A server tells the hashes of a prompt's blocks with its answer. They are remembered by the hashes of the prompt's
text: a later prompt that begins with the same text begins with the same blocks, and which servers hold those they
have said themselves. Where text blocks end inside the tokens is not known, only about where: the share of the text
is the share of the blocks.
"""

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from itertools import chain as joined

import msgspec

from cumulo.engine.decide.core.block_pool import BlockHash

TEXT_BLOCK = 256  # bytes; about 64 tokens of English
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
        return text_chain(repr(before).encode("utf-8", "surrogatepass"), self.text)


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


_USUAL_TOKENS_PER_BYTE = 0.25
_LEARNING = 0.1  # the weight of a new prompt in the mean


class PrefixMemory:
    def __init__(self, most: int = 100_000) -> None:
        """`most`: text blocks that are remembered."""
        self._most = most
        self._blocks: OrderedDict[bytes, tuple[BlockHash, ...]] = OrderedDict()  # by text: those that it adds
        self.tokens_per_byte = _USUAL_TOKENS_PER_BYTE

    def __len__(self) -> int:
        return len(self._blocks)

    def tokens(self, text_bytes: int) -> int:
        """About how many tokens a text has."""
        return max(1, round(text_bytes * self.tokens_per_byte))

    def hashes(self, chain: Sequence[bytes]) -> list[BlockHash]:
        """The hashes of the prompt's blocks, as far as its text is known."""
        found = []
        for text in chain:
            blocks = self._blocks.get(text)
            if blocks is None:
                break
            found.append(blocks)
        return list(joined.from_iterable(found))

    def learn(
        self, chain: Sequence[bytes], text_bytes: int, tokens: int, hashes: Sequence[BlockHash]
    ) -> None:
        if not text_bytes or not tokens:
            return
        self.tokens_per_byte += _LEARNING * (tokens / text_bytes - self.tokens_per_byte)
        end = 0  # of the blocks that the text so far has
        for position, text in enumerate(chain, 1):
            known = self._blocks.get(text)
            if known is None:
                begin, end = end, max(end, int(len(hashes) * min(1.0, position * TEXT_BLOCK / text_bytes)))
                self._blocks[text] = tuple(hashes[begin:end])
            else:
                self._blocks.move_to_end(text)
                end += len(known)
        while len(self._blocks) > self._most:
            self._blocks.popitem(last=False)
