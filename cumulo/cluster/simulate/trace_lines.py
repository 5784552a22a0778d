"""Lines of a CSV file, each field checked when it is read: an error names the file, the line, the column, what is
there and what would be right. The readers of traces and node lists use it."""

import csv
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from cumulo.base.nearest import nearest
from cumulo.errors import ConfigError

_MOST = 1e12  # of any number: with larger ones, a second more would be lost by rounding


@dataclass(frozen=True, slots=True)
class TraceLine:
    file: Path
    number: int  # from 1, with the heading
    fields: Mapping[str, str]

    def text(self, name: str, otherwise: str | None = None) -> str:
        found = self.fields.get(name, "").strip()
        if not found and otherwise is None:
            raise self.wrong(name, "is missing")
        return found or otherwise or ""

    def real(self, name: str, otherwise: float | None = None, least: float = 0.0) -> float:
        text = self.text(name, "" if otherwise is not None else None)
        if not text and otherwise is not None:
            return otherwise
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or not least <= value <= _MOST:
            wanted = "a number" if least == -math.inf else f"a number of {least:g} or more"
            wanted += f", {_MOST:g} at most" if value > _MOST else ""
            raise self.wrong(name, f"must be {wanted}, got {text!r}")
        return value

    def whole(self, name: str, otherwise: int | None = None, least: int | None = 0) -> int:
        value = self.real(name, otherwise, -math.inf if least is None else least)
        if value != int(value):
            raise self.wrong(name, f"must be a whole number, got {self.text(name)!r}")
        return int(value)

    def wrong(self, name: str, why: str) -> ConfigError:
        return ConfigError(f"{self.file}:{self.number}: {name} {why}")


def read_lines(path: Path) -> list[TraceLine]:
    """Column names in any case, maybe with spaces around them; values are separated by commas or semicolons."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            heading = file.readline()
            file.seek(0)
            reader = csv.DictReader(file, delimiter=";" if ";" in heading and "," not in heading else ",")
            names = [(name or "").strip().lower() for name in reader.fieldnames or ()]
            reader.fieldnames = names
            found = [
                TraceLine(path, reader.line_num, _whole(fields, path, reader.line_num)) for fields in reader
            ]
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path} is no CSV file with UTF-8 text ({error})") from error
    twice = sorted({name for name in names if name and names.count(name) > 1})
    if twice:
        raise ConfigError(f"{path}: the column {twice[0]} is there twice")
    if not found:
        raise ConfigError(f"{path} has no lines")
    return found


def _whole(fields: Mapping[str, str | list[str] | None], path: Path, number: int) -> dict[str, str]:
    if None in fields:
        raise ConfigError(f"{path}:{number}: this line has more values than there are columns")
    missing = [name for name, value in fields.items() if value is None]
    if missing:
        raise ConfigError(f"{path}:{number}: this line has no value for {missing[0]}: it ends too early")
    return {name: value for name, value in fields.items() if isinstance(value, str)}


def no_slips(path: Path, columns: Iterable[str], known: Iterable[str]) -> None:
    """Other columns are allowed; one that looks like a known one is a slip."""
    names, columns = set(known), list(columns)
    for column in columns:
        close = nearest(column, sorted(names - set(columns))) if column not in names else []
        if close:
            raise ConfigError(f"{path}: there is no column {column}; did you mean {close[0]}?")


def once(lines: Iterable[TraceLine], names: Iterable[str], column: str) -> None:
    """Names must differ: a second one would replace the first."""
    seen: dict[str, int] = {}
    for line, name in zip(lines, names, strict=True):
        if name in seen:
            raise line.wrong(column, f"{name!r} is already in line {seen[name]}; each needs its own")
        seen[name] = line.number
