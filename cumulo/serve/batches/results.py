"""Results: the lines a batch has written so far, and by that what it need not do again. Used by the runner.

Two files lie next to the batch's record: one of good answers, one of errors. A line counts when it is complete, so
what a killed server wrote in part is cut off and that request runs again.
"""

import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec


class _Written(msgspec.Struct):
    custom_id: str


_decode = msgspec.json.Decoder(_Written).decode


class Results:
    """Reads which requests the files already answer (`done`). Blocks: made in a thread."""

    def __init__(self, folder: Path, batch_id: str) -> None:
        self.output_path = folder / f"{batch_id}.output"
        self.error_path = folder / f"{batch_id}.errors"
        self._lock = threading.Lock()
        self.done: set[str] = set()
        self.completed = self._recover(self.output_path)
        self.failed = self._recover(self.error_path)
        self._descriptors: dict[bool, int] = {}  # good or not; a file is made by its first line

    def _recover(self, path: Path) -> int:
        if not path.exists():
            return 0
        count = good_bytes = 0
        with path.open("rb") as file:
            for content in file:
                if not content.endswith(b"\n"):
                    break
                self.done.add(_decode(content).custom_id)
                count += 1
                good_bytes += len(content)
        os.truncate(path, good_bytes)
        return count

    def write(self, content: Mapping[str, Any], good: bool) -> None:
        """Blocks: called in a thread."""
        rest = memoryview(msgspec.json.encode(content) + b"\n")
        with self._lock:
            if good not in self._descriptors:
                path = self.output_path if good else self.error_path
                flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
                self._descriptors[good] = os.open(path, flags, 0o600)
            while rest:
                rest = rest[os.write(self._descriptors[good], rest) :]
            self.done.add(content["custom_id"])
            if good:
                self.completed += 1
            else:
                self.failed += 1

    def close(self) -> None:
        """Everything written is on disk before the record says so."""
        for descriptor in self._descriptors.values():
            os.fsync(descriptor)
            os.close(descriptor)
