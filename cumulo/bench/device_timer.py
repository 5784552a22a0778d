"""What `cumulo calibrate` measures: the time of a training step's operations on the device of this machine."""

import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch

from cumulo.errors import ConfigError
from cumulo.plan.time.calibration import Kind, Measurement
from cumulo.spec import catalog
from cumulo.spec.device import Device

# What the driver calls a device, and what the catalogue does.
_NAMES = {
    "H200": "h200", "H100 80GB HBM3": "h100-sxm", "H100 PCIe": "h100-pcie", "H100 NVL": "h100-nvl", "H800": "h800",
    "A100-SXM4-80GB": "a100-80gb", "A100-SXM4-40GB": "a100-40gb", "GB300": "gb300", "GB200": "gb200",
    "B300": "b300", "B200": "b200", "L40S": "l40s", "RTX 4090": "rtx-4090", "RTX 5090": "rtx-5090",
    "MI300X": "mi300x",
}  # fmt: skip


def present_device(name: str | None) -> Device:
    if name is None:
        return catalog.device("cpu")
    for part, known in _NAMES.items():
        if part in name:
            return catalog.device(known)
    raise ConfigError(f"the catalogue contains no device for {name!r}; choose the nearest one with --device")


def device_here(seconds: float = 0.6) -> Device:
    """This machine's GPU as the catalogue has it, or its CPU, whose arithmetic and memory are measured."""
    if torch.cuda.is_available():
        return present_device(torch.cuda.get_device_name())
    square, wide, copy = torch.rand(512, 512), torch.zeros(1 << 24), torch.zeros(1 << 24)
    return dataclasses.replace(
        catalog.device("cpu"),
        name="this CPU",
        peak_flops={"float32": 2.0 * 512**3 / _fastest_s(lambda: square @ square, seconds)},
        memory_bytes_per_s=8.0 * wide.numel() / _fastest_s(lambda: copy.copy_(wide), seconds),
    )


def _fastest_s(run: Callable[[], object], seconds: float) -> float:
    """What other programs disturb least."""
    run()
    end, fastest = time.perf_counter() + seconds, math.inf
    while (began := time.perf_counter()) < end:
        run()
        fastest = min(fastest, time.perf_counter() - began)
    return fastest


class DeviceTimer:
    """Times the operations of a training step on one device."""

    def __init__(self, device: str, dtype: torch.dtype, seconds: float) -> None:
        self.device, self.dtype, self.seconds = device, dtype, seconds
        self.large = device == "cuda"
        self.generator = torch.Generator(device=device).manual_seed(0)

    def measure(self) -> Iterator[Measurement]:
        yield from self._products()
        yield from self._attention()
        yield from self._elementwise()
        yield from self._loss()
        yield from self._optimizer()
        yield from self._launches()

    def _random(self, *shape: int) -> torch.Tensor:
        # Never zeros: a device runs faster on degenerate numbers.
        return torch.randn(*shape, generator=self.generator, device=self.device).to(self.dtype)

    def _timed(
        self, kind: Kind, run: Callable[[], object], work: float, operand_bytes: float = 0.0
    ) -> Measurement:
        """The median of as many runs as fit into the time, after one that is not counted."""
        run()
        times: list[float] = []
        end = time.perf_counter() + self.seconds
        while not times or (time.perf_counter() < end and len(times) < 200):
            self._wait()
            begin = time.perf_counter()
            run()
            self._wait()
            times.append(time.perf_counter() - begin)
        return Measurement(kind, sorted(times)[len(times) // 2], work, operand_bytes)

    def _wait(self) -> None:
        if self.large:
            torch.cuda.synchronize()

    def _products(self) -> Iterator[Measurement]:
        sizes = (1024, 2048, 4096, 8192) if self.large else (128, 256, 512)
        shapes = [(m, n, k) for m in sizes[-2:] for n in sizes for k in sizes[-2:]]
        for m, n, k in shapes:
            left, right = self._random(m, k), self._random(k, n)
            moved = left.element_size() * (m * k + k * n + m * n)
            yield self._timed("matmul", partial(torch.matmul, left, right), 2.0 * m * n * k, moved)

    def _attention(self) -> Iterator[Measurement]:
        functional = torch.nn.functional
        heads, width = (16, 128) if self.large else (4, 64)
        for length in (2048, 8192) if self.large else (256, 512):
            query, key, value = (self._random(1, heads, length, width).requires_grad_() for _ in range(3))
            flops = 2.0 * 2 * heads * width * length * (length + 1) / 2
            attend = partial(functional.scaled_dot_product_attention, query, key, value, is_causal=True)
            yield self._timed("attention", attend, flops)
            result = attend()
            gradient = torch.randn_like(result)
            back = partial(torch.autograd.grad, result, (query, key, value), gradient, retain_graph=True)
            yield self._timed("attention backward", back, flops)

    def _elementwise(self) -> Iterator[Measurement]:
        """A residual addition and the norm after it: two tensors read, two written."""
        functional = torch.nn.functional
        tokens, width = (8192, 4096) if self.large else (512, 1024)
        stream, addend, weight = self._random(tokens, width), self._random(tokens, width), self._random(width)
        moved = 4.0 * stream.numel() * stream.element_size()
        yield self._timed(
            "elementwise", lambda: functional.rms_norm(stream + addend, (width,), weight), moved
        )

    def _loss(self) -> Iterator[Measurement]:
        tokens, vocabulary = (4096, 32768) if self.large else (256, 8192)
        logits = self._random(tokens, vocabulary).requires_grad_()
        targets = torch.randint(vocabulary, (tokens,), device=self.device, generator=self.generator)

        def run() -> object:
            loss = torch.nn.functional.cross_entropy(logits.float(), targets)
            return torch.autograd.grad(loss, logits)

        yield self._timed("loss", run, float(tokens * vocabulary))

    def _optimizer(self) -> Iterator[Measurement]:
        count = 2**27 if self.large else 2**20
        parameter = torch.nn.Parameter(torch.randn(count, device=self.device, generator=self.generator))
        parameter.grad = torch.randn(count, device=self.device, generator=self.generator)
        optimizer = torch.optim.AdamW([parameter], lr=1e-5, fused=True)
        yield self._timed("optimizer", lambda: optimizer.step(), float(count))

    def _launches(self) -> Iterator[Measurement]:
        """A layer so narrow that only its launches take time."""
        functional, width = torch.nn.functional, 64
        weights = [self._random(width, width) / math.sqrt(width) for _ in range(6)]
        stream = self._random(1, 1, 16, width)

        def run() -> object:
            normed = functional.rms_norm(stream, (width,))
            query, key, value = (normed @ weight for weight in weights[:3])
            mixed = (
                functional.scaled_dot_product_attention(query, key, value, is_causal=True) @ weights[3]
                + stream
            )
            return functional.silu(functional.rms_norm(mixed, (width,)) @ weights[4]) @ weights[5] + mixed

        yield self._timed("launch", run, 1.0)
