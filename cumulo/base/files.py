"""Reading, writing and comparing files: text that a user has named, files that appear whole or not at all, and
digests of large files from pieces of them."""

import os
import secrets
from hashlib import blake2b
from pathlib import Path

from cumulo.errors import ConfigError, CumuloError


def read_text_file(path: Path, what: str = "") -> str:
    """What cannot be read is said in one line. `what`: before the path in the error, such as "the plan"."""
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"cannot read {what}{what and ' '}{path}: {reason}") from error


def write_text_file(path: Path, text: str, what: str = "") -> None:
    """What cannot be written is said in one line. `what`: before the path in the error, such as "the report to"."""
    try:
        path.write_text(text, "utf-8")
    except OSError as error:
        raise CumuloError(f"cannot write {what}{what and ' '}{path}: {error.strerror or error}") from error


def write_whole(path: Path, content: bytes, mode: int = 0o666) -> None:
    """Written next to its place, then renamed: after a crash it is the old file or the new one, never half of one.
    `mode`: less the process's umask."""
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)


_PIECES, _PIECE_BYTES = 1024, 1 << 12
_ENDS_BYTES = 1 << 16
_WEIGHTS = (".safetensors", ".gguf", ".bin")


def sampled_digest(path: Path) -> bytes:
    """Of the file's size, its beginning and end, and 1,024 pieces between: whether two model files are the same is
    seen without reading all of them. What changes more than a thousandth of a file in a row changes it: a fine-tune
    of a single layer does, whatever else it left alone."""
    size = path.stat().st_size
    state = blake2b(str(size).encode(), digest_size=16, person=b"cumulo-file")
    step = max(_PIECE_BYTES, size // _PIECES)
    with path.open("rb") as file:
        state.update(file.read(_ENDS_BYTES))
        for start in range(0, size, step):
            file.seek(start)
            state.update(file.read(_PIECE_BYTES))
        file.seek(max(0, size - _ENDS_BYTES))
        state.update(file.read(_ENDS_BYTES))
    return state.digest()


def weights_digest(path: Path) -> str:
    """Of a file with weights, or of a folder's and of its config.json: copies on other hosts have the same."""
    files = [path] if path.is_file() else sorted(path.iterdir())
    state = blake2b(digest_size=6, person=b"cumulo-weights")
    for file in files:
        if file.suffix in _WEIGHTS or file.name == "config.json":
            state.update(sampled_digest(file))
    return state.hexdigest()
