"""TrainMetrics: a run's figures as Prometheus reads them, at http://HOST:PORT/metrics of its first rank. The
trainer updates it after each step; the text is made when somebody asks."""

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from cumulo.base.chart import Chart, Series, chart_file
from cumulo.errors import ConfigError
from cumulo.train.run.collective_log import CollectiveRecord
from cumulo.train.run.log import TrainRecord

# name -> (type, what it is). docs/training.md lists them.
STEP_METRICS = {
    "train_step": ("gauge", "The last step that ended."),
    "train_loss": ("gauge", "Its loss, in nats per token."),
    "train_gradient_norm": ("gauge", "Norm of its gradients before clipping."),
    "train_step_seconds": ("gauge", "How long it took."),
    "train_tokens_per_second": ("gauge", "Tokens it computed in a second."),
    "train_mfu": ("gauge", "Model FLOPs utilisation, 0 to 1."),
    "train_memory_bytes": ("gauge", "Most memory that the first rank has held."),
    "train_tokens_total": ("counter", "Tokens with a loss since the run began."),
    "train_data_stall_seconds_total": ("counter", "Seconds that steps waited for data."),
    "train_checkpoint_block_seconds_total": ("counter", "Seconds that steps waited for checkpoints."),
}
COLLECTIVE_METRICS = {
    "train_collective_calls_total": ("counter", "Collectives of the first rank."),
    "train_collective_seconds_total": ("counter", "Their time, waiting for other ranks included."),
    "train_collective_predicted_seconds_total": ("counter", "What the cost model says they take."),
    "train_collective_bus_bytes_total": (
        "counter",
        "Bytes over the busiest link; over seconds: bus bandwidth.",
    ),
}


class TrainMetrics:
    def __init__(self, run: str, host: str, port: int) -> None:
        """`port` 0: any free one; `self.port` is it then."""
        self._run, self._lock = run, threading.Lock()
        self._steps: dict[str, float] = {}
        self._collectives: dict[tuple[str, int], list[float]] = {}
        try:
            self._server = ThreadingHTTPServer((host, port), _handler(self.text))
        except OSError as error:
            raise ConfigError(f"metrics_port {port} of {host} cannot be used: {error}") from error
        self._server.daemon_threads = True
        self.port = int(self._server.server_address[1])
        threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True).start()

    def update(
        self, record: TrainRecord, memory_bytes: int, collectives: Sequence[CollectiveRecord] = ()
    ) -> None:
        with self._lock:
            steps = self._steps
            stalled = steps.get("train_data_stall_seconds_total", 0.0) + record.data_stall_s
            blocked = steps.get("train_checkpoint_block_seconds_total", 0.0) + record.checkpoint_block_s
            values = (
                record.step, record.loss, record.gradient_norm, record.step_s, record.tokens_per_s, record.mfu,
                memory_bytes, record.tokens, stalled, blocked,
            )  # fmt: skip
            self._steps = dict(zip(STEP_METRICS, map(float, values), strict=True))
            for one in collectives:
                sums = self._collectives.setdefault(
                    (one.collective, one.ranks), [0.0] * len(COLLECTIVE_METRICS)
                )
                bus_bytes = one.bus_gb_s * 1e9 * one.seconds
                for at, value in enumerate((one.calls, one.seconds, one.predicted_s, bus_bytes)):
                    sums[at] += value

    def text(self) -> str:
        with self._lock:
            return "\n".join(self._lines()) + "\n"

    def _lines(self) -> Iterator[str]:
        for name, value in self._steps.items():
            yield from _heading(name, *STEP_METRICS[name])
            yield f'cumulo:{name}{{run="{self._run}"}} {value!r}'
        for at, (name, (kind, what)) in enumerate(COLLECTIVE_METRICS.items()):
            yield from _heading(name, kind, what)
            for (collective, ranks), sums in self._collectives.items():
                labels = f'run="{self._run}",collective="{collective}",ranks="{ranks}"'
                yield f"cumulo:{name}{{{labels}}} {sums[at]!r}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def _heading(name: str, kind: str, what: str) -> Iterator[str]:
    yield f"# HELP cumulo:{name} {what}"
    yield f"# TYPE cumulo:{name} {kind}"


def _handler(text: Callable[[], str]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path.split("?")[0] != "/metrics":
                self.send_error(404, "ask for /metrics")
                return
            body = text().encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """The terminal is the run's."""

    return Handler


def loss_plot(
    title: str, points: Sequence[tuple[int, float]], held_out: Sequence[tuple[int, float]] = ()
) -> str:
    """Loss by step, raw and smoothed; held-out losses as dots."""
    finite = [(step, loss) for step, loss in points if math.isfinite(loss)]
    series = [Series("loss", finite, color=7), Series("smoothed", _smoothed(finite), color=0)]
    if held_out:
        tips = [f"held out: {loss:.4f}" for _, loss in held_out]
        series.append(Series("held out", held_out, "both", 2, tips))
    return chart_file(Chart(title, "step", "loss", series, y_from_zero=False))


def _smoothed(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """An exponential mean that forgets over about a twentieth of the run."""
    share, mean, result = 1 / max(1.0, len(points) / 20), None, []
    for step, loss in points:
        mean = loss if mean is None else mean + share * (loss - mean)
        result.append((step, mean))
    return result
