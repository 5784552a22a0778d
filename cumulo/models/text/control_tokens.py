"""ControlTokens: which texts a tokenizer reads as control tokens, and a way to encode them as the plain text they
are. Made and used by `Tokenizer`; `caller_text` asks it what to look for in what callers write.

The `tokenizers` library turns `<|im_end|>` into the end of a turn wherever it stands. A second tokenizer shares the
first one's model, normaliser and word rules, but calls every control token by a secret name. What a template
wrote is renamed before it is encoded; what a caller wrote is not, so it is text like any other.
"""

import re
import secrets
from collections.abc import Iterable, Mapping
from functools import cached_property

import tokenizers
from tokenizers import AddedToken

_MOST_GAPS = 1 << 20  # ids without a token below the largest one; load_tokenizer refuses more


def backend_ids(backend: tokenizers.Tokenizer, text: str, add_special: bool = False) -> list[int]:
    """The ids of a text by the library, which holds the interpreter's lock while it encodes one text, and lets go
    of it for a batch. A batch without offsets is also faster, at any length."""
    ids: list[int] = backend.encode_batch_fast([text], add_special_tokens=add_special)[0].ids
    return ids


def is_marker(token: AddedToken) -> bool:
    """Whether a caller must not be able to write this token: special ones, and markers such as <tool_call> that are
    added without being special. Runs of spaces and whole words that were added stay ordinary text."""
    text = token.content.strip()
    return bool(text) and (token.special or (len(text) > 2 and text[0] in "<[｜"))


class ControlTokens:
    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        self.ids: dict[str, int] = {
            token.content: token_id for token_id, token in added.items() if is_marker(token)
        }
        self.special = frozenset(token.content for token in added.values() if token.special)
        self._added = added
        self.of_normalised = backend.normalizer is not None and any(
            token.normalized for token in added.values() if token.content in self.ids
        )
        self._first_characters = tuple({text[0] for text in self.ids})
        self.pattern = alternatives(self.ids)

    def prepare(self) -> None:
        """Make the second tokenizer now, not in the first request that needs it."""
        self.encode("")

    def occur_in(self, text: str) -> bool:
        """Whether the library would find a control token here."""
        if self.of_normalised and not text.isascii():  # normalising may spell one
            return True
        return any(map(text.__contains__, self._first_characters)) and self.pattern.search(text) is not None

    def encode(self, text: str) -> list[int]:
        """Without recognising control tokens, except those that `renamed` has given their secret names."""
        clone, meant, _ = self._plain
        ids = backend_ids(clone, text)
        if not self._words.isdisjoint(ids):  # Unigram models have control tokens among their words
            ids = [
                token
                for piece in _cut(text, self.pattern.finditer(text))
                for token in backend_ids(clone, piece)
            ]
        return [meant.get(token, token) for token in ids]

    def places(self, text: str) -> list[tuple[int, int]]:
        """Where control tokens stand."""
        return [match.span() for match in self.pattern.finditer(text)]

    def renamed(self, text: str) -> str:
        """A text in which each control token stands under its secret name."""
        names = self._plain[2]
        return self.pattern.sub(lambda match: names[match[0]], text)

    @cached_property
    def around(self) -> tuple[list[int], list[int]]:
        """What the library puts before and after a text when it adds special tokens."""
        bare = backend_ids(self._backend, "a")
        whole = backend_ids(self._backend, "a", add_special=True)
        for begin in range(len(whole) - len(bare) + 1):
            if whole[begin : begin + len(bare)] == bare:
                return whole[:begin], whole[begin + len(bare) :]
        return [], []

    @cached_property
    def _highest_word(self) -> int:
        return max(self._backend.get_vocab(with_added_tokens=False).values(), default=-1)

    @cached_property
    def _words(self) -> frozenset[int]:
        """The control tokens that are words of the model, too."""
        return frozenset(token for token in self.ids.values() if token <= self._highest_word)

    @cached_property
    def _plain(self) -> tuple[tokenizers.Tokenizer, Mapping[int, int], Mapping[str, str]]:
        """The second tokenizer, the ids its added tokens stand for, and control tokens' secret names."""
        backend, secret = self._backend, secrets.token_hex(16)
        clone = tokenizers.Tokenizer(backend.model)  # shared, not copied
        if backend.normalizer is not None:
            clone.normalizer = backend.normalizer
        if backend.pre_tokenizer is not None:
            clone.pre_tokenizer = backend.pre_tokenizer
        # New tokens get the ids from the number of words on: fill the gaps, or an id would have two meanings.
        gaps = min(self._highest_word + 1 - clone.get_vocab_size(), _MOST_GAPS)
        clone.add_tokens([AddedToken(f"\ue000{secret}g{gap}\ue001", normalized=False) for gap in range(gaps)])
        names = {text: f"\ue000{secret}k{token_id}\ue001" for text, token_id in self.ids.items()}
        spelled = {
            token_id: names.get(token.content, token.content) for token_id, token in self._added.items()
        }
        clone.add_tokens(
            [
                AddedToken(
                    spelled[token_id],
                    single_word=token.single_word,
                    lstrip=token.lstrip,
                    rstrip=token.rstrip,
                    normalized=token.normalized,
                )
                for token_id, token in self._added.items()
            ]
        )
        meant = {int(clone.token_to_id(text) or 0): token_id for token_id, text in spelled.items()}
        return clone, meant, names


def alternatives(texts: Iterable[str]) -> re.Pattern[str]:
    """Matches any of these texts, the longest where several begin: as the library matches them."""
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def _cut(text: str, matches: Iterable[re.Match[str]]) -> Iterable[str]:
    begin = 0
    for match in matches:
        middle = match.start() + max(1, len(match[0]) // 2)
        yield text[begin:middle]
        begin = middle
    yield text[begin:]
