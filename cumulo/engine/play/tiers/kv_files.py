"""KvFiles: KV blocks of one model as files of a folder. Used by the mover's threads; engines of a host may share
it.

A file is one block: a header, then keys and values of all layers. It is written aside and renamed, so that it is
whole or not there, whenever a process is killed. Its header names the model's fingerprint and the block's hash, and
a digest covers everything: a damaged or foreign file is noticed, deleted and never used.
"""

import contextlib
import errno
import logging
import os
import re
import struct
import time
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from pathlib import Path

from cumulo.engine.decide.tiers.tiers import KEPT_FILES
from cumulo.errors import ConfigError

log = logging.getLogger(__name__)

_MAGIC = b"CUMULOKV"
_VERSION = 1
_HEAD = struct.Struct("<8sI16s16sQ")  # magic, version, fingerprint, block hash, bytes that follow the digest
_DIGEST_BYTES = 32
_NAME = re.compile(r"[0-9a-f]{32}\.kv")
_FORGOTTEN_S = 600.0  # after which a file that was being written is nobody's
_TELL_EVERY_S = 60.0


class KvFiles:
    def __init__(self, root: Path, fingerprint: bytes, limit_bytes: int) -> None:
        self.root, self.folder, self._fingerprint = root, root / fingerprint.hex(), fingerprint
        self.limit_bytes, self.used_bytes = limit_bytes, 0
        self._told_s = float("-inf")
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            probe = self.folder / f".probe-{os.getpid()}"
            probe.write_bytes(b"")
            probe.unlink()
        except OSError as error:
            raise ConfigError(
                f"kv_disk: files cannot be written to {root} ({error.strerror}); name a folder that this user "
                "can write to"
            ) from error

    def _path(self, block_hash: bytes) -> Path:
        name = block_hash.hex()
        return self.folder / name[:2] / f"{name}.kv"

    # -- single blocks ------------------------------------------------------------------------------------
    def write(self, block_hash: bytes, parts: Sequence[bytes]) -> bool:
        """False: the disk did not take it. Nothing is left behind then."""
        path = self._path(block_hash)
        size = sum(len(part) for part in parts)
        head = _HEAD.pack(_MAGIC, _VERSION, self._fingerprint, block_hash, size)
        aside = path.with_name(f".{path.stem}.{os.getpid()}")
        try:
            path.parent.mkdir(exist_ok=True, mode=0o700)
            aside.touch(mode=0o600)
            with aside.open("wb") as file:
                file.write(head)
                file.write(_digest(head, parts))
                for part in parts:
                    file.write(part)
            aside.replace(path)
        except OSError as error:
            with contextlib.suppress(OSError):
                aside.unlink(missing_ok=True)
            if error.errno == errno.ENOSPC:
                self.trim(int(self.used_bytes * KEPT_FILES))
            self._tell("KV blocks cannot be written to %s: %s", self.root, error.strerror)
            return False
        self.used_bytes += size + len(head) + _DIGEST_BYTES
        if self.used_bytes > self.limit_bytes:
            self.trim(int(self.limit_bytes * KEPT_FILES))
        return True

    def read(self, block_hash: bytes, size: int) -> memoryview | None:
        """The block's bytes; None: there is no such file, or it is not what it should be."""
        path = self._path(block_hash)
        try:
            data = path.read_bytes()
            os.utime(path)  # used now: the oldest are deleted first
        except OSError:
            return None
        start = _HEAD.size + _DIGEST_BYTES
        expected = _HEAD.pack(_MAGIC, _VERSION, self._fingerprint, block_hash, size)
        whole = memoryview(data)
        good = (
            len(data) == start + size
            and data[: _HEAD.size] == expected
            and data[_HEAD.size : start] == _digest(expected, [whole[start:]])
        )
        if not good:
            self._tell("%s is damaged or belongs to another model: it is deleted", path, None)
            with contextlib.suppress(OSError):
                path.unlink()
            return None
        return whole[start:]

    # -- the folder ---------------------------------------------------------------------------------------
    def scan(self) -> set[bytes]:
        """Hashes of all blocks of this model; counts what all models take, and removes what was never finished."""
        found, used = set[bytes](), 0
        for path, size, modified_s in _walk(self.root):
            if path.name.startswith("."):
                if time.time() - modified_s > _FORGOTTEN_S:
                    with contextlib.suppress(OSError):
                        path.unlink()
                continue
            used += size
            if _NAME.fullmatch(path.name) and path.parent.parent == self.folder:
                found.add(bytes.fromhex(path.stem))
        self.used_bytes = used
        if used > self.limit_bytes:
            self.trim(int(self.limit_bytes * KEPT_FILES))
        return found

    def trim(self, limit_bytes: int) -> None:
        """Delete the files that were used least recently, of whatever model, until so much is left."""
        files = sorted(
            (one for one in _walk(self.root) if not one[0].name.startswith(".")), key=lambda one: one[2]
        )
        used = sum(size for _, size, _ in files)
        for path, size, _ in files:
            if used <= limit_bytes:
                break
            with contextlib.suppress(OSError):
                path.unlink()
                used -= size
        self.used_bytes = used

    def _tell(self, words: str, *values: object) -> None:
        """Once a minute: a full disk refuses every block."""
        if time.monotonic() - self._told_s > _TELL_EVERY_S:
            self._told_s = time.monotonic()
            log.warning(words, *[value for value in values if value is not None])


def _digest(head: bytes, parts: Iterable[memoryview | bytes]) -> bytes:
    state = blake2b(head, digest_size=_DIGEST_BYTES)
    for part in parts:
        state.update(part)
    return state.digest()


def _walk(root: Path) -> Iterable[tuple[Path, int, float]]:
    """Files two folders down: path, bytes, when last used. What vanishes meanwhile is passed over."""
    for model in _entries(root):
        for letters in _entries(model.path) if model.is_dir() else ():
            for file in _entries(letters.path) if letters.is_dir() else ():
                with contextlib.suppress(OSError):
                    status = file.stat()
                    yield Path(file.path), status.st_size, status.st_mtime


def _entries(path: str | Path) -> "list[os.DirEntry[str]]":
    try:
        with os.scandir(path) as found:
            return list(found)
    except OSError:
        return []
