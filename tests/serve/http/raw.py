"""Raw sockets for tests that send what no HTTP client would."""

import contextlib
import json
import socket
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

PATIENCE_S = 300.0  # a hang guard, not a measure


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = json.loads(self.body)["error"]
        return error


class Client:
    """One connection. `lost`: the server has closed it, and what was sent since is nowhere."""

    def __init__(self, url: str, receive_buffer_bytes: int | None = None) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None and parts.port is not None
        self.socket = socket.socket()
        if receive_buffer_bytes is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
        self.socket.settimeout(PATIENCE_S)
        self.socket.connect((parts.hostname, parts.port))
        self._unread = b""
        self.lost = False
        self.sent_bytes = 0

    def send(self, data: bytes) -> bool:
        """False when the server does not want to hear more."""
        try:
            self.socket.sendall(data)
        except (ConnectionError, TimeoutError):
            self.lost = True
            return False
        self.sent_bytes += len(data)
        return True

    def flood(self, piece: bytes, most_bytes: int) -> None:
        """Send the same again and again, until the server ends it or all is sent."""
        while self.sent_bytes < most_bytes and self.send(piece):
            pass

    def answer(self) -> Answer | None:
        """The next answer; None when the connection ends without one."""
        head = self._until(b"\r\n\r\n")
        if head is None:
            return None
        first, *lines = head.decode("latin-1").split("\r\n")[:-2]
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        if headers.get("transfer-encoding") == "chunked":
            body = b""
            while (line := self._until(b"\r\n")) is not None and (size := int(line, 16)):
                body += self._exactly(size + 2)[:-2]
            self._exactly(2)
        else:
            body = self._exactly(int(headers.get("content-length", "0")))
        return Answer(int(first.split()[1]), headers, body)

    def is_closed(self) -> bool:
        """Wait until the server says no more: True when it ends the connection, whatever came before."""
        try:
            while self.socket.recv(65536):
                pass
        except ConnectionError:
            pass
        return True

    def is_open(self) -> bool:
        """At this moment."""
        self.socket.setblocking(False)
        try:
            return self.socket.recv(1, socket.MSG_PEEK) != b""
        except BlockingIOError:
            return True
        except ConnectionError:
            return False
        finally:
            self.socket.settimeout(PATIENCE_S)

    def _more(self) -> bool:
        try:
            piece = self.socket.recv(65536)
        except ConnectionError:
            return False
        self._unread += piece
        return piece != b""

    def _until(self, mark: bytes) -> bytes | None:
        while mark not in self._unread:
            if not self._more():
                return None
        end = self._unread.index(mark) + len(mark)
        found, self._unread = self._unread[:end], self._unread[end:]
        return found

    def _exactly(self, size: int) -> bytes:
        while len(self._unread) < size and self._more():
            pass
        found, self._unread = self._unread[:size], self._unread[size:]
        return found

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.close()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def get(path: str = "/health", *headers: str, host: str = "127.0.0.1") -> bytes:
    return "\r\n".join([f"GET {path} HTTP/1.1", f"Host: {host}", *headers, "", ""]).encode("latin-1")


def post(body: bytes, path: str = "/", *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: 127.0.0.1", f"Content-Length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode("latin-1") + body


def chunked(path: str = "/") -> bytes:
    """The header of a body in chunks."""
    return (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        "Transfer-Encoding: chunked\r\n\r\n"
    ).encode()
