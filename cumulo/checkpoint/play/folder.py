"""A folder that is whole or absent: written aside, hashed, forced to disk, renamed. For stores and exports."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
UNFINISHED = ".writing"
_CHUNK_BYTES = 8 << 20
Manifest = dict[str, dict[str, Any]]  # file, relative to the folder: its bytes and sha256


def write_whole(folder: Path, fill: Callable[[Path], None]) -> None:
    """Let `fill` write into a folder beside `folder`, then make it `folder`. On any error nothing is left."""
    aside = begin_aside(folder)
    try:
        fill(aside)
        finish_aside(aside, folder, entries(aside, (path for path in aside.rglob("*") if path.is_file())))
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def begin_aside(folder: Path) -> Path:
    aside = aside_of(folder)
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    return aside


def aside_of(folder: Path) -> Path:
    return folder.with_name(folder.name + UNFINISHED)


def entries(aside: Path, files: Iterable[Path]) -> Manifest:
    """The manifest's lines of some files, which are forced to disk on the way."""

    def line(path: Path) -> dict[str, Any]:
        _to_disk(path)
        return {"bytes": path.stat().st_size, "sha256": file_hash(path)}

    paths = sorted(files)
    with ThreadPoolExecutor(writing_threads()) as threads:
        return {
            str(path.relative_to(aside)): found
            for path, found in zip(paths, threads.map(line, paths), strict=True)
        }


def writing_threads() -> int:
    """A part of the cores: a checkpoint is written beside a training that needs them, too."""
    return max(1, min(8, (os.cpu_count() or 1) // 4))


def finish_aside(aside: Path, folder: Path, manifest: Mapping[str, Any]) -> None:
    (aside / MANIFEST).write_text(json.dumps(manifest, indent=1), "utf-8")
    for path in (aside / MANIFEST, *(path for path in aside.rglob("*") if path.is_dir()), aside):
        _to_disk(path)
    if folder.exists():
        shutil.rmtree(folder)
    aside.replace(folder)
    _to_disk(folder.parent)


def damage(folder: Path, reader: int = 0, readers: int = 1) -> str | None:
    """What is wrong with a folder, or None. Of several readers each looks at some of the files."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text("utf-8"))
        expected = {name: (int(entry["bytes"]), str(entry["sha256"])) for name, entry in manifest.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        return f"its {MANIFEST} cannot be read ({type(error).__name__})"
    for name, (size, digest) in list(expected.items())[reader::readers]:
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size:,} bytes instead of {size:,}"
        if file_hash(path) != digest:
            return f"{name} has changed since it was written (its hash differs)"
    return None


def remove_unfinished(parent: Path) -> None:
    """What a crash left half written."""
    for path in parent.glob(f"*{UNFINISHED}"):
        shutil.rmtree(path, ignore_errors=True)


def file_hash(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _to_disk(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
