"""The listening socket, the event loop and the signals of a server. Used by `cumulo serve` and `cumulo gateway`."""

import asyncio
import contextlib
import functools
import logging
import signal
import socket
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from cumulo.errors import CumuloError
from cumulo.serve.http.connection import Connection
from cumulo.serve.http.host_check import AllowedHosts, HostCheck
from cumulo.serve.http.keeper import Keeper
from cumulo.serve.http.limits import BACKLOG

log = logging.getLogger(__name__)


def bind(host: str, port: int, shared: bool = False) -> socket.socket:
    """The listening socket, made first: a port in use is found out before anything is loaded. `shared`: another
    process that says so, too, may have the same port; both get connections."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shared:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        why = getattr(error, "strerror", None) or str(error).removeprefix("bind(): ")
        raise CumuloError(
            f"cannot listen on {host}:{port} ({why}); choose another with --port, or --port 0 for any free one"
        ) from error
    listener.set_inheritable(False)
    return listener


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def uvicorn_config(
    app: ASGIApp, keeper: Keeper, host: str, allow_hosts: Iterable[str], origins: Iterable[str], **more: Any
) -> uvicorn.Config:
    """How uvicorn serves an application on connections that the Keeper watches. `more`: its other options."""
    return uvicorn.Config(
        # Before everything, the console included.
        HostCheck(app, AllowedHosts(host, allow_hosts), origins, keeper.tally),
        http=functools.partial(Connection, keeper=keeper),  # type: ignore[arg-type]
        backlog=BACKLOG,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=2,  # what is worth waiting for was waited for by the drain
        **more,
    )


_LAST_WORDS_S = 2.0


async def drain(
    server: uvicorn.Server, busy: Callable[[], int], patience_s: float, end: Callable[[], None]
) -> None:
    """Stop when running requests have finished, or after so long; then `end` tells those who still wait."""
    if count := busy():
        log.info("draining: %d requests may finish", count)
    await wait_while(lambda: busy() > 0, patience_s)
    if count := busy():
        log.warning("%d requests did not finish in time and are ended", count)
        end()
        await wait_while(lambda: busy() > 0, _LAST_WORDS_S)
    await asyncio.sleep(0.05)  # the last bytes of what has just finished
    server.should_exit = True


async def wait_while(busy: Callable[[], bool], patience_s: float) -> None:
    """Returns when there is nothing to wait for, or after so long."""
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + patience_s
    while busy() and loop.time() < deadline_s:
        await asyncio.sleep(0.05)


class SignalledServer(uvicorn.Server):
    """Uvicorn, except that a signal begins our drain instead of its shutdown. `on_listening` is called once
    connections are accepted."""

    def __init__(
        self,
        config: uvicorn.Config,
        on_signal: Callable[[], None],
        on_listening: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(config)
        self._on_signal, self._on_listening = on_signal, on_listening

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_listening()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        signals = (signal.SIGTERM, signal.SIGINT)
        for number in signals:
            loop.add_signal_handler(number, self._on_signal)
        try:
            yield
        finally:
            for number in signals:
                loop.remove_signal_handler(number)


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop where it is installed: it halves what a streamed token costs this process."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
