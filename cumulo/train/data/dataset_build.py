"""Build a dataset: documents to one memory-mapped file of token ids. Called by `cumulo train` and `cumulo data`.

Processes tokenise shards; a shard is done when its files carry their final names, so an interrupted build goes on
where it was. The finished folder appears by one rename: it is whole or absent.
"""

import contextlib
import hashlib
import itertools
import json
import os
import shutil
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from cumulo.errors import ConfigError, TrainingError
from cumulo.models.text.tokenizer import Tokenizer, load_tokenizer
from cumulo.train.data.conversations import as_messages

# Documents come out of text, JSON, JSONL and Parquet files, folders of these, or the Python library. Files are cut
# into pieces (a text file, a range of a JSONL file's bytes, a row group of a Parquet file) which can be read
# independently, so that processes share the work and an interrupted build goes on where it was.

STANDARD_LIBRARY = "python-stdlib"
PIECE_BYTES = 8 << 20
_LINES = (".jsonl", ".ndjson")
ROWS = (*_LINES, ".parquet", ".json")
_TEXT = (".txt", ".md", ".rst", ".py", ".text")
_IN_FOLDERS = (
    *_TEXT,
    *_LINES,
    ".parquet",
)  # a .json file is data where it is named: in folders it may be anything
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
            found = sorted(file for file in path.rglob("*") if file.suffix in _IN_FOLDERS and file.is_file())
            if not found:
                raise ConfigError(
                    f"{path} contains no {', '.join(_IN_FOLDERS)} file; name the files themselves"
                )
            files += found
        elif path.is_file():
            files.append(path)
        else:
            raise ConfigError(
                f"there is no dataset at {source!r}, neither in {Path.cwd()} nor next to the configuration; name a "
                f"file, a folder, or {STANDARD_LIBRARY} for Python's standard library"
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
        elif file.suffix in _LINES:
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


def read_documents(piece: TextPiece, text_field: str, chat: bool) -> Iterator[Any]:
    """The documents of a piece: texts, or with `chat` lists of messages."""
    path = Path(piece.path)
    if path.suffix not in ROWS:
        if chat:
            raise TrainingError(f"{path} is text; conversations are read from {', '.join(ROWS)} files")
        try:
            yield path.read_text("utf-8")
        except UnicodeDecodeError as error:
            raise TrainingError(
                f"{path} is not UTF-8 text (byte {error.start}); convert it, or remove it from the sources"
            ) from error
        return
    for at, row in read_rows(piece):
        try:
            yield as_messages(row) if chat else _text_of(row, text_field)
        except ValueError as error:
            raise TrainingError(f"{_place(path, at)}: {error}") from error


def _place(path: Path, at: int) -> str:
    """The line that begins at this byte of a file; of a list of rows, the row with this index."""
    if path.suffix == ".parquet" or (path.suffix == ".json" and _json_list(path) is not None):
        return f"{path}, row {at + 1}"
    with path.open("rb") as stream:
        lines = sum(
            stream.read(min(PIECE_BYTES, at - begin)).count(b"\n") for begin in range(0, at, PIECE_BYTES)
        )
    return f"{path}, line {lines + 1}"


def _text_of(row: Any, field: str) -> str:
    if isinstance(row, dict) and isinstance(text := row.get(field), str):
        return text
    found = ", ".join(map(str, row)) if isinstance(row, dict) else type(row).__name__
    if isinstance(row, dict) and field in row:
        raise ValueError(f"{field!r} must be text, got {type(row[field]).__name__}")
    raise ValueError(f"a row needs a field {field!r} (data.text_field); this one has: {found}")


def read_rows(piece: TextPiece) -> Iterator[tuple[int, Any]]:
    """The rows of a piece, each with where it is: a byte of a file of lines, otherwise the number of the row."""
    path = Path(piece.path)
    if path.suffix == ".parquet":
        file = _parquet(path)
        first = sum(file.metadata.row_group(group).num_rows for group in range(piece.begin))
        yield from enumerate(file.read_row_group(piece.begin).to_pylist(), first)
    elif path.suffix == ".json" and (rows := _json_list(path)) is not None:
        yield from enumerate(rows)
    else:
        yield from _json_lines(piece)


def _json_list(path: Path) -> list[Any] | None:
    """The rows of a file that is one JSON list; None where it is something else, such as JSON lines."""
    try:
        whole = json.loads(path.read_text("utf-8"))
    except ValueError:
        return None
    return whole if isinstance(whole, list) else None


def _json_lines(piece: TextPiece) -> Iterator[tuple[int, Any]]:
    """Lines that begin inside the range: a line over its end is read whole, one from before it is not ours."""
    path = Path(piece.path)
    with path.open("rb") as stream:
        if piece.begin:
            stream.seek(piece.begin - 1)
            stream.readline()
        while stream.tell() < piece.end:
            start = stream.tell()
            line = stream.readline()
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise TrainingError(f"{_place(path, start)} is not valid JSON: {error}") from error
            yield start, row


def _parquet(path: Path) -> Any:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise ConfigError(
            f"to read {path} install pyarrow: pip install -e '.[train]' in Cumulo's folder"
        ) from error
    return parquet.ParquetFile(path)


FORMAT = 1
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class BuildTask:
    """What a process is told about the dataset it works on."""

    tokenizer_folder: str
    text_field: str
    chat: bool
    dtype: str
    end_id: int


def build_dataset(
    folder: Path,
    sources: Sequence[str],
    tokenizer_folder: Path,
    *,
    text_field: str = "text",
    chat: bool = False,
    workers: int = 2,
    progress: Progress | None = None,
) -> Path:
    """Tokenise `sources` into `folder`, unless it already holds exactly this dataset."""
    tokenizer = load_tokenizer(tokenizer_folder)
    if not tokenizer.eos_ids:
        raise TrainingError(f"the tokenizer in {tokenizer_folder} has no end token to put between documents")
    dtype = "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32"
    end_id = tokenizer.eos_ids[0]
    task = BuildTask(str(tokenizer_folder), "messages" if chat else text_field, chat, dtype, end_id)
    files = find_files(sources)
    print_of_it = _fingerprint(files, task, tokenizer)
    if (folder / "dataset.json").is_file():
        if json.loads((folder / "dataset.json").read_text("utf-8"))["fingerprint"] == print_of_it:
            return folder
        shutil.rmtree(folder)
    work = folder.with_name(folder.name + ".building")
    mark = work / "fingerprint"
    if not mark.is_file() or mark.read_text() != print_of_it:
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        mark.write_text(print_of_it)
    shards = shards_of(pieces_of(files))
    missing = [index for index in range(len(shards)) if not (work / f"{index:06d}.lengths.npy").is_file()]
    _run(task, work, shards, missing, workers, progress or (lambda *_: None))
    _join(work, len(shards), task, print_of_it)
    work.replace(folder)
    return folder


def _fingerprint(files: Sequence[Path], task: BuildTask, tokenizer: Tokenizer) -> str:
    """A fingerprint of everything the result depends on; files by name, size and time: reading them all takes
    long."""
    template = tokenizer.chat_template.source if tokenizer.chat_template and task.chat else ""
    parts: dict[str, Any] = asdict(task) | {"format": FORMAT, "template": template}
    del parts["tokenizer_folder"]
    parts["files"] = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    text = json.dumps(parts, sort_keys=True) + tokenizer.backend.to_str()
    return hashlib.sha256(text.encode()).hexdigest()


def _run(
    task: BuildTask,
    work: Path,
    shards: list[list[TextPiece]],
    missing: list[int],
    workers: int,
    progress: Progress,
) -> None:
    with contextlib.ExitStack() as stack:
        run: Any = map
        if workers > 1 and len(missing) > 1:
            # Fresh interpreters: a fork of a process that has used torch's threads may hang.
            pool = ProcessPoolExecutor(min(workers, len(missing)), get_context("spawn"))
            run = stack.enter_context(pool).map
        work_on = partial(tokenise_shard, task, work)
        ended = run(work_on, missing, [shards[index] for index in missing])
        for done, _ in enumerate(itertools.chain([None], ended), len(shards) - len(missing)):
            progress("tokenising", done, len(shards))


def tokenise_shard(task: BuildTask, work: Path, index: int, pieces: Sequence[TextPiece]) -> None:
    """Write one shard's token ids, document lengths and, for conversations, which tokens have a loss."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # this process is one of several already
    tokenizer = load_tokenizer(Path(task.tokenizer_folder))
    tokens: list[np.ndarray] = []
    loss_mask: list[np.ndarray] = []
    for piece in pieces:
        for document in read_documents(piece, task.text_field, task.chat):
            if task.chat:
                ids, flags = encode_conversation(tokenizer, document, piece.path)
                loss_mask.append(np.array(flags, dtype=np.uint8))
            else:
                ids = [*tokenizer.encode(document), task.end_id] if document else []
            tokens.append(np.array(ids, dtype=task.dtype))
    lengths = np.array([len(part) for part in tokens], dtype=np.int64)
    _write(work / f"{index:06d}.tokens.npy", np.concatenate([np.zeros(0, task.dtype), *tokens]))
    if task.chat:
        _write(work / f"{index:06d}.learnt.npy", np.concatenate([np.zeros(0, np.uint8), *loss_mask]))
    _write(work / f"{index:06d}.lengths.npy", lengths)  # last: its presence says that the shard is done


def encode_conversation(tokenizer: Tokenizer, messages: Any, where: str) -> tuple[list[int], list[int]]:
    """Token ids of a conversation, and a 1 for those that an assistant says: its answers and their ends.

    The template writes the whole text and, for each answer, the text before it; the text between is the answer's.
    """
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=False)
    spans = []
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            before = tokenizer.apply_chat_template(messages[:index]) if index else ""
            until = tokenizer.apply_chat_template(messages[: index + 1], add_generation_prompt=False)
            if not (text.startswith(before) and text.startswith(until)):
                raise TrainingError(
                    f"{where}: the chat template rewrites earlier turns, so answers cannot be told from the rest; "
                    "train on conversations of one answer, or give another template"
                )
            spans.append((len(before), len(until)))
    encoding = tokenizer.backend.encode(text, add_special_tokens=False)
    flags = [
        int(any(begin <= first and last <= end for begin, end in spans)) for first, last in encoding.offsets
    ]
    return encoding.ids, flags


def _write(path: Path, array: np.ndarray) -> None:
    temporary = path.with_suffix(".part")
    with temporary.open("wb") as stream:
        np.save(stream, array)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(path)


def cut_long(lengths: np.ndarray) -> np.ndarray:
    """Lengths of documents, of which those of more than a twentieth of all tokens are cut into equal pieces: a book
    in one file can be drawn in another order, and a part of it held out."""
    longest = max(int(lengths.sum()) // 20, 512)
    return np.concatenate(
        [np.diff(np.linspace(0, size, -(-size // longest) + 1).astype(int)) for size in lengths if size]
    )


def _join(work: Path, shards: int, task: BuildTask, print_of_it: str) -> None:
    """All shards into one file each; empty documents are left out of the index."""
    for kind in ["tokens", "learnt"] if task.chat else ["tokens"]:
        with (work / f"{kind}.bin").open("wb") as stream:
            for index in range(shards):
                stream.write(np.load(work / f"{index:06d}.{kind}.npy").data)
            stream.flush()
            os.fsync(stream.fileno())
    lengths = [np.load(work / f"{index:06d}.lengths.npy") for index in range(shards)]
    counts = np.concatenate(lengths) if lengths else np.zeros(0, np.int64)
    if not counts.sum():
        raise TrainingError("the sources contain no text at all; name others in data.sources")
    ends = np.concatenate(([0], np.cumsum(counts[counts > 0] if task.chat else cut_long(counts))))
    _write(work / "documents.npy", ends)
    facts = {"fingerprint": print_of_it, "dtype": task.dtype, "tokens": int(ends[-1]), "documents": len(ends) - 1,
             "chat": task.chat}  # fmt: skip
    (work / "dataset.json").write_text(json.dumps(facts, indent=2) + "\n", "utf-8")
    for path in [*work.glob("??????.*.npy"), work / "fingerprint"]:
        path.unlink()
