"""An upstream that means ill: it is asked for its models like any other server, and answers all else with what no
server may. Used by test_hostile_servers, and by the siege of a gateway."""

import contextlib
import random
import socketserver
import threading
import time
from collections.abc import Iterator

NAME = "hostile"
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
EVENTS = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
NO_HTTP = (
    HEAD + b"transfer-encoding: chunked\r\n\r\n-6\r\nabcdef\r\n0\r\n\r\n",
    HEAD + b"transfer-encoding: chunked\r\n\r\n0x2\r\n{}\r\n0\r\n\r\n",
    HEAD + b"transfer-encoding: chunked\r\ncontent-length: 2\r\n\r\n{}",
    HEAD + b"content-length: -2\r\n\r\n{}",
    HEAD + b"content-length: 2\r\ncontent-length: 3\r\n\r\n{}",
    HEAD + b"x-value: a\x00b\r\ncontent-length: 2\r\n\r\n{}",
    HEAD + b"bad name: 1\r\ncontent-length: 2\r\n\r\n{}",
    b"HTTP/1.1 700 Odd\r\ncontent-length: 2\r\n\r\n{}",
    b"HTTP/1.1 101 Switching\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n",
    b"SSH-2.0-OpenSSH_9.6\r\n",
)
_CUT = (
    b"",
    b"HTTP/1.1 200",
    HEAD + b"content-length: 9\r\n\r\n{",
    EVENTS + b"b\r\ndata: {}\n\n \r\n-6\r\nabcdef\r\n",
    EVENTS + b"b\r\ndata: {}\n\n \r\n",
)
_ENDLESS = (  # a beginning, and what comes after it until the reader has enough or has 64 MiB of it
    (b"HTTP/1.1 200 OK\r\n", b"x-header: value\r\n" * 1000),
    (b"HTTP/1.1 200 OK\r\nx-header: ", b"x" * 65536),
    (HEAD + b"\r\n", b"[" * 65536),
    (EVENTS, b"1000\r\n" + b"data: {}" * 512 + b"\r\n"),
    (EVENTS, b"b\r\ndata: {}\n\n \r\n"),
    (b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 100 Continue\r\n\r\n" * 1000),
)
_MOST_BYTES = 64 << 20


class _Handler(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        chance = random.Random()
        with contextlib.suppress(OSError):
            while head := self._head():
                if b"/internal/" in head:
                    self.wfile.write(b"HTTP/1.1 404 No\r\ncontent-length: 0\r\n\r\n")
                elif head.startswith(b"GET /v1/models"):
                    models = b'{"data": [{"id": "%b"}]}' % NAME.encode()
                    self.wfile.write(HEAD + b"content-length: %d\r\n\r\n%b" % (len(models), models))
                else:
                    self._mistreat(chance)
                    return

    def _head(self) -> bytes:
        lines = list(iter(self.rfile.readline, b"\r\n"))
        if not lines or not lines[-1]:
            return b""
        size = next((int(one[15:]) for one in lines if one.lower().startswith(b"content-length:")), 0)
        self.rfile.read(size)
        return lines[0]

    def _mistreat(self, chance: random.Random) -> None:
        kind = chance.choice(("no http", "cut", "endless", "slow", "late"))
        if kind == "endless":
            begin, piece = chance.choice(_ENDLESS)
            self.wfile.write(begin)
            for _ in range(_MOST_BYTES // len(piece)):
                self.wfile.write(piece)
        elif kind == "slow":
            for byte in chance.choice(NO_HTTP)[:40]:
                self.wfile.write(bytes([byte]))
                time.sleep(0.05)
        else:
            time.sleep(2.0 * (kind == "late"))
            self.wfile.write(chance.choice(NO_HTTP if kind == "no http" else _CUT))


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads, block_on_close, request_queue_size = True, False, 128


@contextlib.contextmanager
def hostile_upstream() -> Iterator[str]:
    """Its address."""
    with _Server(("127.0.0.1", 0), _Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
