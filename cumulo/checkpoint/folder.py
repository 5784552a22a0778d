"""A folder that is whole or absent: written aside, hashed, forced to disk, renamed. For `store.py`."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

MANIFEST = "manifest.json"
UNFINISHED = ".writing"
_CHUNK_BYTES = 8 << 20


def write_whole(folder: Path, fill: Callable[[Path], None]) -> None:
    """Let `fill` write into a folder beside `folder`, then make it `folder`. On any error nothing is left."""
    aside = folder.with_name(folder.name + UNFINISHED)
    shutil.rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir(parents=True)
        fill(aside)
        files = [path for path in sorted(aside.rglob("*")) if path.is_file()]
        manifest = {
            str(path.relative_to(aside)): {"bytes": path.stat().st_size, "sha256": file_hash(path)}
            for path in files
        }
        (aside / MANIFEST).write_text(json.dumps(manifest, indent=1), "utf-8")
        for path in (*files, aside / MANIFEST, *(path for path in aside.rglob("*") if path.is_dir()), aside):
            _to_disk(path)
        if folder.exists():
            shutil.rmtree(folder)
        aside.replace(folder)
        _to_disk(folder.parent)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def damage(folder: Path) -> str | None:
    """What is wrong with a folder that `write_whole` made, or None."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text("utf-8"))
        expected = {name: (int(entry["bytes"]), str(entry["sha256"])) for name, entry in manifest.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        return f"its {MANIFEST} cannot be read ({type(error).__name__})"
    for name, (size, digest) in expected.items():
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
