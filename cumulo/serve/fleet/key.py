"""The fleet's key: one secret that a gateway and its servers share. Read by `cumulo serve` and `cumulo gateway`."""

import os
from pathlib import Path

from cumulo.errors import CumuloError

VARIABLE = "CUMULO_FLEET_KEY"
_SHORTEST = 16


def fleet_key(path: Path | None) -> str | None:
    """From the file, else from the environment; None where there is none."""
    if path is None:
        key, where = os.environ.get(VARIABLE, ""), f"${VARIABLE}"
        if not key:
            return None
    else:
        where = str(path)
        try:
            key = path.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CumuloError(f"the fleet key cannot be read from {path}: {error}; {_make(path)}") from error
    key = key.strip()
    if len(key) < _SHORTEST or not key.isascii() or not key.isprintable() or " " in key:
        raise CumuloError(
            f"{where} holds no fleet key: it is one line of {_SHORTEST} or more letters and digits; "
            f"{_make(path or Path('fleet.key'))}"
        )
    return key


def _make(path: Path) -> str:
    return f"make one with `openssl rand -hex 32 > {path}`"
