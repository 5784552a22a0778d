"""What a person types at the prompt of `cumulo chat`: one line, or several. Called by the conversation."""

from cumulo.cli.shared.terminal import note, out

_FENCE = '"""'


class Prompt:
    """Reads messages. Ctrl-C throws away what is being typed; twice in a row, it leaves."""

    def __init__(self) -> None:
        self._interrupted = False

    def read(self) -> str | None:
        """The next message or command; empty: nothing was said; None: the person leaves.

        A line that ends in a backslash continues on the next one; three double quotes begin a text of several
        lines, and three more end it."""
        try:
            text = _lines()
        except EOFError:
            out.print()
            return None
        except KeyboardInterrupt:
            out.print()
            if self._interrupted:
                return None
            self._interrupted = True
            note("press Ctrl-C again to exit (or Ctrl-D, or type /exit)")
            return ""
        self._interrupted = False
        return text


def _lines() -> str:
    line = input("\n> ")
    if line.lstrip().startswith(_FENCE):
        return _fenced(line.lstrip().removeprefix(_FENCE))
    lines = []
    while line.endswith("\\"):
        lines.append(line[:-1])
        line = input("... ")
    return "\n".join([*lines, line]).strip()


def _fenced(line: str) -> str:
    lines = []
    while _FENCE not in line:
        lines.append(line)
        line = input("... ")
    return "\n".join([*lines, line.partition(_FENCE)[0]]).strip()
