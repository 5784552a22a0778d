"""FixedPieces: what is the same in every prompt is tokenised once. Made and used by `Tokenizer`.

A tokenizer first looks for its added tokens and then tokenises what stands between two of them by itself. So the
pieces that a chat template puts around what people write (its system prompt, its opening of an answer) have the
same ids in every prompt, and need no second look.
"""

import json
import re
from typing import Any

import tokenizers

# Past this, tokenising piece by piece could cost more than it saves: a text may be full of added tokens.
LONGEST_TEXT = 8_000
# These look at nothing but the piece they are given. Metaspace does not: it asks whether a piece begins the text.
_LOCAL = frozenset(
    ("ByteLevel", "Split", "Digits", "Punctuation", "Whitespace", "WhitespaceSplit", "Sequence")
)


class FixedPieces:
    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        """Only for a tokenizer with `independent_pieces`."""
        self._backend = backend
        self._marker_ids = {
            token.content: token_id
            for token_id, token in backend.get_added_tokens_decoder().items()
            if not token.normalized  # the others are looked for within a piece
        }
        longest_first = sorted(self._marker_ids, key=len, reverse=True)  # as the library matches them
        self._split = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")").split
        self._ids: dict[str, list[int]] = {"": []}

    def keep(self, text: str) -> None:
        """Remember the pieces of this text."""
        for piece in self._split(text)[::2]:
            self._ids[piece] = self._backend.encode(piece, add_special_tokens=False).ids

    def encode(self, text: str) -> list[int]:
        """What the backend makes of the whole text."""
        if len(text) > LONGEST_TEXT:
            whole: list[int] = self._backend.encode(text, add_special_tokens=False).ids
            return whole
        ids: list[int] = []
        for position, piece in enumerate(self._split(text)):
            if position % 2:
                ids.append(self._marker_ids[piece])
            else:
                known = self._ids.get(piece)
                if known is None:
                    known = self._backend.encode(piece, add_special_tokens=False).ids
                ids += known
        return ids


def independent_pieces(backend: tokenizers.Tokenizer) -> bool:
    """Whether a text's ids are those of the pieces between its added tokens, one after another."""
    added = backend.get_added_tokens_decoder().values()
    return (
        any(not token.normalized for token in added)
        and not any(token.lstrip or token.rstrip or token.single_word for token in added)
        and backend.normalizer is None
        and backend.truncation is None
        and backend.padding is None
        and not backend.encode_special_tokens
        and backend.pre_tokenizer is not None
        and _types(json.loads(backend.pre_tokenizer.__getstate__())) <= _LOCAL
    )


def _types(description: dict[str, Any]) -> set[str]:
    inner = description.get("pretokenizers", ())
    return {description["type"]}.union(*(_types(part) for part in inner))
