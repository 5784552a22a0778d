"""The fleet's key: one secret that a gateway and its servers share. Read by `cumulo serve` and `cumulo gateway`."""

import os
from pathlib import Path

from cumulo.errors import CumuloError

VARIABLE = "CUMULO_FLEET_KEY"
_SHORTEST = 16


def fleet_key(path: Path | None) -> str | None:
    """From the file, else from the environment; None where there is none."""
    if path is not None:
        return read_key(path)
    key = os.environ.get(VARIABLE, "")
    return _checked(key, f"${VARIABLE}", Path("fleet.key")) if key else None


def read_key(path: Path) -> str:
    try:
        return _checked(path.read_text("utf-8"), str(path), path)
    except (OSError, UnicodeDecodeError) as error:
        raise CumuloError(f"the key cannot be read from {path}: {error}; {_make(path)}") from error


def _checked(key: str, where: str, path: Path) -> str:
    key = key.strip()
    if len(key) < _SHORTEST or not key.isascii() or not key.isprintable() or " " in key:
        raise CumuloError(
            f"{where} holds no key: it is one line of {_SHORTEST} or more letters and digits; {_make(path)}"
        )
    return key


def _make(path: Path) -> str:
    return f"make one with `openssl rand -hex 32 > {path}`"
