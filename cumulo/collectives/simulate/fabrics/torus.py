"""A torus of any dimensions: every rank has a link each way in each dimension, and no switches. Messages
go dimension by dimension, the shorter way round. `fabric_graph` makes it."""

from math import prod

import numpy as np

from cumulo.collectives.simulate.fabrics.links import Ints, LinkTable, Routing
from cumulo.errors import ConfigError


class TorusGraph:
    def __init__(self, shape: tuple[int, ...], link_bytes_per_s: float, hop_latency_s: float) -> None:
        if not shape or min(shape) < 1:
            raise ConfigError(f"a torus needs dimensions of 1 or more, such as 8x8x8, got {shape}")
        self.shape, self.ranks = shape, prod(shape)
        self.strides = [prod(shape[axis + 1 :]) for axis in range(len(shape))]
        self.links = LinkTable()
        for axis in range(len(shape)):
            letter = "xyzuvw"[axis]
            for sign in "+-":
                self.links.add(
                    self.ranks, link_bytes_per_s, hop_latency_s, letter,
                    lambda i, axis=axis, sign=sign: f"rank {i} → rank {self._next(i, axis, sign)}",  # type: ignore[misc]
                )  # fmt: skip

    def _next(self, rank: int, axis: int, sign: str) -> int:
        size, stride = self.shape[axis], self.strides[axis]
        at = rank // stride % size
        return rank + ((at + (1 if sign == "+" else -1)) % size - at) * stride

    def paths(self, source: Ints, target: Ints, keys: Ints, routing: Routing) -> Ints:
        found = np.full((len(source), sum(size // 2 for size in self.shape) or 1), -1, np.int64)
        at, column = source.copy(), 0
        for axis, (size, stride) in enumerate(zip(self.shape, self.strides, strict=True)):
            ahead = (target // stride - at // stride) % size
            forward = ahead <= size // 2
            if size % 2 == 0:  # both ways are as long: half of the messages each
                forward &= (ahead != size // 2) | ((source // stride) % 2 == 0)
            steps = np.where(forward, ahead, size - ahead)
            for step in range(size // 2):
                going = steps > step
                found[going, column] = ((2 * axis + np.where(forward, 0, 1)) * self.ranks + at)[going]
                place = at // stride % size
                moved = (place + np.where(forward, 1, -1)) % size
                at = np.where(going, at + (moved - place) * stride, at)
                column += 1
        return found

    def snake(self) -> Ints:
        """An order of the ranks in which neighbours are one link apart: the ring that a torus carries best."""
        order = np.arange(self.ranks).reshape(self.shape)
        for axis in range(len(self.shape) - 1, 0, -1):
            flat = order.reshape(-1, self.shape[axis - 1], prod(self.shape[axis:])).copy()
            flat[:, 1::2] = flat[:, 1::2, ::-1]
            order = flat.reshape(self.shape)
        return order.ravel()

    def fail(self, link: int, capacity: float = 0.0) -> None:
        self.links.capacity[link] = capacity
