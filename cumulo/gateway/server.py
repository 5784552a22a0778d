"""Runs the gateway: asks the servers what they are, binds the port, and ends in order. Called by `cumulo gateway`.

SIGTERM or Ctrl-C: it stops listening, requests on open connections are still answered, and when none runs, or after
a bound, the process ends with status 0. A new gateway on the same port can be started before.
"""

import asyncio
import gc
import logging
import socket
import time
from collections.abc import Callable

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from cumulo.fleet.remote.replicas import Replicas
from cumulo.gateway.app import GatewayApp
from cumulo.gateway.bodies import MOST_FILE_BYTES
from cumulo.gateway.options import GatewayOptions
from cumulo.serve import stderr_log
from cumulo.serve.http.keeper import Keeper, Tally
from cumulo.serve.http.limits import HttpLimits, find_room
from cumulo.serve.http.listening import SignalledServer, bind, drain, loop_factory, url_of, uvicorn_config

log = logging.getLogger(__name__)
_SWEEP_S = 1.0
_DISCARD_BYTES = 64 << 20


class GatewayRun:
    """One life of the gateway, from the first question to the drain."""

    def __init__(self, options: GatewayOptions, fleet: Replicas, on_listening: Callable[[], None]) -> None:
        self._options, self._fleet = options, fleet
        self._app = GatewayApp(options, fleet)
        tally = Tally(lambda reason: self._app.metrics.refusals.labels(reason).inc())
        # Half of the descriptors are for clients, half for replicas.
        connections = find_room(2 * options.max_connections)
        self._keeper = Keeper(
            HttpLimits(
                connections=connections,
                per_address=connections,  # a fleet's clients often come through one proxy
                header_timeout_s=10.0,
                body_timeout_s=20.0,
                keep_alive_timeout_s=options.keep_alive_timeout_s,
                write_timeout_s=options.write_timeout_s,
                body_bytes=max(options.max_body_bytes, MOST_FILE_BYTES) + _DISCARD_BYTES,
            ),
            tally,
        )
        self._app.metrics.connections.set_function(lambda: float(self._keeper.count))
        app: ASGIApp = self._app
        if options.cors_origins:
            app = CORSMiddleware(
                app,
                allow_origins=list(options.cors_origins),
                allow_methods=["GET", "POST", "DELETE"],
                allow_headers=["*"],
                expose_headers=["X-Request-Id", "Request-Id", "X-Cumulo-Warning", "Retry-After"],
            )
        config = uvicorn_config(
            app, self._keeper, options.host, options.allow_hosts, options.cors_origins, lifespan="off"
        )
        self._uvicorn = SignalledServer(config, self._on_signal, on_listening)
        self._ending: asyncio.Task[None] | None = None

    async def serve(self, listener: socket.socket) -> None:
        self._keeper.start()
        sweeping = asyncio.create_task(self._sweep())
        try:
            await self._uvicorn.serve(sockets=[listener])
        finally:
            self._keeper.stop()
            sweeping.cancel()
            await self._fleet.close()

    async def _sweep(self) -> None:
        """Ends answers that are not going on. Times are looked at together: a timer per token would cost more than
        the token."""
        options = self._options
        while True:
            await asyncio.sleep(_SWEEP_S)
            now_s = time.monotonic()
            for replica in self._fleet.replicas.values():
                for work in list(replica.works):
                    limit_s = options.idle_timeout_s if work.streams else options.first_byte_timeout_s
                    if now_s - work.exchange.heard_s > limit_s:
                        work.exchange.fail(f"sent nothing for {limit_s:g} s")

    def _on_signal(self) -> None:
        if self._ending is None:
            self._ending = asyncio.create_task(self._drain())
        else:
            self._uvicorn.should_exit = True

    async def _drain(self) -> None:
        app = self._app
        app.draining = True
        for server in self._uvicorn.servers:
            server.close()  # another gateway on this port gets the new connections from now on
        # Ended requests are told so, rather than cut off.
        await drain(self._uvicorn, lambda: app.in_flight, self._options.drain_timeout_s, self._fleet.end)


def run(
    options: GatewayOptions,
    *,
    on_listening: Callable[[str, Replicas], None] = lambda url, fleet: None,
) -> None:
    """Serve until told to stop; raises CumuloError if the servers cannot form a fleet. `on_listening` is called
    once requests are answered."""
    stderr_log.start_logging(options.log_level, "gateway")
    listener = bind(options.host, options.port, shared=True)
    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(_run(options, listener, on_listening))
    finally:
        listener.close()


async def _run(
    options: GatewayOptions, listener: socket.socket, on_listening: Callable[[str, Replicas], None]
) -> None:
    fleet = Replicas(options)
    life = GatewayRun(options, fleet, lambda: on_listening(url_of(listener), fleet))
    try:
        await fleet.start()
    except BaseException:
        await fleet.close()
        raise
    gc.collect()
    gc.freeze()
    await life.serve(listener)
