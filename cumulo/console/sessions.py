"""Sessions: who looks at the console. Where the server asks for API keys, a browser shows one once, at /login.

The browser keeps a random token in a cookie no script can read; the key it stands for stays in this process's
memory, is never written down, and is checked again at every use: a revoked key ends its sessions.
"""

import hashlib
import secrets
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

from cumulo.serve.access.keys import ApiKeys, Caller

COOKIE = "cumulo_console"
LIFETIME_S = 12 * 3600
_MOST_SESSIONS = 1000


@dataclass(frozen=True, slots=True)
class Visitor:
    """`key` is None where the server asks for none; then everybody sees everything."""

    name: str
    key: str | None = None
    may_see_names: bool = False  # of other keys, and calls whose caller is not known
    may_operate: bool = False  # drain and restart replicas; an operator sees the requests of all keys

    def may_see(self, caller: str | None) -> bool:
        """None: a call without a valid key. What is seen are numbers and times: no text is kept."""
        return self.key is None or self.may_see_names or self.may_operate or caller == self.name


class Sessions:
    def __init__(self, keys: ApiKeys | None) -> None:
        self._keys = keys
        self._sessions: OrderedDict[bytes, tuple[str, float]] = OrderedDict()  # token's hash: key, until when

    @property
    def needed(self) -> bool:
        return self._keys is not None

    def begin(self, key: str) -> str | None:
        """A token for the cookie; None if the key is not valid."""
        if self._caller(key) is None:
            return None
        token = secrets.token_urlsafe(32)
        self._sessions[_digest(token)] = key, time.monotonic() + LIFETIME_S
        while len(self._sessions) > _MOST_SESSIONS:
            self._sessions.popitem(last=False)
        return token

    def end(self, cookies: Mapping[str, str]) -> None:
        self._sessions.pop(_digest(cookies.get(COOKIE, "")), None)

    def visitor(self, cookies: Mapping[str, str]) -> Visitor | None:
        """Who sent these cookies; None: they must show a key first."""
        if self._keys is None:
            return Visitor("anyone", may_operate=True)
        key, until_s = self._sessions.get(_digest(cookies.get(COOKIE, "")), ("", 0.0))
        caller = self._caller(key) if time.monotonic() < until_s else None
        if caller is None:
            return None
        return Visitor(caller.name, key, caller.may_see_names, caller.may_operate)

    def still_valid(self, visitor: Visitor) -> bool:
        return visitor.key is None or self._caller(visitor.key) is not None

    def _caller(self, key: str) -> Caller | None:
        return self._keys.caller_of(key) if self._keys is not None and key else None


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()
