"""What a job printed, attempt by attempt, and where a service answers: `cumulo serve` prints it when ready."""

import re
from pathlib import Path

_READY = re.compile(r"(.*) is ready at (https?://\S+?)/v1")
SERVICE = "the service"  # what a script says is ready, where it stands before several servers


_ATTEMPT = "--- attempt {number} ---"


def mark_attempt(output: Path, number: int) -> None:
    """A line between the output of one attempt and the next."""
    with output.open("a", encoding="utf-8") as stream:
        stream.write(_ATTEMPT.format(number=number) + "\n")


def served_url(output: Path, who: str = "") -> str:
    """Of the last attempt; empty: it is not ready yet."""
    try:
        text = output.read_text("utf-8", "replace")
    except OSError:
        return ""
    found = _READY.findall(text.rpartition("--- attempt ")[2])
    return next((url for name, url in found if who in ("", name)), "")
