"""WriteStall: whether a client takes what is written to it. Used by Connection; pure, the clock is given."""


class WriteStall:
    def __init__(self) -> None:
        self._since: tuple[float, int] | None = None  # when the buffer was first seen, and its size then

    def clear(self) -> None:
        self._since = None

    def lasts(self, size_bytes: int, now_s: float, patience_s: float, least_bytes_s: float) -> bool:
        """Does the write buffer, this full now, shrink too slowly? Once it grows, the count begins anew."""
        if self._since is None or size_bytes > self._since[1]:
            self._since = now_s, size_bytes
        since_s, first_bytes = self._since
        return now_s - since_s > patience_s + (first_bytes - size_bytes) / least_bytes_s
