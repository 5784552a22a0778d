"""A port that is ours before anybody listens on it."""

import socket

_held: list[socket.socket] = []


def reserved_port() -> int:
    """Nobody listens there, and no other program is given it: a socket that does not listen stays bound to it until
    this process ends. Beside that one, whoever is told the number can listen; all servers set SO_REUSEADDR."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    _held.append(held)
    return int(held.getsockname()[1])
