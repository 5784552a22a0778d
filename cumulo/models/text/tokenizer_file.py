"""tokenizer.json, opened within bounds. Called by `load_tokenizer`.

The `tokenizers` library trusts this file. So before it is used: ids must be those of a vocabulary, not two billion;
the normaliser, through which every prompt passes, must not multiply a text; and the rules that cut text into words
must not backtrack without end. The library's tables are larger than the texts that they are made of, so there are
bounds for those, too.
"""

import json
import re
import time
from collections.abc import Iterator, Mapping
from itertools import pairwise
from os.path import commonprefix
from pathlib import Path
from typing import Any

import tokenizers

from cumulo.errors import ModelError
from cumulo.models.files.json_file import read_json, shown

MOST_TOKENS = 1 << 22
LONGEST_TOKEN = 4096  # characters
_MOST_ADDED = 1 << 20  # characters of all added tokens: each takes microseconds
_MOST_TRIE_BYTES = (
    1 << 21
)  # of a Unigram vocabulary, shared beginnings counted once: each takes 350 bytes of memory
_MOST_PATTERN = 1 << 14  # characters of all patterns
_MOST_GROWTH = 64  # how many times longer a normaliser may make a text
_LONGEST_PREFIX = 64  # characters put before a text
_SLOW_S = 0.5  # for a line of 256 characters, which takes microseconds
_ANY_TEXT = "a1 \n!é<_'A"

Description = Mapping[str, Any]


def open_tokenizer_file(path: Path) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    """The library's tokenizer and the file's content, or a ModelError that says what is wrong with it."""
    description = read_json(path)
    _check_vocabulary(path, description)
    rules = [part for name in ("normalizer", "pre_tokenizer") for part in _parts(description.get(name))]
    _check_growth(path, rules)
    patterns = [text for rule in rules if (text := _pattern(rule)) is not None]
    if sum(map(len, patterns)) > _MOST_PATTERN:
        raise ModelError(f"{path} cuts text by patterns of more than {_MOST_PATTERN:,} characters")
    for pattern in patterns:
        if _repeats_repetition(pattern):
            raise ModelError(
                f"{path} cuts text by the pattern {shown(pattern)}, which repeats a repetition: on some texts it "
                "would take longer than anyone waits"
            )
    try:
        backend = tokenizers.Tokenizer.from_str(json.dumps(description))
        backend.no_truncation()
        backend.no_padding()
        _check_speed(path, backend, patterns)
    except ModelError:
        raise
    except BaseException as error:  # the library raises bare Exception for every kind of damage, and panics
        if not is_failure(error):
            raise
        raise ModelError(f"{path} cannot be used: {' '.join(str(error).split())[:300]}") from error
    return backend, description


def is_failure(error: BaseException) -> bool:
    """Whether this is the library's: a panic of its compiled code is no Exception, but has its name."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def _check_vocabulary(path: Path, description: Description) -> None:
    model, added = description.get("model") or {}, description.get("added_tokens") or []
    words = model.get("vocab") if isinstance(model, dict) else None
    if not isinstance(words, (dict, list)) or not isinstance(added, list):
        raise ModelError(f"{path} has no vocabulary; download the model again")
    ids: list[Any] = list(words.values()) if isinstance(words, dict) else []
    texts: list[Any] = (
        list(words) if isinstance(words, dict) else [w[0] for w in words if isinstance(w, list) and w]
    )
    for token in added:
        if not isinstance(token, dict) or not isinstance(token.get("content"), str):
            raise ModelError(f"{path} has the added token {shown(token)}, which has no text")
        ids.append(token.get("id"))
        texts.append(token["content"])
    check_tokens(str(path), texts, ids)
    if (size := sum(map(len, texts[len(texts) - len(added) :]))) > _MOST_ADDED:
        raise ModelError(f"{path} adds tokens of {size:,} characters; {_MOST_ADDED:,} is the most")
    if isinstance(words, list) and (size := _trie_bytes(texts)) > _MOST_TRIE_BYTES:
        raise ModelError(
            f"{path} has a vocabulary whose words have {size:,} bytes, shared beginnings counted once; "
            f"{_MOST_TRIE_BYTES:,} is the most"
        )


def _trie_bytes(words: list[str]) -> int:
    ordered = sorted(word.encode("utf-8", "surrogatepass") for word in words)
    return sum(len(word) - len(commonprefix((before, word))) for before, word in pairwise([b"", *ordered]))  # noqa: RUF071


def check_tokens(where: str, texts: list[Any], ids: list[Any] | None = None) -> None:
    """For any file format: how many tokens there are, how long, and that their numbers are near each other."""
    if len(texts) > MOST_TOKENS:
        raise ModelError(f"{where} lists {len(texts):,} tokens; {MOST_TOKENS:,} is the most")
    for text in texts:
        if not isinstance(text, str) or len(text) > LONGEST_TOKEN:
            raise ModelError(
                f"{where} has the token {shown(text)}, which is no text or longer than {LONGEST_TOKEN:,} characters"
            )
    if ids is None:
        return
    highest = 2 * len(texts) + (1 << 16)  # published vocabularies have gaps, but not many
    for number in ids:
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < highest:
            raise ModelError(
                f"{where} has a token with the id {shown(number)}; it lists {len(texts):,} tokens, and their ids "
                f"must be whole numbers below {highest:,}"
            )


def _parts(rule: Any) -> Iterator[Description]:
    """The steps of a normaliser or pre-tokenizer, those inside sequences too."""
    waiting = [rule]
    while waiting:
        step = waiting.pop()
        if isinstance(step, dict):
            yield step
            for name in ("normalizers", "pretokenizers"):
                if isinstance(step.get(name), list):
                    waiting += reversed(step[name])


def _check_growth(path: Path, rules: list[Description]) -> None:
    growth = 1.0
    for rule in rules:
        if rule.get("type") == "Replace":
            pattern, content = rule.get("pattern"), rule.get("content")
            if not isinstance(pattern, dict) or not isinstance(content, str):
                continue  # the library refuses it
            text = pattern.get("String")
            # A regular expression may match between any two characters.
            growth *= max(1.0, len(content) / len(text)) if text else 1 + len(content)
        elif rule.get("type") == "Prepend" and len(str(rule.get("prepend"))) > _LONGEST_PREFIX:
            raise ModelError(f"{path} puts {len(str(rule['prepend'])):,} characters before every text")
        if growth > _MOST_GROWTH:
            raise ModelError(
                f"{path} has a normaliser that can make a text more than {_MOST_GROWTH} times longer, so that a "
                "short prompt fills the memory; take the model from its original source"
            )


def _pattern(rule: Description) -> str | None:
    pattern = rule.get("pattern")
    found = pattern.get("Regex") if isinstance(pattern, dict) else None
    return found if isinstance(found, str) else None


def _repeats_repetition(pattern: str) -> bool:
    """(a+)+ and its kin, by which backtracking is exponential. Classes and escapes are skipped over."""
    bare = re.sub(r"\\[pP]\{[^}]*\}|\\x\{[^}]*\}|\\.", "x", pattern, flags=re.DOTALL)
    bare = re.sub(r"\[\^?\]?[^\[\]]*(?:\[[^\[\]]*\][^\[\]]*)*\]", "x", bare)
    unbounded = re.compile(r"[*+]|\{\d*,\}")
    inside: list[bool] = []  # for each open group: whether something in it repeats without end
    position = 0
    while position < len(bare):
        if bare[position] == "(":
            inside.append(False)
        elif bare[position] == ")" and inside:
            repeats = inside.pop()
            if repeats and unbounded.match(bare, position + 1) and not bare.startswith("+", position + 2):
                return True
            if inside:
                inside[-1] = inside[-1] or repeats
        elif inside and unbounded.match(bare, position):
            inside[-1] = True
        position += 1
    return False


def _check_speed(path: Path, backend: tokenizers.Tokenizer, patterns: list[str]) -> None:
    """Try texts that patterns find hard: one character again and again, and then something else."""
    if not patterns:
        return
    letters = {*_ANY_TEXT, *[letter for text in patterns for letter in text if letter.isalnum()][:64]}
    for length in (32, 256):
        for letter in sorted(letters):
            begin_s = time.perf_counter()
            backend.encode(letter * length + "\x00", add_special_tokens=False)
            if time.perf_counter() - begin_s > _SLOW_S:
                raise ModelError(
                    f"{path} cuts text into words so slowly that {length} characters take more than {_SLOW_S} s; "
                    "take the model from its original source"
                )
