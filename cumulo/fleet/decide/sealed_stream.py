"""SealedStream: a server's stream of events, cut where its seals are (see fleet/wire.py).

Only what is sealed goes to the client: so the events that it has and the tokens that are known belong together,
wherever the server died.
"""

from dataclasses import dataclass, field
from typing import Literal

from cumulo.fleet.wire import SEAL

State = Literal["open", "ended", "failed"]


@dataclass(slots=True)
class SealedStream:
    """One answer, over all the servers that it comes from."""

    state: State = "open"
    tokens: int = 0  # that the client has
    cached_tokens: int | None = None
    failure: bytes = b""  # the events of a failed answer: told only if nobody can continue it
    failed_status: int = 0
    _ids: list[bytes] = field(default_factory=list)
    _logprobs: list[bytes] = field(default_factory=list)
    _counts: bytes = b""
    _rest: bytes = b""
    # Events before the first token: another server would begin with them again, so the client gets them with it.
    _beginning: list[bytes] = field(default_factory=list)

    def feed(self, data: bytes) -> bytes:
        """The sealed events in what has come, for the client."""
        data = self._rest + data
        place, told, begin = data.find(SEAL), list[bytes](), 0
        while place >= 0:
            end = data.find(b"\n\n", place + 4)
            if end < 0:
                break
            events = data[begin : place + 2]
            self._seal(data[place + 4 : end], events)
            if self.state != "failed":
                self._beginning.append(events)
            if self.tokens or self.state == "ended":
                told += self._beginning
                self._beginning.clear()
            begin = end + 2
            place = data.find(SEAL, begin)
        self._rest = data[begin:]
        return b"".join(told)

    def restart(self) -> None:
        """Another server continues: what was not sealed is drawn again."""
        self._rest, self.state, self.failure, self.failed_status = b"", "open", b"", 0
        self._beginning.clear()

    def resume_body(self, path: str, body: bytes) -> bytes:
        """A ResumeBody, written without reading the request again."""
        return b'{"path":"%s","ids":[%s],"logprobs":[%s],"counts":%s,"body":%s}' % (
            path.encode(), b",".join(self._ids), b",".join(self._logprobs), self._counts or b"{}", body,
        )  # fmt: skip

    def _seal(self, seal: bytes, events: bytes) -> None:
        kind = seal[:1]
        if kind == b"e":
            self.state = "ended"
            self.cached_tokens = int(seal[4:])
        elif kind == b"f":
            self.state, self.failure, self.failed_status = "failed", events, int(seal[7:])
        elif kind == b"{":
            self._counts = seal
            self.tokens += 1
        else:
            ids, bracket, logprobs = seal.partition(b" [")
            if bracket:
                self._logprobs.append(logprobs[:-1])
            if ids:  # events may come without a token
                ids = ids.replace(b" ", b",")
                self.tokens += ids.count(b",") + 1
                self._ids.append(ids)
