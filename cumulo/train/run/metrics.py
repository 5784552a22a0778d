"""TrainMetrics: a run's figures as Prometheus reads them, at http://HOST:PORT/metrics of its first rank. The
trainer updates it after each step; the text is made when somebody asks."""

import math
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import torch

from cumulo.base.chart import Chart, Series, chart_file
from cumulo.errors import ConfigError
from cumulo.spec.counting import flops_per_token
from cumulo.spec.model import ModelSpec
from cumulo.train.run.log import CollectiveRecord, TrainRecord, read_starts

# Speed, MFU and memory of a run, by conventions that are stated here. Used by the trainer.
#
# MFU (Chowdhery et al. 2022, appendix B) is the model's FLOPs over what the device could do in the time: three
# times the forward pass (backward is two), attention to what a causal mask shows on average, recomputation not
# counted. The device's best is its data sheet's dense figure for GPUs in the table, elsewhere a matrix product,
# timed.

# Dense bfloat16 FLOP/s by the makers' data sheets.
_PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "4090": 165e12, "B200": 2250e12}


def training_flops_per_token(spec: ModelSpec, sequence_length: int, frozen: bool = False) -> int:
    """`frozen`: the model's own weights are not trained, so their gradients are not computed; adapters' own work is
    left out."""
    forward = flops_per_token(spec, (sequence_length + 1) // 2)
    return 3 * forward - (flops_per_token(spec, 0) if frozen else 0)


class Ceiling:
    """What the devices of a run could do at best, in FLOP/s. A GPU's is its data sheet's; any other is the best of
    several matrix products, timed. Other programs may be busy meanwhile: where a run is faster, it is timed again,
    and a share that cannot be is not told."""

    def __init__(self, device: torch.device, dtype: torch.dtype, ranks: int = 1) -> None:
        self._device, self._dtype, self._ranks = device, dtype, ranks
        self._again = 2  # times it may be measured anew
        sheet = _data_sheet(device, dtype)
        self.source = "a matrix product timed here" if sheet is None else f"{sheet[0]}'s data sheet"
        self._sheet = sheet is not None
        self.flops = ranks * (_first_measured(device, dtype) if sheet is None else sheet[1])

    def measure_again(self) -> None:
        if not self._sheet and self._again:
            self._again -= 1
            self.flops = max(self.flops, self._ranks * _measured(self._device, self._dtype))

    def share(self, flops: float) -> float:
        """The share of the ceiling; not a number where it would be more than all."""
        if flops > self.flops:
            self.measure_again()
        return flops / self.flops if flops <= self.flops else math.nan


def _data_sheet(device: torch.device, dtype: torch.dtype) -> tuple[str, float] | None:
    if device.type != "cuda" or dtype != torch.bfloat16:
        return None
    name = torch.cuda.get_device_name(device)
    return next(((part, peak) for part, peak in _PEAKS.items() if part in name), None)


@cache
def _first_measured(device: torch.device, dtype: torch.dtype) -> float:
    """Once for all runs of this process."""
    return _measured(device, dtype)


def _measured(device: torch.device, dtype: torch.dtype) -> float:
    """The best of products of a few sizes, over a fifth of a second: a busy machine shows its best now and then."""
    if device.type != "cpu":
        return _best_product(device, dtype, 8192, 0.1)
    # The first product is small, as a large one would take seconds without instructions for this dtype, and uses
    # one thread: on a busy machine two would wait for each other, and make it look slow.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        best = _best_product(device, dtype, 96, 0.01)
    finally:
        torch.set_num_threads(threads)
    for size in (384, 768):
        if 2 * size**3 / best > 0.1:
            break  # one product would take longer than all should
        best = max(best, _best_product(device, dtype, size, 0.1))
    return best


def _best_product(device: torch.device, dtype: torch.dtype, size: int, for_s: float) -> float:
    """FLOP/s of the quickest of at least five products."""
    a = torch.randn(size, size, device=device).to(dtype)
    best_s, spent_s, products = math.inf, 0.0, 0
    while spent_s < for_s or products < 5:
        _wait(device)
        begin = time.perf_counter()
        a @ a
        _wait(device)
        took_s = time.perf_counter() - begin
        best_s, spent_s, products = min(best_s, took_s), spent_s + took_s, products + 1
    return 2 * size**3 / best_s


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_memory_bytes(device: torch.device) -> int:
    """The most this process has held: of the GPU's memory, or of the machine's."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


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
    "train_starts_total": ("counter", "Starts of the run's ranks, of this and earlier attempts."),
    "train_repeated_steps_total": ("counter", "Steps that were done again after a restart."),
    "train_repeated_gpu_seconds_total": ("counter", "Time of those steps, of all ranks together."),
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
    def __init__(self, folder: Path, host: str, port: int) -> None:
        """`folder`: of the run. `port` 0: any free one; `self.port` is it then."""
        self._run, self._lock = folder.name, threading.Lock()
        starts = [one for one in read_starts(folder) if "step" in one]
        sums = (sum(one[name] for one in starts) for name in ("repeated", "repeated_gpu_s"))
        self._starts = len(starts), *sums
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
                memory_bytes, record.tokens, stalled, blocked, *self._starts,
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
