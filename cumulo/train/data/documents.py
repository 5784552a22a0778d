"""Documents out of files: text, JSONL, Parquet, folders of these, the Python library. Used by `dataset_build.py`.

Files are cut into pieces (a text file, a range of a JSONL file's bytes, a row group of a Parquet file) which can be
read independently, so that processes share the work and an interrupted build goes on where it was.
"""

import json
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cumulo.errors import ConfigError, TrainingError

STANDARD_LIBRARY = "python-stdlib"
PIECE_BYTES = 8 << 20
_ROWS = (".jsonl", ".ndjson", ".parquet")
_TEXT = (".txt", ".md", ".rst", ".py", ".text")
# Tests are a third of the library and repetitive; site-packages is what the user installed, not the library.
_LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "idlelib"}


@dataclass(frozen=True, slots=True)
class TextPiece:
    """What one reader takes: all of a text file, bytes of a JSONL file, or one row group of a Parquet file."""

    path: str
    begin: int
    end: int


def find_files(sources: Sequence[str]) -> list[Path]:
    """The files behind the sources, in an order that does not depend on the file system."""
    files: list[Path] = []
    for source in sources:
        if source == STANDARD_LIBRARY:
            files += _standard_library()
            continue
        path = Path(source).expanduser()
        if path.is_dir():
            found = sorted(
                file for file in path.rglob("*") if file.suffix in (*_ROWS, *_TEXT) and file.is_file()
            )
            if not found:
                raise ConfigError(
                    f"{path} contains no {', '.join((*_TEXT, *_ROWS))} file; name the files themselves"
                )
            files += found
        elif path.is_file():
            files.append(path)
        else:
            raise ConfigError(
                f"there is no dataset at {source!r}; name a file, a folder, or "
                f"{STANDARD_LIBRARY} for Python's standard library"
            )
    return files


def _standard_library() -> list[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    files = (file for file in root.rglob("*.py") if not _LEFT_OUT.intersection(file.relative_to(root).parts))
    return sorted(files)


def pieces_of(files: Iterable[Path]) -> list[TextPiece]:
    pieces = []
    for file in files:
        size = file.stat().st_size
        if file.suffix == ".parquet":
            groups = _parquet(file).num_row_groups
            pieces += [TextPiece(str(file), group, group + 1) for group in range(groups)]
        elif file.suffix in _ROWS:
            pieces += [
                TextPiece(str(file), at, min(at + PIECE_BYTES, size)) for at in range(0, size, PIECE_BYTES)
            ]
        elif size:
            pieces.append(TextPiece(str(file), 0, size))
    return pieces


def shards_of(pieces: Sequence[TextPiece]) -> list[list[TextPiece]]:
    """Neighbouring pieces together until they are worth a process's while."""
    shards: list[list[TextPiece]] = []
    filled = PIECE_BYTES
    for piece in pieces:
        # A row group's size is not known without reading it: each is a shard of its own.
        size = PIECE_BYTES if piece.path.endswith(".parquet") else piece.end - piece.begin
        if filled + size > PIECE_BYTES:
            shards.append([])
            filled = 0
        shards[-1].append(piece)
        filled += size
    return shards


def read_rows(piece: TextPiece, text_field: str) -> Iterator[Any]:
    """The documents of a piece; with text_field "messages" they are lists of messages."""
    path = Path(piece.path)
    if path.suffix == ".parquet":
        yield from _parquet(path).read_row_group(piece.begin, columns=[text_field])[text_field].to_pylist()
    elif path.suffix in _ROWS:
        yield from _jsonl(piece, text_field)
    else:
        try:
            yield path.read_text("utf-8")
        except UnicodeDecodeError as error:
            raise TrainingError(
                f"{path} is not UTF-8 text (byte {error.start}); convert it, or remove it from the sources"
            ) from error


def _jsonl(piece: TextPiece, text_field: str) -> Iterator[Any]:
    """Lines that begin inside the range: a line over its end is read whole, one from before it is not ours."""
    with Path(piece.path).open("rb") as stream:
        if piece.begin:
            stream.seek(piece.begin - 1)
            stream.readline()
        while stream.tell() < piece.end:
            start = stream.tell()
            line = stream.readline()
            if not line.strip():
                continue
            try:
                yield json.loads(line)[text_field]
            except (ValueError, TypeError, KeyError) as error:
                raise TrainingError(
                    f"{piece.path}: the line at byte {start} is no JSON object with a field {text_field!r}"
                ) from error


def _parquet(path: Path) -> Any:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise ConfigError(
            f"to read {path} install pyarrow: pip install -e '.[train]' in Cumulo's folder"
        ) from error
    return parquet.ParquetFile(path)
