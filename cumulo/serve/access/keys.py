"""API keys: a file that holds no key, only salted hashes. Made by `cumulo serve --new-api-key`, read by the
gates of server and gateway.

The file is JSON: {"keys": [{"name", "salt", "sha256", "requests_per_minute"?, "tokens_per_minute"?,
"may_go_first"?, "cache_group"?, "may_see_names"?, "may_operate"?, "slo"?}, ...]}. A key that may go first may
send priorities below 0, which no fair share holds back. Keys of one cache group share cached prefixes; any
other key has a prefix cache of its own. A key that may see names reads the names of all keys in /metrics. A key
that may operate drains and restarts replicas (/v1/fleet). A key is 256 random bits, so one round of SHA-256 is
as good as many: there is nothing to guess.
"""

import fcntl
import hashlib
import hmac
import json
import logging
import os
import secrets
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec
from starlette.datastructures import Headers
from starlette.requests import Request

from cumulo.base.files import write_whole
from cumulo.errors import CumuloError
from cumulo.load.slo import parse_promise
from cumulo.serve.errors import ApiError
from cumulo.spec.slo import Slo

log = logging.getLogger(__name__)

CALLER_KEY = "cumulo.caller"  # in the scope: who asks, known already; no client can write there
_LONGEST_KEY = 256
_LOOK_AGAIN_S = 1.0


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sends a request: the name of a key, or everyone where no keys are asked for."""

    name: str
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    may_go_first: bool = True  # may send a priority below 0; with keys only those whose entry says so
    may_see_names: bool = True  # of other callers, in /metrics; with keys only those whose entry says so
    cache_scope: str = ""  # callers of different scopes never share cached prefixes
    may_operate: bool = False  # drain and restart replicas
    slo: Slo | None = None  # promised to its requests; None: the server's

    def salt(self, own: str) -> str:
        """What the caller's prefixes are hashed with. `own`: the salt that the request gave. Written as JSON, so
        that no two pairs of scope and salt look the same."""
        return json.dumps([self.cache_scope, own]) if self.cache_scope or own else ""

    def promised(self, asked: Slo | None, priority: int) -> Slo | None:
        """What a request asks for, and the key's bounds where it says nothing. As the server's, they are not for
        requests that are less important than usual, such as those of batches."""
        usual = self.slo if priority <= 0 else None
        return usual if asked is None else asked.with_rest_of(usual)


class KeyEntry(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    name: str
    salt: str
    sha256: str
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    may_go_first: bool = False
    may_see_names: bool = False
    may_operate: bool = False
    cache_group: str | None = None
    slo: str | None = None

    @property
    def cache_scope(self) -> str:
        """By the random salt, not the name: a name may be given to somebody else later."""
        return f"key {self.salt}" if self.cache_group is None else f"group {self.cache_group}"


class _KeyFile(msgspec.Struct, forbid_unknown_fields=True):
    keys: list[KeyEntry]


class ApiKeys:
    """The keys of a file. Changes to the file are seen within a second: a key can be revoked while serving."""

    def __init__(self, path: Path, default: Caller) -> None:
        self._path, self._default = path, default
        self._read_mark = self._mark()  # before it is read: what changes meanwhile is read again
        self._entries = read_keys(path)
        self._looked_s = time.monotonic()

    def caller_of(self, key: str) -> Caller | None:
        """The caller whose key this is. Every entry is compared, and in constant time."""
        self._look_again()
        if len(key) > _LONGEST_KEY:
            return None
        found: Caller | None = None
        for entry in self._entries:
            if hmac.compare_digest(hash_key(key, entry.salt), entry.sha256):
                found = self._caller(entry)
        return found

    def named(self, name: str) -> Caller | None:
        """The caller of this name, for work that outlives its request; None if there is no such key now."""
        self._look_again()
        return next((self._caller(entry) for entry in self._entries if entry.name == name), None)

    def _caller(self, entry: KeyEntry) -> Caller:
        return Caller(
            entry.name,
            entry.requests_per_minute or self._default.requests_per_minute,
            entry.tokens_per_minute or self._default.tokens_per_minute,
            entry.may_go_first,
            entry.may_see_names,
            entry.cache_scope,
            entry.may_operate,
            parse_promise(entry.slo) if entry.slo else None,
        )

    def _mark(self) -> tuple[int, int, int]:
        status = self._path.stat()
        return status.st_mtime_ns, status.st_size, status.st_ino

    def _look_again(self) -> None:
        if time.monotonic() - self._looked_s < _LOOK_AGAIN_S:
            return
        self._looked_s = time.monotonic()
        try:
            mark = self._mark()
            if mark != self._read_mark:
                self._entries, self._read_mark = read_keys(self._path), mark
                log.info("%s has changed: %d keys are valid now", self._path, len(self._entries))
        except (OSError, CumuloError) as error:
            log.error("the key file cannot be read again, so the old keys stay valid: %s", error)


def hash_key(key: str, salt: str) -> str:
    return hashlib.sha256(f"{salt}:{key}".encode("utf-8", "surrogatepass")).hexdigest()


def read_keys(path: Path) -> list[KeyEntry]:
    try:
        entries = msgspec.json.decode(path.read_bytes(), type=_KeyFile).keys
    except OSError as error:
        raise CumuloError(
            f"the API keys in {path} cannot be read ({error.strerror}); make some with "
            f"`cumulo serve --api-keys {path} --new-api-key NAME`"
        ) from error
    except msgspec.DecodeError as error:
        raise CumuloError(f"{path} is no file of API keys: {error}") from error
    for entry in entries:
        try:
            _ = parse_promise(entry.slo) if entry.slo else None
        except CumuloError as error:
            raise CumuloError(f"{path}: the slo of the key {entry.name!r} is wrong: {error}") from error
    return entries


def new_key(
    path: Path,
    name: str,
    requests_per_minute: int | None = None,
    tokens_per_minute: int | None = None,
    cache_group: str | None = None,
    may_operate: bool = False,
    slo: str | None = None,
) -> str:
    """Add a key to the file (made if need be, readable by its owner only); returns it, for this once."""
    if slo is not None:
        parse_promise(slo)
    key, salt = f"ck-{secrets.token_urlsafe(32)}", secrets.token_hex(16)
    entry = KeyEntry(
        name,
        salt,
        hash_key(key, salt),
        requests_per_minute,
        tokens_per_minute,
        may_operate=may_operate,
        cache_group=cache_group,
        slo=slo,
    )
    try:
        # The file is replaced, so its folder is locked: who makes a key at the same time waits.
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            entries = read_keys(path) if path.exists() else []
            if any(other.name == name for other in entries):
                raise CumuloError(
                    f"{path} already has a key named {name!r}; choose another name, or remove that entry"
                )
            content = json.dumps({"keys": msgspec.to_builtins([*entries, entry])}, indent=2) + "\n"
            write_whole(path, content.encode(), 0o600)
        finally:
            os.close(folder)
    except OSError as error:
        raise CumuloError(f"the key cannot be written to {path}: {error.strerror}") from error
    return key


# -- requests ---------------------------------------------------------------------------------------------
def shown_key(headers: Headers) -> str:
    """As OpenAI's clients send it, or as Anthropic's do; raises ApiError where there is none, or two."""
    keys = {value.strip() for value in headers.getlist("x-api-key")}
    for value in headers.getlist("authorization"):
        scheme, _, key = value.partition(" ")
        if scheme.lower() == "bearer":
            keys.add(key.strip())
    keys.discard("")
    if not keys:
        raise no_entry("no API key was sent; send one as `Authorization: Bearer KEY` or as `X-Api-Key: KEY`")
    if len(keys) > 1:
        raise no_entry("different API keys were sent in `Authorization` and `X-Api-Key`; send one")
    return keys.pop()


def no_entry(message: str) -> ApiError:
    return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


def caller_of(request: Request) -> Caller:
    """Who sends this request, as the gate has found out."""
    caller: Caller = request.scope["state"]["caller"]
    return caller


def require_operator(request: Request) -> None:
    """Refuse a caller whose key may not operate the server."""
    if not caller_of(request).may_operate:
        raise ApiError(
            403,
            "this API key may not operate the server; make one that may with --new-api-key NAME --operator",
            code="not_an_operator",
        )
