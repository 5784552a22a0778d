"""FileStore: the files of /v1/files in one folder. Used by the file endpoints and by batches.

A file is two files here: ID.data and ID.json (whose it is, its name, its purpose). Ids are made here; what callers
call a file is kept as a label and never becomes part of a path. Everything is readable by the server's user only.
"""

import contextlib
import fcntl
import logging
import os
import secrets
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec

from cumulo.base.files import write_whole
from cumulo.errors import CumuloError
from cumulo.serve.api.batches.schemas import BatchRecord, StoredFile
from cumulo.serve.errors import ApiError

log = logging.getLogger(__name__)

MAX_FILES_PER_KEY = 1000
_LONGEST_NAME = 255


def new_id() -> str:
    return f"file-{secrets.token_hex(12)}"


def private_opener(path: str, flags: int) -> int:
    """For `open`: a file that is made can be read by the server's user only."""
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def _full(message: str) -> ApiError:
    return ApiError(413, message, code="storage_full", headers={"Connection": "close"})


Kept = TypeVar("Kept", StoredFile, BatchRecord)


def owned(kept: Mapping[str, Kept], its_id: str, owner: str, what: str, path: str) -> Kept:
    """One of a key's files or batches; ApiError 404 also where it is another key's."""
    found = kept.get(its_id)
    if found is None or found.owner != owner:
        message = f"there is no {what} {its_id[:64]!r}; GET {path} lists yours"
        raise ApiError(404, message, code=f"{what}_not_found")
    return found


def newest_of(kept: Mapping[str, Kept], owner: str) -> list[Kept]:
    """The files or batches of one key, newest first."""
    found = [one for one in kept.values() if one.owner == owner]
    return sorted(found, key=lambda one: (one.created_at, one.id), reverse=True)


class FileStore:
    def __init__(self, folder: Path | None, bytes_per_key: int, bytes_in_all: int) -> None:
        """`folder`: where files stay over restarts; None: a temporary one that is removed by `close`."""
        self._bytes_per_key, self._bytes_in_all = bytes_per_key, bytes_in_all
        self._bytes: Counter[str] = Counter()  # by key: of its files, and claimed for what is being written
        self._temporary = folder is None
        self.folder = Path(tempfile.mkdtemp(prefix="cumulo-files-")) if folder is None else folder
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise CumuloError(
                f"the folder {self.folder} is in use by another server; give each its own with --files DIR"
            ) from error
        except OSError as error:
            raise CumuloError(
                f"files cannot be kept in {self.folder} ({error.strerror}); choose another folder with --files DIR"
            ) from error
        self._files: dict[str, StoredFile] = {}
        for path in sorted(self.folder.glob("file-*.json")):
            self._read(path)
        for pattern in ("*.upload", ".*.json.*"):  # of a server that was killed meanwhile
            for path in self.folder.glob(pattern):
                path.unlink(missing_ok=True)

    def _read(self, path: Path) -> None:
        try:
            stored = msgspec.json.decode(path.read_bytes(), type=StoredFile)
        except (OSError, msgspec.DecodeError) as error:
            log.error("%s is passed over: it does not describe a file (%s)", path, error)
            return
        if stored.id == path.stem and self.path(stored.id).is_file():
            self._enter(stored)

    def close(self) -> None:
        if self._temporary:
            shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)

    # -- asking -------------------------------------------------------------------------------------------
    def path(self, file_id: str) -> Path:
        """Where the content lies. Only for ids made here."""
        return self.folder / f"{file_id}.data"

    def get(self, file_id: str, owner: str) -> StoredFile:
        return owned(self._files, file_id, owner, "file", "/v1/files")

    def owned_by(self, owner: str) -> list[StoredFile]:
        """The files of one key, newest first."""
        return newest_of(self._files, owner)

    def check_count(self, owner: str) -> None:
        """Raises ApiError where the key may store no further file."""
        if (count := len(self.owned_by(owner))) >= MAX_FILES_PER_KEY:
            raise ApiError(
                400,
                f"this key has {count:,} files already, and a key may have {MAX_FILES_PER_KEY:,}: delete some",
                code="too_many_files",
            )

    # -- changing -----------------------------------------------------------------------------------------
    @contextlib.contextmanager
    def claiming(self, owner: str) -> Iterator[Callable[[int], None]]:
        """Room for what is being written, until `add` counts it as a file. The function that this gives claims so
        many bytes altogether, and raises ApiError where the key or the server has no room for them."""
        held_bytes = 0

        def claim(total_bytes: int) -> None:
            nonlocal held_bytes
            more_bytes = total_bytes - held_bytes
            own_room = self._bytes_per_key - self._bytes[owner]
            if more_bytes > own_room:
                raise _full(
                    f"this key may store {self._bytes_per_key:,} bytes and has {own_room:,} left: delete files you "
                    "no longer need"
                )
            if more_bytes > self._bytes_in_all - self._bytes.total():
                raise _full(f"this server stores {self._bytes_in_all:,} bytes of files, and no more are left")
            self._bytes[owner] += more_bytes
            held_bytes = total_bytes

        try:
            yield claim
        finally:
            self._bytes[owner] -= held_bytes

    def keep(self, owner: str, filename: str, content: BinaryIO) -> StoredFile:
        """Copy what was uploaded into the folder."""
        file_id = new_id()
        arriving = self.folder / f"{file_id}.upload"
        try:
            with open(arriving, "xb", opener=private_opener) as target:
                shutil.copyfileobj(content, target)
            arriving.replace(self.path(file_id))
        finally:
            arriving.unlink(missing_ok=True)
        return self.add(file_id, owner, filename, "batch")

    def add(self, file_id: str, owner: str, filename: str, purpose: str) -> StoredFile:
        """Make a file of what lies on its path."""
        name = "".join(letter for letter in filename if letter.isprintable())[:_LONGEST_NAME]
        size_bytes = self.path(file_id).stat().st_size
        stored = StoredFile(id=file_id, owner=owner, filename=name, purpose=purpose, bytes=size_bytes)
        write_whole(self.folder / f"{file_id}.json", msgspec.json.encode(stored), 0o600)
        self._enter(stored)
        return stored

    def _enter(self, stored: StoredFile) -> None:
        if (before := self._files.get(stored.id)) is not None:  # a batch is finalized anew after a restart
            self._bytes[stored.owner] -= before.bytes
        self._files[stored.id] = stored
        self._bytes[stored.owner] += stored.bytes

    def delete(self, stored: StoredFile) -> None:
        del self._files[stored.id]
        self._bytes[stored.owner] -= stored.bytes
        (self.folder / f"{stored.id}.json").unlink(missing_ok=True)
        self.path(stored.id).unlink(missing_ok=True)
