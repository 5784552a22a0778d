"""Bodies of nearly 4 MiB that are cheap to send and were expensive to read. Used by the tests of request bodies."""

from collections.abc import Callable
from dataclasses import dataclass

from tests.serve.tiny_model import NAME

SIZE_BYTES = (4 << 20) - 1024
_MODEL = f'"model":"{NAME}"'.encode()
_HELLO = b'"messages":[{"role":"user","content":"Hi"}]'
_CHAT, _TEXT = "/v1/chat/completions", "/v1/completions"


@dataclass(frozen=True, slots=True)
class Attack:
    path: str
    write: Callable[[], bytes]  # the body, when it is wanted: there are forty of 4 MiB
    told: str  # words of the error

    @property
    def body(self) -> bytes:
        return self.write()


def _many(item: bytes) -> bytes:
    return b",".join([item] * (SIZE_BYTES // (len(item) + 1)))


def _keys(value: bytes) -> bytes:
    size, keys = 0, list[bytes]()
    while size < SIZE_BYTES:
        keys.append(b'"key%d":%b' % (len(keys), value))
        size += len(keys[-1]) + 1
    return b",".join(keys[:-1])


def _body(fields: bytes, with_messages: bool = False) -> bytes:
    return b"{" + _MODEL + (b"," + _HELLO if with_messages else b"") + b"," + fields + b"}"


CONTAINERS, STRINGS, VALUES = "objects and lists", "strings (keys included)", "values"

ATTACKS: dict[str, Attack] = {
    "parts": Attack(
        _CHAT, lambda: _body(b'"messages":[{"role":"user","content":[' + _many(b"{}") + b"]}]"), CONTAINERS
    ),
    "messages": Attack(_CHAT, lambda: _body(b'"messages":[' + _many(b"{}") + b"]"), CONTAINERS),
    "null messages": Attack(_CHAT, lambda: _body(b'"messages":[' + _many(b"null") + b"]"), VALUES),
    "prompts of one token": Attack(_TEXT, lambda: _body(b'"prompt":[' + _many(b"[1]") + b"]"), CONTAINERS),
    "a prompt of floats": Attack(_TEXT, lambda: _body(b'"prompt":[' + _many(b"1.5") + b"]"), VALUES),
    "empty prompts": Attack(_TEXT, lambda: _body(b'"prompt":[' + _many(b'""') + b"]"), STRINGS),
    "input of responses": Attack(
        "/v1/responses", lambda: _body(b'"input":[' + _many(b"{}") + b"]"), CONTAINERS
    ),
    "tools": Attack(_CHAT, lambda: _body(b'"tools":[' + _many(b"{}") + b"]", True), CONTAINERS),
    "stop": Attack(_CHAT, lambda: _body(b'"stop":[' + _many(b'"a"') + b"]", True), STRINGS),
    "logit_bias": Attack(_CHAT, lambda: _body(b'"logit_bias":{' + _keys(b"1") + b"}", True), STRINGS),
    "metadata": Attack(_CHAT, lambda: _body(b'"metadata":{' + _keys(b'""') + b"}", True), STRINGS),
    "unknown fields": Attack(_CHAT, lambda: _body(_keys(b"0"), True), STRINGS),
    "the same field": Attack(_CHAT, lambda: _body(_many(b'"n":1'), True), STRINGS),
    "input of embeddings": Attack(
        "/v1/embeddings", lambda: _body(b'"input":[' + _many(b"[]") + b"]"), CONTAINERS
    ),
    "messages to tokenize": Attack(
        "/tokenize", lambda: _body(b'"messages":[' + _many(b"{}") + b"]"), CONTAINERS
    ),
    "tokens to detokenize": Attack(
        "/detokenize", lambda: _body(b'"tokens":[' + _many(b'"a"') + b"]"), STRINGS
    ),
    "nested lists": Attack(_CHAT, lambda: b"[" * SIZE_BYTES, CONTAINERS),
    "nested objects": Attack(_CHAT, lambda: b'{"a":' * (SIZE_BYTES // 5), STRINGS),
    "a number of millions of digits": Attack(
        _CHAT, lambda: _body(b'"seed":' + b"9" * SIZE_BYTES, True), "128 digits"
    ),
    "numbers of 4,000 digits": Attack(
        _CHAT, lambda: _body(b'"stop":[' + _many(b"9" * 4000) + b"]", True), "128 digits"
    ),
    "no object at all": Attack("/tokenize", lambda: b"[" + _many(b"{}") + b"]", CONTAINERS),
}

# No spaces: to a tokenizer it is one word.
_CHINESE = "".join(chr(0x4E00 + 7 * place % 20_000) for place in range(600_000)).encode()

# Below every limit, and as expensive as that can be.
WITHIN_LIMITS: dict[str, Attack] = {
    "16,000 parts": Attack(
        _CHAT,
        lambda: _body(
            b'"messages":['
            + b",".join(
                [b'{"role":"user","content":[' + b",".join([b'{"type":"text","text":""}'] * 3900) + b"]}"] * 4
            )
            + b',{"role":"wizard"}]'
        ),
        "messages[4].role",
    ),
    "300,000 tokens": Attack(
        _TEXT, lambda: _body(b'"prompt":[' + b",".join([b"321"] * 300_000) + b"]"), "300,000 tokens"
    ),
    "300,000 tokens and one that is none": Attack(
        _TEXT,
        lambda: _body(b'"prompt":[' + b",".join([b"321"] * 300_000) + b",-1]"),
        "greater than or equal to 0",
    ),
    "escapes": Attack(_TEXT, lambda: _body(b'"prompt":"' + b"\\n" * (SIZE_BYTES // 2) + b'"'), "shorten"),
    "backslashes": Attack(
        _TEXT, lambda: _body(b'"prompt":"' + b"\\\\" * (SIZE_BYTES // 2) + b'"'), "shorten"
    ),
    "600,000 Chinese characters": Attack(_TEXT, lambda: _body(b'"prompt":"' + _CHINESE + b'"'), "shorten"),
    "a chat of 8,000 Chinese characters": Attack(
        _CHAT,
        lambda: _body(b'"messages":[{"role":"user","content":"' + _CHINESE[:24_000] + b'"}]'),
        "more than 2,048 tokens",
    ),
    "marks on 300,000 letters": Attack(
        "/tokenize", lambda: _body(b'"prompt":"' + "e\u0301".encode() * 300_000 + b'"'), "shorten"
    ),
    "128 inputs without spaces": Attack(
        "/v1/embeddings",
        lambda: _body(
            b'"input":['
            + b",".join(b'"%b"' % _CHINESE[begin : begin + 12_000] for begin in range(0, 1_536_000, 12_000))
            + b"]"
        ),
        "shorten the input",
    ),
    "digits of a fraction": Attack(
        _CHAT,
        lambda: _body(b'"temperature":0.' + b"3" * 120 + b',"stop":"' + b"," * 70_000 + b'"', True),
        "stop",
    ),
}
