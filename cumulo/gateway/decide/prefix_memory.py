"""PrefixMemory: which KV blocks a prompt has, known by its text. Asked before a request is routed, taught after.

A server tells the hashes of a prompt's blocks with its answer. They are remembered by the hashes of the prompt's
text: a later prompt that begins with the same text begins with the same blocks, and which servers hold those they
have said themselves. Where text blocks end inside the tokens is not known, only about where: the share of the text
is the share of the blocks.
"""

from collections import OrderedDict
from collections.abc import Sequence
from itertools import chain as joined

from cumulo.engine.decide.core.block_pool import BlockHash
from cumulo.gateway.decide.prompt_text import TEXT_BLOCK

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
        """Of the prompt's blocks, as far as its text is known."""
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
