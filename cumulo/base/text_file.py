"""Files that a user has named: what cannot be written is said in one line. Reports and verbs that write call it."""

from pathlib import Path

from cumulo.errors import CumuloError


def write_text_file(path: Path, text: str, what: str = "") -> None:
    """`what`: before the path in the error, such as "the report to"."""
    try:
        path.write_text(text, "utf-8")
    except OSError as error:
        raise CumuloError(f"cannot write {what}{what and ' '}{path}: {error.strerror or error}") from error
