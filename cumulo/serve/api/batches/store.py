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
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from cumulo.base.files import write_whole
from cumulo.errors import CumuloError
from cumulo.serve.errors import ApiError

log = logging.getLogger(__name__)

MAX_FILES_PER_KEY = 1000
_LONGEST_NAME = 255


def new_id() -> str:
    return f"file-{secrets.token_hex(12)}"


class StoredFile(msgspec.Struct, frozen=True):
    id: str
    owner: str  # the name of the key it belongs to
    filename: str  # as the caller called it
    purpose: str
    size_bytes: int
    created_at: int

    def as_json(self) -> dict[str, object]:
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.size_bytes,
            "created_at": self.created_at,
            "expires_at": None,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
        }


class FileStore:
    """`folder`: where files stay over restarts; None: a temporary one that is removed by `close`."""

    def __init__(self, folder: Path | None, bytes_per_key: int) -> None:
        self.bytes_per_key = bytes_per_key
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
            self._files[stored.id] = stored

    def close(self) -> None:
        if self._temporary:
            shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)

    # -- asking -------------------------------------------------------------------------------------------
    def path(self, file_id: str) -> Path:
        """Where the content lies. Only for ids made here."""
        return self.folder / f"{file_id}.data"

    def get(self, file_id: str, owner: str) -> StoredFile:
        stored = self._files.get(file_id)
        if stored is None or stored.owner != owner:
            raise ApiError(
                404, f"there is no file {file_id[:64]!r}; GET /v1/files lists yours", code="file_not_found"
            )
        return stored

    def owned_by(self, owner: str) -> list[StoredFile]:
        """The files of one key, newest first."""
        found = [stored for stored in self._files.values() if stored.owner == owner]
        return sorted(found, key=lambda stored: (stored.created_at, stored.id), reverse=True)

    def room_bytes(self, owner: str) -> int:
        """How much more the key may store; raises ApiError where it may store no further file."""
        own = self.owned_by(owner)
        if len(own) >= MAX_FILES_PER_KEY:
            raise ApiError(
                400,
                f"this key has {len(own):,} files already, and a key may have {MAX_FILES_PER_KEY:,}: delete some",
                code="too_many_files",
            )
        return self.bytes_per_key - sum(stored.size_bytes for stored in own)

    # -- changing -----------------------------------------------------------------------------------------
    @contextlib.contextmanager
    def writing(self) -> Iterator[tuple[str, int]]:
        """A new id and a descriptor to write its content to; what `add` has not taken is removed at the end."""
        file_id = new_id()
        path = self.folder / f"{file_id}.upload"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            yield file_id, descriptor
        finally:
            os.close(descriptor)
            path.unlink(missing_ok=True)

    def add(self, file_id: str, owner: str, filename: str, purpose: str) -> StoredFile:
        """Keep what `writing` wrote, or what somebody wrote to the file's own path."""
        target, uploaded = self.path(file_id), self.folder / f"{file_id}.upload"
        if uploaded.exists():
            uploaded.replace(target)
        name = "".join(letter for letter in filename if letter.isprintable())[:_LONGEST_NAME]
        stored = StoredFile(file_id, owner, name, purpose, target.stat().st_size, int(time.time()))
        write_whole(self.folder / f"{file_id}.json", msgspec.json.encode(stored), 0o600)
        self._files[file_id] = stored
        return stored

    def delete(self, stored: StoredFile) -> None:
        del self._files[stored.id]
        (self.folder / f"{stored.id}.json").unlink(missing_ok=True)
        self.path(stored.id).unlink(missing_ok=True)
