"""Graphs of steps: kept by shape, forgotten, and captured again in memory that PyTorch still knows."""

from contextlib import nullcontext

import pytest
import torch

from cumulo.kernels.cuda.captured import CapturedGraphs


class Pools:
    """PyTorch's rule: memory is taken back when its last graph goes, and its name is refused from then on."""

    def __init__(self) -> None:
        self.used: dict[int, int] = {}

    def graph_pool_handle(self) -> int:
        self.used[len(self.used)] = 0
        return len(self.used) - 1

    def graph(self) -> "Graph":
        return Graph(self)


class Graph:
    def __init__(self, pools: Pools) -> None:
        self.pools, self.pool, self.ended = pools, -1, False

    def capture_begin(self, pool: int, capture_error_mode: str) -> None:
        if self.pools.used[pool] < 0:
            raise RuntimeError("use_count > 0 INTERNAL ASSERT FAILED")
        self.pool = pool
        self.pools.used[pool] += 1

    def capture_end(self) -> None:
        self.ended = True

    def __del__(self) -> None:
        if self.pool >= 0:
            self.pools.used[self.pool] -= 1
            if self.pools.used[self.pool] == 0:
                self.pools.used[self.pool] = -1


class Stream:
    def wait_stream(self, other: object) -> None:
        pass


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> Pools:
    made = Pools()
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", made.graph_pool_handle)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", made.graph)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    return made


def test_graphs_share_memory_and_are_captured_again_after_all_were_forgotten(pools: Pools) -> None:
    graphs: CapturedGraphs[int] = CapturedGraphs()
    launched: list[int] = []
    for shape in (1, 2):
        assert graphs.capture(shape, lambda shape=shape: launched.append(shape)) is graphs.get(shape)
    assert launched == [1, 2] and len(graphs) == 2 and pools.used == {0: 2}
    graphs.forget(lambda shape: shape == 1)  # one remains: its memory is used on
    assert graphs.get(1) is None and graphs.get(2) is not None
    graphs.capture(1, lambda: None)
    assert pools.used == {0: 2}
    graphs.forget()
    assert len(graphs) == 0
    graphs.capture(1, lambda: None)
    assert pools.used == {0: -1, 1: 1}


def test_a_capture_that_fails_is_ended_and_not_kept(pools: Pools) -> None:
    graphs: CapturedGraphs[int] = CapturedGraphs()

    def fail() -> None:
        raise torch.OutOfMemoryError("no memory for a graph")

    with pytest.raises(torch.OutOfMemoryError):
        graphs.capture(1, fail)
    assert graphs.get(1) is None and len(graphs) == 0
    assert graphs.capture(1, lambda: None) is graphs.get(1)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_graphs_can_be_captured_after_all_were_forgotten() -> None:
    graphs: CapturedGraphs[int] = CapturedGraphs()
    x = torch.zeros(4, device="cuda")
    for turn in range(3):
        graphs.capture(turn, lambda: x.add_(1.0)).replay()
        graphs.forget()
    torch.cuda.synchronize()
    assert x.tolist() == [3.0] * 4
