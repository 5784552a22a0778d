"""Server-sent events out of a byte stream that arrives in arbitrary pieces. Pure; fed by `answer.py`.

Only `data` is kept: OpenAI-compatible servers use nothing else. Written for speed, since it sees every token.
"""


class EventReader:
    """`feed` returns the data of every event completed by the new bytes."""

    __slots__ = ("_data", "_rest")

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []  # the data lines of an event whose end has not come

    @property
    def unfinished(self) -> bool:
        """Whether the bytes so far end inside an event."""
        return bool(self._rest or self._data)

    def feed(self, piece: bytes) -> list[bytes]:
        rest = self._rest
        # By far the most usual piece: exactly one event of one line.
        if (
            not rest
            and not self._data
            and piece.startswith(b"data: ")
            and piece.endswith(b"\n\n")
            and piece.find(b"\n") == len(piece) - 2
            and b"\r" not in piece
        ):
            return [piece[6:-2]]
        piece = rest + piece
        # A carriage return at the very end may be half of a line end: leave it for the next piece.
        held = b"\r" if piece.endswith(b"\r") else b""
        if held:
            piece = piece[:-1]
        lines = piece.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        self._rest = lines.pop() + held
        events = []
        data = self._data
        for line in lines:
            if not line:
                if data:
                    events.append(b"\n".join(data))
                    data.clear()
            elif line.startswith(b"data:"):
                data.append(line[6:] if line[5:6] == b" " else line[5:])
        return events
