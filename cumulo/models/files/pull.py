"""Download a model from a hub over HTTPS: `cumulo pull`, /api/pull, and models that are named and not here.

Asks the hub which files a model has, takes those that Cumulo reads, resumes what an earlier download began, and
checks every file against the hub's checksum before it gets its name. Needs nothing but Python.
"""

import fcntl
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import quote, urlsplit
from urllib.request import Request, urlopen

from cumulo.base.quantities import quantity
from cumulo.errors import ModelError
from cumulo.models.files.pulled import PulledModel, folder_of, keep_pulled, short_name

DEFAULT_HUB = "https://huggingface.co"
DEFAULT_QUANTIZATION = "Q4_K_M"  # of a model that has many GGUF files, where none is named
_READ = re.compile(r"[^/]+\.(safetensors|json|jinja)")  # the files of a folder that are read
_PART_OF_SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
_PIECE_BYTES, _MOST_LISTING_BYTES = 1 << 20, 32 << 20
_TIMEOUT_S, _PAUSE_S, _ATTEMPTS = 30.0, 1.0, 5  # attempts without a further byte


@dataclass(frozen=True, slots=True)
class HubFile:
    path: str
    size: int
    checksum: str  # sha256 of large files, git's sha1 of small ones

    def digest(self) -> Any:
        if len(self.checksum) == 64:
            return hashlib.sha256()
        return hashlib.sha1(b"blob %d\0" % self.size, usedforsecurity=False)


@dataclass(frozen=True, slots=True)
class PullProgress:
    file: HubFile
    file_bytes: int  # of it, that are here
    done_bytes: int  # of all files
    total_bytes: int


def pull(name: str, hub: str = DEFAULT_HUB, every_s: float = 0.1) -> Iterator[PullProgress]:
    """Download a model, or complete a download, while the progress is read: at each file's end, and not more often
    than `every_s`. Raises ModelError."""
    short = short_name(name)
    if short is None:
        raise ModelError(
            f"{name!r} is no name of a model on a hub: write owner/name, owner/name:{DEFAULT_QUANTIZATION} for a "
            "quantization of a GGUF model, or owner/name/file.gguf for one file"
        )
    hub = hub.rstrip("/")
    owner, rest = short.split("/", 1)
    inner, wanted = re.match(r"([\w.-]+)[:/]?(.*)", rest).groups()  # type: ignore[union-attr]
    repository = f"{owner}/{inner}"
    told = _json(f"{hub}/api/models/{quote(repository)}", repository)
    revision = str(told.get("sha") or "main")
    listing = _json(f"{hub}/api/models/{quote(repository)}/tree/{quote(revision)}?recursive=1", repository)
    files = _chosen([_file(row) for row in listing if row.get("type") == "file"], wanted, short)
    folder, total, done, told_s = folder_of(short), sum(file.size for file in files), 0, time.monotonic()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # another process that downloads this model ends first
            _check_room(folder, total)
            for file in files:
                url = f"{hub}/{quote(repository)}/resolve/{quote(revision)}/{quote(file.path)}"
                for have in _fetched(url, folder / file.path, file, repository):
                    if have == file.size or time.monotonic() - told_s >= every_s:
                        told_s = time.monotonic()
                        yield PullProgress(file, have, done + have, total)
                done += file.size
            first = files[0].path if files[0].path.endswith(".gguf") else ""
            keep_pulled(PulledModel(short, folder, first, _license(told), hub, revision, total, time.time()))
    except OSError as error:
        raise ModelError(f"{short} cannot be kept in {folder}: {error.strerror or error}") from error


# -- what to take -----------------------------------------------------------------------------------------
def _file(row: dict[str, Any]) -> HubFile:
    large = row.get("lfs") or {}
    return HubFile(str(row["path"]), int(row["size"]), str(large.get("oid") or row["oid"]))


def _chosen(files: list[HubFile], wanted: str, name: str) -> list[HubFile]:
    """Of a hub's listing, which is not trusted: no path may lead out of the model's folder."""
    files = sorted((one for one in files if _is_inside(one.path)), key=lambda one: one.path)
    if wanted.endswith(".gguf"):
        found = [one for one in files if one.path in _parts(wanted)]
        if len(found) < len(_parts(wanted)):
            raise ModelError(f"{name}: the hub has no such file{_offered(files)}")
        return found
    plain = [one for one in files if _READ.fullmatch(one.path)]
    if not wanted and any(one.path.endswith(".safetensors") for one in plain):
        return plain
    heads = [one.path for one in files if one.path.endswith(".gguf") and _parts(one.path)[0] == one.path]
    tag = wanted or DEFAULT_QUANTIZATION
    matching = [path for path in heads if re.search(rf"(^|[-._/]){re.escape(tag)}([-._/]|$)", path, re.I)]
    if not wanted and len(heads) == 1:
        matching = heads
    if len(matching) != 1:
        why = "has no weights that Cumulo reads: neither safetensors nor GGUF" if not heads else (
            f"has {len(matching) or 'no'} files of {tag}{_offered(files)}"
        )  # fmt: skip
        raise ModelError(f"{name} {why}")
    return [one for one in files if one.path in _parts(matching[0])]


def _is_inside(path: str) -> bool:
    parts = PurePosixPath(path).parts
    return bool(parts) and not path.startswith("/") and ".." not in parts and "\\" not in path


def _parts(path: str) -> list[str]:
    """All files of a split model, from the name of any."""
    split = _PART_OF_SPLIT.fullmatch(path)
    if split is None:
        return [path]
    return [
        f"{split[1]}-{number:05d}-of-{split[3]}.gguf" for number in range(1, min(int(split[3]), 1000) + 1)
    ]


def _offered(files: list[HubFile]) -> str:
    names = [one.path for one in files if one.path.endswith(".gguf")]
    return f"; it has {', '.join(names[:12])}{', ...' if len(names) > 12 else ''}" if names else ""


def _license(told: dict[str, Any]) -> str:
    card = told.get("cardData")
    stated = card.get("license") if isinstance(card, dict) else None
    tagged = (tag.removeprefix("license:") for tag in told.get("tags", ()) if str(tag).startswith("license:"))
    return str(stated or next(tagged, ""))[:100]


# -- fetching ---------------------------------------------------------------------------------------------
def _check_room(folder: Path, total: int) -> None:
    here = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    free = shutil.disk_usage(folder).free
    if total - here > free:
        raise ModelError(
            f"the download has {quantity(total - here, 'B')} more and {folder} has room for {quantity(free, 'B')}: "
            "free some space, or set XDG_DATA_HOME to a larger disk"
        )


def _fetched(url: str, path: Path, file: HubFile, name: str) -> Iterator[int]:
    """Fetches a file; tells how many bytes of it are here."""
    if path.is_file() and path.stat().st_size == file.size:
        yield file.size
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    digest, have = file.digest(), 0
    with part.open("ab+") as out:
        out.seek(0)
        while piece := out.read(_PIECE_BYTES):
            digest.update(piece)
            have += len(piece)
        failures = 0
        while have < file.size:
            began = have
            try:
                with _opened(url, name, have) as response:
                    if have and response.status != 206:  # it does not resume
                        out.truncate(0)
                        digest, have = file.digest(), 0
                    while have <= file.size and (piece := response.read(_PIECE_BYTES)):
                        out.write(piece)
                        digest.update(piece)
                        have += len(piece)
                        yield have
            except (URLError, HTTPException, TimeoutError, ConnectionError) as error:
                if isinstance(error, HTTPError) and error.code < 500:
                    raise _refused(error, name) from None
                if (failures := failures + 1 if have == began else 0) >= _ATTEMPTS:
                    raise _unreached(
                        url, error, f"{quantity(have, 'B')} are kept: ask again to resume"
                    ) from None
                time.sleep(_PAUSE_S)
            else:
                if have == began and have < file.size:
                    raise ModelError(f"{file.path} ends after {have:,} of {file.size:,} bytes: ask again")
    if have != file.size or digest.hexdigest() != file.checksum:
        part.unlink()
        raise ModelError(f"{file.path} is not what the hub says it is (its checksum differs): pull it again")
    part.replace(path)


def _json(url: str, name: str) -> Any:
    try:
        with _opened(url, name) as response:
            return json.loads(response.read(_MOST_LISTING_BYTES))
    except HTTPError as error:
        raise _refused(error, name) from None
    except (URLError, HTTPException, OSError) as error:
        raise _unreached(url, error, "check the network, or name another hub with --hub") from None
    except ValueError:
        raise ModelError(f"{url} is no answer of a hub: name its address with --hub") from None


def _opened(url: str, name: str, start: int = 0) -> Any:
    request = Request(url, headers={"User-Agent": "cumulo"})
    if start:
        request.add_header("Range", f"bytes={start}-")
    if (token := _token()) and url.startswith("https://"):
        # Not for the host that files are fetched from in the end.
        request.add_unredirected_header("Authorization", f"Bearer {token}")
    return urlopen(request, timeout=_TIMEOUT_S)


def hugging_face_folder() -> Path:
    """Where Hugging Face's own tools keep what they download, and the user's token."""
    return Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")


def _token() -> str:
    with suppress(OSError):
        return os.environ.get("HF_TOKEN") or (hugging_face_folder() / "token").read_text("utf-8").strip()
    return ""


def _refused(error: HTTPError, name: str) -> ModelError:
    why = {
        401: "it does not exist there, or needs a token: set HF_TOKEN",
        403: "it asks for consent to its licence: give it on the hub's page, and set HF_TOKEN",
        404: "it does not exist there: check the name",
        429: "too many downloads: try again later",
    }.get(error.code, f"it answers with status {error.code}")
    return ModelError(f"the hub {urlsplit(error.url or '').netloc} does not give {name}: {why}")


def _unreached(url: str, error: Exception, advice: str) -> ModelError:
    reason = getattr(error, "reason", None) or error
    return ModelError(f"{urlsplit(url).netloc} cannot be reached ({reason}); {advice}")
