"""MessageLine: whole messages over a socket between two processes of one machine, in order, and without waiting.
Each end of an engine's link has one.

A message is written by whoever sends it and read by whoever polls for it, with one system call each: no thread
stands in between. On the wire it is its length, in four bytes, and its bytes.
"""

import select
import socket

_LENGTH_BYTES = 4
_READ_BYTES = 256 << 10


class MessageLine:
    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._unsent = bytearray()
        self._unread = bytearray()  # the beginning of a message
        self.closed = False  # by the other side: what it said before has been received

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def has_unsent(self) -> bool:
        """Whether `flush` is to be called when the other side has room."""
        return bool(self._unsent)

    def send(self, message: bytes) -> None:
        """What the other side does not take at once waits here. Raises OSError where there is no other side."""
        self._unsent += len(message).to_bytes(_LENGTH_BYTES, "little") + message
        self.flush()

    def flush(self) -> None:
        """Send what waits, as far as there is room. Raises OSError where there is no other side."""
        try:
            while self._unsent:
                sent_bytes = self._socket.send(memoryview(self._unsent)[:_READ_BYTES])
                del self._unsent[:sent_bytes]
        except BlockingIOError:
            pass

    def receive(self) -> list[bytes]:
        """The messages that are here; to be called again when the socket polls as readable."""
        while data := self._read():
            self._unread += data
            if messages := self._whole_messages():
                return messages
        return []

    def _read(self) -> bytes:
        try:
            data = self._socket.recv(_READ_BYTES)
        except BlockingIOError:
            return b""
        except OSError:  # it ended without reading what it was sent
            data = b""
        self.closed = not data
        return data

    def _whole_messages(self) -> list[bytes]:
        messages, start, end = list[bytes](), 0, len(self._unread)
        while end - start >= _LENGTH_BYTES:
            begin = start + _LENGTH_BYTES
            after = begin + int.from_bytes(self._unread[start:begin], "little")
            if after > end:
                break
            messages.append(bytes(memoryview(self._unread)[begin:after]))
            start = after
        del self._unread[:start]
        return messages

    def close(self, patience_s: float = 0.0) -> None:
        """Wait this long for the other side to take what is still unsent."""
        poll = select.poll()
        poll.register(self._socket, select.POLLOUT)
        try:
            while self._unsent and poll.poll(patience_s * 1000):
                self.flush()
        except OSError:
            pass  # there is nobody to take it
        self._socket.close()
