"""Runs the server: binds the port, starts the engine, and ends in order. Called by `cumulo serve`.

SIGTERM or Ctrl-C: new requests get 503, running ones may finish within a bound, then the process ends with
status 0. A second signal ends what still runs at once.
"""

import asyncio
import gc
import logging
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

from fastapi import FastAPI

from cumulo.errors import CumuloError
from cumulo.models.files.hub import resolve
from cumulo.models.files.pulled import pulled_models
from cumulo.serve import stderr_log
from cumulo.serve.app import create_app
from cumulo.serve.engine_link.messages import Ready
from cumulo.serve.http.keeper import Keeper, Tally
from cumulo.serve.http.limits import find_room, http_limits
from cumulo.serve.http.listening import SignalledServer, bind, drain, loop_factory, url_of, uvicorn_config
from cumulo.serve.model_table import ModelTable
from cumulo.serve.model_text import ModelText
from cumulo.serve.options import ALL_PULLED, ServeOptions
from cumulo.serve.service import Service

if TYPE_CHECKING:
    from cumulo.serve.observe.otel import Tracing

log = logging.getLogger(__name__)


class _Run:
    """One run of the server, from load to drain."""

    def __init__(
        self,
        models: ModelTable,
        on_listening: Callable[[], None],
        on_ready: Callable[[Ready], None],
        extend: Callable[[FastAPI], None] | None = None,
    ) -> None:
        self.models, self.service, self._on_ready = models, models.first, on_ready
        service = models.first
        tally = Tally(service.metrics.on_refusal)
        connections = find_room(service.options.max_connections)
        self._keeper = Keeper(http_limits(service.options, connections), tally)
        service.metrics.series("connections").set_function(lambda: float(self._keeper.count))
        service.metrics.series("log_lines_lost").set_function(lambda: float(stderr_log.install().lost_lines))
        app = self._app = create_app(models)
        if extend is not None:
            extend(app)
        options = service.options
        config = uvicorn_config(
            app,
            self._keeper,
            options.host,
            options.allow_hosts,
            options.cors_origins,
            ws_max_size=max(1 << 20, options.max_body_bytes),
            lifespan="off" if extend is None else "on",
        )
        self._uvicorn = SignalledServer(config, self._on_signal, on_listening)
        self._ending: asyncio.Task[None] | None = None
        self.error: Exception | None = None

    async def serve(self, listener: socket.socket) -> None:
        self._keeper.start()
        starting = asyncio.create_task(self._start())
        try:
            await self._uvicorn.serve(sockets=[listener])
        finally:
            self._keeper.stop()
            starting.cancel()
            await asyncio.wait([starting])
            await self._app.state.batches.close()
            await self.models.close()
            if self.service.tracing is not None:
                await asyncio.to_thread(self.service.tracing.close)

    async def _start(self) -> None:
        try:
            # Beside the event loop, and before somebody asks: making the description takes long.
            describing = asyncio.create_task(asyncio.to_thread(self._app.openapi))
            info = await self.models.start()
            self._app.state.batches.start()
            self._on_ready(info)
            await describing
            # What is loaded stays: a full collection in the middle of a stream need not walk it.
            gc.collect()
            gc.freeze()
        except Exception as error:  # a CumuloError is the user's to read; anything else is a bug of ours
            self.error = error
            self._uvicorn.should_exit = True

    def _on_signal(self) -> None:
        if self._ending is None:
            self._ending = asyncio.create_task(self._drain())
        else:
            log.warning("told again to stop: ending %d running requests", self.models.busy)
            self.models.abort_all("the server was stopped")
            self._uvicorn.should_exit = True

    async def _drain(self) -> None:
        models = self.models
        self.service.draining = True
        why = "the server is shutting down and this request took longer than it could wait"
        patience_s = self.service.options.drain_timeout_s
        await drain(self._uvicorn, lambda: models.busy, patience_s, lambda: models.abort_all(why))


def run(
    options: ServeOptions,
    *,
    on_listening: Callable[[str], None] = lambda url: None,
    on_ready: Callable[[Ready], None] = lambda info: None,
    extend: Callable[[FastAPI], None] | None = None,
) -> None:
    """Serve until told to stop. `on_listening` gets the address once connections are accepted; `extend` may add to
    the application before it serves (the console does)."""
    stderr_log.start_logging(options.log_level, "server")
    tracing = _tracing(options.otlp_endpoint) if options.otlp_endpoint is not None else None
    source = resolve(options.model)
    listener = bind(options.host, options.port)
    try:
        text = ModelText.load(options.model, options.chat_template, options.parse_special_tokens)

        async def serve() -> None:
            service = Service(options, text, options.name or source.name)
            service.tracing = tracing
            models = ModelTable(service, further_models(options))
            life = _Run(models, lambda: on_listening(url_of(listener)), on_ready, extend)
            await life.serve(listener)
            if life.error is not None:
                raise life.error

        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(serve())
    finally:
        listener.close()


def further_models(options: ServeOptions) -> Callable[[], dict[str, str]] | None:
    """Finds the models that are served next to the first, by name; None where it is the only one."""
    if not options.models:
        return None
    named = dict[str, str]()
    for text in options.models:
        if text != ALL_PULLED:
            name, equals, model = text.partition("=")
            named[name if equals else resolve(text).name] = model if equals else text

    def find() -> dict[str, str]:
        pulled = pulled_models() if ALL_PULLED in options.models else ()
        return {one.name: str(one.path) for one in pulled} | named

    return find


def _tracing(endpoint: str) -> "Tracing":
    """Imported only when asked for: its packages are an extra, and cost start-up time."""
    try:
        from cumulo.serve.observe.otel import Tracing
    except ImportError as error:
        raise CumuloError(
            f"traces to {endpoint} need packages that are not installed ({error.name}): "
            "pip install -e '.[otel]' in Cumulo's folder"
        ) from error
    return Tracing(endpoint)
