"""What a gateway and a Cumulo server say to each other beside the client's own bytes. Read and written by both.

A gateway sends a FleetAsk as a header with every request, and another that proves that it knows the fleet's key
(FleetKey). The server then ends every batch of events of a stream with a comment line, the *seal*, that has the ids
of the batch's tokens:

    data: {"choices": ...}\\n\\n: 17 402\\n\\n          what belongs to two tokens
    data: {"choices": ...}\\n\\n: {"0.1":5}\\n\\n       several samples: tokens that each has by now
    data: [DONE]\\n\\n: end 640\\n\\n                   the answer is complete; 640 prompt tokens were cached
    data: {"error": ...}\\n\\n: failed 503\\n\\n        it ended with this error

Clients never see seals. A gateway that has lost a server in mid-answer sends another one a ResumeBody, with the
tokens of the batches that its client has.
"""

import hmac
import os
import secrets
import time
from collections import OrderedDict
from pathlib import Path

import msgspec

from cumulo.errors import CumuloError

PROOF_HEADER = b"x-cumulo-fleet-proof"  # of a request and of its answer
ASK_HEADER = b"x-cumulo-fleet"
VIA_HEADER = b"x-cumulo-via"  # a gateway that a request has come through; one for each
PROMPT_HEADER = b"x-cumulo-prompt"  # of an answer: a PromptTold
STATE_PATH = "/internal/fleet/state"
STATE_TYPE = "application/x-ndjson"  # what a server of ours answers there: some have an answer for every path
RESUME_PATH = "/internal/fleet/resume"
SEAL = b"\n\n: "  # between a batch's events and its seal; JSON has no line ends, so it is nowhere else


class FleetCaller(msgspec.Struct, frozen=True, omit_defaults=True):
    """The caller whose request it is: who was let in by the gateway need not show a key again."""

    name: str
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    may_go_first: bool = True
    may_see_names: bool = True
    cache_scope: str = ""


class FleetAsk(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the gateway adds to a request. The same for each server that it is sent to, so that answers agree."""

    id: str  # the random part of the answer's id
    created: int
    seed: int  # for a request that has none of its own
    caller: FleetCaller | None = None  # None: the server asks for a key itself, if it wants one


class PromptTold(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a server knows of a request when its answer begins."""

    tokens: int
    cached: int | None = None  # None: not known yet


class ResumeBody(msgspec.Struct, frozen=True):
    """The body of a POST to RESUME_PATH: a request and what its client has of the answer."""

    path: str
    body: msgspec.Raw
    ids: list[int] = []
    logprobs: msgspec.Raw = msgspec.Raw(b"[]")  # of these tokens, where the request asks for them
    counts: dict[
        str, int
    ] = {}  # instead of ids, for several samples: they are drawn again and not told twice


class FleetIdentity(msgspec.Struct, frozen=True):
    """Which model a server has. Servers whose identities agree continue each other's answers."""

    version: str
    model: str  # as clients call it
    fingerprint: str  # of weights, configuration and tokenizer
    tokenizer: str  # fingerprint of the tokenizer alone
    max_context: int
    max_running: int


class FleetNews(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of the state that a server streams to a gateway."""

    identity: FleetIdentity | None = None  # in the first line, and when the engine was restarted
    ready: bool = True
    draining: bool = False
    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0  # of prompts, not computed yet
    steps: int = 0
    prompt_tok_s: float = 0.0  # 0: not measured yet
    step_s: float = 0.0
    adapters: dict[str, str] | None = None  # those that are loaded, with their fingerprints; None: as before


read_ask = msgspec.json.Decoder(FleetAsk).decode
read_told = msgspec.json.Decoder(PromptTold).decode
read_resume = msgspec.json.Decoder(ResumeBody).decode
read_news = msgspec.json.Decoder(FleetNews).decode
written = msgspec.json.Encoder().encode


class NoProof(CumuloError):
    """A proof does not hold; the message says why."""


class FleetKey:
    """Both sides prove that they know the fleet's key, and neither sends it. A proof is an HMAC of what is asked,
    by a key that is derived from the fleet's for the role of whoever proves. It holds once, for a short time."""

    LONGEST_S = 120.0  # that the clocks of two machines may differ, and that a request may be on its way

    def __init__(self, key: str) -> None:
        self._gateway, self._server = (
            hmac.digest(key.encode(), b"cumulo fleet: %b" % role, "sha256")
            for role in (b"gateway", b"server")
        )
        self._seen: OrderedDict[bytes, float] = OrderedDict()  # nonces, with the time until which they count

    def prove(self, method: str, target: bytes, ask: bytes = b"") -> bytes:
        """A gateway's proof of a request. `target`: its path and query. `ask`: its FleetAsk as it is written."""
        begun = b"%d %b" % (time.time(), secrets.token_hex(16).encode())
        return b"%b %b" % (begun, _mac(self._gateway, begun, method.encode(), target, ask))

    def check(self, proof: bytes, method: str, target: bytes, ask: bytes = b"") -> None:
        """Raises NoProof."""
        begun, _, mac = proof.rpartition(b" ")
        if not hmac.compare_digest(mac, _mac(self._gateway, begun, method.encode(), target, ask)):
            raise NoProof(
                "the fleet key is not this server's: start gateway and servers with the same --fleet-key-file"
            )
        made_s, now_s = int(begun.partition(b" ")[0]), time.time()
        if abs(now_s - made_s) > self.LONGEST_S:
            raise NoProof(
                f"the clocks of gateway and server differ by {abs(now_s - made_s):.0f} s: set them right"
            )
        while self._seen and next(iter(self._seen.values())) < now_s:
            self._seen.popitem(last=False)
        if begun in self._seen:
            raise NoProof("this request of a gateway has been received before")
        self._seen[begun] = now_s + 2 * self.LONGEST_S

    def answer(self, proof: bytes) -> bytes:
        """A server's proof, with which it answers a gateway's."""
        return _mac(self._server, proof)

    def is_answered(self, proof: bytes, answer: str) -> bool:
        return hmac.compare_digest(self.answer(proof), answer.encode("utf-8", "replace"))


def _mac(key: bytes, *parts: bytes) -> bytes:
    """Returns the hexadecimal digits of an HMAC; parts are told apart by their lengths."""
    told = b"".join(b"%d:%b" % (len(part), part) for part in parts)
    return hmac.digest(key, told, "sha256").hex().encode()


VARIABLE = "CUMULO_FLEET_KEY"
_SHORTEST = 16


def fleet_key(path: Path | None) -> str | None:
    """From the file, else from the environment; None where there is none."""
    if path is not None:
        return read_key(path)
    key = os.environ.get(VARIABLE, "")
    return _checked(key, f"${VARIABLE}", Path("fleet.key")) if key else None


def read_key(path: Path) -> str:
    try:
        return _checked(path.read_text("utf-8"), str(path), path)
    except (OSError, UnicodeDecodeError) as error:
        raise CumuloError(f"the key cannot be read from {path}: {error}; {_make(path)}") from error


def _checked(key: str, where: str, path: Path) -> str:
    key = key.strip()
    if len(key) < _SHORTEST or not key.isascii() or not key.isprintable() or " " in key:
        raise CumuloError(
            f"{where} holds no key: it is one line of {_SHORTEST} or more letters and digits; {_make(path)}"
        )
    return key


def _make(path: Path) -> str:
    return f"make one with `openssl rand -hex 32 > {path}`"
