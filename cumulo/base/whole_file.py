"""Files that appear whole or not at all, written next to their place, then renamed. For what others read."""

import os
import secrets
from pathlib import Path


def write_whole(path: Path, content: bytes, mode: int = 0o666) -> None:
    """After a crash the file is the old one or the new one, never half of one. `mode`: less the process's umask."""
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)
