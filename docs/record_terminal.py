"""Makes docs/terminal.svg from a real session: types into `cumulo chat` in a pseudo-terminal, draws what it said.

Run it from the repository: .venv/bin/python docs/record_terminal.py
"""

import fcntl
import io
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

from rich.console import Console
from rich.text import Text

WIDTH = 104
HERE = Path(__file__).parent
LINES = [
    "What is the capital of France?",
    "What is photosynthesis? One sentence, please.",
    "/why",
    "/exit",
]


def record(command: list[str], lines: list[str]) -> str:
    """The raw output of a session in which each line is typed when the prompt appears."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 50, WIDTH, 0, 0))
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": str(WIDTH)}
    process = subprocess.Popen(
        command, stdin=slave, stdout=slave, stderr=slave, env=environment, cwd=HERE.parent
    )
    os.close(slave)
    seen, unseen, left = "", "", list(lines)
    deadline_s = time.monotonic() + 300
    while time.monotonic() < deadline_s:
        if select.select([master], [], [], 0.5)[0]:
            try:
                unseen += os.read(master, 65536).decode()
            except OSError:
                break  # the program has ended
        elif left and strip_controls(unseen).endswith("> "):
            os.write(master, left.pop(0).encode() + b"\n")
            seen, unseen = seen + unseen, ""
    process.wait(timeout=30)
    os.close(master)
    return seen + unseen


def strip_controls(text: str) -> str:
    return re.sub(r"\x1b\[[?\d;]*[a-zA-Z]", "", text)


def screen(raw: str) -> str:
    """What a terminal would show in the end: bars that were drawn and erased are gone, colours stay."""
    rows, row = [""], 0
    for piece in re.findall(r"\x1b\[[?\d;]*[a-zA-Z]|\r|\n|[^\x1b\r\n]+", raw):
        if piece == "\n":
            row += 1
            if row == len(rows):
                rows.append("")
        elif piece == "\r":
            continue  # whoever goes back to the start erases the line with the next sequence
        elif piece.startswith("\x1b["):
            if piece.endswith("A"):
                row = max(0, row - int(piece[2:-1] or 1))
            elif piece.endswith("K"):
                rows[row] = ""
            elif piece.endswith("m"):
                rows[row] += piece
        else:
            rows[row] += piece
    return "\n".join(rows).strip()


def main() -> None:
    raw = record([sys.executable, "-m", "cumulo.cli", "chat", "--temperature", "0"], LINES)
    console = Console(
        width=WIDTH, record=True, file=io.StringIO(), force_terminal=True, color_system="truecolor"
    )
    console.print(Text("$ cumulo chat --temperature 0", style="bold"))
    console.print(Text.from_ansi(screen(raw)))
    console.save_svg(str(HERE / "terminal.svg"), title="cumulo chat")


if __name__ == "__main__":
    main()
