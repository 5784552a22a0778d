"""Ranks on other hosts: the engine listens, and each rank joins by a TCP connection on which both prove that they
have a key. Plans, answers and the end then travel through it as through the pipe of a rank on this host.

A rank believes what comes through it, so the key is a secret of those who run the engine. What ranks say to each
other is not encrypted: use a network that you trust.
"""

import logging
import os
import pickle
import socket
import struct
import time
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener, answer_challenge, deliver_challenge
from typing import Any

from cumulo.errors import CumuloError

log = logging.getLogger(__name__)

_RETRY_S = 0.5
_GREETING_S = 10  # in which a process proves that it has the key
_ALIVE_S, _ALIVE_TIMES = 5, 3  # how often a silent host is asked whether it is there, and how often in vain


class RankListener:
    """The engine's side, open while ranks are missing."""

    def __init__(self, address: str, key: str) -> None:
        self.host, port = host_and_port(address)
        try:
            self._listener, self._key = Listener((self.host, port), "AF_INET"), key.encode()
        except OSError as error:
            raise CumuloError(
                f"ranks cannot join at {address}: {error}; choose another rank_address"
            ) from error
        self.address = f"{self.host}:{self._listener.address[1]}"

    def admit(self, rank: int, told: Any) -> Connection:
        """Waits for a process that has the key; it becomes this rank."""
        log.info("rank %d is awaited at %s: cumulo serve --rank-of %s", rank, self.address, self.address)
        while True:
            connection = self._listener.accept()
            try:
                _be_patient(connection, _GREETING_S)  # one that says nothing must not keep the others out
                deliver_challenge(connection, self._key)
                answer_challenge(connection, self._key)
                _be_patient(connection, 0)
                _end_when_host_vanishes(connection)
                connection.send_bytes(pickle.dumps((rank, told)))
            except (AuthenticationError, OSError, EOFError) as error:
                log.warning("a process that wanted to be rank %d was refused: %s", rank, error or "wrong key")
                connection.close()
                continue
            return connection

    def close(self) -> None:
        self._listener.close()


def _be_patient(connection: Connection, seconds: int) -> None:
    """Reads fail after so long without a byte; 0: never."""
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        same.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", seconds, 0))


def _end_when_host_vanishes(connection: Connection) -> None:
    """A host without power or network closes nothing: its silence ends the connection here."""
    lost_ms = 1000 * _ALIVE_S * (_ALIVE_TIMES + 1)
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        same.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (
            ("TCP_KEEPIDLE", _ALIVE_S),
            ("TCP_KEEPINTVL", _ALIVE_S),
            ("TCP_KEEPCNT", _ALIVE_TIMES),
            ("TCP_USER_TIMEOUT", lost_ms),  # for what was sent and is not acknowledged
        ):
            if hasattr(socket, name):  # not every system has all of them
                same.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def join_engine(address: str, key: str) -> tuple[Connection, int, Any, str]:
    """Be a rank: the connection, the rank's number, what it is told, and this host's own address. Waits for an
    engine that is not there yet."""
    host, port = host_and_port(address)
    while True:
        try:
            connection = Client((host, port), "AF_INET", authkey=key.encode())
            _end_when_host_vanishes(connection)
            rank, told = pickle.loads(connection.recv_bytes())
        except AuthenticationError as error:
            raise CumuloError(
                f"the engine at {address} has another key: give both the same --fleet-key-file"
            ) from error
        except (OSError, EOFError):
            time.sleep(_RETRY_S)
            continue
        with socket.socket(fileno=os.dup(connection.fileno())) as own:
            return connection, rank, told, own.getsockname()[0]


def host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) >= 1 << 16:
        raise CumuloError(f"{address!r} is no address: write HOST:PORT, as in 10.0.0.1:9100")
    return host, int(port)
